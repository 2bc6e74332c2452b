//! One raw driver allocation for each block, so that a memory checker sees every bound.
//!
//! A free waits for the whole device and then calls the driver, which is slow. The resource tracks no uses; the stream of a
//! block is only a label. It frees a block once, by its identity, and a reap retries a free that the driver refuses.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xlog_base::debug_fields;
use xlog_driver::sync::Mutex;

use super::budget::BudgetReservation;
use super::ordering::{BlockTable, generation_bits};
use super::resource::{
    AllocTag, BlockId, BlockState, CapSlot, DeviceBlock, DeviceMemoryResource, Generation,
    PhysicalCap, PhysicalMeter, ResourceError, ResourceHome, ResourceResult, ResourceStatistics,
    Seal, StreamId, first_error, refused_by_cap,
};
use crate::CudaDevice;

/// The granule in which drivers take memory from the card; allocations up to half of it share one.
const GRANULE: u64 = 2 << 20;

/// Raw driver memory, one allocation per block.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{AllocTag, DeviceMemoryResource, DirectCudaResource, StreamId};
///
/// let resource = DirectCudaResource::new(Arc::new(CudaDevice::open("sim")?), 0);
/// let block = resource.allocate(100, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert_eq!((block.bytes, resource.bytes_outstanding()), (100, 100));
/// resource.deallocate(block)?;
/// assert_eq!(resource.bytes_outstanding(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DirectCudaResource {
    device: Arc<CudaDevice>,
    ordinal: u32,
    table: BlockTable,
    outstanding: AtomicUsize,
    /// Device bytes of the outstanding blocks.
    physical: AtomicUsize,
    /// Their bytes in granules of the driver, limited by the cap.
    granules: AtomicU64,
    cap: CapSlot,
    allocations: AtomicU64,
    deallocations: AtomicU64,
    /// Blocks whose free failed.
    unfinished: Mutex<Vec<Generation>>,
    /// Blocks on which work is being queued. Blocks are retired under this lock.
    pins: Mutex<HashMap<Generation, Pin>>,
    meter: Mutex<Option<Arc<dyn PhysicalMeter>>>,
}

/// Keeps a block while work is queued on it.
#[derive(Default)]
struct Pin {
    holders: usize,
    /// Whether the block was returned: the last holder then frees it.
    is_returned: bool,
}

impl DirectCudaResource {
    /// Creates a resource of `device`, which has the number `ordinal`.
    #[must_use]
    pub fn new(device: Arc<CudaDevice>, ordinal: u32) -> Self {
        Self {
            device,
            ordinal,
            table: BlockTable::new(ordinal),
            outstanding: AtomicUsize::new(0),
            physical: AtomicUsize::new(0),
            granules: AtomicU64::new(0),
            cap: CapSlot::default(),
            allocations: AtomicU64::new(0),
            deallocations: AtomicU64::new(0),
            unfinished: Mutex::new(Vec::new()),
            pins: Mutex::default(),
            meter: Mutex::new(None),
        }
    }

    fn check_parts(&self) -> ResourceResult<()> {
        let device = self.device.ordinal();
        if device == self.ordinal {
            return Ok(());
        }
        let own = self.ordinal;
        Err(ResourceError::Driver(format!("a resource of device {own} was given device {device}")))
    }

    fn meter(&self) -> Option<Arc<dyn PhysicalMeter>> {
        self.meter.lock().clone()
    }

    /// Returns the minimum of device bytes of a block: a multiple of the driver's alignment.
    fn physical(&self, bytes: usize) -> usize {
        let step = self.device.properties().allocation_alignment.max(1);
        bytes.checked_next_multiple_of(step).unwrap_or(bytes)
    }

    /// Returns the device bytes of a block in granules; small blocks share a granule.
    fn in_granules(&self, bytes: usize) -> u64 {
        let physical = self.physical(bytes) as u64;
        let whole = physical.checked_next_multiple_of(GRANULE).unwrap_or(physical);
        if physical > GRANULE / 2 { whole } else { physical }
    }

    /// Charges the granules of a block; refuses a block that exceeds the cap.
    fn charge_granules(&self, bytes: usize) -> ResourceResult<()> {
        let taken = self.in_granules(bytes);
        let allowed = self.cap.in_granules(GRANULE);
        let add = |held: u64| held.checked_add(taken).filter(|sum| *sum <= allowed);
        let added = self.granules.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        added.map(|_| ()).map_err(|held| refused_by_cap(bytes, allowed, GRANULE, held))
    }

    /// Frees an allocation for which the table has no slot. It is uncounted even if the driver refuses.
    #[cold]
    fn refuse_block(&self, ptr: u64, counted: Counted<'_>) -> ResourceError {
        drop(counted);
        #[allow(unsafe_code)]
        // SAFETY: just allocated, so no other thread knows it.
        let freed = unsafe { self.device.driver().free(ptr) };
        freed.err().map_or_else(too_many_blocks, Into::into)
    }

    fn free(&self, generation: Generation) -> ResourceResult<()> {
        let Some(meta) = self.table.at(generation) else { return Ok(()) };
        // Waiting for the whole device would break stream captures of other code. The free waits for the remaining work.
        let _waited = self.device.driver().synchronize_streams()?;
        #[allow(unsafe_code)]
        // SAFETY: the metadata says that the block belongs to this resource and is retired, which happens once; the driver's
        // free returns after all work that was queued before.
        unsafe {
            self.device.driver().free(meta.ptr())?;
        }
        let bytes = self.table.end(&[generation]);
        self.outstanding.fetch_sub(bytes, Ordering::AcqRel);
        let physical = self.physical(bytes);
        self.physical.fetch_sub(physical, Ordering::AcqRel);
        self.granules.fetch_sub(self.in_granules(bytes), Ordering::AcqRel);
        if let Some(meter) = self.meter() {
            meter.release(physical);
        }
        Ok(())
    }

    fn free_or_keep(&self, generation: Generation) -> ResourceResult<()> {
        self.free(generation).inspect_err(|_| self.unfinished.lock().push(generation))
    }
}

/// The charge of a block that is being allocated, for the cap and the meter. Released when dropped.
struct Counted<'a> {
    resource: &'a DirectCudaResource,
    bytes: usize,
    meter: Option<Arc<dyn PhysicalMeter>>,
    is_kept: bool,
}

impl<'a> Counted<'a> {
    fn new(resource: &'a DirectCudaResource, bytes: usize) -> ResourceResult<Self> {
        resource.charge_granules(bytes)?;
        let mut counted = Self { resource, bytes, meter: None, is_kept: false };
        if let Some(meter) = resource.meter() {
            meter.charge(resource.physical(bytes))?;
            counted.meter = Some(meter);
        }
        Ok(counted)
    }

    /// Keeps the charge: the free of the block releases it.
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Some(meter) = &self.meter {
            meter.release(self.resource.physical(self.bytes));
        }
        self.resource.granules.fetch_sub(self.resource.in_granules(self.bytes), Ordering::AcqRel);
    }
}

/// Unpins a block, even if the work panics.
struct Unpin<'a> {
    resource: &'a DirectCudaResource,
    generation: Generation,
}

impl Drop for Unpin<'_> {
    fn drop(&mut self) {
        let is_due = {
            let mut pins = self.resource.pins.lock();
            let Some(pin) = pins.get_mut(&self.generation) else { return };
            pin.holders -= 1;
            let (holders, is_returned) = (pin.holders, pin.is_returned);
            if holders == 0 {
                pins.remove(&self.generation);
            }
            holders == 0 && is_returned
        };
        if is_due {
            // A reap reports the failure.
            let _ = self.resource.free_or_keep(self.generation);
        }
    }
}

impl DeviceMemoryResource for DirectCudaResource {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.check_parts()?;
        if bytes == 0 {
            return Err(ResourceError::zero_bytes());
        }
        let counted = Counted::new(self, bytes)?;
        let ptr = self.device.driver().alloc(bytes)?;
        let Some(generation) = self.table.begin(ptr, bytes, None) else {
            return Err(self.refuse_block(ptr, counted));
        };
        counted.keep();
        self.outstanding.fetch_add(bytes, Ordering::AcqRel);
        self.physical.fetch_add(self.physical(bytes), Ordering::AcqRel);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(DeviceBlock::live(ptr, bytes, self.ordinal, stream, tag, generation))
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let meta = self.table.find_block(&block)?;
        let is_pinned = {
            let mut pins = self.pins.lock();
            if !meta.with_uses(|_| meta.state.retire(generation_bits(block.generation))) {
                return Err(ResourceError::UseAfterFree { generation: block.generation });
            }
            let pin = pins.get_mut(&block.generation);
            pin.map(|pin| pin.is_returned = true).is_some()
        };
        self.deallocations.fetch_add(1, Ordering::Relaxed);
        if is_pinned { Ok(()) } else { self.free_or_keep(block.generation) }
    }

    fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    fn bytes_outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let unfinished = std::mem::take(&mut *self.unfinished.lock());
        first_error(unfinished, |generation| self.free_or_keep(generation))
    }

    fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        let generation = block.generation;
        {
            let mut pins = self.pins.lock();
            let meta = self.table.find_by_id(block)?;
            if !meta.state.is_live(generation_bits(generation)) {
                return Err(ResourceError::UseAfterFree { generation });
            }
            pins.entry(generation).or_default().holders += 1;
        }
        let unpin = Unpin { resource: self, generation };
        work();
        drop(unpin);
        Ok(())
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        self.table.state(block)
    }

    fn is_trusted(&self, _seal: Seal) -> bool {
        true
    }

    fn places_blocks(&self) -> bool {
        true
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    fn home(&self) -> Option<ResourceHome> {
        Some(ResourceHome::new(self.device.clone()))
    }

    fn statistics(&self) -> ResourceStatistics {
        let retired = self.unfinished.lock().len();
        let allocations = self.allocations.load(Ordering::Relaxed);
        let deallocations = self.deallocations.load(Ordering::Relaxed);
        ResourceStatistics {
            bytes_outstanding: self.bytes_outstanding(),
            live_blocks: allocations.saturating_sub(deallocations) as usize,
            retired_blocks: retired,
            allocations,
            deallocations,
            ..Default::default()
        }
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        meter.charge(self.physical.load(Ordering::Acquire))?;
        *self.meter.lock() = Some(meter);
        Ok(())
    }

    fn physical_bytes(&self) -> Option<usize> {
        Some(self.granules.load(Ordering::Acquire) as usize)
    }

    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.cap.add(&cap);
        Ok(())
    }
}

debug_fields!(self: DirectCudaResource {
    device: self.device.spec(), bytes_outstanding: self.bytes_outstanding(), ..
});

pub(super) fn too_many_blocks() -> ResourceError {
    ResourceError::invalid("one more block", "at most 16777216 blocks of one resource at a time")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use xlog_sim::{Call, Fault};

    use super::*;

    #[derive(Debug, Default)]
    struct Sum(AtomicUsize);

    impl PhysicalMeter for Sum {
        fn charge(&self, bytes: usize) -> ResourceResult<()> {
            self.0.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        }
        fn release(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_block_without_a_record_leaves_nothing_counted_also_where_its_free_fails() {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let resource = DirectCudaResource::new(device.clone(), 0);
        let meter = Arc::new(Sum::default());
        resource.meter_physical(meter.clone()).unwrap();
        for fails in [false, true] {
            let counted = Counted::new(&resource, 3 << 20).unwrap();
            assert_eq!(
                (resource.physical_bytes(), meter.0.load(Ordering::Relaxed)),
                (Some(4 << 20), 3 << 20)
            );
            let ptr = device.driver().alloc(3 << 20).unwrap();
            if fails {
                device.sim().unwrap().faults().fail_nth(Call::Free, 1, Fault::Code(999));
            }
            let error = resource.refuse_block(ptr, counted);
            assert_eq!(matches!(error, ResourceError::Driver(_)), fails, "{error}");
            assert_eq!((resource.physical_bytes(), meter.0.load(Ordering::Relaxed)), (Some(0), 0));
        }
        // The next request takes what it needs, and its free releases it.
        let block = resource.allocate(3 << 20, StreamId::DEFAULT, AllocTag("rows")).unwrap();
        assert_eq!(
            (resource.physical_bytes(), meter.0.load(Ordering::Relaxed)),
            (Some(4 << 20), 3 << 20)
        );
        resource.deallocate(block).unwrap();
        assert_eq!((resource.physical_bytes(), meter.0.load(Ordering::Relaxed)), (Some(0), 0));
    }
}
