//! What the simulated device costs: bytes against a plain memcpy, and a queued no-op.
//!
//! The figures are compared in one run: `bytes/memset+copy` against `bytes/memcpy of the same bytes`, and
//! `queue/...` against one microsecond.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use xlog_driver::{Driver, StreamHandle};
use xlog_sim::{SimConfig, SimDevice, SimKernel};

const BYTES: usize = 64 << 20;
const NO_OPS: u64 = 10_000;

fn engines() -> [(&'static str, SimConfig); 2] {
    [("sim", SimConfig::default()), ("sim:1", SimConfig::default().with_seed(1))]
}

/// A fill and a copy, each moving `BYTES`.
fn fill_and_copy(device: &SimDevice, to: u64, from: u64, stream: StreamHandle) {
    // SAFETY: both blocks are live and this long.
    unsafe {
        device.memset(from, 7, BYTES, stream).unwrap();
        device.copy_dtod(to, from, BYTES, stream).unwrap();
    }
    device.stream_synchronize(stream).unwrap();
}

fn bytes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("bytes");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(2 * BYTES as u64));
    let (mut a, mut b) = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
    let memcpy = "memcpy of the same bytes";
    group.bench_function(memcpy, |bencher| {
        bencher.iter(|| {
            black_box(&mut b).copy_from_slice(black_box(&a));
            black_box(&mut a).copy_from_slice(black_box(&b));
        });
    });
    for (name, config) in engines() {
        let device = SimDevice::open(config).unwrap();
        let stream = device.stream_create(0).unwrap();
        let (to, from) = (device.alloc(BYTES).unwrap(), device.alloc(BYTES).unwrap());
        fill_and_copy(&device, to, from, stream);
        group.bench_function(BenchmarkId::new("memset+copy", name), |bencher| {
            bencher.iter(|| fill_and_copy(&device, to, from, stream));
        });
        let source = vec![3_u8; BYTES];
        let mut target = vec![0_u8; BYTES];
        group.bench_function(BenchmarkId::new("copy in+copy out", name), |bencher| {
            bencher.iter(|| {
                // SAFETY: the block is live and this long.
                unsafe {
                    device.copy_htod(to, &source, stream).unwrap();
                    device.copy_dtoh(&mut target, to, stream).unwrap();
                }
            });
        });
    }
    group.finish();
}

fn queue(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    group.sample_size(20);
    group.throughput(Throughput::Elements(NO_OPS));
    for (name, config) in engines() {
        let device = SimDevice::open(config).unwrap();
        let stream = device.stream_create(0).unwrap();
        group.bench_function(BenchmarkId::new("host function", name), |bencher| {
            bencher.iter(|| {
                for _ in 0..NO_OPS {
                    device.host_fn(stream, Box::new(|| {})).unwrap();
                }
                device.stream_synchronize(stream).unwrap();
            });
        });
        group.bench_function(BenchmarkId::new("empty kernel", name), |bencher| {
            bencher.iter(|| {
                for _ in 0..NO_OPS {
                    device.launch(stream, SimKernel::new("none", |_| {})).unwrap();
                }
                device.stream_synchronize(stream).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bytes, queue);
criterion_main!(benches);
