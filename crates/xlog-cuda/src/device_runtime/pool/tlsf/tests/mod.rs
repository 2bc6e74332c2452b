//! Tests of the TLSF: hazards one by one, random programs against a model, and workloads with their figures.

mod hazards;
mod model;
mod oracle;
mod speed;
mod workloads;

use xlog_base::Random;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|value| value.parse().expect("a whole number"))
}

/// Runs a program for many seeds, or for a given one; names a failing seed.
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
