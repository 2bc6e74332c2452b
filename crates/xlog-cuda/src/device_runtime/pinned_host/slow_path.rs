//! Finds memory for a request, and returns it to the host.
//!
//! Sources, cheapest first:
//! 1. the free list, after a poll of the oldest returned blocks;
//! 2. all returned blocks whose work has completed;
//! 3. a new chunk;
//! 4. at the maximum, or if the host has no more: wait for returned blocks, within the deadline of a budget above;
//! 5. a new chunk in place of free ones that are too small.
//!
//! Polls and growth hold one lock, which is never held during a wait for the device; another lock serializes trims. No driver
//! call is made under the lock of the chunks.

use xlog_driver::{DriverError, DriverResult, HostMemory};

use super::chunks::{Chunk, Chunks};
use super::{PAGE, PinnedHostResource};
use crate::device_runtime::logging::{ServedBy, note_path};
use crate::device_runtime::pool::tlsf::TlsfAllocation;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceError, ResourceResult};

/// Returned blocks that every request polls.
const POLLED_PER_REQUEST: usize = 2;

impl PinnedHostResource {
    pub(super) fn find(&self, bytes: usize, align: usize) -> ResourceResult<TlsfAllocation> {
        let allocate = |path| {
            let found = self.chunks.lock().free.allocate(bytes as u64, align as u64);
            found.inspect(|_| note_path(path))
        };
        if bytes > self.maximum_bytes {
            return Err(self.refusal(bytes, &self.chunks.lock()));
        }
        // A block that cannot be polled stays retired; a reap reports it.
        if let Some(_slow_path) = self.slow_path.try_lock() {
            let _ = self.release_completed(POLLED_PER_REQUEST);
        }
        if let Some(found) = allocate(ServedBy::Completed) {
            return Ok(found);
        }
        let slow_path = self.slow_path.lock();
        let _ = self.release_completed(usize::MAX);
        if let Some(found) = allocate(ServedBy::Completed) {
            return Ok(found);
        }
        match self.grow(bytes, align, self.chunk_bytes) {
            Err(ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. }) => {}
            grown => return grown,
        }
        let streams = self.retired.streams(&self.tracker);
        // A thread whose progress the device needs may wait for the slow path.
        drop(slow_path);
        for stream in streams {
            let _ = stream.synchronize_freed_in_time(&self.tracker.counters);
        }
        let _ = self.reap_completed();
        if let Some(found) = allocate(ServedBy::Reaped) {
            return Ok(found);
        }
        if let refusal @ ResourceError::OutOfBudget { .. } =
            self.refusal(bytes, &self.chunks.lock())
        {
            return Err(refusal);
        }
        // Freeing chunks that are too small allows one that is large enough.
        self.release_chunks()?;
        let _slow_path = self.slow_path.lock();
        self.grow(bytes, align, bytes)
    }

    /// Takes a chunk of about `wanted` bytes from the host, and allocates from it before other threads see it.
    fn grow(&self, bytes: usize, align: usize, wanted: usize) -> ResourceResult<TlsfAllocation> {
        let chunk = self.take_chunk(bytes, wanted)?;
        let chunks = &mut *self.chunks.lock();
        chunks.insert(chunk);
        note_path(ServedBy::Grown);
        let found = chunks.free.allocate(bytes as u64, align as u64);
        found.ok_or_else(|| self.refusal(bytes, chunks))
    }

    /// Takes a chunk from the host: `wanted` bytes, or fewer if the maximum or the host require it, but at least `bytes`.
    pub(super) fn take_chunk(&self, bytes: usize, wanted: usize) -> ResourceResult<Chunk> {
        let room = self.maximum_bytes - self.bytes_held();
        if bytes > room {
            return Err(self.refusal(bytes, &self.chunks.lock()));
        }
        let take = |bytes: usize| {
            let bytes = bytes.next_multiple_of(PAGE).min(room);
            let memory = self.host_memory()?.alloc_host(bytes)?;
            Ok(Chunk { memory, bytes })
        };
        let chunk = match take(wanted.max(bytes)) {
            Err(ResourceError::OutOfMemory { .. }) if wanted > bytes => take(bytes)?,
            taken => taken?,
        };
        self.chunks.lock().held += chunk.bytes;
        Ok(chunk)
    }

    fn host_memory(&self) -> DriverResult<&dyn HostMemory> {
        let host = self.device.driver().host_memory();
        host.ok_or(DriverError::Unsupported { call: "alloc_host" })
    }

    /// Returns the error for a request that exceeds the maximum.
    fn refusal(&self, requested: usize, chunks: &Chunks) -> ResourceError {
        let maximum = self.maximum_bytes;
        let remaining = maximum.saturating_sub(self.bytes_outstanding());
        if requested > remaining {
            return ResourceError::OutOfBudget { requested, remaining };
        }
        let (held, largest) = (chunks.held, chunks.free.largest_free());
        let detail = format!(
            "{held} of at most {maximum} bytes of page-locked host memory are held, in pieces: the largest free one has {largest}"
        );
        ResourceError::OutOfMemory { requested, detail }
    }

    /// Frees up to `count` returned blocks whose work has completed. The caller holds the slow path.
    pub(super) fn release_completed(&self, count: usize) -> ResourceResult<()> {
        self.retired.release_completed(&self.tracker, count, |generation, meta| {
            let node = meta.node();
            let bytes = self.tracker.table.end(&[generation]);
            self.tracker.counters.count(|counts| {
                counts.freed += 1;
                counts.outstanding = counts.outstanding.wrapping_sub(bytes);
            });
            self.chunks.lock().free.free(node, 0);
            Ok(())
        })
    }

    /// Returns completely free chunks to the host; returns the number of their bytes. The driver may wait for the device, so
    /// the caller does not hold the slow path.
    pub(super) fn release_chunks(&self) -> ResourceResult<usize> {
        let _trimming = self.trimming.lock();
        let idle = self.chunks.lock().remove_idle();
        let (mut released, mut outcome) = (0, Ok(()));
        for chunk in idle {
            #[allow(unsafe_code)]
            // SAFETY: the chunk belongs to this resource and is completely free: no block lies in it, and no work is pending on it.
            let freed = self.host_memory().and_then(|host| unsafe { host.free_host(chunk.memory) });
            let chunks = &mut *self.chunks.lock();
            if freed.is_ok() {
                chunks.held -= chunk.bytes;
                released += chunk.bytes;
            } else {
                chunks.insert(chunk);
            }
            outcome = outcome.and(freed);
        }
        outcome.map(|()| released).map_err(Into::into)
    }
}
