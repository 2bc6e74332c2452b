//! The expected results, computed on the CPU from the seed alone, without any data of the device.
//!
//! Threads share nothing: each takes a part of the keys, vertices or rows, generates the numbers it needs, and returns a
//! fingerprint.

pub mod closure;
pub mod join;
pub mod sorted;

use std::ops::Range;

/// Runs `body` on each of `threads` parts of `0..all` concurrently, and returns their results in order.
fn parts<T: Send>(all: usize, threads: usize, body: impl Fn(Range<usize>) -> T + Sync) -> Vec<T> {
    let threads = threads.clamp(1, 256).min(all.max(1));
    let size = all.div_ceil(threads);
    let range = |part: usize| (part * size).min(all)..((part + 1) * size).min(all);
    if threads == 1 {
        return vec![body(range(0))];
    }
    std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> =
            (0..threads).map(|part| scope.spawn(move || body(range(part)))).collect();
        let joined = handles.into_iter().map(|handle| handle.join());
        // Propagates a panic of a part.
        joined.map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
