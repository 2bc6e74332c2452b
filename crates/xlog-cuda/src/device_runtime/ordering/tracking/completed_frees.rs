//! Returned blocks whose memory is reused only after the host has seen all their work complete.
//!
//! Stream order does not suffice for memory that the host accesses: page-locked memory, which its next owner may write at
//! once, and memory under a checker, which learns of blocks when the host frees them. A free records events behind the
//! block's work and waits for nothing; later requests and reaps poll them.
//!
//! Callers serialize calls that remove blocks; any thread may free at any time.

use std::collections::{HashMap, HashSet, VecDeque};

use xlog_driver::sync::Mutex;

use super::tracker::Tracker;
use crate::device_runtime::ordering::block::block_meta::BlockMeta;
use crate::device_runtime::resource::{Generation, ResourceResult, first_error};
use crate::stream::{Completion, RawStream};

/// Retired blocks on which work may be pending, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct CompletedFrees {
    retired: Mutex<VecDeque<RetiredBlock>>,
}

#[derive(Clone, Copy, Debug)]
struct RetiredBlock {
    generation: Generation,
    /// A stamp of the block's own stream after all its work there, covered by an event; `None` if none could be recorded.
    stamp: Option<u64>,
}

impl CompletedFrees {
    /// Adds a retired block on which no use is open. After an error the block is kept, and the next poll records again.
    pub(crate) fn push(
        &self,
        tracker: &Tracker,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        let recorded = record_behind(tracker, meta);
        let stamp = recorded.as_ref().ok().copied();
        self.retired.lock().push_back(RetiredBlock { generation, stamp });
        recorded.map(|_| ())
    }

    pub(crate) fn len(&self) -> usize {
        self.retired.lock().len()
    }

    /// Polls up to `count` blocks, and passes completed ones, without outstanding uses, to `release`. Never waits.
    pub(crate) fn release_completed(
        &self,
        tracker: &Tracker,
        count: usize,
        mut release: impl FnMut(Generation, &BlockMeta) -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        let polled: Vec<RetiredBlock> = {
            let mut retired = self.retired.lock();
            let count = count.min(retired.len());
            retired.drain(..count).collect()
        };
        let mut poll = Poll { tracker, pending: HashMap::new() };
        first_error(polled, |mut block| {
            let Some(meta) = tracker.table.at(block.generation) else { return Ok(()) };
            match poll.is_complete(&mut block, meta) {
                Ok(true) => {
                    meta.with_uses(|uses| uses.take_outstanding(&tracker.streams));
                    release(block.generation, meta)
                }
                other => {
                    self.retired.lock().push_back(block);
                    other.map(|_| ())
                }
            }
        })
    }

    /// Returns the streams of all uses of these blocks.
    pub(crate) fn streams<'t>(&self, tracker: &'t Tracker) -> Vec<&'t RawStream> {
        let retired: Vec<_> = self.retired.lock().iter().map(|block| block.generation).collect();
        let mut slots = HashSet::new();
        for meta in retired.into_iter().filter_map(|generation| tracker.table.at(generation)) {
            let used = meta.with_uses(|uses| uses.copy_outstanding());
            slots.extend(used.iter().map(|entry| entry.slot).chain([meta.owner()]));
        }
        slots.into_iter().filter_map(|slot| tracker.streams.at(slot).map(|raw| &**raw)).collect()
    }
}

struct Poll<'t> {
    tracker: &'t Tracker,
    /// The earliest stamp of each stream that was found pending, by slot: later stamps are not polled.
    pending: HashMap<u32, u64>,
}

impl Poll<'_> {
    /// Whether the host has seen all work on a block complete.
    fn is_complete(&mut self, block: &mut RetiredBlock, meta: &BlockMeta) -> ResourceResult<bool> {
        let stamp = match block.stamp {
            Some(stamp) => stamp,
            None => *block.stamp.insert(record_behind(self.tracker, meta)?),
        };
        Ok(self.has_completed(meta.owner(), stamp)
            && meta
                .with_uses(|uses| uses.copy_outstanding())
                .iter()
                .all(|entry| self.has_completed(entry.slot, entry.stamp)))
    }

    fn has_completed(&mut self, slot: u32, stamp: u64) -> bool {
        if self.pending.get(&slot).is_some_and(|&pending| pending <= stamp) {
            return false;
        }
        let stream = self.tracker.streams.at(slot);
        let is_complete = stream.is_none_or(|stream| stream.poll(stamp) == Completion::Complete);
        if !is_complete {
            self.pending.insert(slot, stamp);
        }
        is_complete
    }
}

/// Records events behind all work on a block, and makes no stream wait. Returns the covered stamp of its own stream.
fn record_behind(tracker: &Tracker, meta: &BlockMeta) -> ResourceResult<u64> {
    for entry in meta.with_uses(|uses| uses.copy_outstanding()) {
        if let Some(stream) = tracker.streams.at(entry.slot) {
            stream.note_free(entry.stamp);
            if stream.poll(entry.stamp) == Completion::Unrecorded {
                stream.record(&tracker.counters)?;
            }
        }
    }
    let owner = tracker.owner_stream(meta)?;
    // First as well, so that the memory becomes free even if no event can be recorded.
    owner.stamp_free();
    let covers = owner.record(&tracker.counters)?;
    owner.note_free(covers);
    Ok(covers)
}
