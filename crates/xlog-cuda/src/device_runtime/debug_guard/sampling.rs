//! Which blocks are guarded, where only some are, and which of those that come back were.
//!
//! A program that runs as it always does asks the first with every allocation and the second with every use, so each is one comparison;
//! a free asks only where the resource below has refused it. Where every block is guarded the same comparisons say so.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::thread_name;

thread_local! {
    /// Calls of this thread until one is due; what is not below the interval says that none was counted.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// Chooses blocks, and tells the addresses of those that were chosen.
#[derive(Debug)]
pub(super) struct Sampling {
    /// Blocks that are handed out as they are between two that are guarded.
    skipped: u64,
    /// Blocks that are guarded lie from here on; [`NOWHERE`] until there was one.
    from: AtomicU64,
    /// In so many bytes.
    span: u64,
    is_on: bool,
}

/// No device has memory from here on.
const NOWHERE: u64 = 1 << 63;

impl Sampling {
    /// One block in `every`, which then lies somewhere in a range of `span` bytes; all where there is no such number.
    pub(super) fn new(every: Option<NonZeroU64>, span: usize) -> Self {
        let is_on = every.is_some();
        Self {
            skipped: every.map_or(0, |every| every.get() - 1),
            from: AtomicU64::new(if is_on { NOWHERE } else { 0 }),
            span: if is_on { span as u64 } else { u64::MAX },
            is_on,
        }
    }

    /// Whether only some blocks are guarded.
    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// True when the next block of this thread is handed out as it is.
    #[inline(always)]
    pub(super) fn skips(&self) -> bool {
        // Not by `get` and `set` of the key: the latter is a call.
        LEFT.with(|cell| {
            let left = cell.get();
            let skips = left.wrapping_sub(1) < self.skipped;
            if skips {
                cell.set(left - 1);
            }
            skips || self.skips_after(left)
        })
    }

    #[cold]
    #[inline(never)]
    fn skips_after(&self, left: u64) -> bool {
        if !self.is_on {
            return false;
        }
        let now = match left {
            0 => 0,
            // Threads begin at different places, so that the first block of each is nothing special.
            _ => {
                u64::from(thread_name()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    % self.skipped.saturating_add(1)
            }
        };
        LEFT.set(if now == 0 { self.skipped } else { now - 1 });
        now > 0
    }

    /// Blocks that are guarded lie from here on. Said before the first of them is handed out.
    pub(super) fn set_guarded(&self, from: u64) {
        if self.is_on {
            self.from.store(from, Ordering::Relaxed);
        }
    }

    /// True for the address of a block that the guard knows nothing of.
    #[inline(always)]
    pub(super) fn passes(&self, ptr: u64) -> bool {
        // Who has a guarded block got it after the range was said; of any other, both values say the same.
        ptr.wrapping_sub(self.from.load(Ordering::Relaxed)) >= self.span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_so_many_is_chosen() {
        let sampling = Sampling::new(NonZeroU64::new(10), 4096);
        let chosen: Vec<usize> = (0..100).filter(|_| !sampling.skips()).collect();
        assert_eq!(chosen.len(), 10);
        assert!(chosen.windows(2).all(|pair| pair[1] - pair[0] == 10), "{chosen:?}");
        let every = Sampling::new(NonZeroU64::new(1), 4096);
        assert!((0..100).all(|_| !every.skips()), "an interval of one is every block");
        let all = Sampling::new(None, 4096);
        assert!((0..100).all(|_| !all.skips()));
    }

    #[test]
    fn addresses_are_told_apart_from_the_first_guarded_block_on() {
        let sampling = Sampling::new(NonZeroU64::new(10), 4096);
        for ptr in [0, 1 << 20, 1 << 57] {
            assert!(sampling.passes(ptr), "none is guarded yet");
        }
        sampling.set_guarded(1 << 40);
        for (ptr, passes) in [
            ((1 << 40) - 1, true),
            (1 << 40, false),
            ((1 << 40) + 4095, false),
            ((1 << 40) + 4096, true),
        ] {
            assert_eq!(sampling.passes(ptr), passes, "{ptr:x}");
        }
        let all = Sampling::new(None, 4096);
        assert!([0, 1 << 20, 1 << 40].into_iter().all(|ptr| !all.passes(ptr)));
    }
}
