//! Stream-ordered pools, simulated.

#![allow(unsafe_code)]

use std::sync::Arc;

use xlog_driver::{
    Access, AsyncPools, DriverError, DriverResult, PoolHandle, PoolOptions, PoolUsage, StreamHandle,
};

use crate::device::SimDevice;
use crate::faults::Call;
use crate::memory::{BLOCK_ALIGN, Backing, Owner, Pool, RegionKind, Reuse, Standing, round_up};
use crate::op::{Argument, Label, Marker, OpKind};
use crate::state::State;

/// The minimum growth of a pool, if the device has enough memory.
const GROWTH: u64 = 32 << 20;
const SEGMENT_ALIGN: u64 = 2 << 20;

impl SimDevice {
    fn live_pool<'s>(
        &self,
        state: &'s mut State,
        call: Call,
        pool: PoolHandle,
    ) -> DriverResult<&'s mut Pool> {
        match state.pools.get_mut(&pool.number()) {
            Some(known) if known.ordinal == self.ordinal() && !known.destroyed => Ok(known),
            _ => {
                Err(call
                    .invalid(format!("{pool}, unknown or destroyed"), "a live pool of this device"))
            }
        }
    }

    /// Releases idle segments of a pool to the device.
    pub(crate) fn release_pool(&self, state: &mut State, pool: u64, keep: u64) {
        let Some(known) = state.pools.get_mut(&pool) else {
            return;
        };
        if known.usage.reserved <= keep {
            return;
        }
        let ordinal = known.ordinal;
        for (start, bytes, backing) in known.release(keep) {
            state.detector.fade(&backing);
            state.space.free_addresses(ordinal, start, bytes);
            state.release_bytes(ordinal, bytes);
        }
        state.detector.sweep();
        let gone = |known: &Pool| known.destroyed && known.usage.reserved == 0;
        if state.pools.get(&pool).is_some_and(gone) {
            state.pools.remove(&pool);
        }
    }

    /// Adds a segment of at least `bytes`. Returns false if the pool's or the device's limit forbids it.
    fn grow_pool(&self, state: &mut State, pool: u64, bytes: u64) -> bool {
        let Some(known) = state.pools.get(&pool) else {
            return false;
        };
        let room = known
            .options
            .max_bytes
            .map_or(u64::MAX, |max| max.saturating_sub(known.usage.reserved))
            .min(state.free_bytes(self.ordinal()));
        let Some(least) = round_up(bytes, SEGMENT_ALIGN.min(GROWTH)) else {
            return false;
        };
        let wanted = if least.max(GROWTH) <= room { least.max(GROWTH) } else { least.min(room) };
        if wanted < bytes {
            return false;
        }
        let Some(backing) = usize::try_from(wanted).ok().and_then(Backing::new) else {
            return false;
        };
        let Some(start) = state.space.allocate_addresses(self.ordinal(), wanted, SEGMENT_ALIGN)
        else {
            return false;
        };
        if state.charge_bytes(Call::AllocAsync.name(), self.ordinal(), wanted).is_err() {
            return false;
        }
        if let Some(known) = state.pools.get_mut(&pool) {
            known.grow(start, wanted, backing);
        }
        true
    }

    /// Finds a chunk for `stream`: ordered or completed frees first, then new memory, then frees to wait for.
    fn find_chunk(
        &self,
        state: &mut State,
        pool: u64,
        bytes: u64,
        stream: StreamHandle,
    ) -> Option<Reuse> {
        let reuse = state.pools.get(&pool)?.options.reuse;
        let clock = {
            let mut clock = state.streams.get(&stream.number())?.line.clock.clone();
            clock.join(&state.host);
            clock
        };
        let judge = |free: &Marker| {
            let covered = || free.reached.get().is_some_and(|point| clock.covers(point.epoch));
            if free.stream == stream || (reuse.follow_event_dependencies && covered()) {
                Standing::Ordered
            } else if reuse.opportunistic && free.is_done() {
                Standing::Completed
            } else {
                Standing::Pending
            }
        };
        if let Some(found) = state.pools.get_mut(&pool)?.allocate(bytes, judge) {
            return Some(found);
        }
        if self.grow_pool(state, pool, bytes) {
            return state.pools.get_mut(&pool)?.allocate(bytes, judge);
        }
        if reuse.internal_dependencies {
            return state.pools.get_mut(&pool)?.allocate_with_wait(bytes, judge);
        }
        None
    }
}

impl SimDevice {
    /// A whole block with its rounding as the argument of its allocation or free, because a reuse is compared with all of the chunk.
    fn whole_block(&self, state: &State, call: Call, start: u64) -> DriverResult<Argument> {
        let mut block = self.argument(state, call, start, 1, Access::Write)?;
        if let Some(region) = state.space.starting_at(start) {
            block.bytes = region.bytes;
            block.pieces = region.whole().unwrap_or_default();
        }
        Ok(block)
    }
}

impl AsyncPools for SimDevice {
    fn pool_create(&self, options: &PoolOptions) -> DriverResult<PoolHandle> {
        let mut state = self.enter(Call::PoolCreate)?;
        let handle = state.handle();
        state.pools.insert(handle, Pool::new(self.ordinal(), *options));
        Ok(PoolHandle::numbered(handle))
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> DriverResult<()> {
        let mut state = self.enter(Call::PoolDestroy)?;
        let known = self.live_pool(&mut state, Call::PoolDestroy, pool)?;
        known.destroyed = true;
        known.options.release_threshold = 0;
        if known.usage.reserved == 0 {
            state.pools.remove(&pool.number());
        }
        self.release_pool(&mut state, pool.number(), 0);
        Ok(())
    }

    fn pool_usage(&self, pool: PoolHandle) -> DriverResult<PoolUsage> {
        let mut state = self.enter(Call::PoolUsage)?;
        Ok(self.live_pool(&mut state, Call::PoolUsage, pool)?.usage)
    }

    fn pool_trim(&self, pool: PoolHandle, keep_bytes: u64) -> DriverResult<()> {
        let mut state = self.enter(Call::PoolTrim)?;
        self.live_pool(&mut state, Call::PoolTrim, pool)?;
        self.release_pool(&mut state, pool.number(), keep_bytes);
        Ok(())
    }

    fn alloc_async(
        &self,
        bytes: usize,
        pool: PoolHandle,
        stream: StreamHandle,
    ) -> DriverResult<u64> {
        let call = Call::AllocAsync;
        let mut state = self.enter_on(call, stream)?;
        // CUDA would make it a node of the graph, which the runtime never wants, so the capture is invalidated.
        self.refuse_captured(&mut state, call, stream, true)?;
        self.live_pool(&mut state, call, pool)?;
        Self::refuse_zero(call, bytes)?;
        Self::cost(&mut state, |model| model.async_alloc);
        let span = round_up(bytes as u64, BLOCK_ALIGN);
        let found = span.and_then(|span| {
            let reuse = self.find_chunk(&mut state, pool.number(), span, stream)?;
            let place = state.pools.get(&pool.number())?.place(reuse.start)?;
            Some((span, reuse, place))
        });
        let Some((span, reuse, (backing, offset))) = found else {
            return Err(DriverError::OutOfMemory { call: call.name(), requested: bytes as u64 });
        };
        let start = reuse.start;
        for free in reuse.wait_for {
            state.push(stream, Label::Fixed("wait"), OpKind::Wait(free), Vec::new());
        }
        let kind = RegionKind::Block { owner: Owner::Pool(pool.number()), backing, offset };
        state.space.insert(start, bytes as u64, span, self.ordinal(), kind);
        let block = self.whole_block(&state, call, start)?;
        let kind = OpKind::Alloc { completed: reuse.completed };
        state.push(stream, Label::Fixed("alloc_async"), kind, vec![block]);
        self.shared.queued(&mut state, stream.number());
        Ok(start)
    }

    unsafe fn free_async(&self, ptr: u64, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::FreeAsync;
        let mut state = self.enter_on(call, stream)?;
        self.refuse_captured(&mut state, call, stream, true)?;
        let pool = match state.space.starting_at(ptr).map(|region| (&region.kind, region.ordinal)) {
            Some((RegionKind::Block { owner: Owner::Pool(pool), .. }, ordinal))
                if ordinal == self.ordinal() =>
            {
                *pool
            }
            Some((_, owner)) => {
                return Err(call.invalid(
                    format!("{ptr:#x} of device {owner}"),
                    format!("the start of a block of alloc_async on device {}", self.ordinal()),
                ));
            }
            None => {
                let accepted = state.space.why_unknown(ptr);
                return Err(call.invalid(format!("{ptr:#x}"), accepted));
            }
        };
        Self::cost(&mut state, |model| model.async_alloc);
        let bytes = state.space.starting_at(ptr).map_or(0, |region| region.bytes as usize);
        let block = self.argument(&state, call, ptr, bytes, Access::Write)?;
        state.space.remove(ptr);
        let meta = state.meta(Label::Fixed("free_async"), Some(stream));
        let marker = Marker::new(stream, meta.sequence);
        if let Some(pool) = state.pools.get_mut(&pool) {
            pool.free(ptr, Arc::clone(&marker));
        }
        state.push_as(stream, meta, OpKind::Free(marker), vec![block]);
        self.shared.queued(&mut state, stream.number());
        Ok(())
    }
}
