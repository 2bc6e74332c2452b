//! The budget as a resource: frees and their charges, and everything else of the one below.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::GlobalDeviceBudget;
use super::core::{Claim, Core};
use super::flights::Seat;
use super::reclaim::{Reclaim, call_below};
use super::records::Record;
use super::reservation::{BudgetReservation, RESERVED};
use super::seats::seat;
use super::tally::{Pending, Tally};
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, MIN_ALIGN,
    PhysicalMeter, ResourceError, ResourceResult, Seal, StreamId,
};

/// A free under way. Dropped by a panic below, it leaves the block charged.
struct UnderWay<'a> {
    core: &'a Core,
    seat: Seat,
    charge: usize,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.core.keep(self.seat, self.charge);
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// A free below failed, or the block is not free yet.
    #[cold]
    #[inline(never)]
    fn settle_free(&self, seat: Seat, id: BlockId, record: Record, error: Option<&ResourceError>) {
        // A claim that was refused changed nothing. Any other failure came half way: the block was taken.
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
        let Record { charge, tag, scope } = record;
        if refused {
            self.core.keep(seat, charge);
            return;
        }
        self.core.records.forget(id.ptr, id.generation);
        self.keep_pending(seat, Pending { block: id, charge, tag, scope });
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
        self.obtain((bytes, charge), tag, move || self.inner.allocate(bytes, stream, tag))
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        let Some(record) = self.core.records.find(id.ptr, id.generation) else {
            return self.inner.deallocate(block);
        };
        let seat = seat();
        self.core.credits.begin(seat, record.charge);
        let under_way = UnderWay { core: &self.core, seat, charge: record.charge };
        match self.inner.deallocate_with_state(&block) {
            Ok(state) => {
                std::mem::forget(under_way);
                if state == BlockState::Freed {
                    self.core.records.forget(id.ptr, id.generation);
                    self.core.release_block(seat, record.charge, record.scope, record.tag);
                } else {
                    self.settle_free(seat, id, record, None);
                }
                Ok(())
            }
            Err(error) => {
                std::mem::forget(under_way);
                self.settle_free(seat, id, record, Some(&error));
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
        let call = move || self.inner.allocate_aligned(bytes, align, stream, tag);
        self.obtain((bytes, charge), tag, call)
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
        let mut claim = Claim {
            charge: 0,
            scope: super::scope::current(&self.core),
            tag,
            blocks: sizes.len() as u32,
        };
        let mut charges = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            let one = self.claim(bytes, self.inner.charge_for(bytes), tag)?;
            claim.charge = claim.charge.saturating_add(one.charge);
            charges.push(one.charge);
        }
        let call = || self.inner.allocate_batch(sizes, stream, tag);
        let announced = |n: usize| charges.get(n).copied().unwrap_or(0);
        self.climb(&claim, None, None, call, announced)
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
        let charge = self.inner.charge_for_aligned(bytes, align);
        let mut claim = self.claim(bytes, charge, tag)?;
        reservation.covers(claim.charge)?;
        claim.scope = reservation.scope_index();
        let mut reclaim: Option<Reclaim> = None;
        let seat = seat();
        let block = loop {
            let (given, spent) = call_below(reclaim.as_ref(), || match &mut reservation.below {
                Some(below) => self.inner.allocate_reserved(below, bytes, align, stream, tag),
                None if align <= MIN_ALIGN => self.inner.allocate(bytes, stream, tag),
                None => self.inner.allocate_aligned(bytes, align, stream, tag),
            });
            match given {
                Ok(block) => break block,
                Err(error) if self.is_shortage(&error) => {
                    let reclaim =
                        reclaim.get_or_insert_with(|| Reclaim::new(self.core.policy(), spent));
                    if !self.make_room_below(&claim, reclaim) {
                        self.report_below(&claim, &error);
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        };
        let charge = claim.charge.max(block.bytes);
        if charge > reservation.bytes {
            let remaining = reservation.bytes;
            self.inner.deallocate(block)?;
            return Err(ResourceError::OutOfBudget { requested: charge, remaining });
        }
        reservation.bytes -= charge;
        let note = |tally: &mut Tally| {
            let reserved = tally.index_of(RESERVED, &self.core.names);
            let index = tally.index_of(tag, &self.core.names);
            tally.remove(reserved, charge, 0);
            tally.add(index, charge, 1);
            index
        };
        let tag = self.core.credits.with_extra(seat, note);
        let record = Record { charge, tag, scope: claim.scope };
        self.core.records.put(block.ptr, block.generation, record);
        Ok(block)
    }
}
