//! Plain segments: one raw driver allocation each, for devices without virtual memory and for memory checkers.
//!
//! An allocation is freed when all of it is idle. Its last unit is never handed out, so that two adjacent allocations are
//! not coalesced: no copy may lie across them. Nothing can be remapped. No lock is held over a driver call.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_driver::sync::Mutex;

use super::super::super::resource::{ResourceError, ResourceResult, StreamId};
use super::super::sanitizer::Heaps;
use super::account::Account;
use super::{Segments, Span, UNIT, min_size, out_of_memory, to_usize};
use crate::CudaDevice;

/// The unit in which drivers take memory from the device for large allocations.
const GRANULARITY: u64 = 2 << 20;

/// Raw driver memory of one device, for one pool.
pub(crate) struct PlainSegments {
    device: Arc<CudaDevice>,
    account: Account,
    /// Sizes of the allocations, by address.
    allocations: Mutex<BTreeMap<u64, u64>>,
    /// Registers the allocations with a memory checker.
    heaps: Option<Arc<Heaps>>,
}

impl PlainSegments {
    /// Creates segments of `device`, at most `maximum` bytes. Takes no memory yet.
    pub(crate) fn new(device: Arc<CudaDevice>, maximum: u64) -> Self {
        let account = Account::new(maximum, GRANULARITY);
        Self { device, account, allocations: Mutex::new(BTreeMap::new()), heaps: None }
    }

    /// Reports every allocation to a memory checker. Called before memory is taken.
    pub(crate) fn with_heaps(mut self, heaps: Option<Arc<Heaps>>) -> Self {
        self.heaps = heaps;
        self
    }

    fn grow_by(&self, bytes: u64, requested: u64) -> ResourceResult<Span> {
        self.account.charge(bytes)?;
        let undo = |error: ResourceError| {
            self.account.release(bytes);
            error
        };
        let ptr = self.device.driver().alloc(to_usize(bytes)).map_err(|error| {
            let error = ResourceError::from(error);
            match undo(error) {
                ResourceError::OutOfMemory { detail, .. } => out_of_memory(requested, detail),
                other => other,
            }
        })?;
        self.allocations.lock().insert(ptr, bytes);
        if let Some(heaps) = &self.heaps {
            heaps.begin(ptr, bytes);
        }
        Ok(handed_out(ptr, bytes))
    }

    /// Removes the allocations inside `idle` from the table, the highest first and at most `bytes` in all.
    fn remove_inside(&self, idle: &[Span], bytes: u64) -> Vec<(u64, u64)> {
        let mut allocations = self.allocations.lock();
        let mut found: Vec<(u64, u64)> = idle
            .iter()
            .flat_map(|range| {
                let allocations = allocations.range(range.ptr..range.end().max(range.ptr));
                let allocations = allocations.map(|(&ptr, &bytes)| (ptr, bytes));
                allocations.filter(|&(ptr, bytes)| range.contains(handed_out(ptr, bytes)))
            })
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.dedup();
        let mut left = bytes;
        found.retain(|(ptr, bytes)| {
            let fits = *bytes <= left;
            if fits {
                left -= bytes;
                allocations.remove(ptr);
            }
            fits
        });
        found
    }
}

impl Segments for PlainSegments {
    fn grow(&self, bytes: u64, _stream: StreamId) -> ResourceResult<Span> {
        let total = self.device.properties().total_bytes;
        min_size(bytes, UNIT, total)?;
        self.grow_by(min_size(bytes.saturating_add(UNIT), GRANULARITY, total)?, bytes)
    }

    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>) {
        let mut gone = Vec::new();
        let mut outcome = Ok(());
        for (ptr, bytes) in self.remove_inside(idle, bytes) {
            if let Some(heaps) = &self.heaps {
                heaps.end(ptr);
            }
            #[allow(unsafe_code)]
            // SAFETY: the address came from the table of allocations; the pool promises that no block lies there and
            // that the host has seen all work on it complete.
            let freed = unsafe { self.device.driver().free(ptr) };
            match freed {
                Ok(()) => {
                    self.account.release(bytes);
                    gone.push(handed_out(ptr, bytes));
                }
                Err(error) => {
                    self.allocations.lock().insert(ptr, bytes);
                    if let Some(heaps) = &self.heaps {
                        heaps.begin(ptr, bytes);
                    }
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        gone.reverse();
        (gone, outcome)
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn segment_count(&self) -> usize {
        self.allocations.lock().len()
    }

    fn kind(&self) -> &'static str {
        "plain"
    }

    fn granularity(&self) -> u64 {
        GRANULARITY
    }
}

/// Returns the span that the pool gets of an allocation: all but the last unit.
fn handed_out(ptr: u64, bytes: u64) -> Span {
    Span { ptr, bytes: bytes.saturating_sub(UNIT) }
}
