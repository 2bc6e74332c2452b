//! What a record costs the thread that emits it, beside the cost of reading the clock.
//!
//! Emitting is timed in runs that fit the ring, with the flush between them left out: the writer
//! has its own thread and its own core.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use xlog_trace::{Action, Format, Record, Recorder, RecorderConfig, ServedBy, intern};

/// Half the default ring.
const RUN: u64 = 1 << 13;

fn record(order: u64) -> Record {
    Record::new(Action::Allocate, 0, order, order * 100)
        .with_thread(7)
        .with_stream(3)
        .with_ptr(0x7f00_0000_0000 + order * 256)
        .with_bytes(1024)
        .with_granted(1024)
        .with_alignment(256)
        .with_generation(order)
        .with_query_id(5)
        .with_tag(intern("bench"))
        .with_latency_nanos(40)
        .with_served_by(ServedBy::Magazine)
}

fn timed(recorder: &Recorder, iterations: u64) -> Duration {
    let mut total = Duration::ZERO;
    let mut done = 0;
    while done < iterations {
        let run = RUN.min(iterations - done);
        let started = Instant::now();
        for order in done..done + run {
            recorder.emit(black_box(record(order)));
        }
        total += started.elapsed();
        done += run;
        recorder.flush().unwrap();
    }
    total
}

fn emit(c: &mut Criterion) {
    let directory = std::env::temp_dir().join(format!("xlog-trace-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    c.bench_function("clock", |b| b.iter(Instant::now));
    c.bench_function("intern_known", |b| b.iter(|| intern(black_box("bench"))));
    for format in [Format::Binary, Format::Csv] {
        let config = RecorderConfig::new().with_format(format).with_rotation(64 << 20, 1);
        let recorder = Recorder::create(directory.join("log"), config).unwrap();
        c.bench_function(&format!("emit {format}"), |b| {
            b.iter_custom(|iterations| timed(&recorder, iterations));
        });
        assert_eq!(recorder.dropped_records(), 0);
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

criterion_group!(benches, emit);
criterion_main!(benches);
