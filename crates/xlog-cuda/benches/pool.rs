//! What a pool costs.
//!
//!     cargo bench -p xlog-cuda --bench pool -- [--gate] [--device SPEC] [FILTER]
//!
//! Every request goes through the trait object. On a GPU the bare driver runs beside it. Without one, memory is the simulated
//! device's behind the plain driver seam, so that what is measured is the pool and not the detector. `--gate` ends with status 1
//! when a bar is missed.

#![allow(missing_docs, clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)]
#[path = "peers/generators.rs"]
mod generators;
mod support;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use generators::{Minstd, Xorshift};
use support::{Arguments, Table};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, DeviceMemoryResource, GlobalDeviceBudget, PoolConfig, PoolResource,
    StreamId, StreamPool,
};

const BATCHES: usize = 101;
const PER_BATCH: usize = 1000;
const TAG: AllocTag = AllocTag("bench");
const MIB: usize = 1 << 20;

type Resource = Box<dyn DeviceMemoryResource + Send + Sync>;

fn main() -> ExitCode {
    let arguments = match Arguments::parse("pool", "--gate, --device SPEC") {
        Ok(arguments) => arguments,
        Err(refused) => return refused,
    };
    let device = support::device(arguments.device.as_deref());
    println!("on {} ({})", device.spec(), device.properties().name);
    let mut table = Table { arguments, widths: (44, 44), missed: 0 };
    for bytes in [256, 1 << 10, 64 << 10, MIB, 64 * MIB] {
        pair(&mut table, &device, bytes);
    }
    stack(&mut table, &device);
    holes(&mut table, &device);
    live(&mut table, &device);
    for max in [1, 4, 64, 256, 1024, 4096] {
        random(&mut table, &device, max);
    }
    threads(&mut table, &device);
    table.arguments.status("pool", table.missed)
}

struct Setup {
    streams: Arc<StreamPool>,
    pool: Arc<PoolResource>,
    resource: Resource,
}

fn setup(device: &Arc<CudaDevice>) -> Setup {
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool =
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), PoolConfig::default());
    let pool = Arc::new(pool.unwrap());
    Setup { streams, resource: Box::new(pool.clone()), pool }
}

/// The median and the best of batches, in nanoseconds for each repetition.
fn measure(mut batch: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = (0..BATCHES + 10)
        .map(|_| {
            let start = Instant::now();
            batch();
            start.elapsed().as_nanos() as f64 / PER_BATCH as f64
        })
        .skip(10)
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

fn pairs(resource: &Resource, stream: StreamId, bytes: usize) -> (f64, f64) {
    measure(|| {
        for _ in 0..PER_BATCH {
            let block = resource.allocate(black_box(bytes), stream, TAG).unwrap();
            resource.deallocate(black_box(block)).unwrap();
        }
    })
}

fn size(bytes: usize) -> String {
    if bytes >= MIB { format!("{} MiB", bytes / MIB) } else { format!("{} B", bytes) }
}

fn pair(table: &mut Table, device: &Arc<CudaDevice>, bytes: usize) {
    let name = format!("pair, {}", size(bytes));
    if !table.wants(&name) {
        return;
    }
    let setup = setup(device);
    let stream = setup.streams.lease().unwrap();
    let (median, best) = pairs(&setup.resource, stream.id(), bytes);
    let bar = if bytes > MIB { 80.0 } else { 40.0 };
    let mut figure = format!("{median:.1} ns (best {best:.1})");
    if device.sim().is_none()
        && device.spec().starts_with("cuda")
        && let Some(pools) = device.driver().async_pools()
    {
        let pool = device.memory_pool().unwrap();
        let (bare, _) = measure(|| {
            for _ in 0..PER_BATCH {
                let ptr = pools.alloc_async(bytes, pool, stream.handle()).unwrap();
                // SAFETY: just allocated on this stream, and nothing uses it.
                unsafe { pools.free_async(black_box(ptr), stream.handle()).unwrap() };
            }
        });
        figure += &format!(", driver {bare:.0} = 1/{:.1}", bare / median);
    }
    table.row(&name, &figure, Some((median, bar)));
}

/// The production stack: a budget over the pool.
fn stack(table: &mut Table, device: &Arc<CudaDevice>) {
    let name = "pair, 1 KiB, budget over pool";
    if !table.wants(name) {
        return;
    }
    let Setup { streams, resource, .. } = setup(device);
    let stream = streams.lease().unwrap();
    let resource: Resource = Box::new(GlobalDeviceBudget::new(resource, 1 << 36));
    let (median, best) = pairs(&resource, stream.id(), 1 << 10);
    table.row(name, &format!("{median:.1} ns (best {best:.1})"), Some((median, 90.0)));
}

fn holes(table: &mut Table, device: &Arc<CudaDevice>) {
    if !table.wants("holes") {
        return;
    }
    let mut first = None;
    for count in [4 << 10, 16 << 10, 64 << 10] {
        let setup = setup(device);
        let stream = setup.streams.lease().unwrap();
        let mut blocks: Vec<Option<DeviceBlock>> = (0..2 * count)
            .map(|_| Some(setup.resource.allocate(4096, stream.id(), TAG).unwrap()))
            .collect();
        for hole in blocks.iter_mut().step_by(2) {
            setup.resource.deallocate(hole.take().unwrap()).unwrap();
        }
        let (median, _) = pairs(&setup.resource, stream.id(), 1 << 10);
        let first = *first.get_or_insert(median);
        let ratio = median / first;
        let name = format!("holes, {count}");
        table.row(&name, &format!("{median:.1} ns, {ratio:.2} of the first"), Some((ratio, 1.3)));
        blocks.into_iter().flatten().for_each(|block| setup.resource.deallocate(block).unwrap());
    }
}

/// Random replacement among many live blocks.
fn live(table: &mut Table, device: &Arc<CudaDevice>) {
    if !table.wants("live") {
        return;
    }
    let mut first = None;
    for count in [1_000, 1_000_000] {
        let setup = setup(device);
        let stream = setup.streams.lease().unwrap();
        let mut random = Xorshift(7);
        let mut blocks: Vec<DeviceBlock> =
            (0..count).map(|_| setup.resource.allocate(1024, stream.id(), TAG).unwrap()).collect();
        let (pair, _) = pairs(&setup.resource, stream.id(), 1 << 10);
        let (replaced, _) = measure(|| {
            for _ in 0..PER_BATCH {
                let at = random.below(count);
                let new = setup.resource.allocate(1024, stream.id(), TAG).unwrap();
                let old = std::mem::replace(&mut blocks[at], new);
                setup.resource.deallocate(old).unwrap();
            }
        });
        let first = *first.get_or_insert((pair, replaced));
        let name = format!("live, {count} blocks");
        let ratio = pair / first.0;
        let figure = format!(
            "pair {pair:.1} ns = {ratio:.2}, any replaced {replaced:.1} ns = {:.2}",
            replaced / first.1
        );
        table.row(&name, &figure, Some((ratio, 1.5)));
        blocks.into_iter().for_each(|block| setup.resource.deallocate(block).unwrap());
    }
}

/// RMM's random allocations: what was done, and how long it took with `resource`, or with nothing.
fn random_run(
    resource: Option<(&Resource, StreamId)>,
    n: usize,
    max: usize,
) -> (usize, usize, f64) {
    const CAP: u64 = 16_000 << 20;
    let mut random = Minstd::new(1);
    let mut live: Vec<(u64, Option<DeviceBlock>)> = Vec::with_capacity(n);
    let (mut allocated, mut bytes, mut peak, mut operations) = (0, 0_u64, 0_u64, 0);
    let start = Instant::now();
    for _ in 0..2 * n {
        let size = random.draw(1, (max * MIB) as u64);
        let choice = if live.is_empty() { 0 } else { random.draw(0, 99) };
        let allocate = live.is_empty() || choice < 73 && allocated < n && bytes + size < CAP;
        operations += 1;
        if allocate {
            let block = resource
                .map(|(resource, stream)| resource.allocate(size as usize, stream, TAG).unwrap());
            live.push((size, block));
            allocated += 1;
            bytes += size;
            peak = peak.max(bytes);
        } else {
            let at = random.draw(0, n as u64 - 1) as usize % live.len();
            let (size, block) = live.swap_remove(at);
            bytes -= size;
            if let (Some((resource, _)), Some(block)) = (resource, block) {
                resource.deallocate(block).unwrap();
            }
        }
    }
    let time = start.elapsed().as_nanos() as f64;
    if let Some((resource, _)) = resource {
        let live = live.into_iter().filter_map(|(_, block)| block);
        live.for_each(|block| resource.deallocate(block).unwrap());
    }
    (operations, peak as usize, time)
}

fn random(table: &mut Table, device: &Arc<CudaDevice>, max: usize) {
    const N: usize = 100_000;
    let name = format!("random, {max} MiB");
    if !table.wants(&name) {
        return;
    }
    if device.properties().total_bytes < 64 << 30 {
        table.row(&name, "left out: needs a device of 64 GiB", None);
        return;
    }
    let setup = setup(device);
    let stream = setup.streams.lease().unwrap();
    random_run(Some((&setup.resource, stream.id())), N, max);
    let reserved = setup.pool.snapshot().reserved_bytes;
    let best = |run: &mut dyn FnMut() -> f64| (0..5).map(|_| run()).fold(f64::INFINITY, f64::min);
    let mut operations = 0;
    let mut peak = 0;
    let ours = best(&mut || {
        let (ops, most, time) = random_run(Some((&setup.resource, stream.id())), N, max);
        (operations, peak) = (ops, most);
        time
    });
    let nothing = best(&mut || random_run(None, N, max).2);
    let per = (ours - nothing) / operations as f64;
    let ratio = reserved as f64 / peak as f64;
    let figure = format!("{per:.1} ns per operation, reserved {ratio:.3} of the peak");
    let bar = (max <= 4).then_some((per, 90.0));
    table.row(&name, &figure, bar);
}

/// Millions of operations per second of `count` threads with a stream each: 64 slots, toggled.
fn toggling(setup: &Setup, count: usize) -> f64 {
    const STEPS: usize = 1_000_000;
    let barrier = Barrier::new(count + 1);
    let time = std::thread::scope(|scope| {
        for thread in 0..count {
            let (setup, barrier) = (setup, &barrier);
            let stream = setup.streams.lease().unwrap();
            scope.spawn(move || {
                let mut random = Xorshift(0x9e37_79b9 + thread as u64);
                let mut slots: Vec<Option<DeviceBlock>> = (0..64).map(|_| None).collect();
                let mut step = |steps: usize| {
                    for _ in 0..steps {
                        let at = random.below(64);
                        match slots[at].take() {
                            Some(block) => setup.resource.deallocate(block).unwrap(),
                            None => {
                                let bytes = 1 + random.below(MIB);
                                let block =
                                    setup.resource.allocate(bytes, stream.id(), TAG).unwrap();
                                slots[at] = Some(block);
                            }
                        }
                    }
                };
                step(STEPS / 10);
                barrier.wait();
                step(STEPS);
                barrier.wait();
                let left = slots.into_iter().flatten();
                left.for_each(|block| setup.resource.deallocate(block).unwrap());
            });
        }
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        start.elapsed().as_secs_f64()
    });
    (count * STEPS) as f64 / time / 1e6
}

fn threads(table: &mut Table, device: &Arc<CudaDevice>) {
    if !table.wants("threads") {
        return;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let counts = [1, 2, 4, 8, 16].into_iter().filter(|count| *count <= 2 * cores);
    let mut single = 0.0;
    let mut most = 1;
    for count in counts {
        let rate = toggling(&setup(device), count);
        if count == 1 {
            single = rate;
        }
        most = count;
        let name = format!("threads, {count}");
        let per = rate / single / count as f64;
        table.row(&name, &format!("{rate:.1} Mops/s, {per:.2} of the first per thread"), None);
    }
    // The best of several runs of each, in turn, under a budget that never refuses.
    let (mut bare, mut under) = (0.0_f64, 0.0_f64);
    for _ in 0..5 {
        bare = bare.max(toggling(&setup(device), most));
        let Setup { streams, pool, resource } = setup(device);
        let resource: Resource = Box::new(GlobalDeviceBudget::new(resource, 1 << 36));
        under = under.max(toggling(&Setup { streams, pool, resource }, most));
    }
    let name = format!("budget over pool, {most} threads");
    let figure = format!("{under:.1} of {bare:.1} Mops/s = {:.2}", under / bare);
    table.row(&name, &figure, Some((0.65, under / bare)));
}
