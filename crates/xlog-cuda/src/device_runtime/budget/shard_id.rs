//! The shard of each thread: its own for the life of the thread, or the shared one.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::in_flight::ShardId;

/// Shards of a budget. Threads beyond this number share the last one.
pub(crate) const SHARDS: usize = 64;
const SHARED: usize = SHARDS - 1;
const NONE: usize = usize::MAX;

/// One bit for each shard that a thread owns.
static TAKEN: AtomicU64 = AtomicU64::new(1 << SHARED);

thread_local! {
    static MINE: Cell<usize> = const { Cell::new(NONE) };
    static OWNED: Owned = const { Owned };
}

/// Frees the shard when its thread ends.
struct Owned;

impl Drop for Owned {
    fn drop(&mut self) {
        // What the thread still does is counted in the shared shard.
        let mine = MINE.replace(SHARED);
        if mine < SHARED {
            TAKEN.fetch_and(!(1 << mine), Ordering::AcqRel);
        }
    }
}

/// Returns the shard of this thread.
#[inline(always)]
pub(crate) fn current_shard() -> ShardId {
    let mut index = MINE.get();
    if index == NONE {
        index = claim_shard();
    }
    ShardId { index, shared: index == SHARED }
}

#[cold]
#[inline(never)]
fn claim_shard() -> usize {
    let free = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
    let index = match TAKEN.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) {
        Ok(before) => before.trailing_ones() as usize,
        Err(_) => SHARED,
    };
    MINE.set(index);
    if index < SHARED && OWNED.try_with(|_| ()).is_err() {
        // The thread is ending and would not free the shard.
        MINE.set(SHARED);
        TAKEN.fetch_and(!(1 << index), Ordering::AcqRel);
        return SHARED;
    }
    index
}
