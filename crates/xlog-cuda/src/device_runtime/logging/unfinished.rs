//! Frees that failed half way: the resource has the block and finishes the free at a later reap.
//!
//! The log has the failure of such a free. When the block is free, it gets a second record of the free: a success, served by a
//! reap. The list is empty unless a driver call failed, so an allocation only reads one flag.

use std::sync::atomic::{AtomicBool, Ordering};

use xlog_base::Mutex;

use crate::device_runtime::resource::{BlockId, DeviceBlock};

/// Blocks whose free failed half way, as their owners passed them.
#[derive(Default)]
pub(super) struct UnfinishedFrees {
    has_any: AtomicBool,
    blocks: Mutex<Vec<DeviceBlock>>,
}

impl UnfinishedFrees {
    /// Returns whether there is one. Relaxed suffices: the resource orders a thread that gets the memory after its free.
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
    /// Numbers are issued under the lock: a thread that finds its address gone from the list gets a higher number.
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
