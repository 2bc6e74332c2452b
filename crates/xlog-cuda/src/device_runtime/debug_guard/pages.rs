//! Guard pages: blocks between unmapped addresses, where a stray access faults.
//!
//! One address range is reserved for all blocks. A block gets whole units of it, with an unmapped unit before and after it. A freed range
//! stays unmapped: fresh addresses are used first, then the range that was freed first.
//!
//! Invariant: physical memory is charged to the meter before it is created, and until it is destroyed. Memory that the driver did
//! not free is kept as a leftover, which [`Pages::sweep`] retries.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use xlog_base::debug_fields;
use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, DriverResult, MapAccess, MemoryHandle, VirtualMemory, Waited};

use super::config::{GuardConfig, PagePlacement};
use super::redzones::Redzones;
use crate::CudaDevice;
use crate::device_runtime::resource::{MIN_ALIGN, PhysicalMeter, ResourceError, ResourceResult};

/// The size of the reserved address range, which takes no memory.
pub(super) const ADDRESSES: usize = 1 << 40;
/// The number of freed address ranges that are kept from reuse.
const MAX_RESTING: usize = 1024;

/// The mapped units of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mapped {
    pub(super) start: u64,
    pub(super) bytes: usize,
    memory: MemoryHandle,
}

/// Physical memory that the driver did not free.
#[derive(Clone, Copy, Debug)]
struct Leftover {
    memory: MemoryHandle,
    bytes: usize,
    /// The address where it is still mapped.
    mapped_at: Option<u64>,
    /// Whether work may be queued on it.
    in_use: bool,
}

/// Address ranges and what is mapped in them.
pub(super) struct Pages {
    device: Arc<CudaDevice>,
    placement: PagePlacement,
    canary: usize,
    max_physical: usize,
    /// The start of the address range, once it is reserved.
    base: OnceLock<u64>,
    ranges: Mutex<Ranges>,
    physical: AtomicUsize,
    /// The number of existing mappings.
    mappings: AtomicU64,
    leftovers: Mutex<Vec<Leftover>>,
    meter: Mutex<Option<Arc<dyn PhysicalMeter>>>,
}

impl Pages {
    pub(super) fn new(device: Arc<CudaDevice>, config: &GuardConfig) -> Self {
        Self {
            device,
            placement: config.placement,
            canary: config.canary_bytes,
            max_physical: config.max_page_bytes(),
            base: OnceLock::new(),
            ranges: Mutex::default(),
            physical: AtomicUsize::new(0),
            mappings: AtomicU64::new(0),
            leftovers: Mutex::default(),
            meter: Mutex::new(None),
        }
    }

    fn memory(&self) -> DriverResult<&dyn VirtualMemory> {
        let unsupported = DriverError::Unsupported { call: "guard pages" };
        self.device.driver().virtual_memory().ok_or(unsupported)
    }

    /// The unit of mappings; 1 on a device without virtual memory.
    fn unit(&self) -> usize {
        self.memory().map_or(1, |memory| memory.granularity().max(1))
    }

    /// Returns the start of the address range of all blocks, once it is reserved.
    pub(super) fn addresses(&self) -> Option<u64> {
        self.base.get().copied()
    }

    /// Returns the physical memory that a block takes.
    pub(super) fn charge_for(&self, bytes: usize) -> usize {
        bytes.checked_next_multiple_of(self.unit()).unwrap_or(usize::MAX)
    }

    /// Physical memory that is mapped.
    pub(super) fn physical(&self) -> usize {
        self.physical.load(Ordering::Acquire)
    }

    /// Returns whether the limit of physical memory allows a block of `bytes`.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        let now = self.physical();
        now.checked_add(self.charge_for(bytes)).is_some_and(|sum| sum <= self.max_physical)
    }

    /// Charges the existing physical memory to a meter, and later changes.
    pub(super) fn start_meter(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        meter.charge(self.physical())?;
        *self.meter.lock() = Some(meter);
        Ok(())
    }

    /// Maps memory for a block. Returns the mapping and the block's redzones in it.
    pub(super) fn map(&self, bytes: usize, align: usize) -> ResourceResult<(Mapped, Redzones)> {
        let memory = self.memory()?;
        let (unit, align) = (self.unit(), align.max(MIN_ALIGN));
        if align > unit {
            return Err(ResourceError::invalid(
                format!("alignment {align}"),
                format!("at most {unit} between guard pages"),
            ));
        }
        let too_much = |detail: &str| ResourceError::OutOfMemory {
            requested: bytes,
            detail: detail.to_owned(),
        };
        let length = self.charge_for(bytes);
        if length >= ADDRESSES - 2 * unit {
            return Err(too_much("no device has so many addresses"));
        }
        // Counted before it is created, so that concurrent threads do not exceed the limit together.
        let taken = self.physical.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            now.checked_add(length).filter(|sum| *sum <= self.max_physical)
        });
        if taken.is_err() {
            return Err(too_much("the limit of memory between guard pages"));
        }
        let mapped = self.allocate(memory, length, unit)?;
        Ok((mapped, self.place_block(mapped, bytes, align)))
    }

    fn allocate(
        &self,
        memory: &dyn VirtualMemory,
        length: usize,
        unit: usize,
    ) -> ResourceResult<Mapped> {
        if let Some(meter) = self.meter.lock().clone()
            && let Err(error) = meter.charge(length)
        {
            self.physical.fetch_sub(length, Ordering::AcqRel);
            return Err(error);
        }
        let start = self.reserved(memory).and_then(|base| {
            let mut ranges = self.ranges.lock();
            let found = ranges.allocate(length + 2 * unit);
            let none = DriverError::OutOfMemory { call: "reserve", requested: length as u64 };
            found.map(|offset| base + offset).ok_or(none)
        });
        let created = start.and_then(|range| {
            let start = range + unit as u64;
            let created = memory.create(length).inspect_err(|_| self.free_range(start, length));
            Ok((start, created?))
        });
        let (start, physical) = created.inspect_err(|_| self.uncount(length))?;
        let leftover = Leftover { memory: physical, bytes: length, mapped_at: None, in_use: false };
        #[allow(unsafe_code)]
        // SAFETY: the range is part of the reservation and nothing is mapped there.
        if let Err(error) = unsafe { memory.map(start, length, physical) } {
            self.free_range(start, length);
            // A failure makes it a leftover.
            let _ = self.free_physical(memory, leftover);
            return Err(error.into());
        }
        self.mappings.fetch_add(1, Ordering::AcqRel);
        #[allow(unsafe_code)]
        // SAFETY: exactly the mapping made above; nothing is queued on it.
        if let Err(error) = unsafe { memory.set_access(start, length, MapAccess::ReadWrite) } {
            let _ = self.free_physical(memory, Leftover { mapped_at: Some(start), ..leftover });
            return Err(error.into());
        }
        Ok(Mapped { start, bytes: length, memory: physical })
    }

    /// Uncounts destroyed physical memory.
    fn uncount(&self, bytes: usize) {
        self.physical.fetch_sub(bytes, Ordering::AcqRel);
        if let Some(meter) = self.meter.lock().clone() {
            meter.release(bytes);
        }
    }

    /// Unmaps and destroys physical memory; a failure makes it a leftover. All work on it has completed.
    fn free_physical(
        &self,
        memory: &dyn VirtualMemory,
        mut leftover: Leftover,
    ) -> DriverResult<()> {
        let mut step = || {
            if let Some(start) = leftover.mapped_at {
                #[allow(unsafe_code)]
                // SAFETY: exactly one mapping of this module, and all work on it has completed.
                unsafe {
                    memory.unmap(start, leftover.bytes)?;
                }
                leftover.mapped_at = None;
                self.mappings.fetch_sub(1, Ordering::AcqRel);
                self.free_range(start, leftover.bytes);
            }
            #[allow(unsafe_code)]
            // SAFETY: created by `allocate`, with one owner, and destroyed once: after a success nothing names it.
            unsafe {
                memory.destroy(leftover.memory)
            }
        };
        let done = step();
        match done {
            Ok(()) => self.uncount(leftover.bytes),
            Err(_) => self.leftovers.lock().push(leftover),
        }
        done
    }

    /// Retries the leftovers. With `wait`, also those with queued work, after a wait for all streams; if a stream is captured, they stay
    /// for a later call.
    pub(super) fn sweep(&self, wait: bool) -> DriverResult<()> {
        let left = std::mem::take(&mut *self.leftovers.lock());
        let mut outcome = Ok(());
        for mut leftover in left {
            if leftover.in_use {
                let waited = match wait {
                    true => self.device.driver().synchronize_streams(),
                    false => Ok(Waited::ForSome),
                };
                if waited != Ok(Waited::ForAll) {
                    self.leftovers.lock().push(leftover);
                    outcome = outcome.and(waited.map(drop));
                    continue;
                }
                leftover.in_use = false;
            }
            let this = self.memory().and_then(|memory| self.free_physical(memory, leftover));
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Makes a leftover of the memory of a failed allocation, on which work may be queued.
    pub(super) fn abandon(&self, mapped: Mapped) {
        let Mapped { start, bytes, memory } = mapped;
        let leftover = Leftover { memory, bytes, mapped_at: Some(start), in_use: true };
        self.leftovers.lock().push(leftover);
    }

    fn reserved(&self, memory: &dyn VirtualMemory) -> DriverResult<u64> {
        if let Some(base) = self.base.get() {
            return Ok(*base);
        }
        let base = memory.reserve(ADDRESSES, 0)?;
        let kept = *self.base.get_or_init(|| base);
        if kept != base {
            #[allow(unsafe_code)]
            // SAFETY: just reserved by this thread, which lost the race, and nothing was mapped.
            unsafe {
                memory.release(base, ADDRESSES)?;
            }
        }
        Ok(kept)
    }

    /// Places a block in its mapping, with a canary before it as far as it fits. At the end of the mapping, all bytes after the block are
    /// canary.
    fn place_block(&self, mapped: Mapped, bytes: usize, align: usize) -> Redzones {
        let end = mapped.start + mapped.bytes as u64;
        let user = match self.placement {
            PagePlacement::End => (end - bytes as u64) & !(align as u64 - 1),
            PagePlacement::Start => mapped.start,
        };
        let front = self.canary.min((user - mapped.start) as usize);
        let rest = (end - user) as usize - bytes;
        let back = match self.placement {
            PagePlacement::End => rest,
            PagePlacement::Start => rest.min(self.canary.max(MIN_ALIGN)),
        };
        Redzones { base: user - front as u64, front, bytes, back }
    }

    /// Unmaps a block. All work on it has completed. After an error a sweep retries it.
    pub(super) fn unmap(&self, mapped: Mapped) -> DriverResult<()> {
        let Mapped { start, bytes, memory } = mapped;
        let leftover = Leftover { memory, bytes, mapped_at: Some(start), in_use: false };
        self.free_physical(self.memory()?, leftover)
    }

    fn free_range(&self, start: u64, bytes: usize) {
        let (unit, base) = (self.unit(), self.base.get().copied().unwrap_or(0));
        let offset = start - unit as u64 - base;
        self.ranges.lock().free(offset, bytes + 2 * unit, MAX_RESTING);
    }

    /// Releases the addresses if nothing is mapped in them.
    pub(super) fn end(&self) {
        // A lost device has freed its memory already.
        let _ = self.sweep(false);
        if self.mappings.load(Ordering::Acquire) > 0 {
            return;
        }
        if let (Ok(memory), Some(base)) = (self.memory(), self.base.get()) {
            #[allow(unsafe_code)]
            // SAFETY: the reservation of this module, and nothing is mapped in it.
            let released = unsafe { memory.release(*base, ADDRESSES) };
            // A lost device has released it already.
            let _ = released;
        }
    }
}

debug_fields!(self: Pages { physical: self.physical(), base: self.base.get(), .. });

/// Offsets in the reservation.
#[derive(Debug, Default)]
struct Ranges {
    /// Offsets from here on were never used.
    fresh: u64,
    /// Freed ranges that are kept from reuse: start and size, the oldest first.
    resting: VecDeque<(u64, u64)>,
    /// Freed ranges that may be reused, by start. No two are adjacent.
    rested: BTreeMap<u64, u64>,
}

impl Ranges {
    fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let bytes = bytes as u64;
        if self.fresh + bytes <= ADDRESSES as u64 {
            let start = self.fresh;
            self.fresh += bytes;
            return Some(start);
        }
        loop {
            let fits = self.rested.iter().find(|(_, size)| **size >= bytes);
            if let Some((&start, &size)) = fits {
                self.rested.remove(&start);
                if size > bytes {
                    self.rested.insert(start + bytes, size - bytes);
                }
                return Some(start);
            }
            self.recycle_oldest()?;
        }
    }

    fn free(&mut self, start: u64, bytes: usize, max_resting: usize) {
        self.resting.push_back((start, bytes as u64));
        while self.resting.len() > max_resting {
            let _ = self.recycle_oldest();
        }
    }

    /// Makes the oldest resting range reusable.
    fn recycle_oldest(&mut self) -> Option<()> {
        let (mut start, mut size) = self.resting.pop_front()?;
        if let Some((&before, &length)) = self.rested.range(..start).next_back()
            && before + length == start
        {
            self.rested.remove(&before);
            (start, size) = (before, size + length);
        }
        if let Some(length) = self.rested.remove(&(start + size)) {
            size += length;
        }
        self.rested.insert(start, size);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_used_again_only_when_there_is_no_fresh_one() {
        let all = ADDRESSES as u64;
        let mut ranges = Ranges::default();
        assert_eq!(ranges.allocate(ADDRESSES - 100), Some(0));
        ranges.free(0, ADDRESSES - 100, 10);
        assert_eq!(ranges.allocate(60), Some(all - 100), "fresh ones first");
        assert_eq!(ranges.allocate(60), Some(0), "then what has rested");
        ranges.free(0, 60, 0);
        ranges.free(all - 100, 60, 0);
        assert_eq!(ranges.allocate(ADDRESSES - 40), Some(0), "neighbours have grown together");
        assert_eq!(ranges.allocate(60), None);
    }
}
