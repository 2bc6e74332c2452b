//! The budget as a resource: charges around the calls of the one below.

use std::sync::Arc;

use super::GlobalDeviceBudget;
use super::core::{Claim, Core};
use super::credit::Seat;
use super::ladder::{OomPolicy, Relief};
use super::records::Record;
use super::reservation::{BudgetReservation, RESERVED};
use super::seats::seat;
use super::tally::{Pending, TagIndex, Tally};
use super::tree::{DEVICE, ScopeIndex};
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, FreeSpace, MIN_ALIGN,
    PhysicalMeter, ResourceError, ResourceResult, ResourceStatistics, StreamId,
};

/// How often a block that is larger than was announced is asked for again.
const TRIES: u32 = 4;

/// A charge whose inner call is under way. Dropped by a panic below, it gives the charge back.
struct Flight<'a> {
    core: &'a Core,
    seat: Seat,
    charge: usize,
    scope: ScopeIndex,
    tag: TagIndex,
    blocks: u32,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.core.release(self.seat, self.charge, self.scope, self.tag, self.blocks);
    }
}

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

/// How an inner call went.
pub(super) enum Outcome<B> {
    Given(B),
    Failed(ResourceError),
    /// The block was larger than announced and did not fit: it would have been this.
    Larger(usize),
}

/// One block or several.
pub(super) trait Blocks: Sized {
    fn blocks(&self) -> &[DeviceBlock];
    fn into_vec(self) -> Vec<DeviceBlock>;
}

impl Blocks for DeviceBlock {
    fn blocks(&self) -> &[DeviceBlock] {
        std::slice::from_ref(self)
    }
    fn into_vec(self) -> Vec<DeviceBlock> {
        vec![self]
    }
}

impl Blocks for Vec<DeviceBlock> {
    fn blocks(&self) -> &[DeviceBlock] {
        self
    }
    fn into_vec(self) -> Vec<DeviceBlock> {
        self
    }
}

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// One block, charged. The usual way takes the charge out of this thread's own credit.
    #[inline(always)]
    pub(super) fn obtain(
        &self,
        bytes: usize,
        tag: AllocTag,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let charge = self.inner.charge_for(bytes);
        let seat = seat();
        if bytes == 0 || super::scope::current(&self.core) != DEVICE {
            return self.obtain_slow(bytes, tag, None, call);
        }
        let Some(index) = self.core.take_own(seat, charge, tag) else {
            return self.obtain_slow(bytes, tag, None, call);
        };
        let flight =
            Flight { core: &self.core, seat, charge, scope: DEVICE, tag: index, blocks: 1 };
        match call() {
            Ok(block) if block.bytes <= charge => {
                std::mem::forget(flight);
                let record = Record { charge, tag: index, scope: DEVICE };
                self.core.records.put(block.ptr, block.generation, record);
                self.core.keep(seat, charge);
                Ok(by_fields(block))
            }
            Ok(block) => {
                let outcome = self.settle(flight, by_fields(block), |_| charge);
                self.obtain_slow(bytes, tag, Some(outcome), call)
            }
            Err(error) => {
                drop(flight);
                self.obtain_slow(bytes, tag, Some(Outcome::Failed(error)), call)
            }
        }
    }

    /// By way of the pot and the ladder, after what has failed.
    #[cold]
    #[inline(never)]
    fn obtain_slow(
        &self,
        bytes: usize,
        tag: AllocTag,
        failed: Option<Outcome<DeviceBlock>>,
        call: impl Fn() -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let claim = self.claim(bytes, tag)?;
        self.climb(&claim, None, failed, call, |_| claim.charge)
    }

    /// Takes, calls, and makes room below while there is a way to.
    pub(super) fn climb<B: Blocks>(
        &self,
        claim: &Claim,
        policy: Option<&OomPolicy>,
        failed: Option<Outcome<B>>,
        call: impl Fn() -> ResourceResult<B>,
        announced: impl Fn(usize) -> usize,
    ) -> ResourceResult<B> {
        let seat = seat();
        let mut claim = *claim;
        // The budget's own, unless the caller has one; asked for when it is needed.
        let policy = || policy.cloned().unwrap_or_else(|| self.core.policy());
        let mut relief = None;
        let mut failed = failed;
        let mut larger = 0;
        loop {
            match failed {
                None => {}
                Some(Outcome::Given(given)) => return Ok(given),
                Some(Outcome::Failed(error)) => {
                    if !matches!(error, ResourceError::OutOfMemory { .. }) {
                        return Err(error);
                    }
                    let relief = relief.get_or_insert_with(|| Relief::new(policy()));
                    if !self.relieve(seat, &claim, relief) {
                        self.report_below(&claim, &error);
                        return Err(error);
                    }
                }
                Some(Outcome::Larger(charge)) => {
                    claim.charge = charge;
                    larger += 1;
                    if larger > TRIES {
                        let sight = self.core.sight(charge, claim.scope);
                        return Err(self.refuse(&claim, sight));
                    }
                }
            }
            let tag = match self.core.take(seat, &claim) {
                Some(tag) => tag,
                None => self.take_slow(seat, &claim, &policy())?,
            };
            let Claim { charge, scope, blocks, .. } = claim;
            let flight = Flight { core: &self.core, seat, charge, scope, tag, blocks };
            failed = Some(match call() {
                Ok(given) => self.settle(flight, given, &announced),
                Err(error) => Outcome::Failed(error),
            });
        }
    }

    /// Records what was given; takes what it is larger than announced, or returns it.
    #[cold]
    fn settle<B: Blocks>(
        &self,
        flight: Flight<'_>,
        given: B,
        announced: impl Fn(usize) -> usize,
    ) -> Outcome<B> {
        let Flight { seat, charge, scope, tag, .. } = flight;
        let charges: Vec<usize> = given
            .blocks()
            .iter()
            .enumerate()
            .map(|(n, block)| announced(n).max(block.bytes))
            .collect();
        let real = charges.iter().fold(0, |sum: usize, charge| sum.saturating_add(*charge));
        let extra = real.saturating_sub(charge);
        if extra > 0 {
            let name = self.core.names.name(tag as usize);
            let claim = Claim { charge: extra, scope, tag: name, blocks: 0 };
            if self.core.gather(seat, &claim).is_err() {
                // Recorded, so that the free releases what was charged, whenever it completes.
                std::mem::forget(flight);
                let mut left = charge;
                let count = charges.len();
                for (n, block) in given.blocks().iter().enumerate() {
                    let share = if n + 1 == count { left } else { announced(n).min(left) };
                    left -= share;
                    let record = Record { charge: share, tag, scope };
                    self.core.records.put(block.ptr, block.generation, record);
                }
                self.core.keep(seat, charge);
                let _ = self.deallocate_batch(given.into_vec());
                return Outcome::Larger(real);
            }
            self.core.keep(seat, extra);
        }
        std::mem::forget(flight);
        for (block, charge) in given.blocks().iter().zip(&charges) {
            let record = Record { charge: *charge, tag, scope };
            self.core.records.put(block.ptr, block.generation, record);
        }
        if charge > real {
            // It was asked for again with the size of a larger block.
            self.core.keep(seat, real);
            self.core.release(seat, charge - real, scope, tag, 0);
        } else {
            self.core.keep(seat, charge);
        }
        Outcome::Given(given)
    }

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
            self.look_through_all(seat);
        }
    }
}

/// The same block, moved field by field: as a whole it would be read back before it is all written, which costs more than the rest.
#[inline(always)]
fn by_fields(block: DeviceBlock) -> DeviceBlock {
    let DeviceBlock { ptr, device_ordinal, alloc_stream, bytes, align, tag, generation, state } =
        block;
    DeviceBlock { ptr, device_ordinal, alloc_stream, bytes, align, tag, generation, state }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for GlobalDeviceBudget<R> {
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.obtain(bytes, tag, move || self.inner.allocate(bytes, stream, tag))
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
        match self.inner.deallocate(block) {
            Ok(()) => {
                std::mem::forget(under_way);
                if self.inner.block_state(id) == BlockState::Freed {
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

    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_pending();
        self.look_through_all(seat());
        reaped
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let reaped = self.inner.reap_completed();
        self.look_through_all(seat());
        reaped
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        self.inner.record_block_use(block, use_stream)
    }

    fn supports_block_use_tracking(&self) -> bool {
        self.inner.supports_block_use_tracking()
    }

    #[inline]
    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.inner.prepare_block_use(block, use_stream, access)
    }

    #[inline]
    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.inner.finish_block_use(block, use_stream, access)
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.inner.finish_block_uses(uses, use_stream)
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        self.inner.block_state(block)
    }

    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.obtain(bytes, tag, move || self.inner.allocate_aligned(bytes, align, stream, tag))
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
            let one = self.claim(bytes, tag)?;
            claim.charge = claim.charge.saturating_add(one.charge);
            charges.push(one.charge);
        }
        let call = || self.inner.allocate_batch(sizes, stream, tag);
        let announced = |n: usize| charges.get(n).copied().unwrap_or(0);
        self.climb(&claim, None, None, call, announced)
    }

    fn charge_for(&self, bytes: usize) -> usize {
        self.inner.charge_for(bytes)
    }

    fn statistics(&self) -> ResourceStatistics {
        self.inner.statistics()
    }

    fn free_space(&self) -> Option<FreeSpace> {
        self.inner.free_space()
    }

    fn trim(&self) -> ResourceResult<usize> {
        let trimmed = self.inner.trim();
        self.look_through_all(seat());
        trimmed
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.inner.meter_physical(meter)
    }

    fn places_blocks(&self) -> bool {
        self.inner.places_blocks()
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
        let mut claim = self.claim(bytes, tag)?;
        reservation.covers(claim.charge)?;
        claim.scope = reservation.scope_index();
        let mut relief = Relief::new(self.core.policy());
        let seat = seat();
        let block = loop {
            let given = match &mut reservation.below {
                Some(below) => self.inner.allocate_reserved(below, bytes, align, stream, tag),
                None if align <= MIN_ALIGN => self.inner.allocate(bytes, stream, tag),
                None => self.inner.allocate_aligned(bytes, align, stream, tag),
            };
            match given {
                Ok(block) => break block,
                Err(error @ ResourceError::OutOfMemory { .. }) => {
                    if !self.relieve(seat, &claim, &mut relief) {
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
