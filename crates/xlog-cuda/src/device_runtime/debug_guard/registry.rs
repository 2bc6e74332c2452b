//! What a guard knows of its blocks: who has them, which are held back, and which checks are on their way.
//!
//! Everything here is plain bookkeeping under one lock, which is never held over a call of the driver or of the resource below.
//! The quarantine is bounded at every instant: what a block has to make room for leaves before the block enters.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::checker::FindingSlot;
use super::pages::Mapped;
use super::report::{BlockInfo, FoundBy};
use crate::device_runtime::resource::{
    BlockId, DeviceBlock, Generation, ResourceError, ResourceResult,
};

/// Where a guarded block is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Handed out.
    Live,
    /// Returned; a use is open, or its free failed half way.
    Returned,
    /// In the quarantine; its poison is queued before this point.
    Quarantined(Option<StreamPoint>),
    /// On its way out of the quarantine.
    Evicted,
    /// Given to the resource below, after what the guard queued before this point.
    Released(Option<StreamPoint>),
}

/// A point in the order of a stream. Where an `Option` of it is `None`, the host has already waited for the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StreamPoint {
    /// The stream's slot in its pool.
    pub(super) stream_slot: u32,
    /// Work queued before this stamp precedes the point.
    pub(super) stamp: u64,
}

/// What the quarantine may hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QuarantineLimits {
    pub(super) bytes: usize,
    pub(super) blocks: usize,
}

/// The outcome of an eviction from the quarantine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Eviction {
    /// The caller releases this block.
    Ready(Generation),
    /// A check has the block open; the close of that check releases it.
    Busy,
    /// The quarantine is empty.
    Empty,
}

#[derive(Debug)]
pub(super) struct GuardedBlock {
    pub(super) info: Arc<BlockInfo>,
    /// As the resource below knows it.
    pub(super) below: BlockId,
    /// To be given back to the resource below.
    pub(super) block: Option<DeviceBlock>,
    pub(super) charge: usize,
    /// The slot of the stream it was allocated on.
    pub(super) stream_slot: Option<u32>,
    pub(super) stage: Stage,
    /// Uses, and checks of the guard's own, that are under way.
    pub(super) open: u32,
    /// Whether it counts as [`BlockRegistry::lingering`].
    pub(super) lingers: bool,
    /// Whether its user has announced a use; until then its own stream may be used without.
    pub(super) announced: bool,
    /// Its own memory between guard pages; what the resource below has given is then a stand-in that orders its uses.
    pub(super) mapped: Option<Mapped>,
}

/// A check that is queued.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) info: Arc<BlockInfo>,
    pub(super) slot: FindingSlot,
    pub(super) point: Option<StreamPoint>,
    pub(super) found_by: FoundBy,
}

/// What is left to do for a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Nothing,
    /// Check it, fill it, and hold it back.
    Retire,
    /// Check it and give it to the resource below.
    Release,
}

/// A block to do something with.
#[derive(Clone, Debug)]
pub(super) struct BlockJob {
    pub(super) info: Arc<BlockInfo>,
    pub(super) below: BlockId,
    pub(super) stream_slot: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct BlockRegistry {
    pub(super) blocks: HashMap<Generation, GuardedBlock>,
    quarantine: VecDeque<Generation>,
    held_bytes: usize,
    pub(super) pending: Vec<Pending>,
    /// Returned blocks for which something failed.
    pub(super) unfinished: Vec<(Generation, Due)>,
    /// Blocks that the resource below has, whose free was not known to have completed when it was last asked.
    pub(super) gone: Vec<Generation>,
    /// Bytes of those that the resource below counts no longer, though what the guard queued on them has not completed.
    pub(super) lingering: usize,
    /// Blocks between guard pages that were given back, to be unmapped once the host has seen these points.
    pub(super) unmapping: Vec<(Generation, Option<StreamPoint>)>,
    history: VecDeque<Arc<BlockInfo>>,
    /// Returned blocks that the resource below still counts as live.
    pub(super) held_back: usize,
}

impl BlockRegistry {
    /// The entry that a claimed identity names.
    pub(super) fn find(&mut self, block: BlockId) -> ResourceResult<&mut GuardedBlock> {
        let generation = block.generation;
        match self.blocks.get_mut(&generation) {
            Some(entry) if entry.info.redzones.user() == block.ptr => Ok(entry),
            _ => Err(ResourceError::UseAfterFree { generation }),
        }
    }

    /// Opens a use of a live block.
    pub(super) fn open(&mut self, block: BlockId) -> ResourceResult<BlockId> {
        let entry = self.find(block)?;
        if entry.stage != Stage::Live {
            return Err(ResourceError::UseAfterFree { generation: block.generation });
        }
        entry.open += 1;
        Ok(entry.below)
    }

    /// The block below, for a use that may be open.
    pub(super) fn opened(&mut self, block: BlockId) -> ResourceResult<BlockId> {
        let entry = self.find(block)?;
        match entry.stage {
            Stage::Live => Ok(entry.below),
            Stage::Returned if entry.open > 0 => Ok(entry.below),
            _ => Err(ResourceError::UseAfterFree { generation: block.generation }),
        }
    }

    /// A use was closed.
    pub(super) fn close(&mut self, generation: Generation) -> Due {
        let Some(entry) = self.blocks.get_mut(&generation) else { return Due::Nothing };
        entry.open = entry.open.saturating_sub(1);
        match entry.stage {
            _ if entry.open > 0 => Due::Nothing,
            Stage::Returned => Due::Retire,
            Stage::Evicted => Due::Release,
            _ => Due::Nothing,
        }
    }

    pub(super) fn job(&self, generation: Generation) -> Option<BlockJob> {
        let GuardedBlock { info, below, stream_slot, .. } = self.blocks.get(&generation)?;
        Some(BlockJob { info: info.clone(), below: *below, stream_slot: *stream_slot })
    }

    /// Blocks to check, each with a use of its own until [`BlockRegistry::close`], and whether it is held back.
    pub(super) fn open_all(&mut self) -> Vec<(BlockJob, bool)> {
        let mut jobs = Vec::new();
        for entry in self.blocks.values_mut() {
            if !matches!(entry.stage, Stage::Live | Stage::Quarantined(_)) {
                continue;
            }
            entry.open += 1;
            let (info, below) = (entry.info.clone(), entry.below);
            let is_held = entry.stage != Stage::Live;
            jobs.push((BlockJob { info, below, stream_slot: entry.stream_slot }, is_held));
        }
        jobs.sort_unstable_by_key(|(job, _)| job.info.generation);
        jobs
    }

    /// Puts a block into the quarantine. Returns the blocks that leave for it; a block above the limits leaves itself.
    pub(super) fn enter_quarantine(
        &mut self,
        generation: Generation,
        point: Option<StreamPoint>,
        limits: QuarantineLimits,
    ) -> Vec<Generation> {
        let Some(entry) = self.blocks.get_mut(&generation) else { return Vec::new() };
        let charge = entry.charge;
        if charge > limits.bytes || limits.blocks == 0 {
            entry.stage = Stage::Evicted;
            return vec![generation];
        }
        entry.stage = Stage::Quarantined(point);
        let mut evicted = Vec::new();
        while self.held_bytes > limits.bytes - charge || self.quarantine.len() >= limits.blocks {
            match self.evict_oldest() {
                Eviction::Ready(oldest) => evicted.push(oldest),
                Eviction::Busy => {}
                Eviction::Empty => break,
            }
        }
        self.held_bytes += charge;
        self.quarantine.push_back(generation);
        evicted
    }

    /// Takes the oldest block out of the quarantine.
    fn evict_oldest(&mut self) -> Eviction {
        let Some(oldest) = self.quarantine.pop_front() else { return Eviction::Empty };
        let Some(entry) = self.blocks.get_mut(&oldest) else { return Eviction::Busy };
        self.held_bytes = self.held_bytes.saturating_sub(entry.charge);
        entry.stage = Stage::Evicted;
        if entry.open == 0 { Eviction::Ready(oldest) } else { Eviction::Busy }
    }

    /// Takes everything out of the quarantine.
    pub(super) fn evict_all(&mut self) -> Vec<Generation> {
        let mut evicted = Vec::new();
        loop {
            match self.evict_oldest() {
                Eviction::Ready(oldest) => evicted.push(oldest),
                Eviction::Busy => {}
                Eviction::Empty => return evicted,
            }
        }
    }

    /// The block that a release gives to the resource below.
    pub(super) fn release_block(
        &mut self,
        generation: Generation,
        point: Option<StreamPoint>,
    ) -> Option<(BlockId, DeviceBlock)> {
        let entry = self.blocks.get_mut(&generation)?;
        let block = entry.block.take()?;
        entry.stage = Stage::Released(point);
        let below = entry.below;
        self.gone.push(generation);
        self.held_back = self.held_back.saturating_sub(1);
        Some((below, block))
    }

    /// The resource below has freed a block on which the guard's own work has not completed.
    pub(super) fn linger(&mut self, generation: Generation) {
        if let Some(entry) = self.blocks.get_mut(&generation)
            && !entry.lingers
        {
            entry.lingers = true;
            self.lingering += entry.charge;
        }
    }

    /// True for a block that has memory between guard pages.
    pub(super) fn is_mapped(&self, generation: Generation) -> bool {
        self.blocks.get(&generation).is_some_and(|entry| entry.mapped.is_some())
    }

    /// The blocks that the resource below has and nothing is left to do for, each with its point.
    pub(super) fn released_blocks(&self) -> Vec<(Generation, BlockId, Option<StreamPoint>)> {
        let of = |generation: &Generation| {
            let entry = self.blocks.get(generation)?;
            let Stage::Released(point) = entry.stage else { return None };
            if entry.mapped.is_some() {
                return None;
            }
            Some((*generation, entry.below, point))
        };
        self.gone.iter().filter_map(of).collect()
    }

    /// Forgets blocks that are freed below.
    pub(super) fn remove(&mut self, freed: &[Generation], history: usize) {
        for generation in freed {
            if let Some(entry) = self.blocks.remove(generation) {
                self.lingering -= if entry.lingers { entry.charge } else { 0 };
                self.history.push_back(entry.info);
            }
        }
        while self.history.len() > history {
            self.history.pop_front();
        }
        self.gone.retain(|generation| !freed.contains(generation));
    }

    pub(super) fn quarantine(&self) -> (usize, usize) {
        (self.held_bytes, self.quarantine.len())
    }

    /// Every block that is remembered, with what it is now, the latest last.
    pub(super) fn remembered(&self) -> impl Iterator<Item = (&Arc<BlockInfo>, Stage)> {
        let past = self.history.iter().map(|info| (info, Stage::Released(None)));
        let now = |entry: &'_ GuardedBlock| match entry.stage {
            Stage::Released(_) if entry.mapped.is_some() => Stage::Returned,
            stage => stage,
        };
        past.chain(self.blocks.values().map(move |entry| (&entry.info, now(entry))))
    }
}
