//! Queued frees that are not known to have completed.
//!
//! The frees of a stream are collected in batches, with one event for each. When the event has completed, the batch is
//! counted. A single free costs no further driver call.

use std::collections::VecDeque;

use xlog_driver::DriverResult;
use xlog_driver::sync::Mutex;

use crate::device_runtime::ordering::{Lock, Slab, StripedCounters};
use crate::device_runtime::resource::Generation;
use crate::stream::{Completion, RawStream, is_capture_refusal};

/// Frees that share one event.
const BATCH: usize = 256;
/// The maximum number of streams, as in a stream pool.
const MAX_STREAMS: u32 = 1 << 16;

#[derive(Debug)]
pub(super) struct Frees {
    /// By stream slot.
    streams: Slab<FreesShard, 16>,
}

/// On cache lines of its own, since threads mostly use different streams.
#[derive(Debug, Default)]
#[repr(align(128))]
struct FreesShard {
    frees: Lock<StreamFrees>,
    /// Held from the removal of completed frees until they are counted. Not held while the host waits for the device.
    counting: Mutex<()>,
}

#[derive(Debug, Default)]
struct StreamFrees {
    slot: u32,
    /// Frees without an event, in the order they were queued.
    loose: VecDeque<Generation>,
    /// The number of frees before the first of `loose`.
    before: u64,
    /// The oldest first.
    batches: VecDeque<Batch>,
    /// Whether memory was freed here since the host last waited for the stream. The driver's pool releases memory only
    /// after such a wait; a query does not suffice.
    unseen: bool,
}

/// Frees with an event.
#[derive(Debug)]
struct Batch {
    /// The stamp that the event covers.
    stamp: u64,
    /// The number of frees up to the last of this batch.
    end: u64,
    frees: Vec<Generation>,
}

impl Default for Frees {
    fn default() -> Self {
        Self { streams: Slab::new(MAX_STREAMS) }
    }
}

impl StreamFrees {
    /// The number of frees queued so far.
    fn end(&self) -> u64 {
        self.before + self.loose.len() as u64
    }

    /// Removes the loose frees up to `end`, except those that another thread has removed.
    fn take_loose(&mut self, end: u64) -> Vec<Generation> {
        let count = end.saturating_sub(self.before).min(self.loose.len() as u64);
        self.before += count;
        self.loose.drain(..count as usize).collect()
    }

    /// Removes the batches that complete with `stamp`, and those of the first `end` frees.
    fn take_batches(&mut self, stamp: u64, end: u64) -> Vec<Generation> {
        let is_complete = |batch: &Batch| batch.stamp <= stamp || batch.end <= end;
        let count = self.batches.partition_point(is_complete);
        self.batches.drain(..count).flat_map(|batch| batch.frees).collect()
    }
}

impl Frees {
    /// Adds a free on `stream`. Returns true if there are enough for [`Frees::poll`].
    #[inline]
    pub(super) fn queued(&self, stream: &RawStream, generation: Generation) -> bool {
        let slot = stream.clock().slot();
        let push = |frees: &mut StreamFrees| {
            frees.slot = slot;
            frees.unseen = true;
            frees.loose.push_back(generation);
            frees.loose.len() >= BATCH
        };
        match self.streams.get(slot).and_then(|at| at.frees.enter()) {
            Some(mut frees) => push(&mut frees),
            None => self.with_elsewhere(stream, push),
        }
    }

    /// Notes memory on `stream` that became no block; a reap waits for it as for a free.
    pub(super) fn undone(&self, stream: &RawStream) {
        self.with(stream, |frees| frees.unseen = true);
    }

    /// [`Frees::with`], out of line.
    #[cold]
    #[inline(never)]
    fn with_elsewhere<T: Default>(
        &self,
        stream: &RawStream,
        change: impl FnOnce(&mut StreamFrees) -> T,
    ) -> T {
        self.with(stream, change)
    }

    /// Passes the frees that have completed to `count`, and records an event for the loose ones. Never waits for work.
    ///
    /// It queries the driver without the lock, for the frees so far. The thread that removes an entry counts it.
    pub(super) fn poll(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
        count: impl FnOnce(&[Generation]),
    ) -> DriverResult<()> {
        let _counting = self.shard(stream).map(|at| at.counting.lock());
        count(&self.remove_completed(stream, counters)?);
        Ok(())
    }

    fn remove_completed(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, stamps, unseen) = self.with(stream, |frees| {
            let stamps: Vec<u64> = frees.batches.iter().map(|batch| batch.stamp).collect();
            (frees.end(), stamps, std::mem::take(&mut frees.unseen))
        });
        // A stream that other code may begin to capture is not queried, and an event is recorded there only for loose frees.
        let is_done = !stream.handle_escaped() && stream.is_unused();
        let is_seen = is_done && matches!(stream.synchronize_if_complete(counters), Ok(true));
        if unseen && !is_seen {
            self.with(stream, |frees| frees.unseen = true);
        }
        if is_done {
            let done = self.with(stream, |frees| {
                let mut done = frees.take_batches(stamps.last().copied().unwrap_or(0), end);
                done.append(&mut frees.take_loose(end));
                done
            });
            return Ok(done);
        }
        let mut done = self.take_complete(stream, stamps);
        if !self.with(stream, |frees| frees.loose.is_empty()) {
            match stream.record(counters) {
                Ok(covers) => {
                    self.with(stream, |frees| {
                        let loose = frees.take_loose(end);
                        let at = frees.batches.partition_point(|batch| batch.stamp < covers);
                        if !loose.is_empty() {
                            let batch = Batch { stamp: covers, end: frees.before, frees: loose };
                            frees.batches.insert(at, batch);
                        }
                    });
                    if stream.handle_escaped() {
                        // Only events may be queried here, and these frees had none before.
                        done.append(&mut self.take_complete(stream, vec![covers]));
                    }
                }
                // A later reap handles a stream under capture.
                Err(error) if is_capture_refusal(&error) => {}
                // The completed ones are counted now; the next call reports the failure.
                Err(_) if !done.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Removes the batches of these stamps whose events have completed; stops at the first pending one.
    fn take_complete(&self, stream: &RawStream, stamps: Vec<u64>) -> Vec<Generation> {
        let (mut complete, mut has_waited) = (0, false);
        for stamp in stamps {
            // A stamp that is known to be complete needs no wait.
            has_waited = !stream.clock().is_complete(stamp);
            if stream.poll_waiting(stamp) != Completion::Complete {
                break;
            }
            complete = stamp;
        }
        self.with(stream, |frees| {
            let done = frees.take_batches(complete, 0);
            // After a wait for the event of the last free, a stream whose handle escaped needs no further query.
            let all_seen = frees.batches.is_empty() && frees.loose.is_empty() && has_waited;
            frees.unseen &= !(all_seen && !done.is_empty() && stream.handle_escaped());
            done
        })
    }

    /// Waits for all frees on `stream`, and passes them to `count`.
    pub(super) fn synchronize(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
        count: impl FnOnce(&[Generation]),
    ) -> DriverResult<()> {
        let (end, unseen, last_batch, has_loose) = self.with(stream, |frees| {
            let last_batch = frees.batches.back().map_or(0, |batch| batch.stamp);
            (frees.end(), std::mem::take(&mut frees.unseen), last_batch, !frees.loose.is_empty())
        });
        // On a stream that other code may begin to capture, an event is recorded only for frees that none covers.
        let has_events = stream.handle_escaped() && !has_loose && (last_batch > 0 || !unseen);
        let synchronized = if has_events && stream.clock().is_complete(last_batch) {
            // The host may only have queried so far.
            let is_seen = match unseen.then(|| stream.synchronize_if_complete(counters)) {
                None => Ok(true),
                // A later reap handles a stream under capture, except for completed frees.
                Some(Err(error)) if is_capture_refusal(&error) => Ok(false),
                Some(is_complete) => is_complete,
            };
            is_seen.map(|is_seen| {
                self.with(stream, |frees| frees.unseen |= !is_seen);
                last_batch
            })
        } else if has_events {
            stream.synchronize_up_to(last_batch).map(|_| last_batch)
        } else {
            stream.synchronize(counters)
        };
        let synchronized = synchronized.inspect_err(|_| {
            self.with(stream, |frees| frees.unseen |= unseen);
        });
        let stamp = match synchronized {
            // A later reap handles a stream under capture.
            Err(error) if is_capture_refusal(&error) => return Ok(()),
            stamp => stamp?,
        };
        let _counting = self.shard(stream).map(|at| at.counting.lock());
        let done = self.with(stream, |frees| {
            // Another thread may have recorded a later event for frees that are complete now.
            let mut done = frees.take_batches(stamp, end);
            done.append(&mut frees.take_loose(end));
            done
        });
        count(&done);
        Ok(())
    }

    /// Waits until other threads have counted what they have removed.
    pub(super) fn wait_until_counted(&self) {
        self.streams.iter().for_each(|(_, at)| drop(at.counting.lock()));
    }

    /// Returns the slots of the streams with frees that the host has not seen complete.
    pub(super) fn slots(&self) -> Vec<u32> {
        let waiting = |at: &FreesShard| {
            at.frees.with(|frees| {
                let idle = frees.loose.is_empty() && frees.batches.is_empty() && !frees.unseen;
                (!idle).then_some(frees.slot)
            })
        };
        self.streams.iter().filter_map(|(_, at)| waiting(at)).collect()
    }

    /// Returns the frees of a stream. A stream pool has no slots beyond the last one.
    #[inline]
    fn shard(&self, stream: &RawStream) -> Option<&FreesShard> {
        let slot = stream.clock().slot();
        self.streams.get(slot).or_else(|| self.streams.get_or_make(slot))
    }

    #[inline]
    fn with<T: Default>(
        &self,
        stream: &RawStream,
        change: impl FnOnce(&mut StreamFrees) -> T,
    ) -> T {
        let slot = stream.clock().slot();
        let at = self.shard(stream);
        at.map(|at| {
            at.frees.with(|frees| {
                frees.slot = slot;
                change(frees)
            })
        })
        .unwrap_or_default()
    }
}
