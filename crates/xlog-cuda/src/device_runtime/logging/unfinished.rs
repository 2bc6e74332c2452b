//! Frees that failed after the resource took the block: a later reap finishes them.
//!
//! The log has the failure of such a free. Once the block is free, a second record logs the success, served by a reap. The list is empty
//! unless a driver call failed, so an allocation only reads one flag.

use std::sync::atomic::{AtomicBool, Ordering};

use xlog_base::Mutex;

use crate::device_runtime::resource::{BlockId, DeviceBlock};

/// The blocks of unfinished frees, as the callers passed them.
#[derive(Default)]
pub(super) struct UnfinishedFrees {
    has_any: AtomicBool,
    blocks: Mutex<Vec<DeviceBlock>>,
}

impl UnfinishedFrees {
    /// Returns whether there is a block. Relaxed suffices: the resource orders a thread that gets the memory after its free.
    #[inline(always)]
    pub(super) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, block: DeviceBlock) {
        let mut blocks = self.blocks.lock();
        blocks.push(block);
        self.has_any.store(true, Ordering::Relaxed);
    }

    /// Removes the blocks that are free and numbers them by `order`.
    ///
    /// The lock is held while numbers are issued: a thread that no longer finds its address here gets a higher number.
    pub(super) fn drain_finished(
        &self,
        is_free: impl Fn(BlockId) -> bool,
        order: impl Fn() -> u64,
    ) -> Vec<(u64, DeviceBlock)> {
        let mut blocks = self.blocks.lock();
        let freed = blocks.extract_if(.., |block| is_free(BlockId::from_block(block)));
        let finished = freed.map(|block| (order(), block)).collect();
        self.has_any.store(!blocks.is_empty(), Ordering::Relaxed);
        finished
    }
}
