//! Looks at blocks, from the queue to what they found, and the unmapping that waits for them.
//!
//! Results are taken in turns, one thread at a time; the looks of a stream stay in its order. What could not be read, or unmapped, is
//! kept for the next turn.

use std::collections::HashMap;

use xlog_driver::Access;

use super::books::{Mark, Pending};
use super::core::{Core, Worked};
use super::report::FoundBy;
use crate::device_runtime::resource::{
    DeviceMemoryResource, Generation, ResourceError, ResourceResult,
};

impl<R: DeviceMemoryResource> Core<R> {
    /// Queues a look at every block that is live or held back.
    pub(super) fn look_at_all(&self, found_by: FoundBy) -> ResourceResult<()> {
        let jobs = self.books.lock().open_all();
        let mut outcome = Ok(());
        for (job, is_held) in jobs {
            let inside = is_held && self.config.poison;
            let late = (Access::Read, true);
            let worked = self.work(job.below, job.place, late, |raw| self.look(&job, inside, raw));
            let this = worked.map(|Worked { done, mark }| {
                self.await_look(&job.info, done, mark, found_by);
            });
            let due = self.books.lock().close(job.info.generation);
            outcome = outcome.and(this).and(self.do_due(job.info.generation, due));
        }
        outcome
    }

    /// True when everything before a mark has completed. Never waits.
    pub(super) fn is_complete(&self, mark: Mark) -> bool {
        let (Some((place, stamp)), Ok(parts)) = (mark, &self.parts) else { return true };
        let Some(raw) = parts.streams.at(place) else { return true };
        // An idle stream is asked first: an event recorded only to ask would keep it from being idle.
        match raw.poll(stamp) {
            Some(complete) => complete,
            None if raw.poll_tail() => true,
            None => raw.record(&self.counters).is_ok() && raw.poll(stamp) == Some(true),
        }
    }

    /// Takes down what looks have found that are done; with `wait`, of all that are queued.
    pub(super) fn collect(&self, wait: bool) -> ResourceResult<()> {
        let Ok(parts) = &self.parts else { return Ok(()) };
        let _turn = self.turn.lock();
        let (pending, unmapping) = {
            let mut books = self.books.lock();
            (std::mem::take(&mut books.pending), std::mem::take(&mut books.unmapping))
        };
        let mut outcome = Ok(());
        let marks = pending.iter().map(|look| look.mark);
        let marks = marks.chain(unmapping.iter().map(|(_, mark)| *mark));
        let mut places: Vec<u32> = marks.filter_map(|mark| Some(mark?.0)).collect();
        places.sort_unstable();
        places.dedup();
        let mut covered = HashMap::new();
        for place in places {
            let of_place = |look: &&Pending| look.mark.is_some_and(|mark| mark.0 == place);
            let done = match parts.streams.at(place).filter(|_| wait) {
                Some(raw) => raw.synchronize(&self.counters).map(Some),
                None => {
                    let marks = pending.iter().filter(of_place).map(|look| look.mark);
                    let last = marks.take_while(|mark| self.is_complete(*mark)).last();
                    Ok(last.flatten().map(|(_, stamp)| stamp))
                }
            };
            match done {
                Ok(stamp) => _ = covered.insert(place, stamp),
                Err(error) => outcome = outcome.and(Err(ResourceError::from(error))),
            }
        }
        let is_done = |look: &Pending| match look.mark {
            None => true,
            Some((place, stamp)) => covered.get(&place).is_some_and(|done| Some(stamp) <= *done),
        };
        let (done, left): (Vec<_>, Vec<_>) = pending.into_iter().partition(is_done);
        let slots: Vec<_> = done.iter().map(|look| &look.slot).collect();
        match if slots.is_empty() { Ok(Vec::new()) } else { parts.checker.read(&slots) } {
            Ok(findings) => {
                for (look, findings) in done.into_iter().zip(findings) {
                    self.journal.enter(&look.info, &findings, look.found_by);
                    look.slot.free();
                }
                self.put_back(left);
            }
            Err(error) => {
                outcome = outcome.and(Err(error.into()));
                self.put_back(done.into_iter().chain(left).collect());
            }
        }
        if wait {
            outcome = outcome.and(parts.checker.reclaim().map_err(ResourceError::from));
        }
        outcome.and(self.unmap_all(unmapping, wait))
    }

    /// Unmaps what the host has seen complete; keeps the rest.
    fn unmap_all(&self, unmapping: Vec<(Generation, Mark)>, wait: bool) -> ResourceResult<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        let mut outcome = pages.sweep(wait).map_err(ResourceError::from);
        for (generation, mark) in unmapping {
            let entry_mapped =
                self.books.lock().entries.get(&generation).and_then(|entry| entry.mapped);
            let Some(mapped) = entry_mapped else { continue };
            let unmapped = match self.is_complete(mark) {
                true => Some(pages.unmap(mapped)),
                false => None,
            };
            let mut books = self.books.lock();
            match unmapped {
                // What failed is left to a sweep.
                Some(unmapped) => {
                    if let Some(entry) = books.entries.get_mut(&generation) {
                        entry.mapped = None;
                    }
                    outcome = outcome.and(unmapped.map_err(ResourceError::from));
                }
                None => books.unmapping.push((generation, mark)),
            }
        }
        self.prune();
        outcome
    }

    /// Before those that were queued meanwhile: the looks of a stream stay in its order.
    fn put_back(&self, mut looks: Vec<Pending>) {
        let mut books = self.books.lock();
        looks.append(&mut books.pending);
        books.pending = looks;
    }
}
