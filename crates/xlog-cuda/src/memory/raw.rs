//! The owner of one block.
//!
//! The drop of a [`RawBlock`] frees the block once, through its runtime; typed buffers wrap it. A drop cannot return an error: the
//! manager counts a failed free, and a handler receives it ([`set_failed_free_handler`](super::set_failed_free_handler)).

use std::sync::Arc;

use xlog_base::debug_fields;

use super::account::Account;
use super::slice::TrackedCudaSlice;
use super::{DeviceRepr, FailedFree, Shown};
use crate::Result;
use crate::device_runtime::resource::{BlockId, DeviceBlock, ResourceError, StreamId};
use crate::device_runtime::runtime::{XlogDeviceRuntime, catch_panic, report_failed_free};

/// Untyped device memory that frees itself through its runtime, after every recorded use.
///
/// ```
/// use xlog_cuda::prelude::*;
///
/// let runtime = XlogDeviceRuntime::open("sim")?;
/// let manager = GpuMemoryManager::with_runtime(runtime);
/// let raw = manager.alloc_raw(64)?;
/// assert_eq!(raw.bytes(), 64);
/// let mut numbers = raw.into_slice::<u32>()?;
/// numbers.copy_from_slice(&[7; 16])?;
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[must_use = "dropping the block frees it at once"]
pub struct RawBlock {
    ptr: u64,
    bytes: usize,
    stream: StreamId,
    /// `None` for an empty block and for foreign memory.
    owned: Option<Owned>,
    /// Set for a block of a tracked-only manager: whether its address is visible.
    shown: Option<Shown>,
}

/// A block, its runtime, and the account that is charged with the bytes of the [`RawBlock`].
struct Owned {
    block: DeviceBlock,
    runtime: XlogDeviceRuntime,
    account: Arc<Account>,
}

impl RawBlock {
    /// Wraps a block whose `bytes` are charged to `account` already.
    pub(super) fn owning(
        block: DeviceBlock,
        bytes: usize,
        runtime: &XlogDeviceRuntime,
        account: &Arc<Account>,
    ) -> Self {
        account.opened(bytes);
        Self {
            ptr: block.ptr,
            bytes,
            stream: block.alloc_stream,
            owned: Some(Owned { block, runtime: runtime.share(), account: account.clone() }),
            shown: None,
        }
    }

    /// Hides the address until a recorder has prepared a use of the block.
    pub(super) fn hidden(mut self) -> Self {
        self.shown = Some(Shown::not_yet());
        self
    }

    /// Returns the flag that makes the address visible, if the block hides it.
    pub(super) fn shown(&self) -> Option<&Shown> {
        self.shown.as_ref()
    }

    /// Returns the device address, even if the block hides it.
    pub(super) fn address(&self) -> u64 {
        self.ptr
    }

    /// Creates an empty block with an aligned address that is not null and never accessed.
    pub(super) fn empty(align: usize, stream: StreamId) -> Self {
        Self { ptr: align as u64, bytes: 0, stream, owned: None, shown: None }
    }

    /// Wraps foreign memory, which its owner frees.
    pub(super) fn foreign(ptr: u64, bytes: usize) -> Self {
        Self { ptr, bytes, stream: StreamId::DEFAULT, owned: None, shown: None }
    }

    /// Makes the block stand in for foreign memory: its uses order that memory.
    pub(super) fn standing_for(self, ptr: u64) -> Self {
        let mut this = self;
        this.ptr = ptr;
        this
    }

    /// Returns whether no runtime backs the memory.
    pub(super) fn is_foreign(&self) -> bool {
        self.owned.is_none() && self.bytes > 0
    }

    pub(super) fn runtime(&self) -> Option<&XlogDeviceRuntime> {
        self.owned.as_ref().map(|owned| &owned.runtime)
    }

    /// Returns the device address. It is 0 for a block of
    /// [`GpuMemoryManager::tracked_only`](super::GpuMemoryManager::tracked_only) before its first preflight, and an aligned address that
    /// is not null for an empty block.
    pub fn ptr(&self) -> u64 {
        match &self.shown {
            Some(shown) if !shown.get() => 0,
            _ => self.ptr,
        }
    }

    /// Returns a reference to the address, from which a launch copies its argument.
    #[cfg(feature = "cudarc")]
    pub(super) fn ptr_ref(&self) -> &u64 {
        &self.ptr
    }

    /// The requested bytes. The block may have more.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The stream it was allocated on and is freed on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// The runtime's block; `None` for an empty block and for memory that no runtime backs.
    pub fn runtime_block(&self) -> Option<&DeviceBlock> {
        self.owned.as_ref().map(|owned| &owned.block)
    }

    /// The identity of the runtime's block.
    pub fn id(&self) -> Option<BlockId> {
        self.runtime_block().map(BlockId::from_block)
    }

    /// Converts to a buffer of `T`s, if the size and the alignment fit. Otherwise the memory is freed.
    pub fn into_slice<T: DeviceRepr>(self) -> Result<TrackedCudaSlice<T>> {
        TrackedCudaSlice::from_raw(self)
    }
}

impl Drop for RawBlock {
    fn drop(&mut self) {
        let Some(Owned { block, runtime, account }) = self.owned.take() else {
            return;
        };
        let (id, bytes, tag) = (BlockId::from_block(&block), block.bytes, block.tag);
        let freed = catch_panic(|| runtime.deallocate(block)).unwrap_or_else(|| {
            Err(ResourceError::Driver("the resource panicked in deallocate".to_owned()))
        });
        account.closed(self.bytes);
        if let Some(shown) = self.shown.take() {
            shown.end();
        }
        if let Err(error) = freed {
            account.free_failed();
            report_failed_free(&FailedFree { block: id, bytes, tag, error });
        }
    }
}

debug_fields!(self: RawBlock {
    ptr: format_args!("{:#x}", self.ptr), bytes: self.bytes, stream: self.stream,
    block: self.runtime_block(),
});
