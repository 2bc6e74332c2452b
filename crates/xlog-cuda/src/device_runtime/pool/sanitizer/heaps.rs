//! Registers a pool with a memory checker: a heap for each segment, a region for each block.
//!
//! Invariant: a region lies inside a heap that the tool accepted, and ends before its memory does. The caller ensures
//! that regions do not overlap. Blocks in a heap that the tool refuses have no regions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_driver::sync::Mutex;
use xlog_nvtx::{Domain, Heap, Tool};

use crate::device_runtime::resource::{ResourceError, ResourceResult};

#[derive(Debug)]
pub(crate) struct Heaps {
    /// Size and handle of each heap, by address.
    heaps: Mutex<BTreeMap<u64, (u64, Heap)>>,
    regions: AtomicUsize,
    refused: AtomicUsize,
    name: String,
    domain: Domain,
}

impl Heaps {
    /// Creates the heaps of the pool of this name for the attached tool; `None` without a tool.
    pub(super) fn of_tool(name: String) -> ResourceResult<Option<Self>> {
        let tool = xlog_nvtx::tool().map_err(|error| ResourceError::Driver(error.to_string()))?;
        Ok(tool.map(|tool| Self::new(tool, name)))
    }

    /// Creates a registry without heaps; `name` names the pool in the tool's reports.
    fn new(tool: &Tool, name: String) -> Self {
        Self {
            heaps: Mutex::default(),
            regions: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            domain: Domain::new(tool, &name),
            name,
        }
    }

    /// Registers a driver allocation as a heap, of which only regions may be accessed.
    pub(crate) fn begin(&self, ptr: u64, bytes: u64) {
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        match self.domain.register_heap(ptr, size, &self.name) {
            Some(heap) => {
                self.heaps.lock().insert(ptr, (bytes, heap));
            }
            None => {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Unregisters the heap at this address, before its memory is freed.
    pub(crate) fn end(&self, ptr: u64) {
        let removed = self.heaps.lock().remove(&ptr);
        if let Some((_, heap)) = removed {
            self.domain.unregister_heap(heap);
        }
    }

    /// Registers a block; false if its heap was refused.
    pub(super) fn begin_region(&self, ptr: u64, bytes: usize, name: &str) -> bool {
        let heaps = self.heaps.lock();
        match heaps.range(..=ptr).next_back() {
            Some((start, (size, heap))) if ptr - start < *size => {
                self.domain.register_region(heap, ptr, bytes, name);
                self.regions.fetch_add(1, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }

    pub(super) fn end_region(&self, ptr: u64) {
        self.domain.unregister_region(ptr);
        self.regions.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the numbers of heaps, regions and refused heaps.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let heaps = self.heaps.lock().len();
        (heaps, self.regions.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

impl Drop for Heaps {
    /// Memory of live blocks stays allocated, and is not checked any more.
    fn drop(&mut self) {
        for (_, (_, heap)) in std::mem::take(&mut *self.heaps.lock()) {
            self.domain.unregister_heap(heap);
        }
    }
}
