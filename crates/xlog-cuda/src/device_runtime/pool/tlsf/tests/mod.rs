//! Tests of the index: hazards one by one, random programs against a model, and workloads with their figures.

mod hazards;
mod model;
mod oracle;
mod speed;
mod workloads;

/// A small generator; the same seed gives the same program everywhere.
#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // Spread, so that neighbouring seeds do not begin alike.
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|value| value.parse().expect("a whole number"))
}

/// Runs a program for many seeds, or for the one that is named; says which one failed.
fn for_each_seed(count: u64, program: fn(u64)) {
    if let Some(seed) = number("XLOG_INDEX_SEED") {
        return program(seed);
    }
    for seed in 0..number("XLOG_INDEX_PROGRAMS").unwrap_or(count) {
        if let Err(cause) = std::panic::catch_unwind(|| program(seed)) {
            eprintln!("replay with XLOG_INDEX_SEED={seed}");
            std::panic::resume_unwind(cause);
        }
    }
}
