//! What a memory checker is told of a pool: a heap for each segment, a region for each block.
//!
//! Invariant: a region lies inside a heap that the tool accepted, overlaps no other one, and is gone before its memory is. Whoever
//! calls sees to the second; that the rest holds is kept here. A heap that the tool refuses has no regions and stays as it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_driver::sync::Mutex;
use xlog_nvtx::{Domain, Heap, Tool};

/// The heaps of one pool.
#[derive(Debug)]
pub(crate) struct Heaps {
    /// By address: how many bytes, and the tool's handle.
    heaps: Mutex<BTreeMap<u64, (u64, Heap)>>,
    regions: AtomicUsize,
    refused: AtomicUsize,
    name: String,
    domain: Domain,
}

impl Heaps {
    /// No heaps yet. The name says which pool it is.
    pub(super) fn new(tool: &Tool, name: String) -> Self {
        Self {
            heaps: Mutex::default(),
            regions: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            domain: Domain::new(tool, &name),
            name,
        }
    }

    /// A driver allocation became a segment: from now on only its regions may be touched.
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

    /// The segment at this address is about to be freed.
    pub(crate) fn end(&self, ptr: u64) {
        let removed = self.heaps.lock().remove(&ptr);
        if let Some((_, heap)) = removed {
            self.domain.unregister_heap(heap);
        }
    }

    /// A block is handed out; false where the tool does not know its segment.
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

    /// A block that has a region is free.
    pub(super) fn end_region(&self, ptr: u64) {
        self.domain.unregister_region(ptr);
        self.regions.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many heaps and regions there are, and how many heaps were refused.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let heaps = self.heaps.lock().len();
        (heaps, self.regions.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

impl Drop for Heaps {
    /// What live blocks hold stays taken, and is not checked any more.
    fn drop(&mut self) {
        for (_, (_, heap)) in std::mem::take(&mut *self.heaps.lock()) {
            self.domain.unregister_heap(heap);
        }
    }
}
