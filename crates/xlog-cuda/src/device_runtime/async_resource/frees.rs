//! Frees that are queued and not yet known to have completed.
//!
//! Per stream they gather until there are enough for one event; a batch whose event has completed is counted. Nothing is asked
//! of the driver for a single free.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xlog_driver::DriverResult;
use xlog_driver::sync::{Mutex, MutexGuard};

use crate::device_runtime::ordering::OrderCounters;
use crate::device_runtime::resource::Generation;
use crate::stream::RawStream;

/// Frees for which one event is recorded.
const BATCH: usize = 256;
const SHARDS: usize = 16;
/// More than this are freed with a wait.
const MOST_PUT_BY: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Frees {
    shards: [Shard; SHARDS],
    /// Frees that failed half way.
    kept: Mutex<Vec<Generation>>,
    /// Returned blocks whose uses on other streams have not completed.
    put_by: Mutex<VecDeque<Generation>>,
    put_by_count: AtomicUsize,
    /// Held while blocks are taken out of `put_by` or `kept` and freed, so that a reap misses none that is on its way.
    turn: Mutex<()>,
    /// Where the next stream begins to count, so that what was said of one that was let go of is not taken for another.
    starts: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard(Mutex<Vec<StreamFrees>>);

#[derive(Debug)]
struct StreamFrees {
    stream: Arc<RawStream>,
    /// Not covered by an event of ours, in the order they were queued.
    loose: VecDeque<Generation>,
    /// How many were loose before the first of them.
    before: u64,
    /// With the stamp that says when they are done, the oldest first.
    batches: VecDeque<(u64, Vec<Generation>)>,
}

impl StreamFrees {
    fn key(&self) -> u64 {
        self.stream.clock().key()
    }

    /// How far frees have been queued.
    fn end(&self) -> u64 {
        self.before + self.loose.len() as u64
    }

    /// Takes the loose ones up to `end` that nobody else has taken meanwhile.
    fn take_loose(&mut self, end: u64) -> Vec<Generation> {
        let count = end.saturating_sub(self.before).min(self.loose.len() as u64);
        self.before += count;
        self.loose.drain(..count as usize).collect()
    }

    /// Takes the batches that are done when `stamp` is.
    fn take_batches(&mut self, stamp: u64) -> Vec<Generation> {
        let count = self.batches.partition_point(|(at, _)| *at <= stamp);
        self.batches.drain(..count).flat_map(|(_, batch)| batch).collect()
    }
}

impl Frees {
    fn shard(&self, key: u64) -> &Mutex<Vec<StreamFrees>> {
        &self.shards[key as usize % SHARDS].0
    }

    /// A free was queued on `stream`. Returns older ones that turned out to be done.
    pub(super) fn queued(
        &self,
        stream: &Arc<RawStream>,
        generation: Generation,
        counters: &OrderCounters,
    ) -> Vec<Generation> {
        let full = self.with(stream, |frees| {
            frees.loose.push_back(generation);
            frees.loose.len() >= BATCH
        });
        if !full {
            return Vec::new();
        }
        // A failure here only leaves them for a reap.
        self.poll(stream, counters).unwrap_or_default()
    }

    /// Returns what has completed, and records an event for what is loose. Never waits.
    ///
    /// The driver is asked without the lock, about what was there before; whoever takes an entry out counts it.
    pub(super) fn poll(
        &self,
        stream: &Arc<RawStream>,
        counters: &OrderCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, stamps) = self.with(stream, |frees| {
            let stamps: Vec<u64> = frees.batches.iter().map(|(stamp, _)| *stamp).collect();
            (frees.end(), stamps)
        });
        if stream.is_done() {
            let done = self.with(stream, |frees| {
                let mut done = frees.take_batches(stamps.last().copied().unwrap_or(0));
                done.append(&mut frees.take_loose(end));
                done
            });
            self.forget_idle(stream.clock().key());
            return Ok(done);
        }
        let complete =
            stamps.into_iter().take_while(|&stamp| stream.poll(stamp) == Some(true)).last();
        let done = self.with(stream, |frees| frees.take_batches(complete.unwrap_or(0)));
        if !self.with(stream, |frees| frees.loose.is_empty()) {
            match stream.record(counters) {
                Ok(recorded) => self.with(stream, |frees| {
                    let loose = frees.take_loose(end);
                    let at = frees.batches.partition_point(|(stamp, _)| *stamp < recorded.covers);
                    if !loose.is_empty() {
                        frees.batches.insert(at, (recorded.covers, loose));
                    }
                }),
                // What is known to be done is counted; the failure comes back with the next call.
                Err(_) if !done.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Waits for everything queued on `stream`, and returns what was freed there.
    pub(super) fn settle(
        &self,
        stream: &Arc<RawStream>,
        counters: &OrderCounters,
    ) -> DriverResult<Vec<Generation>> {
        let end = self.with(stream, |frees| frees.end());
        let stamp = stream.settle(counters)?;
        let done = self.with(stream, |frees| {
            let mut done = frees.take_batches(stamp);
            done.append(&mut frees.take_loose(end));
            done
        });
        self.forget_idle(stream.clock().key());
        Ok(done)
    }

    /// The streams on which frees wait.
    pub(super) fn streams(&self) -> Vec<Arc<RawStream>> {
        let of = |shard: &Shard| -> Vec<Arc<RawStream>> {
            shard.0.lock().iter().map(|frees| Arc::clone(&frees.stream)).collect()
        };
        let mut streams: Vec<_> = self.shards.iter().flat_map(of).collect();
        streams.sort_by_key(|stream| stream.clock().key());
        streams
    }

    /// A free failed half way; a reap tries it again.
    pub(super) fn keep(&self, generation: Generation) {
        self.kept.lock().push(generation);
    }

    pub(super) fn take_kept(&self) -> Vec<Generation> {
        std::mem::take(&mut *self.kept.lock())
    }

    /// Keeps a block until its uses have completed; false when too many are kept already.
    pub(super) fn put_by(&self, generation: Generation) -> bool {
        let mut put_by = self.put_by.lock();
        if put_by.len() >= MOST_PUT_BY {
            return false;
        }
        put_by.push_back(generation);
        self.put_by_count.store(put_by.len(), Ordering::Release);
        true
    }

    /// Takes up to `count` of those, the oldest first.
    pub(super) fn take_put_by(&self, count: usize) -> Vec<Generation> {
        let mut put_by = self.put_by.lock();
        let count = count.min(put_by.len());
        let taken = put_by.drain(..count).collect();
        self.put_by_count.store(put_by.len(), Ordering::Release);
        taken
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    pub(super) fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.try_lock()
    }

    #[inline]
    pub(super) fn has_put_by(&self) -> bool {
        self.put_by_count.load(Ordering::Acquire) > 0
    }

    /// The frees of a stream, which may have been let go of in between.
    fn with<T>(&self, stream: &Arc<RawStream>, change: impl FnOnce(&mut StreamFrees) -> T) -> T {
        let key = stream.clock().key();
        let mut shard = self.shard(key).lock();
        let known = shard.iter().position(|frees| frees.key() == key);
        let at = known.unwrap_or_else(|| {
            shard.push(StreamFrees {
                stream: Arc::clone(stream),
                loose: VecDeque::new(),
                before: self.starts.fetch_add(1 << 32, Ordering::Relaxed),
                batches: VecDeque::new(),
            });
            shard.len() - 1
        });
        change(&mut shard[at])
    }

    /// A stream nothing waits on is let go of.
    fn forget_idle(&self, key: u64) {
        let mut shard = self.shard(key).lock();
        let idle = |f: &StreamFrees| f.key() == key && f.loose.is_empty() && f.batches.is_empty();
        let gone = shard.iter().position(idle).map(|at| shard.swap_remove(at));
        drop(shard);
        drop(gone);
    }
}
