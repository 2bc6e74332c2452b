//! The collection of queued checks, and the unmapping of blocks after their checks.
//!
//! Invariants: one thread at a time collects results, and pending checks of a stream stay in the order of the stream. A check that could
//! not be read and a block that could not be unmapped stay for the next collection.

use std::collections::HashMap;

use xlog_driver::Access;

use super::core::{GuardCore, GuardWork, Worked};
use super::registry::{Pending, StreamPoint};
use super::report::FoundBy;
use crate::device_runtime::resource::{
    DeviceMemoryResource, Generation, ResourceError, ResourceResult, first_error,
};
use crate::stream::Completion;

/// The number of pending checks at which a request or a free collects findings.
const COLLECT_AT: usize = 128;

impl<R: DeviceMemoryResource> GuardCore<R> {
    /// Queues a check of every block that is live or in the quarantine.
    pub(super) fn check_all(&self, found_by: FoundBy) -> ResourceResult<()> {
        let jobs = self.registry.lock().open_all();
        first_error(jobs, |(job, is_held)| {
            let inside = is_held && self.config.poison;
            let work = GuardWork { access: Access::Read, after_uses: true };
            let worked = self.work_outside(&job, work, |raw| self.check(&job, inside, raw));
            let this = worked.map(|worked| {
                // If a captured stream may still use the block, only its free checks it.
                if let Some(Worked { done, point }) = worked {
                    self.track_check(&job.info, done, point, found_by);
                }
            });
            let due = self.registry.lock().close(job.info.generation);
            let performed = self.perform(job.info.generation, due);
            this.and(performed)
        })
    }

    /// Returns whether all work before a point has completed. Never waits.
    pub(super) fn is_complete(&self, point: Option<StreamPoint>) -> bool {
        let (Some(point), Ok(parts)) = (point, &self.parts) else { return true };
        let StreamPoint { stream_slot, stamp } = point;
        let Some(raw) = parts.streams.at(stream_slot) else { return true };
        // Polls the tail first: an event that is recorded only for the poll would keep an idle stream busy.
        match raw.poll(stamp) {
            Completion::Complete => true,
            Completion::Pending => false,
            Completion::Unrecorded => {
                raw.poll_tail()
                    || raw.record(&self.counters).is_ok() && raw.poll(stamp) == Completion::Complete
            }
        }
    }

    /// Reads the findings of completed checks, and unmaps freed blocks whose work has completed. With `wait`, waits for all of them.
    pub(super) fn collect(&self, wait: bool) -> ResourceResult<()> {
        let _collector = self.collector_lock.lock();
        self.collect_locked(wait)
    }

    /// Unmaps freed blocks whose work has completed, during a request or a free; also collects findings once many are pending.
    ///
    /// Does nothing while another thread collects: that thread may wait for a stream that this one holds. A reap retries failures.
    pub(super) fn collect_due(&self) {
        let Some(_collector) = self.collector_lock.try_lock() else { return };
        let unmapping = {
            let mut registry = self.registry.lock();
            let are_few = registry.pending.len() < COLLECT_AT;
            are_few.then(|| std::mem::take(&mut registry.unmapping))
        };
        let _ = match unmapping {
            Some(unmapping) if unmapping.is_empty() => Ok(()),
            Some(unmapping) => self.unmap_all(unmapping, false),
            None => self.collect_locked(false),
        };
    }

    fn collect_locked(&self, wait: bool) -> ResourceResult<()> {
        let Ok(parts) = &self.parts else { return Ok(()) };
        let (pending, unmapping) = {
            let mut registry = self.registry.lock();
            (std::mem::take(&mut registry.pending), std::mem::take(&mut registry.unmapping))
        };
        let mut outcome = Ok(());
        let points = pending.iter().map(|check| check.point);
        let points = points.chain(unmapping.iter().map(|(_, point)| *point));
        let mut stream_slots: Vec<u32> = points.flatten().map(|point| point.stream_slot).collect();
        stream_slots.sort_unstable();
        stream_slots.dedup();
        let mut covered = HashMap::new();
        for stream_slot in stream_slots {
            let of_stream = |check: &&Pending| {
                check.point.is_some_and(|point| point.stream_slot == stream_slot)
            };
            let done = match parts.streams.at(stream_slot).filter(|_| wait) {
                Some(raw) => raw.synchronize(&self.counters).map(Some),
                None => {
                    let points = pending.iter().filter(of_stream).map(|check| check.point);
                    let last = points.take_while(|point| self.is_complete(*point)).last();
                    Ok(last.flatten().map(|point| point.stamp))
                }
            };
            match done {
                Ok(stamp) => _ = covered.insert(stream_slot, stamp),
                Err(error) => outcome = outcome.and(Err(ResourceError::from(error))),
            }
        }
        let is_done = |check: &Pending| match check.point {
            None => true,
            Some(StreamPoint { stream_slot, stamp }) => {
                covered.get(&stream_slot).is_some_and(|done| Some(stamp) <= *done)
            }
        };
        let (done, left): (Vec<_>, Vec<_>) = pending.into_iter().partition(is_done);
        let slots: Vec<_> = done.iter().map(|check| &check.slot).collect();
        match if slots.is_empty() { Ok(Vec::new()) } else { parts.checker.read(&slots) } {
            Ok(findings) => {
                for (check, findings) in done.into_iter().zip(findings) {
                    self.journal.enter(&check.info, &findings, check.found_by);
                    check.slot.free();
                }
                self.requeue(left);
            }
            Err(error) => {
                outcome = outcome.and(Err(error.into()));
                self.requeue(done.into_iter().chain(left).collect());
            }
        }
        if wait {
            outcome = outcome.and(parts.checker.reclaim().map_err(ResourceError::from));
        }
        outcome.and(self.unmap_all(unmapping, wait))
    }

    /// Unmaps the blocks whose work has completed; keeps the rest.
    fn unmap_all(
        &self,
        unmapping: Vec<(Generation, Option<StreamPoint>)>,
        wait: bool,
    ) -> ResourceResult<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        let mut outcome = pages.sweep(wait).map_err(ResourceError::from);
        // Streams with a point that is not complete. Later points of them are not polled.
        let mut busy: Vec<u32> = Vec::new();
        for (generation, point) in unmapping {
            let stream_slot = point.map(|point| point.stream_slot);
            let is_busy = stream_slot.is_some_and(|stream_slot| busy.contains(&stream_slot));
            if !is_busy && self.is_complete(point) {
                outcome = outcome.and(self.unmap_block(generation));
                continue;
            }
            busy.extend(stream_slot.filter(|_| !is_busy));
            self.registry.lock().unmapping.push((generation, point));
        }
        self.prune();
        outcome
    }

    /// Unmaps a freed block whose work has completed. A sweep retries a failure.
    pub(super) fn unmap_block(&self, generation: Generation) -> ResourceResult<()> {
        let mapped = self.registry.lock().blocks.get(&generation).and_then(|entry| entry.mapped);
        let (Some(mapped), Some(pages)) = (mapped, &self.pages) else { return Ok(()) };
        let unmapped = pages.unmap(mapped);
        if let Some(entry) = self.registry.lock().blocks.get_mut(&generation) {
            entry.mapped = None;
        }
        Ok(unmapped?)
    }

    /// Puts checks back in front of those that were queued meanwhile, so that the checks of a stream stay in its order.
    fn requeue(&self, mut checks: Vec<Pending>) {
        let mut registry = self.registry.lock();
        checks.append(&mut registry.pending);
        registry.pending = checks;
    }
}
