//! Frees that are queued and not yet known to have completed.
//!
//! Per stream they gather until there are enough for one event; a batch whose event has completed is counted. Nothing is asked
//! of the driver for a single free.

use std::collections::VecDeque;

use xlog_driver::DriverResult;

use crate::device_runtime::ordering::primitive::Lock;
use crate::device_runtime::ordering::slab::Slab;
use crate::device_runtime::ordering::striped_counters::StripedCounters;
use crate::device_runtime::resource::Generation;
use crate::stream::RawStream;

/// Frees for which one event is recorded.
const BATCH: usize = 256;
/// Streams on which frees can wait: as many as a pool can have.
const MAX_STREAMS: u32 = 1 << 16;

#[derive(Debug)]
pub(super) struct Frees {
    /// By the place of the stream in its pool.
    streams: Slab<FreesShard, 16>,
}

/// On cache lines of its own: each stream has mostly another thread.
#[derive(Debug, Default)]
#[repr(align(128))]
struct FreesShard(Lock<StreamFrees>);

#[derive(Debug, Default)]
struct StreamFrees {
    slot: u32,
    /// Not covered by an event of ours, in the order they were queued.
    loose: VecDeque<Generation>,
    /// How many were loose before the first of them.
    before: u64,
    /// With the stamp that says when they are done, the oldest first.
    batches: VecDeque<(u64, Vec<Generation>)>,
    /// Whether memory that became no block was given back there since somebody waited.
    undone: bool,
}

impl Default for Frees {
    fn default() -> Self {
        Self { streams: Slab::new(MAX_STREAMS) }
    }
}

impl StreamFrees {
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
    /// A free was queued on `stream`. True when there are enough for a question: [`Frees::poll`].
    #[inline]
    pub(super) fn queued(&self, stream: &RawStream, generation: Generation) -> bool {
        let slot = stream.clock().slot();
        let push = |frees: &mut StreamFrees| {
            frees.slot = slot;
            frees.loose.push_back(generation);
            frees.loose.len() >= BATCH
        };
        match self.streams.get(slot).and_then(|at| at.0.enter()) {
            Some(mut frees) => push(&mut frees),
            None => self.with_elsewhere(stream, push),
        }
    }

    /// Memory that became no block was given back on `stream`: it is waited for as a free is.
    pub(super) fn undone(&self, stream: &RawStream) {
        self.with(stream, |frees| frees.undone = true);
    }

    /// [`Frees::with`] out of the way of the common case.
    #[cold]
    #[inline(never)]
    fn with_elsewhere<T: Default>(
        &self,
        stream: &RawStream,
        change: impl FnOnce(&mut StreamFrees) -> T,
    ) -> T {
        self.with(stream, change)
    }

    /// Returns what has completed, and records an event for what is loose. Never waits.
    ///
    /// The driver is asked without the lock, about what was there before; whoever takes an entry out counts it.
    pub(super) fn poll(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, stamps, undone) = self.with(stream, |frees| {
            let stamps: Vec<u64> = frees.batches.iter().map(|(stamp, _)| *stamp).collect();
            (frees.end(), stamps, std::mem::take(&mut frees.undone))
        });
        if stream.is_done() {
            let done = self.with(stream, |frees| {
                let mut done = frees.take_batches(stamps.last().copied().unwrap_or(0));
                done.append(&mut frees.take_loose(end));
                done
            });
            return Ok(done);
        }
        if undone {
            self.undone(stream);
        }
        let complete =
            stamps.into_iter().take_while(|&stamp| stream.poll(stamp) == Some(true)).last();
        let done = self.with(stream, |frees| frees.take_batches(complete.unwrap_or(0)));
        if !self.with(stream, |frees| frees.loose.is_empty()) {
            match stream.record(counters) {
                Ok(covers) => self.with(stream, |frees| {
                    let loose = frees.take_loose(end);
                    let at = frees.batches.partition_point(|(stamp, _)| *stamp < covers);
                    if !loose.is_empty() {
                        frees.batches.insert(at, (covers, loose));
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
    pub(super) fn synchronize(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, undone) =
            self.with(stream, |frees| (frees.end(), std::mem::take(&mut frees.undone)));
        let stamp = stream.synchronize(counters).inspect_err(|_| {
            self.with(stream, |frees| frees.undone |= undone);
        })?;
        let done = self.with(stream, |frees| {
            let mut done = frees.take_batches(stamp);
            done.append(&mut frees.take_loose(end));
            done
        });
        Ok(done)
    }

    /// The places of the streams on which frees wait.
    pub(super) fn slots(&self) -> Vec<u32> {
        let waiting = |at: &FreesShard| {
            at.0.with(|frees| {
                let idle = frees.loose.is_empty() && frees.batches.is_empty() && !frees.undone;
                (!idle).then_some(frees.slot)
            })
        };
        self.streams.iter().filter_map(|(_, at)| waiting(at)).collect()
    }

    /// The frees of a stream.
    #[inline]
    fn with<T: Default>(
        &self,
        stream: &RawStream,
        change: impl FnOnce(&mut StreamFrees) -> T,
    ) -> T {
        let slot = stream.clock().slot();
        let at = self.streams.get(slot).or_else(|| self.streams.get_or_make(slot));
        // A pool has no streams beyond the last place.
        at.map(|at| {
            at.0.with(|frees| {
                frees.slot = slot;
                change(frees)
            })
        })
        .unwrap_or_default()
    }
}
