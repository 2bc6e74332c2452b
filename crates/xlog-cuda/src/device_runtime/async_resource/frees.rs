//! Queued frees that are not known to have completed.
//!
//! The frees of a stream are collected in batches, with one event for each. When the event has completed, the batch is
//! counted. A single free costs no further driver call.

use std::collections::VecDeque;

use xlog_driver::DriverResult;

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
struct FreesShard(Lock<StreamFrees>);

#[derive(Debug, Default)]
struct StreamFrees {
    slot: u32,
    /// Frees without an event, in the order they were queued.
    loose: VecDeque<Generation>,
    /// The number of frees before the first of `loose`.
    before: u64,
    /// Frees with an event, by the stamp that it covers, the oldest first.
    batches: VecDeque<(u64, Vec<Generation>)>,
    /// Whether memory was freed here since the host last waited for the stream. The driver's pool releases memory only
    /// after such a wait; a query does not suffice.
    unseen: bool,
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

    /// Removes the batches that complete with `stamp`.
    fn take_batches(&mut self, stamp: u64) -> Vec<Generation> {
        let count = self.batches.partition_point(|(at, _)| *at <= stamp);
        self.batches.drain(..count).flat_map(|(_, batch)| batch).collect()
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
        match self.streams.get(slot).and_then(|at| at.0.enter()) {
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

    /// Returns the frees that have completed, and records an event for the loose ones. Never waits for work.
    ///
    /// It queries the driver without the lock, for the frees so far. The thread that removes an entry counts it.
    pub(super) fn poll(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, stamps, unseen) = self.with(stream, |frees| {
            let stamps: Vec<u64> = frees.batches.iter().map(|(stamp, _)| *stamp).collect();
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
                let mut done = frees.take_batches(stamps.last().copied().unwrap_or(0));
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
                        let at = frees.batches.partition_point(|(stamp, _)| *stamp < covers);
                        if !loose.is_empty() {
                            frees.batches.insert(at, (covers, loose));
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
            let done = frees.take_batches(complete);
            // After a wait for the event of the last free, a stream whose handle escaped needs no further query.
            let all_seen = frees.batches.is_empty() && frees.loose.is_empty() && has_waited;
            frees.unseen &= !(all_seen && !done.is_empty() && stream.handle_escaped());
            done
        })
    }

    /// Waits for all frees on `stream`, and returns them.
    pub(super) fn synchronize(
        &self,
        stream: &RawStream,
        counters: &StripedCounters,
    ) -> DriverResult<Vec<Generation>> {
        let (end, unseen, last_batch, has_loose) = self.with(stream, |frees| {
            let last_batch = frees.batches.back().map_or(0, |(stamp, _)| *stamp);
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
            Err(error) if is_capture_refusal(&error) => return Ok(Vec::new()),
            stamp => stamp?,
        };
        let done = self.with(stream, |frees| {
            let mut done = frees.take_batches(stamp);
            done.append(&mut frees.take_loose(end));
            done
        });
        Ok(done)
    }

    /// Returns the slots of the streams with frees that the host has not seen complete.
    pub(super) fn slots(&self) -> Vec<u32> {
        let waiting = |at: &FreesShard| {
            at.0.with(|frees| {
                let idle = frees.loose.is_empty() && frees.batches.is_empty() && !frees.unseen;
                (!idle).then_some(frees.slot)
            })
        };
        self.streams.iter().filter_map(|(_, at)| waiting(at)).collect()
    }

    #[inline]
    fn with<T: Default>(
        &self,
        stream: &RawStream,
        change: impl FnOnce(&mut StreamFrees) -> T,
    ) -> T {
        let slot = stream.clock().slot();
        let at = self.streams.get(slot).or_else(|| self.streams.get_or_make(slot));
        // A stream pool has no slots beyond the last one.
        at.map(|at| {
            at.0.with(|frees| {
                frees.slot = slot;
                change(frees)
            })
        })
        .unwrap_or_default()
    }
}
