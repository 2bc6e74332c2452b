//! Mapped segments: physical handles, mapped in sequence into a large reservation of addresses.
//!
//! A small request creates small handles, so that a live block pins little memory. A large one creates few handles, since
//! the cost of a handle does not depend on its size. A handle is unmapped and returned whole. Idle handles can be remapped
//! next to each other, so [`Segments::defragment`] fails only if the idle handles and the free memory of the device
//! together are too little.
//!
//! One lock is held while mappings change. A failed undo is kept and retried at the next call.

mod addresses;
mod plan;
mod state;

use std::sync::Arc;

use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, VirtualMemory};

use super::super::super::resource::{ResourceError, ResourceResult, StreamId};
use super::account::Account;
use super::{
    FreeMemory, LastWork, Remap, Segments, Span, SpanRequest, UNIT, min_size, out_of_memory,
    to_usize,
};
use crate::CudaDevice;
use addresses::Addresses;
use plan::{Need, Plan};
use state::{PhysicalHandle, State};

/// Requests up to this size share small handles.
const PRIVATE_BYTES: u64 = 32 << 20;
/// The size of the largest handle.
const LARGEST_HANDLE: u64 = 128 << 20;
/// The approximate number of handles of a pool: the handles of a large pool are larger.
const POOL_HANDLES: u64 = 512;
/// The approximate maximum of handles for a request of up to 1 GiB: creating them takes about 2 ms.
const MAX_HANDLES: u64 = 40;
/// The approximate minimum of fresh handles beside moved ones, which keeps them small.
const MIN_FRESH_HANDLES: u64 = 12;
/// The approximate maximum for a larger request.
const MAX_LARGE_HANDLES: u64 = 128;
/// The smallest handle of a large request is about 1/TAIL_PART of it.
const TAIL_PART: u64 = 64;

/// Sizes of physical handles, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct HandleConfig {
    /// The size of a handle for small requests. A handle is returned whole.
    pub(super) handle_bytes: u64,
    /// The size of the largest handle for a large request. A partly occupied handle cannot be remapped.
    pub(super) largest_handle: u64,
    /// A larger request gets handles of its own; up to this size, requests share small ones, so that a live block pins little memory.
    pub(super) private_bytes: u64,
}

/// Virtual memory of one device, for one pool.
pub(crate) struct MappedSegments {
    device: Arc<CudaDevice>,
    config: HandleConfig,
    granularity: u64,
    account: Account,
    state: Mutex<State>,
}

impl MappedSegments {
    /// Creates segments of `device`, which must offer virtual memory, at most `maximum` bytes. Takes no memory and reserves no addresses
    /// yet.
    pub(crate) fn new(device: Arc<CudaDevice>, maximum: u64) -> ResourceResult<Self> {
        let granularity = virtual_memory(&device)?.granularity() as u64;
        if !LARGEST_HANDLE.is_multiple_of(granularity) {
            let accepted = format!("a divisor of {LARGEST_HANDLE}");
            return Err(ResourceError::invalid(format!("granularity = {granularity}"), accepted));
        }
        let addresses = Addresses::new(granularity, device.properties().total_bytes);
        Ok(Self {
            account: Account::new(maximum, granularity),
            state: Mutex::new(State::new(addresses)),
            device,
            config: HandleConfig {
                handle_bytes: granularity,
                largest_handle: LARGEST_HANDLE,
                private_bytes: PRIVATE_BYTES,
            },
            granularity,
        })
    }

    #[cfg(test)]
    pub(super) fn with_handles(mut self, config: HandleConfig) -> Self {
        self.config = config;
        self
    }

    /// Bytes that are held of the device but unknown to the pool, after a failure.
    #[cfg(test)]
    pub(super) fn hidden_bytes(&self) -> u64 {
        self.state.lock().hidden_bytes()
    }

    fn memory(&self) -> ResourceResult<&dyn VirtualMemory> {
        virtual_memory(&self.device)
    }

    /// Returns the sizes of the handles for `minimum` bytes of a large request.
    fn exactly(&self, minimum: u64) -> Vec<u64> {
        self.handle_sizes(minimum, MAX_HANDLES).split(minimum)
    }

    /// Returns the sizes for `bytes` of a large request in about `count` handles or fewer.
    fn handle_sizes(&self, bytes: u64, count: u64) -> HandleSizes {
        let HandleConfig { private_bytes, largest_handle, .. } = self.config;
        if private_bytes == 0 {
            return HandleSizes { largest: largest_handle, smallest: largest_handle };
        }
        let few = (bytes / count).min(private_bytes).max(bytes / MAX_LARGE_HANDLES);
        let times = larger_pool(bytes);
        let largest = few.next_power_of_two().max(self.usual_handle(times));
        let smallest = (bytes / TAIL_PART).next_power_of_two();
        HandleSizes {
            largest: largest.min(largest_handle),
            smallest: smallest.max(self.granularity),
        }
    }

    /// Returns the size of a handle in a pool `times` as large as this one.
    fn usual_handle(&self, times: u64) -> u64 {
        let unit = self.config.handle_bytes;
        let units = (self.reserved() / POOL_HANDLES * times / unit).next_power_of_two();
        unit.saturating_mul(units).min(self.config.largest_handle)
    }

    /// Returns the sizes of the fresh handles for each fill of a plan for `requested` bytes.
    fn fresh_sizes(&self, plan: &Plan, requested: u64) -> Vec<Vec<u64>> {
        let count = MAX_HANDLES.saturating_sub(plan.moved().count() as u64);
        let sizes = self.handle_sizes(plan.fresh(), count.max(MIN_FRESH_HANDLES));
        let is_shared = requested <= self.config.private_bytes;
        let fills = plan.fills.iter().map(|fill| match fill.fresh {
            0 => Vec::new(),
            fresh if is_shared => self.small(fresh),
            fresh => sizes.split(fresh),
        });
        fills.collect()
    }

    /// Returns the sizes of the handles for one step of growth that serves `minimum` bytes.
    fn growth(&self, minimum: u64) -> Vec<u64> {
        let HandleConfig { handle_bytes, private_bytes, .. } = self.config;
        match minimum {
            small if small <= handle_bytes => vec![handle_bytes],
            shared if shared <= private_bytes => self.small(shared),
            private => self.exactly(private),
        }
    }

    /// Returns the sizes of small handles that together serve `minimum` bytes.
    fn small(&self, minimum: u64) -> Vec<u64> {
        let bytes = self.usual_handle(1).min(minimum);
        let mut handles = vec![bytes; to_usize(minimum / bytes)];
        handles.extend(Some(minimum % bytes).filter(|&rest| rest > 0));
        handles
    }

    /// Creates handles of these sizes for a request of `requested` bytes: all or none.
    fn create(
        &self,
        memory: &dyn VirtualMemory,
        sizes: &[u64],
        requested: u64,
    ) -> ResourceResult<Vec<PhysicalHandle>> {
        let mut missing: u64 = sizes.iter().sum();
        if missing == 0 {
            return Ok(Vec::new());
        }
        self.account.charge(missing).map_err(|error| name_request(error, requested))?;
        let mut handles = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            match memory.create(to_usize(bytes)) {
                Ok(memory) => handles.push(PhysicalHandle { bytes, memory }),
                Err(error) => {
                    self.account.release(missing);
                    self.destroy(memory, handles);
                    return Err(name_request(error.into(), requested));
                }
            }
            missing -= bytes;
        }
        Ok(handles)
    }

    /// Destroys unmapped handles. One that the driver refuses is kept for the next sweep.
    fn destroy(&self, memory: &dyn VirtualMemory, handles: Vec<PhysicalHandle>) {
        if handles.is_empty() {
            return;
        }
        let (freed, _) = self.state.lock().destroy(memory, handles);
        self.account.release(freed);
    }

    /// Returns the memory that an earlier failure left behind. Repeated failures are kept for the next sweep.
    fn sweep(&self, memory: &dyn VirtualMemory) -> ResourceResult<()> {
        let (freed, outcome) = self.state.lock().sweep(memory);
        self.account.release(freed);
        outcome
    }

    fn grow_by(
        &self,
        memory: &dyn VirtualMemory,
        sizes: &[u64],
        requested: u64,
    ) -> ResourceResult<Span> {
        let handles = self.create(memory, sizes, requested)?;
        let placed = self.state.lock().map_handles(memory, handles);
        placed.map_err(|(handles, error)| {
            self.destroy(memory, handles);
            name_request(error.into(), requested)
        })
    }

    /// Plans a request over free memory, and allocates the addresses that get handles.
    fn plan_and_allocate(
        &self,
        memory: &dyn VirtualMemory,
        free: FreeMemory<'_>,
        need: Need,
    ) -> ResourceResult<Plan> {
        let mut state = self.state.lock();
        let plan = match state.plan(free, need) {
            Some(plan) => plan,
            None => {
                let bytes = need.bytes.next_multiple_of(self.granularity);
                state.addresses.reserve(memory, bytes.saturating_add(need.align))?;
                let none = DriverError::OutOfMemory { call: "reserve", requested: bytes };
                state.plan(free, need).ok_or(none)?
            }
        };
        for fill in &plan.fills {
            // The addresses were unmapped when the plan was made, under this lock.
            state.addresses.allocate_at(fill.ptr, fill.bytes());
        }
        Ok(plan)
    }

    /// Executes a plan whose addresses are allocated, with these fresh handles for its fills.
    ///
    /// Moved handles are mapped at their new addresses before the old ones are unmapped, so a failure leaves them where they were.
    fn carry_out(
        &self,
        memory: &dyn VirtualMemory,
        plan: &Plan,
        free: FreeMemory<'_>,
        fresh: Vec<Vec<PhysicalHandle>>,
    ) -> ResourceResult<()> {
        let mut state = self.state.lock();
        let found: Result<Vec<_>, _> = plan.moved().map(|span| state.handle_at(span)).collect();
        let (moved, mut refused) = match found {
            Ok(moved) => (moved, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let mut handles = moved.iter().copied();
        let (mut placed, mut unplaced) = (Vec::new(), Vec::new());
        for (fill, fresh) in plan.fills.iter().zip(fresh) {
            let handles: Vec<_> = handles.by_ref().take(fill.moved.len()).chain(fresh).collect();
            if refused.is_some() {
                state.addresses.free(fill.ptr, fill.bytes());
                unplaced.extend(handles);
                continue;
            }
            match state.map_at(memory, fill.ptr, handles) {
                Ok(span) => placed.push(span),
                Err((handles, error)) => {
                    unplaced.extend(handles);
                    refused = Some(error);
                }
            }
        }
        let Some(error) = refused else {
            for old in plan.moved() {
                let is_pending = free.pending.iter().any(|span| span.overlaps(old));
                state.leave(old, is_pending.then_some(free.last_work));
            }
            state.unmap_stale(memory, usize::MAX, &|_| false);
            return Ok(());
        };
        for span in placed {
            unplaced.extend(state.unmap_at(memory, span));
        }
        state.keep(&moved);
        unplaced.retain(|handle| !moved.contains(handle));
        let (freed, _) = state.destroy(memory, unplaced);
        drop(state);
        self.account.release(freed);
        Err(error.into())
    }

    /// Rounds the request to the units of a plan; an error if a device of this size cannot serve it.
    fn need(&self, request: SpanRequest) -> ResourceResult<Need> {
        let SpanRequest { bytes, align, max_moved } = request;
        let granularity = self.granularity;
        min_size(bytes, granularity, self.device.properties().total_bytes)?;
        Ok(Need { bytes: bytes.next_multiple_of(UNIT), align, granularity, max_moved })
    }
}

impl Segments for MappedSegments {
    fn grow(&self, bytes: u64, _stream: StreamId) -> ResourceResult<Span> {
        let minimum = min_size(bytes, self.granularity, self.device.properties().total_bytes)?;
        let memory = self.memory()?;
        // Best effort: this request may need the bytes.
        let _ = self.sweep(memory);
        let (generous, exact) = (self.growth(minimum), self.exactly(minimum));
        match self.grow_by(memory, &generous, bytes) {
            Err(ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })
                if generous != exact =>
            {
                self.grow_by(memory, &exact, bytes)
            }
            grown => grown,
        }
    }

    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>) {
        let memory = match self.memory() {
            Ok(memory) => memory,
            Err(error) => return (Vec::new(), Err(error)),
        };
        let mut state = self.state.lock();
        let (mut freed, mut outcome) = state.sweep(memory);
        let mut left = bytes;
        let mut gone = Vec::new();
        for span in state.returnable(idle).into_iter().rev() {
            if span.bytes > left {
                continue;
            }
            match state.unmap_handle(memory, span) {
                Ok(handle) => {
                    left -= span.bytes;
                    state.addresses.free(span.ptr, span.bytes);
                    gone.push(span);
                    let (destroyed, this) = state.destroy(memory, [handle]);
                    freed += destroyed;
                    outcome = outcome.and(this);
                }
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        drop(state);
        self.account.release(freed);
        gone.reverse();
        (gone, outcome)
    }

    fn releasable(&self, idle: &[Span]) -> u64 {
        self.state.lock().returnable(idle).iter().map(|span| span.bytes).sum()
    }

    fn plan(&self, free: FreeMemory<'_>, request: SpanRequest) -> Option<Remap> {
        let plan = self.state.lock().plan(free, self.need(request).ok()?)?;
        let fresh = self.fresh_sizes(&plan, request.bytes);
        Some(Remap {
            handles: plan.moved().count() + fresh.iter().map(Vec::len).sum::<usize>(),
            fresh: plan.fresh(),
            stays: plan.stays.iter().map(|span| span.bytes).sum(),
            uses: plan.uses(),
        })
    }

    fn defragment(
        &self,
        free: FreeMemory<'_>,
        request: SpanRequest,
        _stream: StreamId,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        let bytes = request.bytes;
        let planned = self.need(request).and_then(|need| {
            let memory = self.memory()?;
            let _ = self.sweep(memory);
            Ok((memory, self.plan_and_allocate(memory, free, need)?))
        });
        let (memory, plan) = match planned {
            Ok(planned) => planned,
            Err(error) => return (None, Vec::new(), Err(name_request(error, bytes))),
        };
        // Creating handles is most likely to fail, so it precedes all moves.
        let mut fresh = Vec::with_capacity(plan.fills.len());
        for sizes in self.fresh_sizes(&plan, bytes) {
            match self.create(memory, &sizes, bytes) {
                Ok(handles) => fresh.push(handles),
                Err(error) => {
                    let mut state = self.state.lock();
                    for fill in &plan.fills {
                        state.addresses.free(fill.ptr, fill.bytes());
                    }
                    drop(state);
                    self.destroy(memory, fresh.into_iter().flatten().collect());
                    return (None, Vec::new(), Err(error));
                }
            }
        }
        match self.carry_out(memory, &plan, free, fresh) {
            Ok(()) => (Some(plan.span), plan.uses(), Ok(())),
            Err(error) => (None, Vec::new(), Err(name_request(error, bytes))),
        }
    }

    fn unmap_stale(&self, most: usize, is_complete: &dyn Fn(LastWork) -> bool) {
        if let Ok(memory) = self.memory() {
            self.state.lock().unmap_stale(memory, most, is_complete);
        }
    }

    fn can_move(&self) -> bool {
        true
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn segment_count(&self) -> usize {
        self.state.lock().handles.len()
    }

    fn kind(&self) -> &'static str {
        "mapped"
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }
}

impl Drop for MappedSegments {
    fn drop(&mut self) {
        let Ok(memory) = self.memory() else { return };
        // Handles that the pool has not released stay mapped, with their reservation: work may still run on them.
        let _ = self.sweep(memory);
        self.state.lock().addresses.release(memory);
    }
}

/// The largest and the smallest handle of a large request.
#[derive(Clone, Copy, Debug)]
struct HandleSizes {
    largest: u64,
    smallest: u64,
}

impl HandleSizes {
    /// Splits `bytes` into equal handles, and smaller ones for the rest. Such sizes serve later requests exactly.
    fn split(self, bytes: u64) -> Vec<u64> {
        let mut handles = vec![self.largest; to_usize(bytes / self.largest)];
        let (mut rest, mut size) = (bytes % self.largest, self.largest / 2);
        while size > self.smallest && rest > 0 {
            if rest >= size {
                handles.push(size);
                rest -= size;
            }
            size /= 2;
        }
        handles.extend(Some(rest).filter(|&rest| rest > 0));
        handles
    }
}

/// Fresh memory of this size gets the handles of a pool this many times as large: in the middle, moves cost more than fragments.
fn larger_pool(bytes: u64) -> u64 {
    match bytes >> 20 {
        64..256 => 5,
        256..1024 => 2,
        _ => 1,
    }
}

fn virtual_memory(device: &CudaDevice) -> ResourceResult<&dyn VirtualMemory> {
    let unsupported = DriverError::Unsupported { call: "virtual memory" };
    device.driver().virtual_memory().ok_or_else(|| unsupported.into())
}

/// Names the size of the request in an error about one of its handles.
fn name_request(error: ResourceError, requested: u64) -> ResourceError {
    match error {
        ResourceError::OutOfMemory { detail, .. } => out_of_memory(requested, detail),
        other => other,
    }
}
