//! The budget as a resource: allocations and frees with their charges. Everything else is forwarded.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::GlobalDeviceBudget;
use super::charging::call_below;
use super::core::{BudgetCore, TakenCharge};
use super::pending::Pending;
use super::quota::Charge;
use super::reclaim::ReclaimState;
use super::reservation::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, MIN_ALIGN,
    PhysicalMeter, ResourceError, ResourceResult, Seal, StreamId,
};

/// A free in progress. A panic below drops it, which leaves the block charged.
struct FreeInFlight<'a> {
    core: &'a BudgetCore,
    bytes: usize,
}

impl Drop for FreeInFlight<'_> {
    fn drop(&mut self) {
        self.core.quotas.end(self.bytes);
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Handles a free that failed below, or whose block is not free yet.
    #[cold]
    #[inline(never)]
    fn record_unfinished_free(
        &self,
        id: BlockId,
        charge: Charge,
        taken: TakenCharge<'_>,
        error: Option<&ResourceError>,
    ) {
        // A refused free changed nothing. After any other failure the resource below has the block.
        let refused = match error {
            None => false,
            Some(ResourceError::UseAfterFree { generation }) if *generation == id.generation => {
                true
            }
            Some(_) => {
                id.device_ordinal != self.inner.device_ordinal()
                    || self.inner.block_state(id) == BlockState::Live
            }
        };
        if refused {
            return self.core.quotas.end(charge.bytes);
        }
        taken.discard();
        self.add_pending(Pending { block: id, charge });
        if error.is_some() && self.inner.block_state(id) == BlockState::Freed {
            self.scan_pending();
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for GlobalDeviceBudget<R> {
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.inner)
    }

    fn is_trusted(&self, seal: Seal) -> bool {
        self.inner.is_trusted(seal)
    }

    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }

    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let charge = self.inner.charge_for(bytes);
        let call = || self.inner.allocate(bytes, stream, tag);
        self.allocate_charged(self.charge_for_block(bytes, charge, tag)?, None, call, |_| charge)
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        let Some((charge, taken)) = self.core.take_charge(id.generation)? else {
            return self.inner.deallocate(block);
        };
        self.core.quotas.begin(charge.bytes);
        let in_flight = FreeInFlight { core: &self.core, bytes: charge.bytes };
        let result = self.inner.deallocate_with_state(&block);
        std::mem::forget(in_flight);
        match result {
            Ok(BlockState::Freed) => {
                taken.discard();
                self.core.release(&charge);
                Ok(())
            }
            Ok(_) => {
                self.record_unfinished_free(id, charge, taken, None);
                Ok(())
            }
            Err(error) => {
                self.record_unfinished_free(id, charge, taken, Some(&error));
                Err(error)
            }
        }
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_pending();
        self.scan_pending();
        reaped
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_completed();
        self.scan_pending();
        reaped
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.inner.finish_block_uses(uses, use_stream)
    }

    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let charge = self.inner.charge_for_aligned(bytes, align);
        let call = || self.inner.allocate_aligned(bytes, align, stream, tag);
        self.allocate_charged(self.charge_for_block(bytes, charge, tag)?, None, call, |_| charge)
    }

    fn allocate_batch(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        if sizes.is_empty() {
            return self.inner.allocate_batch(sizes, stream, tag);
        }
        let charges: Vec<usize> = sizes.iter().map(|&bytes| self.inner.charge_for(bytes)).collect();
        let sum = charges.iter().fold(0, |sum: usize, charge| sum.saturating_add(*charge));
        let least = sizes.iter().copied().min().unwrap_or_default();
        let charge = self.charge_for_block(least, sum, tag)?;
        let call = || self.inner.allocate_batch(sizes, stream, tag);
        let announced = |n: usize| charges.get(n).copied().unwrap_or(0);
        self.allocate_charged(charge, None, call, announced)
    }

    fn trim(&self) -> ResourceResult<usize> {
        let trimmed = self.inner.trim();
        self.scan_pending();
        trimmed
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.inner.meter_physical(meter)?;
        let below = self.inner.reserve_budget(0);
        let is_lowest = matches!(below, Ok(None) | Err(ResourceError::Unsupported { .. }));
        self.metered.store(is_lowest, Ordering::Release);
        Ok(())
    }

    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        self.reserve(bytes).map(Some)
    }

    fn allocate_reserved(
        &self,
        reservation: &mut BudgetReservation,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if !Arc::ptr_eq(&self.core, &reservation.core) {
            return Err(ResourceError::InvalidRequest {
                value: "a reservation of another budget".to_owned(),
                accepted: "one that this budget gave".to_owned(),
            });
        }
        let bytes_charged = self.inner.charge_for_aligned(bytes, align);
        reservation.covers(bytes_charged)?;
        let mut charge = self.charge_for_block(bytes, bytes_charged, tag)?;
        charge.scope = reservation.scope_index();
        let mut reclaim: Option<ReclaimState> = None;
        let block = loop {
            let given = call_below(reclaim.as_ref(), || match &mut reservation.below {
                Some(below) => self.inner.allocate_reserved(below, bytes, align, stream, tag),
                None if align <= MIN_ALIGN => self.inner.allocate(bytes, stream, tag),
                None => self.inner.allocate_aligned(bytes, align, stream, tag),
            });
            match given {
                Ok(block) => break block,
                Err((error, spent)) if self.is_shortage(&error) => {
                    let reclaim =
                        reclaim.get_or_insert_with(|| ReclaimState::new(self.core.policy(), spent));
                    if !self.reclaim_step(&charge, reclaim) {
                        self.report_below(&charge, &error);
                        return Err(error);
                    }
                }
                Err((error, _)) => return Err(error),
            }
        };
        charge.bytes = charge.bytes.max(block.bytes);
        if charge.bytes > reservation.bytes {
            let remaining = reservation.bytes;
            self.inner.deallocate(block)?;
            return Err(ResourceError::OutOfBudget { requested: charge.bytes, remaining });
        }
        reservation.bytes -= charge.bytes;
        self.core.reserved.fetch_sub(charge.bytes, Ordering::AcqRel);
        self.core.record(block.generation, &charge);
        Ok(block)
    }
}
