//! What order costs, against what it is made of.
//!
//!     cargo bench -p xlog-cuda --bench ordering -- [--gate] [--csv] [FILTER]
//!
//! A ratio compares two variants in one run: short batches of one and the other alternate, so that a change of clock or of load meets
//! both, each batch is compared with the one beside it, and the ratio is the median. A time that stands alone is the fastest twentieth of
//! its batches, as in the other benches, with the median beside it: what else runs on a shared host halves a processor for seconds.
//! `--gate` ends with status 1 when a bar is missed; `--csv` prints `peer,variant,workload,parameter,value,unit` instead of a table. What
//! needs a GPU takes the one that `XLOG_TEST_DEVICE` or `XLOG_DEVICE` names, else the first, and is left out where there is none; rings of
//! streams are then measured on the simulated device.

#![allow(missing_docs, clippy::unwrap_used)]

mod ring;
#[path = "../support/mod.rs"]
mod support;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use support::{Arguments, median};
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DeviceMemoryResource, PoolConfig, PoolResource,
    StreamLease, StreamPool,
};
use xlog_cuda::driver::{AsyncPools, DeviceKind};
use xlog_cuda::{CudaDevice, DeviceSpec};
use xlog_kernels::exercise::Exercise;

const BATCHES: usize = 401;
const PER_BATCH: usize = 256;
const BLOCKS: usize = 64;

const SAME_STREAM_BAR: f64 = 15.0;
const RATIO_BAR: f64 = 1.15;
const OVERLAP_BAR: f64 = 1.1;

fn main() -> ExitCode {
    let arguments = match Arguments::parse("ordering", "--gate, --csv") {
        Ok(arguments) => arguments,
        Err(refused) => return refused,
    };
    let mut table = Table { arguments, missed: 0 };
    same_stream(&mut table);
    ring::on_idle_driver(&mut table);
    match gpu() {
        Ok(device) => {
            table.say(&format!("on {} ({})", device.spec(), device.properties().name));
            alternating(&mut table, &device);
            for bytes in [1 << 10, 1 << 20] {
                allocation(&mut table, &device, bytes);
            }
            overlap(&mut table, &device);
            ring::on_gpu(&mut table, &device);
        }
        Err(reason) => {
            table.say(&format!("left out what needs a GPU: {reason}"));
            ring::on_simulated_device(&mut table);
        }
    }
    table.arguments.status("ordering", table.missed)
}

fn gpu() -> Result<Arc<CudaDevice>, String> {
    let named =
        ["XLOG_TEST_DEVICE", "XLOG_DEVICE"].iter().find_map(|name| std::env::var(name).ok());
    let spec = named.unwrap_or_else(|| "cuda:0".to_owned());
    let is_gpu = matches!(spec.parse(), Ok(DeviceSpec::Cuda(_)));
    match is_gpu.then(|| CudaDevice::open(&spec)) {
        Some(Ok(device)) if device.properties().kind == DeviceKind::Cuda => Ok(Arc::new(device)),
        Some(Err(error)) => Err(error.to_string()),
        _ => Err(format!("the device asked for is {spec}")),
    }
}

struct Table {
    arguments: Arguments,
    missed: usize,
}

impl Table {
    /// A remark beside the rows.
    fn say(&self, text: &str) {
        if !self.arguments.csv {
            println!("{text}");
        }
    }

    /// The row as the comparison with peers reads it.
    fn raw(&self, variant: &str, workload: &str, parameter: usize, value: f64, unit: &str) {
        if self.arguments.csv {
            println!("xlog,{variant},{workload},{parameter},{value:.4},{unit}");
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.arguments.wants(name)
    }

    fn row(&mut self, name: &str, figure: &str, goal: &str, is_met: bool) {
        let verdict = if is_met { "met" } else { "MISSED" };
        self.say(&format!("{name:<44} {figure:<48} goal {goal:<12} {verdict}"));
        self.missed += usize::from(!is_met);
    }

    /// Compares two variants, in nanoseconds.
    fn ratio(&mut self, name: &str, Compared { ours, bare, ratio }: Compared) {
        let figure = format!("{ours:.0} ns against {bare:.0} ns bare = {ratio:.3}");
        self.row(name, &figure, &format!("<= {RATIO_BAR}"), ratio <= RATIO_BAR);
    }
}

/// Nanoseconds of each of `count` repetitions.
fn time(count: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The medians of two variants, and of what one is to the other.
#[derive(Clone, Copy)]
struct Compared {
    ours: f64,
    bare: f64,
    ratio: f64,
}

/// Alternates batches of two variants, which return their time per repetition.
fn compare(mut ours: impl FnMut() -> f64, mut bare: impl FnMut() -> f64) -> Compared {
    let mut times = (Vec::with_capacity(BATCHES), Vec::with_capacity(BATCHES));
    for batch in 0..BATCHES + BATCHES / 10 {
        // Each goes first as often as the other.
        let pair = if batch % 2 == 0 {
            let first = ours();
            (first, bare())
        } else {
            let first = bare();
            (ours(), first)
        };
        // The first tenth warms up.
        if batch >= BATCHES / 10 {
            times.0.push(pair.0);
            times.1.push(pair.1);
        }
    }
    let ratios = times.0.iter().zip(&times.1).map(|(ours, bare)| ours / bare).collect();
    Compared { ours: median(times.0), bare: median(times.1), ratio: median(ratios) }
}

struct Setup {
    pool: Arc<StreamPool>,
    resource: AsyncCudaResource,
}

fn setup(device: &Arc<CudaDevice>) -> Setup {
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let resource = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
    Setup { pool, resource }
}

/// Uses on the block's own stream, which reach no driver.
fn same_stream(table: &mut Table) {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let Setup { pool, resource } = setup(&device);
    let lease = pool.lease().unwrap();
    let stream = lease.id();
    let blocks: Vec<_> =
        (0..BLOCKS).map(|_| resource.allocate(256, stream, AllocTag::UNTAGGED).unwrap()).collect();
    let ids: Vec<BlockId> = blocks.iter().map(BlockId::from_block).collect();
    for (name, access) in [("read", Access::Read), ("write", Access::Write)] {
        let name = format!("same stream, prepare+finish, {name}");
        if !table.wants(&name) {
            continue;
        }
        let calls = |device: &CudaDevice| device.sim().map(|sim| sim.faults().total_calls());
        let before = calls(&device);
        let batch = || {
            time(PER_BATCH * BLOCKS, || {
                for _ in 0..PER_BATCH {
                    for id in black_box(&ids) {
                        resource.prepare_block_use(*id, stream, access).unwrap();
                        resource.finish_block_use(*id, stream, access).unwrap();
                    }
                }
            })
        };
        let mut times: Vec<f64> = (0..BATCHES).map(|_| batch()).collect();
        times.sort_unstable_by(f64::total_cmp);
        let (cost, median) = (times[BATCHES / 20], times[BATCHES / 2]);
        let made = calls(&device).zip(before).map_or(0, |(after, before)| after - before);
        let figure = format!("{cost:.1} ns (median {median:.1}), {made} driver calls");
        let goal = format!("<= {SAME_STREAM_BAR} ns");
        let variant = if access == Access::Read { "read" } else { "write" };
        table.raw(variant, "order-same-stream", 256, cost, "ns");
        table.row(&name, &figure, &goal, cost <= SAME_STREAM_BAR && made == 0);
    }
    blocks.into_iter().for_each(|block| resource.deallocate(block).unwrap());
    resource.reap_pending().unwrap();
}

/// One block written on two streams in turn, against the record and the wait that this takes.
fn alternating(table: &mut Table, device: &Arc<CudaDevice>) {
    let name = "alternating streams, prepare+finish";
    if !table.wants(name) {
        return;
    }
    let Setup { pool, resource } = setup(device);
    let streams = [pool.lease().unwrap(), pool.lease().unwrap()];
    // Streams whose handle was handed out are asked whether they are captured, so the bare driver has its own.
    let bare = [pool.lease().unwrap(), pool.lease().unwrap()];
    let wait = |streams: &[StreamLease; 2]| {
        for stream in streams {
            stream.synchronize().unwrap();
        }
    };
    let block = resource.allocate(256, streams[0].id(), AllocTag::UNTAGGED).unwrap();
    let id = BlockId::from_block(&block);
    let driver = device.driver();
    let events: Vec<_> = (0..PER_BATCH).map(|_| driver.event_create().unwrap()).collect();
    let compared = compare(
        || {
            let cost = time(PER_BATCH, || {
                for turn in 0..PER_BATCH {
                    let stream = streams[turn % 2].id();
                    resource.prepare_block_use(id, stream, Access::Write).unwrap();
                    resource.finish_block_use(id, stream, Access::Write).unwrap();
                }
            });
            wait(&streams);
            cost
        },
        || {
            let cost = time(PER_BATCH, || {
                for (turn, event) in events.iter().enumerate() {
                    let (own, other) = (&bare[turn % 2], &bare[(turn + 1) % 2]);
                    driver.event_record(*event, other.handle()).unwrap();
                    driver.stream_wait_event(own.handle(), *event).unwrap();
                }
            });
            wait(&bare);
            cost
        },
    );
    let statistics = resource.statistics();
    table.raw("async", "order-alternating", 256, compared.ratio, "ratio");
    table.ratio(name, compared);
    let uses = ((BATCHES + BATCHES / 10) * PER_BATCH) as f64;
    table.say(&format!(
        "{:<44} {:.2} events recorded and {:.2} waits queued per use",
        "",
        statistics.events_recorded as f64 / uses,
        statistics.waits_inserted as f64 / uses
    ));
    for event in events {
        // SAFETY: made here, and not used any more.
        unsafe { driver.event_destroy(event) }.unwrap();
    }
    resource.deallocate(block).unwrap();
    resource.reap_pending().unwrap();
}

/// A block allocated and freed on one stream, against the two driver calls that this takes, in the same pool.
fn allocation(table: &mut Table, device: &Arc<CudaDevice>, bytes: usize) {
    let name = format!("async allocate+free, {} KiB", bytes >> 10);
    if !table.wants(&name) {
        return;
    }
    let Setup { pool, resource } = setup(device);
    let stream = pool.lease().unwrap();
    let bare = pool.lease().unwrap();
    let driver_pool = device.memory_pool().unwrap();
    let pools: &dyn AsyncPools = device.driver().async_pools().unwrap();
    let compared = compare(
        || {
            let cost = time(PER_BATCH, || {
                for _ in 0..PER_BATCH {
                    let block = resource.allocate(bytes, stream.id(), AllocTag::UNTAGGED).unwrap();
                    resource.deallocate(black_box(block)).unwrap();
                }
            });
            stream.synchronize().unwrap();
            cost
        },
        || {
            let cost = time(PER_BATCH, || {
                for _ in 0..PER_BATCH {
                    let ptr = pools.alloc_async(bytes, driver_pool, bare.handle()).unwrap();
                    // SAFETY: just allocated on this stream, and nothing uses it.
                    unsafe { pools.free_async(black_box(ptr), bare.handle()).unwrap() };
                }
            });
            bare.synchronize().unwrap();
            cost
        },
    );
    table.raw("async", "order-async", bytes, compared.ratio, "ratio");
    table.ratio(&name, compared);
    resource.reap_pending().unwrap();
}

/// A pipeline over two streams: a kernel of about a millisecond writes a block, another on the other stream reads it. The kernel of a
/// round runs while the one of the round before does, unless somebody makes it wait without need.
fn overlap(table: &mut Table, device: &Arc<CudaDevice>) {
    const ROUNDS: usize = 20;
    const TICKS: u64 = 1_700_000;
    let name = "overlap of two streams";
    if !table.wants(name) {
        return;
    }
    let kernels = Exercise::load(device).unwrap();
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    // Memory that belongs to no stream yet: what a stream must not wait for is another stream.
    let config = PoolConfig::default().with_initial(32 << 20);
    let resource =
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config).unwrap();
    let (a, b) = (streams.lease().unwrap(), streams.lease().unwrap());
    let kept = resource.allocate(8, a.id(), AllocTag::UNTAGGED).unwrap();
    device.synchronize().unwrap();
    let driver = device.driver();
    let events: Vec<_> = (0..ROUNDS).map(|_| driver.event_create().unwrap()).collect();
    let bare = || {
        let start = Instant::now();
        for event in &events {
            // SAFETY: both words are live until the device was waited for, and each has one writer.
            unsafe { kernels.spin(&a, TICKS, kept.ptr, 1).unwrap() };
            driver.event_record(*event, a.handle()).unwrap();
            driver.stream_wait_event(b.handle(), *event).unwrap();
            // SAFETY: as above.
            unsafe { kernels.spin(&b, TICKS, kept.ptr + 4, 1).unwrap() };
        }
        device.synchronize().unwrap();
        start.elapsed().as_secs_f64()
    };
    let ours = || {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            let block = resource.allocate(4, a.id(), AllocTag::UNTAGGED).unwrap();
            let id = BlockId::from_block(&block);
            for (stream, access, out) in
                [(&a, Access::Write, block.ptr), (&b, Access::Read, kept.ptr + 4)]
            {
                resource.prepare_block_use(id, stream.id(), access).unwrap();
                // SAFETY: the word is live, and the hooks order the kernel.
                unsafe { kernels.spin(stream, TICKS, out, 1).unwrap() };
                resource.finish_block_use(id, stream.id(), access).unwrap();
            }
            resource.deallocate(block).unwrap();
        }
        device.synchronize().unwrap();
        start.elapsed().as_secs_f64()
    };
    let mut times = (Vec::new(), Vec::new());
    for turn in 0..6 {
        let pair = (bare() * 1e9, ours() * 1e9);
        // The first fills caches and pools.
        if turn > 0 {
            times.0.push(pair.0);
            times.1.push(pair.1);
        }
    }
    let (bare, ours) = (median(times.0), median(times.1));
    table.raw("pool", "order-overlap", ROUNDS, ours / bare, "ratio");
    let figure =
        format!("{:.2} ms against {:.2} ms bare = {:.3}", ours / 1e6, bare / 1e6, ours / bare);
    table.row(name, &figure, &format!("<= {OVERLAP_BAR}"), ours / bare <= OVERLAP_BAR);
    for event in events {
        // SAFETY: made here, and not used any more.
        unsafe { driver.event_destroy(event) }.unwrap();
    }
    resource.deallocate(kept).unwrap();
}
