//! The budget as a resource: allocations and frees with their charges. Everything else is forwarded.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::GlobalDeviceBudget;
use super::charge::Charge;
use super::charging::BlockSize;
use super::core::{BudgetCore, ChargeRequest};
use super::in_flight::ShardId;
use super::reclaim::{ReclaimState, call_below};
use super::reservation::{BudgetReservation, RESERVED};
use super::shard_id::current_shard;
use super::tag_counts::{Pending, TagCounts};
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, MIN_ALIGN,
    PhysicalMeter, ResourceError, ResourceResult, Seal, StreamId,
};

/// A free in progress. A panic below drops it, which leaves the block charged.
struct FreeInFlight<'a> {
    core: &'a BudgetCore,
    shard_id: ShardId,
    charge: usize,
}

impl Drop for FreeInFlight<'_> {
    fn drop(&mut self) {
        self.core.confirm(self.shard_id, self.charge);
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Handles a free that failed below, or whose block is not free yet.
    #[cold]
    #[inline(never)]
    fn record_unfinished_free(
        &self,
        shard_id: ShardId,
        id: BlockId,
        entry: Charge,
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
        let Charge { bytes: charge, tag, scope } = entry;
        if refused {
            self.core.confirm(shard_id, charge);
            return;
        }
        self.core.charges.remove(id.generation);
        self.add_pending(shard_id, Pending { block: id, charge, tag, scope });
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
        let size = BlockSize { bytes, charge: self.inner.charge_for(bytes) };
        self.allocate_charged(size, tag, move || self.inner.allocate(bytes, stream, tag))
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let id = BlockId::from_block(&block);
        let Some(words) = self.core.charges.find(id.generation) else {
            return self.inner.deallocate(block);
        };
        let entry = Charge::from_words(words);
        let shard_id = current_shard();
        self.core.quotas.begin(shard_id, entry.bytes);
        let in_flight = FreeInFlight { core: &self.core, shard_id, charge: entry.bytes };
        match self.inner.deallocate_with_state(&block) {
            Ok(state) => {
                std::mem::forget(in_flight);
                if state == BlockState::Freed {
                    self.core.charges.remove(id.generation);
                    self.core.release_block(shard_id, entry.bytes, entry.scope, entry.tag);
                } else {
                    self.record_unfinished_free(shard_id, id, entry, None);
                }
                Ok(())
            }
            Err(error) => {
                std::mem::forget(in_flight);
                self.record_unfinished_free(shard_id, id, entry, Some(&error));
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
        let size = BlockSize { bytes, charge: self.inner.charge_for_aligned(bytes, align) };
        let call = move || self.inner.allocate_aligned(bytes, align, stream, tag);
        self.allocate_charged(size, tag, call)
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
        let mut request = ChargeRequest {
            charge: 0,
            scope: super::scope::current(&self.core),
            tag,
            blocks: sizes.len() as u32,
        };
        let mut charges = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            let size = BlockSize { bytes, charge: self.inner.charge_for(bytes) };
            let one = self.charge_request(size, tag)?;
            request.charge = request.charge.saturating_add(one.charge);
            charges.push(one.charge);
        }
        let call = || self.inner.allocate_batch(sizes, stream, tag);
        let announced = |n: usize| charges.get(n).copied().unwrap_or(0);
        self.allocate_with_reclaim(&request, None, None, call, announced)
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
        let size = BlockSize { bytes, charge: self.inner.charge_for_aligned(bytes, align) };
        let mut request = self.charge_request(size, tag)?;
        reservation.covers(request.charge)?;
        request.scope = reservation.scope_index();
        let mut reclaim: Option<ReclaimState> = None;
        let shard_id = current_shard();
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
                        reclaim.get_or_insert_with(|| ReclaimState::new(self.core.policy(), spent));
                    if !self.reclaim_step(&request, reclaim) {
                        self.report_below(&request, &error);
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        };
        let charge = request.charge.max(block.bytes);
        if charge > reservation.bytes {
            let remaining = reservation.bytes;
            self.inner.deallocate(block)?;
            return Err(ResourceError::OutOfBudget { requested: charge, remaining });
        }
        reservation.bytes -= charge;
        let note = |tag_counts: &mut TagCounts| {
            let reserved = tag_counts.index_of(RESERVED, &self.core.names);
            let index = tag_counts.index_of(tag, &self.core.names);
            tag_counts.remove(reserved, charge, 0);
            tag_counts.add(index, charge, 1);
            index
        };
        let tag = self.core.quotas.with_extra(shard_id, note);
        let entry = Charge { bytes: charge, tag, scope: request.scope };
        self.core.charges.insert(block.generation, entry.to_words());
        Ok(block)
    }
}
