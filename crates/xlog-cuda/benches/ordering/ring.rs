//! One block that is written on each stream of a ring in turn: what a handover costs with many streams, against two.
//!
//! On an idle driver, whose calls cost the same with any number of streams, the rows are the cost of the runtime; the goals are for
//! these. The rows of a device contain its driver's own cost: the simulated one keeps a full vector clock for each stream and each
//! event. Host memory is what the process has allocated meanwhile, and by how much its resident set has grown, which contains the
//! memory of the driver.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, PoolConfig, PoolResource, StreamLease, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder};
use xlog_testing::IdleDriver;

use super::{Table, median, time};

/// Streams of a ring, and how much more a handover may cost than between the first of them.
const RINGS: [(usize, f64); 4] = [(2, 1.0), (64, 4.0), (256, 8.0), (1000, 20.0)];
/// Handovers of a ring, and how many are timed together at least.
const HANDOVERS: usize = 1 << 16;
const BATCH: usize = 512;
const MEMORY_BAR: f64 = 16.0;

/// Allocated bytes of the process.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of host memory.
#[derive(Clone, Copy)]
struct HostMemory {
    allocated: usize,
    resident: usize,
}

impl HostMemory {
    fn now() -> Self {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Self { allocated: ALLOCATED.load(Ordering::Relaxed), resident: 4096_usize * pages }
    }

    /// MiB by which the process has grown since then.
    fn grown(self) -> (f64, f64) {
        let now = Self::now();
        let mib = |now: usize, then: usize| now.saturating_sub(then) as f64 / f64::from(1 << 20);
        (mib(now.allocated, self.allocated), mib(now.resident, self.resident))
    }
}

/// How a use is opened and closed.
#[derive(Clone, Copy)]
enum By {
    Hooks,
    Recorder,
}

/// What the handovers of one ring cost.
struct Cost {
    /// Nanoseconds of a handover.
    ns: f64,
    waits: f64,
    events: f64,
    allocated: f64,
    resident: f64,
}

pub(crate) fn on_idle_driver(table: &mut Table) {
    let open = || Arc::new(CudaDevice::from_driver(Arc::new(IdleDriver::new())));
    rings(table, open, "idle driver", true);
}

pub(crate) fn on_gpu(table: &mut Table, device: &Arc<CudaDevice>) {
    rings(table, || device.clone(), device.spec(), false);
}

/// Each ring on a device of its own: a simulated one remembers streams that are gone.
pub(crate) fn on_simulated_device(table: &mut Table) {
    rings(table, || Arc::new(CudaDevice::open("sim").unwrap()), "sim", false);
}

fn rings(table: &mut Table, open: impl Fn() -> Arc<CudaDevice>, of: &str, has_goals: bool) {
    for (by, variant) in [(By::Hooks, "hooks"), (By::Recorder, "recorder")] {
        let name = format!("ring of streams, {variant}, {of}");
        if !table.wants(&name) {
            continue;
        }
        let mut two = None;
        for (streams, bar) in RINGS {
            let Cost { ns, waits, events, allocated, resident } = ring(&open(), streams, by);
            let ratio = ns / *two.get_or_insert(ns);
            let figure = format!(
                "{ns:.0} ns = {ratio:.1} x, {waits:.2} waits and {events:.2} events each, {allocated:.1} MiB (resident {resident:.1})"
            );
            let is_met = !has_goals || ratio <= bar && allocated <= MEMORY_BAR;
            let goal = match has_goals {
                true => format!("<= {bar} x, {MEMORY_BAR} MiB"),
                false => "none".to_owned(),
            };
            if has_goals {
                table.raw(variant, "order-ring", streams, ratio, "ratio");
                table.raw(variant, "order-ring-memory", streams, allocated, "MiB");
            }
            table.row(&format!("{name}, {streams}"), &figure, &goal, is_met);
        }
    }
}

/// Hands one block around a ring of this many streams.
fn ring(device: &Arc<CudaDevice>, streams: usize, by: By) -> Cost {
    let pool = Arc::new(StreamPool::new(device.clone(), streams));
    let resource =
        PoolResource::new(device.clone(), device.ordinal(), pool.clone(), PoolConfig::default());
    let runtime = XlogDeviceRuntime::with_resource(
        device.clone(),
        device.ordinal(),
        pool.clone(),
        Box::new(resource.unwrap()),
    );
    let runtime = Arc::new(runtime);
    let leases: Vec<StreamLease> = (0..streams).map(|_| pool.lease().unwrap()).collect();
    let manager = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(leases[0].id());
    let buffer = manager.alloc::<u32>(64).unwrap();
    let block = runtime.allocate(256, leases[0].id(), AllocTag::UNTAGGED).unwrap();
    let id = BlockId::from_block(&block);
    let rounds = BATCH.div_ceil(streams);
    let batch = || {
        time(rounds * streams, || {
            for lease in (0..rounds).flat_map(|_| &leases) {
                match by {
                    By::Hooks => {
                        runtime.prepare_block_use(id, lease.id(), Access::Write).unwrap();
                        runtime.finish_block_use(id, lease.id(), Access::Write).unwrap();
                    }
                    By::Recorder => {
                        let mut launch = LaunchRecorder::new_strict(lease.id());
                        launch.write(&buffer).preflight(&runtime).unwrap();
                        launch.commit(&runtime).unwrap();
                    }
                }
            }
        })
    };
    let before = HostMemory::now();
    let counts = runtime.statistics();
    let batches = HANDOVERS / (rounds * streams);
    let times: Vec<f64> = (0..batches).map(|_| batch()).collect();
    let after = runtime.statistics();
    let (allocated, resident) = before.grown();
    let handovers = (batches * rounds * streams) as f64;
    let each = |after: u64, before: u64| (after - before) as f64 / handovers;
    let cost = Cost {
        ns: median(times),
        waits: each(after.waits_inserted, counts.waits_inserted),
        events: each(after.events_recorded, counts.events_recorded),
        allocated,
        resident,
    };
    device.synchronize().unwrap();
    runtime.deallocate(block).unwrap();
    drop(buffer);
    runtime.reap_pending().unwrap();
    cost
}
