//! The expected results, computed on the CPU from the seed alone.
//!
//! The work is shared out so that threads never meet: each takes a part of the keys, vertices or rows, makes the numbers it needs
//! by itself, and hands back a fingerprint. Nothing of the device's data goes into what is expected.

pub mod closure;
pub mod join;
pub mod sorted;

use std::ops::Range;

/// Runs `body` on each of `threads` parts of `0..all` at once, and returns their results, in order.
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
        // A part that panicked does so here.
        joined.map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
