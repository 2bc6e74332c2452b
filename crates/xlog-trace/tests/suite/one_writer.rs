//! A log file has one writer, whatever it is called and whichever process asks.
#![cfg(unix)]

use std::path::Path;

use xlog_trace::{Action, Reader, Record, Recorder, RecorderConfig, TraceError};

use crate::support::{Scratch, child, child_argument, read_all};

fn record(index: u64) -> Record {
    Record::new(Action::Allocate, 0, index, index).with_ptr(index)
}

fn assert_in_use(path: &Path) {
    match Recorder::create(path, RecorderConfig::new()) {
        Err(error @ TraceError::InUse { .. }) => {
            let said = error.to_string();
            assert!(said.contains(path.to_str().unwrap()) && said.contains("%p"), "{said}");
        }
        other => panic!("{}: {other:?}", path.display()),
    }
}

/// Body of the child: is refused the file that its parent writes.
#[test]
#[ignore = "the body of a child process"]
fn child_that_is_refused() {
    let Some(argument) = child_argument() else { return };
    assert_in_use(Path::new(&argument));
}

#[test]
fn a_second_writer_of_a_file_is_refused_and_spoils_nothing() {
    let scratch = Scratch::new("one-writer");
    let path = scratch.path("log");
    let recorder = Recorder::create(&path, RecorderConfig::new()).unwrap();
    (0..100).for_each(|index| recorder.emit(record(index)));
    recorder.flush().unwrap();

    let (symbolic, hard) = (scratch.path("symbolic"), scratch.path("hard"));
    std::os::unix::fs::symlink(&path, &symbolic).unwrap();
    std::fs::hard_link(&path, &hard).unwrap();
    for name in [&path, &symbolic, &hard] {
        assert_in_use(name);
        let mut other = child("one_writer::child_that_is_refused", name.to_str().unwrap());
        let output = other.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    (100..200).for_each(|index| recorder.emit(record(index)));
    drop(recorder);
    assert_eq!(read_all(&mut Reader::open(&path).unwrap()).len(), 200);
    // The writer is gone, so the file may be replaced.
    drop(Recorder::create(&hard, RecorderConfig::new()).unwrap());
    assert!(read_all(&mut Reader::open(&path).unwrap()).is_empty());
}

/// Between the files of a rotation, and after a removal, the name may go to another writer: nothing is mixed.
#[test]
fn a_name_that_another_writer_took_meanwhile_stays_with_it() {
    let scratch = Scratch::new("taken");
    let path = scratch.path("log");
    let silent = RecorderConfig::new().with_on_error(xlog_trace::OnError::Silent);
    let first = Recorder::create(&path, silent).unwrap();
    first.emit(record(1));
    first.flush().unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Recorder::create(&path, RecorderConfig::new()).unwrap();
    // Its file is gone, which the write finds out; the next record opens the file again.
    for index in [2, 3] {
        first.emit(record(index));
        assert!(first.flush().is_err());
    }
    second.emit(record(9));
    drop(first);
    second.flush().unwrap();
    let all = read_all(&mut Reader::open(&path).unwrap());
    assert_eq!(all.iter().map(|said| said.0.order()).collect::<Vec<_>>(), [9]);
}

/// A writer that rotates its files and one that tries for their name: no file that is complete is cut by the other.
#[test]
fn a_rotated_file_is_cut_by_no_other_writer() {
    use std::sync::atomic::{AtomicBool, Ordering};

    let scratch = Scratch::new("rotated");
    let path = scratch.path("log");
    let silent = || RecorderConfig::new().with_on_error(xlog_trace::OnError::Silent);
    let recorder = Recorder::create(&path, silent().with_rotation(4096, 9999)).unwrap();
    // Alone at first, so that there are several files however the threads are scheduled.
    for index in 0..1000 {
        recorder.emit(record(index));
    }
    recorder.flush().unwrap();
    assert!(xlog_trace::rotated_files(&path).len() > 2);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                // Granted only between two files; a log of nothing is left then, under the name or as a numbered file.
                drop(Recorder::create(&path, silent()));
            }
        });
        for index in 1000..5_000 {
            recorder.emit(record(index));
            if index % 100 == 0 {
                let _ = recorder.flush();
            }
        }
        let _ = recorder.flush();
        ended.store(true, Ordering::Relaxed);
    });
    let written = recorder.stats().written;
    drop(recorder);
    let files = xlog_trace::rotated_files(&path);
    let read = files.iter().map(|file| read_all(&mut Reader::open(file).unwrap()).len() as u64);
    assert_eq!(read.sum::<u64>(), written, "what was written is in {} files", files.len());
}
