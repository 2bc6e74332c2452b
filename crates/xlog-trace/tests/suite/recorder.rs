//! What is emitted is in the file, in order, and what is not is counted.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_trace::{
    Action, Failure, Format, Header, Ordered, Overflow, Reader, Record, Recorder, RecorderConfig,
    Source, Strictness, intern, intern_text, rotated_files,
};

use crate::support::{Scratch, child, child_argument, read_all};

fn record(thread: u64, index: u64) -> Record {
    Record::new(Action::Allocate, 0, index, index)
        .with_thread(thread)
        .with_ptr(index * 256)
        .with_bytes(index)
        .with_tag(intern("recorder test"))
}

fn open(path: &Path) -> Reader {
    Reader::open_with(path, Strictness::Strict).unwrap()
}

/// Checks that each thread's records are in the file, in order and without a gap.
fn check_threads(path: &Path, threads: u64, each: u64) {
    let mut next = vec![0; threads as usize];
    let mut reader = open(path);
    while let Some(record) = reader.next_record().unwrap() {
        let next = &mut next[record.thread() as usize];
        assert_eq!(record.bytes(), Some(*next), "thread {}", record.thread());
        *next += 1;
    }
    assert_eq!(next, vec![each; threads as usize]);
    assert!(reader.report().closed);
}

#[test]
fn everything_emitted_is_in_the_file_in_both_formats() {
    let scratch = Scratch::new("formats");
    for format in [Format::Binary, Format::Csv] {
        let path = scratch.path("log");
        let header = Header::of_this_process().with_device_name("sim");
        let config = RecorderConfig::new().with_format(format).with_header(header.clone());
        let recorder = Recorder::create(&path, config).unwrap();
        let failure = Failure { kind: intern("OutOfBudget"), message: intern_text("full: 12 B") };
        recorder.emit(record(1, 0));
        recorder.emit(Record::new(Action::Allocate, 3, 1, 50).with_failure(failure));
        recorder.flush().unwrap();
        assert_eq!((recorder.stats().written, recorder.dropped_records()), (2, 0));
        recorder.emit(Record::new(Action::Deallocate, 3, 2, 60).with_process(99));
        drop(recorder);
        let mut reader = open(&path);
        let all = read_all(&mut reader);
        assert_eq!(all.len(), 3);
        assert_eq!(all[0].1[0].as_deref(), Some("recorder test"));
        assert_eq!(all[1].1[1].as_deref(), Some("OutOfBudget"));
        assert_eq!(all[1].1[2].as_deref(), Some("full: 12 B"));
        let processes: Vec<u32> = all.iter().map(|(record, _)| record.process()).collect();
        assert_eq!(processes, [std::process::id(), std::process::id(), 99]);
        assert_eq!(
            all[1].0.time_nanos(),
            if format == Format::Csv { header.unix_nanos(50) } else { 50 }
        );
    }
}

/// 16 threads at the default ring size, each record with a call's worth of work before it.
#[test]
fn sixteen_threads_lose_nothing_when_the_writer_keeps_up() {
    let each: u64 = if cfg!(debug_assertions) { 20_000 } else { 1_000_000 };
    let scratch = Scratch::new("sixteen");
    let path = scratch.path("log");
    let recorder = Arc::new(Recorder::create(&path, RecorderConfig::new()).unwrap());
    let order = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (recorder, order) = (&recorder, &order);
            scope.spawn(move || {
                for index in 0..each {
                    // Two clock reads frame the call in a logging resource.
                    let (started, now) = (Instant::now(), Instant::now());
                    let nanos = now.duration_since(started).as_nanos() as u64;
                    let order = order.fetch_add(1, Ordering::Relaxed);
                    let record = Record::new(Action::Allocate, 0, order, 0)
                        .with_thread(thread)
                        .with_bytes(index)
                        .with_latency_nanos(nanos);
                    recorder.emit(record);
                    // The writer's share of the machine: on fewer cores than threads it only
                    // keeps up if the threads let it run.
                    if index % 4096 == 4095 {
                        recorder.flush().unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(recorder.dropped_records(), 0);
    drop(recorder);
    check_threads(&path, 16, each);
    let mut ordered = Ordered::new(open(&path));
    let mut next = 0;
    while let Some(record) = ordered.next_record().unwrap() {
        assert_eq!(record.order(), next, "the history is whole and in order");
        next += 1;
    }
    assert_eq!(ordered.late(), 0);
}

#[test]
fn a_blocking_recorder_loses_nothing_through_small_rings() {
    let scratch = Scratch::new("block");
    let path = scratch.path("log");
    let config = RecorderConfig::new()
        .with_overflow(Overflow::Block)
        .with_ring_records(64)
        .with_write_interval(Duration::from_millis(1));
    let recorder = Recorder::create(&path, config).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let recorder = &recorder;
            scope.spawn(move || (0..20_000).for_each(|index| recorder.emit(record(thread, index))));
        }
    });
    assert_eq!(recorder.dropped_records(), 0);
    drop(recorder);
    check_threads(&path, 4, 20_000);
}

#[test]
fn overflow_counts_are_exact() {
    let scratch = Scratch::new("overflow");
    let path = scratch.path("log");
    let config =
        RecorderConfig::new().with_ring_records(64).with_write_interval(Duration::from_secs(60));
    let recorder = Recorder::create(&path, config).unwrap();
    let (threads, each) = (8, 50_000);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let recorder = &recorder;
            scope.spawn(move || (0..each).for_each(|index| recorder.emit(record(thread, index))));
        }
    });
    recorder.flush().unwrap();
    let stats = recorder.stats();
    assert!(stats.dropped_overflow > 0, "rings of 64 cannot hold this");
    assert_eq!(stats.written + stats.dropped_overflow, threads * each);
    assert_eq!(recorder.dropped_records(), stats.dropped_overflow);
    drop(recorder);
    let mut reader = open(&path);
    assert_eq!(read_all(&mut reader).len() as u64, stats.written);
    assert_eq!(reader.report().dropped_at_source, stats.dropped_overflow);
}

#[test]
fn a_flush_covers_what_other_threads_emitted_before() {
    let scratch = Scratch::new("flush");
    let path = scratch.path("log");
    let config = RecorderConfig::new().with_write_interval(Duration::from_secs(60));
    let recorder = Recorder::create(&path, config).unwrap();
    for round in 1..=50 {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let recorder = &recorder;
                scope.spawn(move || recorder.emit(record(thread, round)));
            }
        });
        recorder.flush().unwrap();
        let mut reader = open(&path);
        assert_eq!(read_all(&mut reader).len(), 3 * round as usize);
    }
}

#[test]
fn the_rings_of_ended_threads_serve_the_next_ones() {
    let scratch = Scratch::new("recycle");
    let path = scratch.path("log");
    let recorder = Arc::new(Recorder::create(&path, RecorderConfig::new()).unwrap());
    for index in 0..200 {
        let recorder = Arc::clone(&recorder);
        // Joined by its handle: a scope may end before its threads' locals are gone.
        std::thread::spawn(move || recorder.emit(record(0, index))).join().unwrap();
    }
    assert_eq!(recorder.stats().rings, 1);
    drop(recorder);
    check_threads(&path, 1, 200);
}

#[test]
fn two_recorders_in_one_thread_keep_apart() {
    let scratch = Scratch::new("two");
    let paths = [scratch.path("a"), scratch.path("b")];
    let recorders: Vec<Recorder> =
        paths.iter().map(|path| Recorder::create(path, RecorderConfig::new()).unwrap()).collect();
    for index in 0..100 {
        for (thread, recorder) in recorders.iter().enumerate() {
            recorder.emit(record(thread as u64, index));
        }
    }
    drop(recorders);
    for (thread, path) in paths.iter().enumerate() {
        let all = read_all(&mut open(path));
        assert_eq!(all.len(), 100);
        assert!(all.iter().all(|(record, _)| record.thread() == thread as u64));
    }
}

#[test]
fn rotated_files_are_bounded_and_each_reads_by_itself() {
    let scratch = Scratch::new("rotation");
    for format in [Format::Binary, Format::Csv] {
        let path = scratch.path("log");
        let config = RecorderConfig::new().with_format(format).with_rotation(64 << 10, 3);
        let recorder = Recorder::create(&path, config).unwrap();
        for index in 0..8000 {
            recorder.emit(record(0, index));
            if index % 200 == 0 {
                recorder.flush().unwrap();
            }
        }
        drop(recorder);
        let numbered = |number: u32| scratch.path(&format!("log.{number}"));
        assert!(!numbered(4).exists(), "three finished files are kept");
        let mut expected = None;
        let files = [numbered(3), numbered(2), numbered(1), path.clone()];
        assert_eq!(rotated_files(&path), files);
        for file in files {
            let size = std::fs::metadata(&file).unwrap().len();
            assert!(size < (64 << 10) + (32 << 10), "{size} bytes in {}", file.display());
            for (record, texts) in read_all(&mut open(&file)) {
                assert_eq!(texts[0].as_deref(), Some("recorder test"), "names are repeated");
                assert_eq!(record.order(), *expected.get_or_insert(record.order()));
                expected = Some(record.order() + 1);
            }
            std::fs::remove_file(&file).unwrap();
        }
        assert_eq!(expected, Some(8000), "the kept files are the newest, without a gap");
    }
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let scratch = Scratch::new("settings");
    for (config, text) in [
        (RecorderConfig::new().with_ring_records(3), "ring_records is 3, expected 16 to"),
        (RecorderConfig::new().with_write_interval(Duration::ZERO), "write_interval is 0ns"),
        (RecorderConfig::new().with_rotation(100, 2), "rotate_bytes is 100"),
    ] {
        let error = Recorder::create(scratch.path("log"), config).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
    let error = Recorder::create(scratch.dir().join("no/log"), RecorderConfig::new());
    assert!(error.unwrap_err().to_string().contains("no/log"));
}

static FOR_EXIT: std::sync::OnceLock<Recorder> = std::sync::OnceLock::new();

/// Body of a child: emits into a recorder that is never dropped, then ends in the way asked for.
#[test]
#[ignore = "the body of a child process"]
fn child_that_ends() {
    let Some(argument) = child_argument() else { return };
    let (how, path) = argument.split_once(' ').unwrap();
    let config = RecorderConfig::new().with_write_interval(Duration::from_secs(60));
    let recorder = FOR_EXIT.get_or_init(|| Recorder::create(path, config).unwrap());
    // The writer has made its first round and sleeps: what follows is left to the last flush.
    recorder.flush().unwrap();
    (0..1000).for_each(|index| recorder.emit(record(0, index)));
    match how {
        "exit" => std::process::exit(0),
        "panic" => {
            let _ = std::thread::spawn(|| panic!("on purpose")).join();
            // No exit handler from here on: what the file has, the panic hook wrote.
            std::process::abort();
        }
        other => unreachable!("{other}"),
    }
}

#[test]
fn records_of_a_static_recorder_are_written_at_exit_and_on_panic() {
    let scratch = Scratch::new("ends");
    for how in ["exit", "panic"] {
        let path = scratch.path(how);
        let argument = format!("{how} {}", path.display());
        let output = child("recorder::child_that_ends", &argument).output().unwrap();
        assert_eq!(output.status.success(), how == "exit", "{output:?}");
        assert_eq!(read_all(&mut open(&path)).len(), 1000, "{how}");
    }
}

#[test]
fn handles_cross_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    fn sent<T: Send + 'static>() {}
    shared::<Recorder>();
    shared::<Record>();
    shared::<xlog_trace::Names>();
    shared::<xlog_trace::Summary>();
    sent::<Reader>();
    sent::<Ordered<Reader>>();
}

/// Emits `each` records in each of `threads`, one after the other.
fn emit_in_a_row(recorder: &Arc<Recorder>, threads: u64, each: u64) {
    for thread in 0..threads {
        let recorder = Arc::clone(recorder);
        let emit = move || (0..each).for_each(|index| recorder.emit(record(thread, index)));
        std::thread::spawn(emit).join().unwrap();
    }
}

#[test]
fn threads_with_few_records_wake_the_writer_together_although_many_rings_are_empty() {
    const THREADS: usize = 60;
    let scratch = Scratch::new("few");
    let config = RecorderConfig::new().with_ring_records(16);
    let config = config.with_write_interval(Duration::from_secs(60));
    let recorder = Recorder::create(scratch.path("log"), config).unwrap();
    let recorder = Arc::new(recorder);
    // All at once, so that each has a ring of its own.
    let barrier = std::sync::Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                recorder.emit(record(0, 0));
                barrier.wait();
            });
        }
    });
    let began = Instant::now();
    for _ in 0..3 {
        recorder.flush().unwrap();
        let before = recorder.stats().written;
        emit_in_a_row(&recorder, 2, 3);
        while recorder.stats().written == before {
            // By itself it comes once a minute: after three of them.
            assert!(began.elapsed() < Duration::from_secs(120), "nothing woke the writer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_thread_does_not_begin_with_the_full_ring_of_an_ended_one() {
    let scratch = Scratch::new("ended");
    let config = |records| {
        let config = RecorderConfig::new().with_ring_records(records);
        config.with_write_interval(Duration::from_secs(60))
    };
    // Each thread fills most of a ring, whether or not the writer comes to empty one: three quarters of it are free at least.
    let recorder = Arc::new(Recorder::create(scratch.path("a"), config(1024)).unwrap());
    emit_in_a_row(&recorder, 40, 760);
    assert_eq!(recorder.dropped_records(), 0);
    recorder.flush().unwrap();
    assert_eq!(recorder.stats().written, 40 * 760);

    // Threads that each emit too little to wake the writer wake it together. It is given the time to come after so many of them.
    let recorder = Arc::new(Recorder::create(scratch.path("b"), config(16)).unwrap());
    let began = Instant::now();
    for round in 0..10 {
        emit_in_a_row(&recorder, 50, 3);
        while recorder.stats().written <= 150 * round {
            // By itself it comes once a minute: after ten of them.
            assert!(began.elapsed() < Duration::from_secs(300), "nobody woke the writer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let stats = recorder.stats();
    assert_eq!(stats.dropped_overflow, 0, "{stats:?}");
    assert!(stats.rings <= 128, "{stats:?}");
    recorder.flush().unwrap();
    assert_eq!(recorder.stats().written, 1500);
}
