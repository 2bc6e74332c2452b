//! What becomes of a log at the end of its process, in the child of a fork, and on a disk that is full for a while.
#![cfg(unix)]
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::OnceLock;

use xlog_trace::{
    Action, Format, OnError, Overflow, Reader, Record, Recorder, RecorderConfig, Source, Strictness,
};

use crate::support::{Scratch, child, child_argument, read_all};

fn record(index: u64) -> Record {
    Record::new(Action::Allocate, 0, index, index).with_ptr(index + 1)
}

/// Runs a body of this module and returns the word it printed in front of a `;`.
fn run(body: &str, argument: &str) -> String {
    let output = child(&format!("forks_and_exits::{body}"), argument).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}\n{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    let answer = printed.split_once(';').map_or("", |(answer, _)| answer);
    answer.rsplit(|c: char| c.is_whitespace()).next().unwrap_or_default().to_owned()
}

/// Body: forks with a log open. The child emits, flushes, drops the recorder and exits; the parent goes on.
#[test]
#[ignore = "the body of a child process"]
fn child_that_forks() {
    let Some(path) = child_argument() else { return };
    let recorder = Recorder::create(path, RecorderConfig::new()).unwrap();
    recorder.emit(record(1));
    // SAFETY: the child runs code of this test only, and ends by `_exit` or `exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let before = recorder.dropped_records();
        recorder.emit(record(2));
        let is_counted = recorder.dropped_records() == before + 1;
        let is_said = recorder.flush().is_err();
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(recorder)));
        let is_good = is_counted && is_said && dropped.is_ok();
        // SAFETY: ends the child without the test harness, which belongs to the parent.
        unsafe { libc::_exit(i32::from(!is_good)) };
    }
    let mut status = 0;
    // SAFETY: `status` is written by the call alone.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "what the child saw was wrong, or it panicked");
    recorder.emit(record(3));
    recorder.flush().unwrap();
}

#[test]
fn a_fork_with_a_log_drops_its_records_and_panics_nowhere() {
    let scratch = Scratch::new("fork");
    let path = scratch.path("log");
    run("child_that_forks", path.to_str().unwrap());
    let all = read_all(&mut Reader::open(&path).unwrap());
    assert_eq!(all.iter().map(|said| said.0.order()).collect::<Vec<_>>(), [1, 3]);
}

/// Body: a log in a static loses records, for its ring is small, and the process ends.
#[test]
#[ignore = "the body of a child process"]
fn child_that_exits() {
    static RECORDER: OnceLock<Recorder> = OnceLock::new();
    let Some(path) = child_argument() else { return };
    let config = RecorderConfig::new()
        .with_ring_records(16)
        .with_write_interval(std::time::Duration::from_secs(60));
    let recorder = RECORDER.get_or_init(|| Recorder::create(path, config).unwrap());
    (0..100_000).for_each(|index| recorder.emit(record(index)));
    recorder.flush().unwrap();
    println!("{};", recorder.dropped_records());
}

#[test]
fn the_log_of_a_static_is_closed_at_exit_and_says_what_it_lost() {
    let scratch = Scratch::new("exit");
    let path = scratch.path("log");
    let dropped: u64 = run("child_that_exits", path.to_str().unwrap()).parse().unwrap();
    let mut reader = Reader::open(&path).unwrap();
    let all = read_all(&mut reader).len() as u64;
    let report = reader.report();
    assert_eq!((report.closed, report.unclosed), (true, false));
    assert_eq!((all + dropped, report.dropped_at_source), (100_000, dropped));
}

/// No file of this process grows beyond `bytes`.
fn limit_files(bytes: libc::rlim_t) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write `limit` alone; the signal is one that would end the process.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit), 0);
        limit.rlim_cur = bytes.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}

/// Body: the disk is full, then it is not, then it is again until the end or not.
#[test]
#[ignore = "the body of a child process"]
fn child_on_a_full_disk() {
    let Some(argument) = child_argument() else { return };
    let (kind, path) = argument.split_once(' ').unwrap();
    let format = if kind.starts_with("csv") { Format::Csv } else { Format::Binary };
    let config = RecorderConfig::new()
        .with_format(format)
        .with_overflow(Overflow::Block)
        .with_on_error(OnError::Silent);
    let recorder = Recorder::create(path, config).unwrap();
    // Emits and returns how many were lost. The rest of a batch may be small enough to be written.
    let mut next = 0;
    let mut lost = || {
        let before = recorder.dropped_records();
        (next..next + 10_000).for_each(|index| recorder.emit(record(index)));
        next += 10_000;
        let _ = recorder.flush();
        recorder.dropped_records() - before
    };
    limit_files(64 << 10);
    assert!(lost() > 0);
    if kind.ends_with("resumed") {
        limit_files(libc::RLIM_INFINITY);
        assert_eq!(lost(), 0);
    }
    limit_files(64 << 10);
    assert!(lost() > 0);
    limit_files(libc::RLIM_INFINITY);
    let written = recorder.stats().written;
    drop(recorder);
    println!("{written};");
}

#[test]
fn a_log_that_resumed_after_a_full_disk_reads_without_a_bad_place_and_says_what_it_lost() {
    let scratch = Scratch::new("resumed");
    for kind in ["binary", "binary-resumed", "csv", "csv-resumed"] {
        let path = scratch.path(kind);
        let argument = format!("{kind} {}", path.display());
        let written: u64 = run("child_on_a_full_disk", &argument).parse().unwrap();
        let mut reader = Reader::open_with(&path, Strictness::Strict).unwrap();
        assert_eq!(read_all(&mut reader).len() as u64, written, "{kind}");
        if kind.ends_with("resumed") {
            assert!(written >= 10_000, "{kind}: {written}");
        }
        let (report, total) = (reader.report(), if kind.contains('-') { 30_000 } else { 20_000 });
        let is_closed = kind.starts_with("binary");
        assert_eq!(
            (report.closed, report.dropped_at_source),
            (is_closed, total - written),
            "{kind}"
        );
        assert!(written < total, "{kind}");
    }
}

/// Body: each record is a write of its own, until the disk is full; it stays full.
#[test]
#[ignore = "the body of a child process"]
fn child_that_fills_a_disk() {
    let Some(argument) = child_argument() else { return };
    let (bytes, path) = argument.split_once(' ').unwrap();
    let config = RecorderConfig::new().with_format(Format::Csv).with_on_error(OnError::Silent);
    let recorder = Recorder::create(path, config).unwrap();
    limit_files(bytes.parse().unwrap());
    for index in 0..100 {
        recorder.emit(record(index));
        let _ = recorder.flush();
    }
    println!("{};", recorder.dropped_records());
}

#[test]
fn a_csv_log_on_a_disk_without_room_for_another_line_says_what_it_lost() {
    let scratch = Scratch::new("no-room");
    // Lines are shorter than this range.
    for bytes in (2000..2200).step_by(20) {
        let path = scratch.path(&bytes.to_string());
        run("child_that_fills_a_disk", &format!("{bytes} {}", path.display()));
        let mut reader = Reader::open_with(&path, Strictness::Strict).unwrap();
        let read = read_all(&mut reader).len() as u64;
        assert_eq!(read + reader.report().dropped_at_source, 100, "{bytes} bytes");
    }
}

#[test]
fn a_log_that_nobody_closed_says_so() {
    let scratch = Scratch::new("unclosed");
    let path = scratch.path("log");
    let recorder = Recorder::create(&path, RecorderConfig::new()).unwrap();
    recorder.emit(record(1));
    recorder.flush().unwrap();
    let unclosed = |path: &Path| {
        let mut reader = Reader::open(path).unwrap();
        assert_eq!(read_all(&mut reader).len(), 1);
        reader.report().unclosed
    };
    assert!(unclosed(&path));
    drop(recorder);
    assert!(!unclosed(&path));
}
