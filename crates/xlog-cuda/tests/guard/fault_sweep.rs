//! Every driver call fails in turn, under every guard mode and every resource; afterwards nothing is lost.
//!
//! By default a sample runs: of each kind of call its first and one other. `XLOG_FAULT_SWEEP=complete` makes every call of the program
//! fail, once with an error code, once with out-of-memory, once by the loss of the device. A lost device gives nothing back: there the errors
//! are typed, no block is free twice, and the budget charges nothing that is not outstanding.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::num::NonZeroU64;
use std::sync::Arc;

use xlog_conformance::BoxedResource;
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AllocRequest, AsyncCudaResource, BlockId, BlockState, DebugGuardResource, DeviceBlock,
    DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, GuardMode, PinnedHostResource,
    PoolConfig, PoolResource, PoolSegments, ResourceError, ResourceResult, StreamLease, StreamPool,
};
use xlog_cuda::sim::{Call, Fault};

use crate::faults::{Meter, device, taken};
use crate::support::{ROWS, quiet, twin};

const LIMIT: usize = 64 << 20;
const SIZES: [usize; 5] = [100, 70_000, 1000, 3, 300_000];

const FAULTS: [Fault; 3] = [Fault::Code(999), Fault::OutOfMemory, Fault::DeviceLost];

#[derive(Clone, Copy, Debug)]
enum Backend {
    Direct,
    Async,
    PoolMapped,
    PoolPlain,
    PoolOverAsync,
    PinnedHost,
}

#[derive(Clone, Copy, Debug)]
struct Guard {
    mode: GuardMode,
    is_synchronous: bool,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    backend: Backend,
    guard: Option<Guard>,
}

fn settings(backend: Backend) -> Vec<Setting> {
    let of = |mode, is_synchronous| Some(Guard { mode, is_synchronous });
    let sampled = GuardMode::Sampled(NonZeroU64::new(2).unwrap());
    let guards = [
        None,
        of(GuardMode::Canaries, false),
        of(GuardMode::Canaries, true),
        of(GuardMode::Pages, false),
        of(sampled, false),
    ];
    guards.into_iter().map(|guard| Setting { backend, guard }).collect()
}

fn build(
    setting: Setting,
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
) -> Option<BoxedResource> {
    let (owned, streams) = (device.clone(), streams.clone());
    let pool = |segments| {
        let config = PoolConfig::default().with_segments(segments);
        PoolResource::new(owned.clone(), 0, streams.clone(), config)
    };
    let memory: BoxedResource = match setting.backend {
        Backend::Direct => Box::new(DirectCudaResource::new(owned, 0)),
        Backend::Async => Box::new(AsyncCudaResource::new(owned, 0, streams)),
        Backend::PoolMapped => Box::new(pool(PoolSegments::Mapped).ok()?),
        Backend::PoolPlain => Box::new(pool(PoolSegments::Plain).ok()?),
        Backend::PoolOverAsync => {
            let inner = Box::new(AsyncCudaResource::new(owned, 0, streams.clone()));
            Box::new(PoolResource::over(inner, streams, PoolConfig::default()).ok()?)
        }
        Backend::PinnedHost => {
            Box::new(PinnedHostResource::new(owned, 0, streams).with_chunk(1 << 19))
        }
    };
    Some(match setting.guard {
        None => memory,
        Some(Guard { mode, is_synchronous }) => {
            let config = quiet().with_mode(mode).with_synchronous(is_synchronous);
            let config = config.with_quarantine(1 << 20, 2);
            Box::new(DebugGuardResource::new(memory, config))
        }
    })
}

/// A small program with handovers, reuse, frees under open uses, a trim and reaps. A failure is typed, and the program goes on.
struct Program<'a> {
    resource: &'a GlobalDeviceBudget,
    live: Vec<DeviceBlock>,
    errors: usize,
}

impl Program<'_> {
    fn note<T>(&mut self, result: ResourceResult<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(ResourceError::Driver(_) | ResourceError::OutOfMemory { .. }) => {
                self.errors += 1;
                None
            }
            Err(error) => panic!("a failure of the driver became {error:?}"),
        }
    }

    fn step(&mut self, n: usize, streams: &[StreamLease]) {
        let (own, user) = (&streams[n % 3], &streams[(n + 1 + n / 3 % 2) % 3]);
        let size = SIZES[n % SIZES.len()];
        let allocated = match n % 4 {
            3 => self
                .resource
                .allocate_request(AllocRequest::new(size, own.id(), ROWS).aligned(256), None),
            _ => self.resource.allocate(size, own.id(), ROWS),
        };
        let Some(block) = self.note(allocated) else { return };
        let id = BlockId::from_block(&block);
        let tracks = self.resource.supports_block_use_tracking();
        let mut closing = Vec::new();
        for (stream, access) in
            [(own, Access::Write), (user, Access::ReadWrite), (user, Access::Read)]
        {
            if !tracks {
                break;
            }
            let prepared = self.resource.prepare_block_use(id, stream.id(), access);
            if self.note(prepared).is_none() {
                continue;
            }
            if access.writes() {
                // SAFETY: the block is live, and the use is open.
                let _ = unsafe { stream.memset(block.ptr, n as u8, size) };
            }
            match n % 5 {
                // Closed when the block has been freed.
                0 => closing.push((stream.id(), access)),
                _ => {
                    let finished = self.resource.finish_block_use(id, stream.id(), access);
                    self.note(finished);
                }
            }
        }
        self.live.push(block);
        if n.is_multiple_of(5) || self.live.len() > 3 {
            let at = if n.is_multiple_of(5) { self.live.len() - 1 } else { 0 };
            let freed = self.resource.deallocate(self.live.remove(at));
            self.note(freed);
        }
        for (stream, access) in closing {
            let finished = self.resource.finish_block_use(id, stream, access);
            self.note(finished);
        }
        if n % 6 == 5 {
            let reaped = self.resource.reap_completed();
            self.note(reaped);
        }
        if n == 9 {
            let trimmed = self.resource.trim();
            self.note(trimmed);
        }
    }
}

/// Runs the program with one failing call. Returns how often each kind of call was made.
fn run(setting: Setting, planned: Option<(Call, u64, Fault)>) -> Vec<u64> {
    let what = format!("{setting:?} {planned:?}");
    let device = device();
    let sim = device.sim().unwrap().clone();
    let faults = sim.faults();
    assert_eq!(taken(&device), 0);
    let counts = || Call::ALL.iter().map(|call| faults.calls(*call)).collect::<Vec<_>>();
    let before = counts();
    if let Some((call, nth, fault)) = planned {
        faults.fail_nth(call, nth, fault);
    }
    let is_lost = matches!(planned, Some((_, _, Fault::DeviceLost)));
    let meter = Arc::new(Meter::default());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    if let Some(resource) = build(setting, &device, &streams) {
        let budget = GlobalDeviceBudget::new(resource, LIMIT);
        let leases: Vec<_> = (0..3).filter_map(|_| streams.lease().ok()).collect();
        let mut program = Program { resource: &budget, live: Vec::new(), errors: 0 };
        // A meter that was refused counts nothing. Page-locked memory is none of the device.
        let is_page_locked = matches!(setting.backend, Backend::PinnedHost);
        let is_metered =
            !is_page_locked && program.note(budget.meter_physical(meter.clone())).is_some();
        if leases.len() == 3 {
            (0..16).for_each(|n| program.step(n, &leases));
        }
        if !is_lost {
            faults.clear();
        }
        // A lost device fails every call, and loses no block: what was freed is not free again.
        let is_allowed = |done: &ResourceResult<()>| match done {
            Ok(()) => true,
            Err(error) => is_lost && matches!(error, ResourceError::Driver(_)),
        };
        for block in std::mem::take(&mut program.live) {
            let (id, again) = (BlockId::from_block(&block), twin(&block));
            let freed = budget.deallocate(block);
            assert!(is_allowed(&freed), "{what}: {freed:?}");
            assert_ne!(budget.block_state(id), BlockState::Live, "{what}: {freed:?}");
            let refused = budget.deallocate(again);
            assert!(
                matches!(refused, Err(ResourceError::UseAfterFree { .. })),
                "{what}: {refused:?}"
            );
        }
        for _ in 0..2 {
            // What leaves a quarantine is freed by the reap that follows.
            let trimmed = budget.trim();
            let done = trimmed.and(budget.reap_pending());
            assert!(is_allowed(&done), "{what}: {done:?}");
        }
        if is_lost {
            let (charged, held) = (budget.reserved_bytes(), budget.bytes_outstanding());
            // A block between guard pages is charged until its stand-in is freed, even if its pages are gone.
            let has_pages = setting.guard.is_some_and(|guard| guard.mode == GuardMode::Pages);
            assert!(
                has_pages || charged <= held,
                "{what}: {charged} bytes charged, {held} outstanding"
            );
        } else {
            assert_eq!(budget.bytes_outstanding(), 0, "{what}: bytes outstanding");
            assert_eq!(budget.reserved_bytes(), 0, "{what}: the budget is not full again");
            let trimmed = budget.trim();
            assert!(trimmed.is_ok(), "{what}: {trimmed:?}");
            if is_page_locked {
                // Nothing is outstanding, so what is held is free.
                let held = budget.free_space().map(|free| free.bytes);
                assert_eq!(held, Some(0), "{what}: page-locked memory is not returned");
            }
            let metered = if is_metered { meter.bytes() } else { taken(&device) };
            assert_eq!(metered, taken(&device), "{what}: metered is not what is taken");
        }
    }
    drop(streams);
    let made = counts().into_iter().zip(before).map(|(now, then)| now - then).collect();
    if !is_lost {
        assert_eq!(taken(&device), 0, "{what}: the device is not as at the start");
        assert_eq!(meter.bytes(), 0, "{what}: the meter counts memory that is returned");
        assert!(device.races().is_empty(), "{what}: {:#?}", device.races());
    }
    made
}

fn sweep(backend: Backend) {
    let complete = std::env::var("XLOG_FAULT_SWEEP").is_ok_and(|value| value == "complete");
    let mut runs = 0_u64;
    for setting in settings(backend) {
        let made = run(setting, None);
        for (call, made) in Call::ALL.iter().zip(made) {
            let picked: Vec<u64> = match complete {
                true => (1..=made).collect(),
                false => vec![1, 2 + (runs * 7919) % made.max(2)],
            };
            for nth in picked.into_iter().filter(|nth| *nth <= made) {
                // In the sample a later call fails in one of these ways, in another one each time.
                let way = runs as usize % FAULTS.len();
                let ways = if complete || nth == 1 { 0..=FAULTS.len() - 1 } else { way..=way };
                for fault in &FAULTS[ways] {
                    run(setting, Some((*call, nth, *fault)));
                    runs += 1;
                }
            }
        }
    }
    println!("{runs} runs with one failing driver call each");
    assert!(runs > 100, "{runs} runs");
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_the_direct_resource() {
    sweep(Backend::Direct);
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_the_async_resource() {
    sweep(Backend::Async);
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_a_mapped_pool() {
    sweep(Backend::PoolMapped);
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_a_plain_pool() {
    sweep(Backend::PoolPlain);
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_a_pool_over_the_async_resource() {
    sweep(Backend::PoolOverAsync);
}

#[test]
fn nothing_is_lost_when_a_driver_call_fails_under_page_locked_memory() {
    sweep(Backend::PinnedHost);
}
