//! Bytes of operations whose result is open, counted by the threads that run them.
//!
//! Invariant: an audit may count an operation as in flight for longer than it was, never for a shorter time.

use super::primitive::{AtomicUsize, Ordering};

/// The shard of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ShardId {
    pub(crate) index: usize,
    /// Whether other threads use it too.
    pub(crate) shared: bool,
}

/// Bytes of operations that began and of those that ended. The difference is in flight. Both wrap.
///
/// A shard of one thread has one writer, so plain loads and stores suffice. An audit reads the ends first.
#[derive(Debug)]
pub(crate) struct InFlight {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl InFlight {
    pub(crate) fn new() -> Self {
        Self { begun: AtomicUsize::new(0), ended: AtomicUsize::new(0) }
    }

    #[inline(always)]
    pub(crate) fn begin(&self, shard_id: ShardId, bytes: usize) {
        advance(&self.begun, shard_id, bytes);
    }

    #[inline(always)]
    pub(crate) fn end(&self, shard_id: ShardId, bytes: usize) {
        advance(&self.ended, shard_id, bytes);
    }

    pub(crate) fn bytes(&self) -> usize {
        let ended = self.ended.load(Ordering::Acquire);
        self.begun.load(Ordering::Acquire).wrapping_sub(ended)
    }
}

#[inline(always)]
fn advance(counter: &AtomicUsize, shard_id: ShardId, bytes: usize) {
    if shard_id.shared {
        counter.fetch_add(bytes, Ordering::AcqRel);
    } else {
        let now = counter.load(Ordering::Relaxed);
        counter.store(now.wrapping_add(bytes), Ordering::Release);
    }
}
