//! Disks that fill up and directories that go: counted, told once, and no emitter waits for them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use xlog_trace::{
    Action, Format, OnError, Overflow, Reader, Record, Recorder, RecorderConfig, Source,
    Strictness, TraceError,
};

use crate::support::{Scratch, read_all};

fn record(index: u64) -> Record {
    Record::new(Action::Allocate, 0, index, index).with_ptr(index)
}

/// Settings whose failures are heard, and what was heard.
fn heard() -> (RecorderConfig, Arc<Mutex<Vec<String>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&heard);
    let call = OnError::Call(Arc::new(move |text: &str| {
        listener.lock().unwrap().push(text.to_owned());
    }));
    (RecorderConfig::new().with_on_error(call), heard)
}

#[test]
fn a_full_disk_is_counted_and_told_once_and_blocks_nobody() {
    if !std::path::Path::new("/dev/full").exists() {
        eprintln!("skipped: there is no /dev/full here");
        return;
    }
    for overflow in [Overflow::Drop, Overflow::Block] {
        let (config, heard) = heard();
        let config = config
            .with_overflow(overflow)
            .with_ring_records(1024)
            .with_write_interval(Duration::from_millis(1));
        let recorder = Recorder::create("/dev/full", config).unwrap();
        let started = Instant::now();
        for index in 0..50_000 {
            recorder.emit(record(index));
        }
        assert!(started.elapsed() < Duration::from_secs(120), "emitting does not wait for a disk");
        let error = recorder.flush().unwrap_err();
        assert!(matches!(error, TraceError::Io { .. }), "{error}");
        let stats = recorder.stats();
        assert_eq!((recorder.dropped_records(), stats.written), (50_000, 0));
        assert!(stats.io_errors > 0);
        if overflow == Overflow::Block {
            assert_eq!(stats.dropped_overflow, 0);
        }
        drop(recorder);
        let heard = heard.lock().unwrap();
        assert_eq!(heard.len(), 1, "{heard:?}");
        assert!(heard[0].starts_with("writing /dev/full: "), "{heard:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_vanished_directory_is_counted_and_a_new_one_taken_up() {
    let scratch = Scratch::new("vanished");
    for format in [Format::Binary, Format::Csv] {
        let directory = scratch.path("logs");
        std::fs::create_dir_all(&directory).unwrap();
        let (config, heard) = heard();
        let path = directory.join("log");
        let recorder = Recorder::create(&path, config.with_format(format)).unwrap();
        recorder.emit(record(0));
        recorder.flush().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        for index in 1..=10 {
            recorder.emit(record(index));
        }
        recorder.flush().unwrap_err();
        assert_eq!((recorder.stats().written, recorder.dropped_records()), (1, 10));
        std::fs::create_dir_all(&directory).unwrap();
        recorder.emit(record(11).with_tag(xlog_trace::intern("after")));
        recorder.flush().unwrap();
        assert_eq!((recorder.stats().written, recorder.dropped_records()), (2, 10));
        drop(recorder);
        assert_eq!(heard.lock().unwrap().len(), 1);
        let mut reader = Reader::open(&path).unwrap();
        let all = read_all(&mut reader);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].0.order(), all[0].1[0].as_deref()), (11, Some("after")));
        assert_eq!((reader.report().skipped, reader.report().dropped_at_source), (0, 10));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn a_rotation_that_fails_goes_on_in_the_same_file() {
    let scratch = Scratch::new("stuck");
    let path = scratch.path("log");
    let (config, heard) = heard();
    let recorder = Recorder::create(&path, config.with_rotation(4096, 1)).unwrap();
    // The name of the finished file is taken by a directory.
    std::fs::create_dir_all(scratch.path("log.1").join("in the way")).unwrap();
    for index in 0..1000 {
        recorder.emit(record(index));
        if index % 50 == 0 {
            let _ = recorder.flush();
        }
    }
    assert_eq!(recorder.dropped_records(), 0);
    drop(recorder);
    assert_eq!(heard.lock().unwrap().len(), 1);
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(read_all(&mut reader).len(), 1000);
    assert_eq!(reader.report().skipped, 0);
}

/// A pipe that nobody reads stands for a file system that hangs.
#[cfg(target_os = "linux")]
#[test]
fn a_writer_that_hangs_blocks_nobody_for_long_and_goes_on_when_it_can() {
    use std::io::Read;
    use std::os::fd::AsRawFd;

    let (mut reading, writing) = std::io::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", writing.as_raw_fd());
    let config = RecorderConfig::new()
        .with_overflow(Overflow::Block)
        .with_block_limit(Duration::from_millis(50))
        .with_ring_records(64);
    let recorder = Recorder::create(path, config).unwrap();
    let started = Instant::now();
    for index in 0..20_000 {
        recorder.emit(record(index));
    }
    // Each record that waited would wait 50 ms: a quarter of an hour together.
    assert!(started.elapsed() < Duration::from_secs(120), "{:?}", started.elapsed());
    let dropped = recorder.dropped_records();
    assert!(dropped > 0, "a pipe does not hold 20000 records");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        reading.read_to_end(&mut bytes).unwrap();
        bytes
    });
    recorder.flush().unwrap();
    for index in 20_000..20_010 {
        recorder.emit(record(index));
    }
    recorder.flush().unwrap();
    let stats = recorder.stats();
    assert_eq!((stats.written, stats.dropped_overflow), (20_010 - dropped, dropped));
    drop(recorder);
    drop(writing);
    let mut log =
        Reader::from_stream(std::io::Cursor::new(reader.join().unwrap()), Strictness::Strict)
            .unwrap();
    assert_eq!(read_all(&mut log).len() as u64, stats.written);
    assert_eq!(log.report().dropped_at_source, dropped);
}
