//! The registry of guarded blocks: their stages, the quarantine, and pending checks.
//!
//! Its one lock is never held over a call of the driver or of the resource below.
//!
//! Invariant: the quarantine is within its limits at every instant: blocks are evicted before a new one enters.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::checker::FindingSlot;
use super::pages::Mapped;
use super::report::{BlockInfo, FoundBy};
use crate::device_runtime::resource::{
    BlockId, DeviceBlock, Generation, ResourceError, ResourceResult,
};

/// The number of freed blocks that are kept for a post-mortem.
const MAX_HISTORY: usize = 1024;

/// The stage of a guarded block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Allocated.
    Live,
    /// Freed by its user; a use is open, or the guard has not queued its work yet.
    Returned,
    /// In the quarantine; its poison is queued before this point.
    Quarantined(Option<StreamPoint>),
    /// Out of the quarantine, not yet released.
    Evicted,
    /// Freed below. The guard's work on it precedes this point.
    Released(Option<StreamPoint>),
}

/// A point in the order of a stream. `None` of an `Option` of it means that the work has completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StreamPoint {
    /// The stream's slot in its pool.
    pub(super) stream_slot: u32,
    /// Work queued before this stamp precedes the point.
    pub(super) stamp: u64,
}

/// The limits of the quarantine.
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
    /// A check has a use of the block open; its close releases the block.
    Busy,
    /// The quarantine is empty.
    Empty,
}

#[derive(Debug)]
pub(super) struct GuardedBlock {
    pub(super) info: Arc<BlockInfo>,
    /// Its identity in the resource below.
    pub(super) below: BlockId,
    /// The block of the resource below, until it is freed there.
    pub(super) block: Option<DeviceBlock>,
    pub(super) charge: usize,
    /// The slot of the stream it was allocated on.
    pub(super) stream_slot: Option<u32>,
    pub(super) stage: Stage,
    /// Open uses, including the guard's own checks.
    pub(super) open: u32,
    /// Whether it counts as [`BlockRegistry::lingering`].
    pub(super) lingers: bool,
    /// Whether its user has announced a use. Until then work on its own stream may be unannounced.
    pub(super) announced: bool,
    /// Its memory between guard pages, if any. The block of the resource below is then a stand-in that orders its uses.
    pub(super) mapped: Option<Mapped>,
}

/// A queued check.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) info: Arc<BlockInfo>,
    pub(super) slot: FindingSlot,
    pub(super) point: Option<StreamPoint>,
    pub(super) found_by: FoundBy,
}

/// The next step for a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Nothing,
    /// Check it, poison it, and move it into the quarantine.
    Retire,
    /// Check it and free it below.
    Release,
}

/// A block to work on, copied out of the registry.
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
    /// Freed blocks with a failed step.
    pub(super) unfinished: Vec<(Generation, Due)>,
    /// Blocks whose free below was not complete at the last query.
    pub(super) gone: Vec<Generation>,
    /// Bytes of blocks that the resource below no longer counts, though the guard's work on them has not completed.
    pub(super) lingering: usize,
    /// Freed blocks between guard pages, to be unmapped after these points.
    pub(super) unmapping: Vec<(Generation, Option<StreamPoint>)>,
    history: VecDeque<Arc<BlockInfo>>,
    /// Freed blocks that the resource below still counts as live.
    pub(super) held_back: usize,
}

impl BlockRegistry {
    /// Finds the block of a claimed identity.
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

    /// Returns the block below for a use that may be open.
    pub(super) fn opened(&mut self, block: BlockId) -> ResourceResult<BlockId> {
        let entry = self.find(block)?;
        match entry.stage {
            Stage::Live => Ok(entry.below),
            Stage::Returned if entry.open > 0 => Ok(entry.below),
            _ => Err(ResourceError::UseAfterFree { generation: block.generation }),
        }
    }

    /// Closes a use. Returns the next step for the block.
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

    /// Opens a use of every block to check, until [`BlockRegistry::close`]. The flag is whether the block is in the quarantine.
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

    /// Adds a block to the quarantine. Returns the evicted blocks; a block above the limits is evicted itself.
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

    /// Evicts the oldest block from the quarantine.
    fn evict_oldest(&mut self) -> Eviction {
        let Some(oldest) = self.quarantine.pop_front() else { return Eviction::Empty };
        let Some(entry) = self.blocks.get_mut(&oldest) else { return Eviction::Busy };
        self.held_bytes = self.held_bytes.saturating_sub(entry.charge);
        entry.stage = Stage::Evicted;
        if entry.open == 0 { Eviction::Ready(oldest) } else { Eviction::Busy }
    }

    /// Evicts all blocks. Returns those without open checks.
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

    /// Removes the block of the resource below, for its free.
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

    /// Counts a block that the resource below has freed before the guard's own work on it has completed.
    pub(super) fn linger(&mut self, generation: Generation) {
        if let Some(entry) = self.blocks.get_mut(&generation)
            && !entry.lingers
        {
            entry.lingers = true;
            self.lingering += entry.charge;
        }
    }

    pub(super) fn is_mapped(&self, generation: Generation) -> bool {
        self.blocks.get(&generation).is_some_and(|entry| entry.mapped.is_some())
    }

    /// Lists the blocks that were freed below and need no further step, each with its point.
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

    /// Moves blocks that are freed below to the history.
    pub(super) fn remove(&mut self, freed: &[Generation]) {
        for generation in freed {
            if let Some(entry) = self.blocks.remove(generation) {
                self.lingering -= if entry.lingers { entry.charge } else { 0 };
                self.history.push_back(entry.info);
            }
        }
        while self.history.len() > MAX_HISTORY {
            self.history.pop_front();
        }
        self.gone.retain(|generation| !freed.contains(generation));
    }

    pub(super) fn quarantine(&self) -> (usize, usize) {
        (self.held_bytes, self.quarantine.len())
    }

    /// Returns all known blocks with their stages, the history first.
    pub(super) fn remembered(&self) -> impl Iterator<Item = (&Arc<BlockInfo>, Stage)> {
        let past = self.history.iter().map(|info| (info, Stage::Released(None)));
        let now = |entry: &'_ GuardedBlock| match entry.stage {
            Stage::Released(_) if entry.mapped.is_some() => Stage::Returned,
            stage => stage,
        };
        past.chain(self.blocks.values().map(move |entry| (&entry.info, now(entry))))
    }
}
