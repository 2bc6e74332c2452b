//! Which shard a thread has: one of its own as long as it lives, or the one that the others share.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::flights::Seat;

/// Threads beyond this share the last seat.
pub(crate) const SEATS: usize = 64;
const SHARED: usize = SEATS - 1;
const NONE: usize = usize::MAX;

/// One bit for each seat that a thread has.
static TAKEN: AtomicU64 = AtomicU64::new(1 << SHARED);

thread_local! {
    static MINE: Cell<usize> = const { Cell::new(NONE) };
    static OWNED: Owned = const { Owned };
}

/// Gives the seat back when its thread ends.
struct Owned;

impl Drop for Owned {
    fn drop(&mut self) {
        // What the thread still does belongs to the shared seat.
        let mine = MINE.replace(SHARED);
        if mine < SHARED {
            TAKEN.fetch_and(!(1 << mine), Ordering::AcqRel);
        }
    }
}

/// The seat of this thread.
#[inline(always)]
pub(crate) fn seat() -> Seat {
    let mut index = MINE.get();
    if index == NONE {
        index = take();
    }
    Seat { index, shared: index == SHARED }
}

#[cold]
#[inline(never)]
fn take() -> usize {
    let free = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
    let index = match TAKEN.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) {
        Ok(before) => before.trailing_ones() as usize,
        Err(_) => SHARED,
    };
    MINE.set(index);
    if index < SHARED && OWNED.try_with(|_| ()).is_err() {
        // The thread is ending already and would not give it back.
        MINE.set(SHARED);
        TAKEN.fetch_and(!(1 << index), Ordering::AcqRel);
        return SHARED;
    }
    index
}
