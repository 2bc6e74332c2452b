//! Times of the TLSF alone, in a release build: `cargo test --release -p xlog-cuda --lib pool::tlsf -- --ignored --nocapture`.
//! Ignored by default, because times of a busy machine are not reliable.

use std::hint::black_box;
use std::time::Instant;

use super::super::{Range, Tlsf, UNIT};
use super::Random;
use super::workloads::{Op, handles, log_uniform, random_allocations, run, small_blocks, uniform};

const BASE: u64 = 1 << 40;

/// The best of several runs, in nanoseconds per operation.
fn best(operations: u64, mut body: impl FnMut()) -> f64 {
    let times = (0..9).map(|_| {
        let start = Instant::now();
        body();
        start.elapsed().as_nanos() as f64 / operations as f64
    });
    times.fold(f64::MAX, f64::min)
}

fn with(bytes: u64) -> Tlsf {
    let mut tlsf = Tlsf::default();
    assert!(tlsf.insert_span(Range { ptr: BASE, bytes, stamp: 0 }, true));
    tlsf
}

fn pair(tlsf: &mut Tlsf, bytes: u64) -> f64 {
    const PAIRS: u64 = 200_000;
    best(PAIRS, || {
        for stamp in 0..PAIRS {
            if let Some(taken) = tlsf.allocate(black_box(bytes), UNIT) {
                tlsf.free(black_box(taken.node), stamp);
            }
        }
    })
}

/// Fills a TLSF with blocks of one size and frees every second one.
fn holes(count: usize, bytes: u64) -> Tlsf {
    let mut tlsf = with((2 * count as u64 + 1) * bytes);
    let taken: Vec<_> = (0..2 * count).map(|_| tlsf.allocate(bytes, UNIT).unwrap()).collect();
    for taken in taken.iter().step_by(2) {
        tlsf.free(taken.node, 1);
    }
    tlsf
}

#[test]
#[ignore = "times of the release build"]
fn speed() {
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        println!(
            "pair of {bytes:9} from one range       {:6.1} ns",
            pair(&mut with(65 << 28), bytes)
        );
    }
    for size in [1 << 10, 16 << 10] {
        for count in [4_000, 16_000, 65_000] {
            let mut tlsf = holes(count, size);
            println!(
                "pair of 1 KiB, {count:6} holes of {size:5}  {:6.1} ns",
                pair(&mut tlsf, 1 << 10)
            );
        }
    }
    for live in [1_000, 10_000, 100_000, 1_000_000] {
        churn(live);
    }
    for max in [1, 4, 64, 256] {
        let (ops, _) = random_allocations(100_000, max << 20);
        timed(&format!("random allocations, {max} MiB"), &ops);
    }
    timed("100000 uniform", &small_blocks(100_000, uniform));
    timed("100000 log-uniform", &small_blocks(100_000, log_uniform));
}

fn timed(name: &str, ops: &[Op]) {
    let ns = (0..5).map(|_| run(ops, handles).1).fold(f64::MAX, f64::min);
    println!("{name:38} {ns:6.1} ns per operation");
}

/// Replaces random live blocks by blocks of other sizes; then allocates and frees in pairs, with all blocks live.
fn churn(live: usize) {
    const STEPS: u64 = 1_000_000;
    let mut random = Random::new(1);
    let mut tlsf = with(8192 * 2 * live as u64);
    let mut blocks: Vec<_> =
        (0..live).map(|_| tlsf.allocate(size(&mut random), UNIT).unwrap().node).collect();
    let idle = best(STEPS, || {
        for _ in 0..STEPS {
            black_box((blocks[random.below(live)], size(&mut random)));
        }
    });
    let ns = best(STEPS, || {
        for stamp in 0..STEPS {
            let at = random.below(live);
            tlsf.free(blocks[at], stamp);
            blocks[at] = tlsf.allocate(size(&mut random), UNIT).unwrap().node;
        }
    });
    let beside = pair(&mut tlsf, 1 << 10);
    println!(
        "{live:8} live: replace one {ns:6.1} ns (the loop alone {idle:5.1}), pair {beside:5.1} ns"
    );
}

fn size(random: &mut Random) -> u64 {
    1 + random.next_u64() % 8192
}
