//! Chunks of page-locked memory, and the free ranges in them.
//!
//! Invariants: no work is pending on free memory; free memory of two chunks is never coalesced. Nothing here calls the
//! driver.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;

use xlog_driver::HostAllocation;

use crate::device_runtime::pool::tlsf::{Range, Tlsf};
use crate::device_runtime::resource::Generation;

/// One allocation of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) memory: HostAllocation,
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// By device address.
    pub(super) free: Tlsf,
    /// By their first device address.
    chunks: BTreeMap<u64, Chunk>,
    /// Bytes of all chunks, including those that are being freed.
    pub(super) held: usize,
    /// Blocks of typed buffers, and whether such a block was returned: safe code can forge one. The memory stays until the
    /// buffer is dropped.
    pub(super) buffers: HashMap<Generation, bool>,
}

impl Chunks {
    /// Adds a chunk as free memory.
    pub(super) fn insert(&mut self, chunk: Chunk) {
        let Chunk { memory, bytes } = chunk;
        self.free.insert_span(Range { ptr: memory.device, bytes: bytes as u64, stamp: 0 }, false);
        self.chunks.insert(memory.device, chunk);
    }

    /// Removes the completely free chunks.
    pub(super) fn remove_idle(&mut self) -> Vec<Chunk> {
        let bytes_of = |ptr| self.chunks.get(&ptr).map(|chunk: &Chunk| chunk.bytes as u64);
        let mut whole =
            |range: &Range| (bytes_of(range.ptr) == Some(range.bytes)).then_some(*range);
        let idle = self.free.remove_if(0, &mut whole);
        idle.ranges.iter().filter_map(|range| self.chunks.remove(&range.ptr)).collect()
    }

    /// Returns the host address of a device address.
    pub(super) fn host_ptr(&self, ptr: u64) -> Option<NonNull<u8>> {
        let (start, chunk) = self.chunks.range(..=ptr).next_back()?;
        let offset = usize::try_from(ptr - start).ok().filter(|offset| *offset < chunk.bytes)?;
        #[allow(unsafe_code)]
        // SAFETY: the offset lies inside the chunk, which is one allocation.
        Some(unsafe { chunk.memory.host.add(offset) })
    }
}
