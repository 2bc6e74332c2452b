//! Memory of CUDA graphs: allocations on captured streams.
//!
//! A graph reuses its addresses at every launch. So memory allocated during a capture is reused only in captures into the same
//! PyTorch pool, and only on the same stream, whose order is part of the graph. It returns to the runtime after PyTorch has
//! destroyed every graph of the pool and freed all its blocks.
//!
//! PyTorch owns the lifetime: several graphs share a pool, and PyTorch reports the end of a capture after it has ended. So the
//! arenas of `XlogDeviceRuntime::join_capture`, which belong to one graph and are joined and left inside the capture, do not fit.
//!
//! A block with another stream recorded by `record_stream` is not reused before its capture has ended. A new range is used only
//! after the host has seen all earlier work on it complete: a capture cannot wait for it.

use std::collections::{BTreeMap, BTreeSet};

use xlog_cuda::device_runtime::{AllocTag, DeviceBlock, ResourceResult};

/// PyTorch's alignment of blocks.
pub(super) const UNIT: usize = 512;
/// The segment size of small requests.
const SMALL_SEGMENT: usize = 2 << 20;

/// A range of a segment: a block or free space.
struct Range {
    bytes: usize,
    stream: usize,
    /// The address of its segment. Ranges of different segments are never merged.
    segment: u64,
    is_free: bool,
}

/// A free range, ordered for best fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Free {
    stream: usize,
    bytes: usize,
    ptr: u64,
}

/// The memory of one graph pool.
#[derive(Default)]
pub(super) struct GraphMemory {
    ranges: BTreeMap<u64, Range>,
    free: BTreeSet<Free>,
    segments: Vec<DeviceBlock>,
    live: usize,
    /// Freed blocks that another stream of the capture may still use.
    deferred: Vec<u64>,
    /// Captures into the pool minus destroyed and abandoned graphs.
    pub(super) uses: usize,
}

impl GraphMemory {
    /// Allocates at least `bytes` for a captured stream; returns block and size. `grow` allocates a segment without pending work.
    pub(super) fn allocate(
        &mut self,
        bytes: usize,
        stream: usize,
        grow: impl FnOnce(usize, AllocTag) -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<(u64, usize)> {
        let bytes = bytes.next_multiple_of(UNIT);
        let found = self.free.range(Free { stream, bytes, ptr: 0 }..).next().copied();
        let free = match found.filter(|free| free.stream == stream) {
            Some(free) => free,
            None => self.grow(bytes, stream, grow)?,
        };
        self.free.remove(&free);
        if free.bytes > bytes {
            let rest = Free { ptr: free.ptr + bytes as u64, bytes: free.bytes - bytes, stream };
            let segment = self.ranges.get(&free.ptr).map_or(free.ptr, |range| range.segment);
            self.ranges
                .insert(rest.ptr, Range { bytes: rest.bytes, stream, segment, is_free: true });
            self.free.insert(rest);
        }
        if let Some(range) = self.ranges.get_mut(&free.ptr) {
            (range.bytes, range.is_free) = (bytes, false);
        }
        self.live += 1;
        Ok((free.ptr, bytes))
    }

    fn grow(
        &mut self,
        bytes: usize,
        stream: usize,
        grow: impl FnOnce(usize, AllocTag) -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<Free> {
        let segment = grow(bytes.next_multiple_of(SMALL_SEGMENT), AllocTag("cuda graph"))?;
        let free = Free { stream, bytes: segment.bytes / UNIT * UNIT, ptr: segment.ptr };
        let range = Range { bytes: free.bytes, stream, segment: segment.ptr, is_free: true };
        self.ranges.insert(free.ptr, range);
        self.free.insert(free);
        self.segments.push(segment);
        Ok(free)
    }

    /// Frees a block and merges it with its free neighbours.
    pub(super) fn free(&mut self, ptr: u64) {
        let Some(range) = self.ranges.get_mut(&ptr).filter(|range| !range.is_free) else { return };
        range.is_free = true;
        let (stream, segment) = (range.stream, range.segment);
        let mut free = Free { ptr, bytes: range.bytes, stream };
        self.live -= 1;
        let joins =
            |range: &Range| range.is_free && range.stream == stream && range.segment == segment;
        let next = ptr + free.bytes as u64;
        if let Some(range) = self.ranges.get(&next).filter(|range| joins(range)) {
            let bytes = range.bytes;
            self.free.remove(&Free { ptr: next, bytes, stream });
            self.ranges.remove(&next);
            free.bytes += bytes;
        }
        let before = self.ranges.range(..ptr).next_back();
        if let Some((&start, range)) = before.filter(|(_, range)| joins(range)) {
            let bytes = range.bytes;
            self.free.remove(&Free { ptr: start, bytes, stream });
            self.ranges.remove(&ptr);
            free = Free { ptr: start, bytes: bytes + free.bytes, stream };
        }
        if let Some(range) = self.ranges.get_mut(&free.ptr) {
            range.bytes = free.bytes;
        }
        self.free.insert(free);
    }

    /// Frees a block that other streams of the capture use. It is reused after the capture, whose end joins all its streams.
    pub(super) fn free_after_capture(&mut self, ptr: u64) {
        self.deferred.push(ptr);
    }

    /// Makes the blocks freed during the capture reusable.
    pub(super) fn end_capture(&mut self) {
        for ptr in std::mem::take(&mut self.deferred) {
            self.free(ptr);
        }
    }

    /// Returns whether its segments can return to the runtime.
    pub(super) fn is_over(&self) -> bool {
        self.uses == 0 && self.live == 0
    }

    pub(super) fn into_segments(self) -> Vec<DeviceBlock> {
        self.segments
    }
}
