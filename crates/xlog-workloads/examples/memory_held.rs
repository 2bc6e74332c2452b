//! Device memory that a resource reserves, relative to the requested bytes.
//!
//!     cargo run --release -p xlog-workloads --example memory_held [-- [--device SPEC] [--async] [--behind N] [FILTER | LOG.csv[.gz] ...]]
//!
//! The resource is the pool, or with `--async` the driver's pool. With `--behind N` work completes N to 2 N operations after it
//! was queued, as if the host ran ahead of the device. A log on a GPU is replayed by both; the figures of PyTorch's allocator
//! are added if the log's README.md has them.
//! Each row prints peak reserved over peak requested bytes, the time per operation and, on the simulated device, the driver
//! calls: handles created and unmapped. A log has RMM's six columns; one thread replays it in recorded order. Without a device,
//! a simulated one without race detection is used, so that the time is the pool's.

#![allow(clippy::unwrap_used, clippy::panic, clippy::unreachable)]

#[path = "../tests/support/gzip.rs"]
mod gzip;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use xlog_base::SplitMix;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DeviceBlock, DeviceMemoryResource, PoolConfig,
    PoolResource, ResourceError, StreamId, StreamLease, StreamPool,
};
use xlog_cuda::sim::{Call, SimDevice};
use xlog_cuda::{CudaDevice, Gate};
use xlog_trace::Format;
use xlog_workloads::logs::{LogKind, LogSettings, write_log};
use xlog_workloads::{RandomAllocations, Target};

const TAG: AllocTag = AllocTag("held");
const MIB: u64 = 1 << 20;

/// The device and resource of the rows.
#[derive(Clone, Copy)]
struct Setup<'a> {
    /// The device; `None` for a simulated one without race detection.
    spec: Option<&'a str>,
    /// Whether the resource is the driver's pool.
    is_async: bool,
    /// The number of operations that streams lag behind; 0 if all work completes at once.
    behind: u64,
}

/// A resource with its streams, and the peaks so far.
struct Held {
    /// Holds of the streams. They are dropped before the resource, which waits for the streams.
    gates: Vec<Gate>,
    behind: u64,
    sim: Option<Arc<SimDevice>>,
    streams: Vec<StreamLease>,
    resource: Box<dyn DeviceMemoryResource>,
    requested: u64,
    peak_requested: u64,
    peak_reserved: u64,
    operations: u64,
    begin: Instant,
}

impl Held {
    fn new(Setup { spec, is_async, behind }: Setup<'_>, streams: usize) -> Self {
        let sim = spec.is_none().then(|| SimDevice::open(Default::default()).unwrap());
        let device = match (&sim, spec) {
            (None, Some(spec)) => Arc::new(CudaDevice::open(spec).unwrap()),
            (Some(sim), _) => Arc::new(CudaDevice::from_driver(sim.clone())),
            (None, None) => unreachable!("one of the two"),
        };
        let pool_of_streams = Arc::new(StreamPool::new(device.clone(), streams));
        let leases: Vec<_> = (0..streams).map(|_| pool_of_streams.lease().unwrap()).collect();
        let ordinal = device.ordinal();
        let resource: Box<dyn DeviceMemoryResource> = if is_async {
            Box::new(AsyncCudaResource::new(device, ordinal, pool_of_streams))
        } else {
            let config = PoolConfig::default();
            Box::new(PoolResource::new(device, ordinal, pool_of_streams, config).unwrap())
        };
        Self {
            gates: Vec::new(),
            behind,
            sim,
            streams: leases,
            resource,
            requested: 0,
            peak_requested: 0,
            peak_reserved: 0,
            operations: 0,
            begin: Instant::now(),
        }
    }

    fn id(&self, stream: usize) -> StreamId {
        self.streams[stream % self.streams.len()].id()
    }

    /// Counts an operation. Work queued before the last hold completes when the next one is queued.
    fn count(&mut self) {
        self.operations += 1;
        if self.behind > 0 && self.operations.is_multiple_of(self.behind) {
            let next = self.streams.iter().map(|stream| stream.hold().unwrap()).collect();
            self.gates = next;
        }
    }

    fn allocate(&mut self, bytes: u64, stream: usize) -> Option<DeviceBlock> {
        self.count();
        let block = match self.resource.allocate(bytes as usize, self.id(stream), TAG) {
            Ok(block) => block,
            Err(ResourceError::OutOfMemory { .. }) => return None,
            Err(error) => panic!("{error}"),
        };
        self.requested += bytes;
        self.peak_requested = self.peak_requested.max(self.requested);
        let reserved = self.resource.physical_bytes().unwrap_or(0) as u64;
        self.peak_reserved = self.peak_reserved.max(reserved);
        Some(block)
    }

    fn free(&mut self, block: DeviceBlock, bytes: u64) {
        self.count();
        self.requested -= bytes;
        self.resource.deallocate(block).unwrap();
    }

    fn print(&self, name: &str) -> f64 {
        let nanos = self.begin.elapsed().as_nanos() as f64;
        let per = nanos / self.operations.max(1) as f64;
        let ratio = self.peak_reserved as f64 / self.peak_requested.max(1) as f64;
        let calls = self.sim.as_ref().map_or(String::new(), |sim| {
            let calls = |call| sim.faults().calls(call);
            format!(", {} created, {} unmapped", calls(Call::Create), calls(Call::Unmap))
        });
        let peak = self.peak_requested as f64 / MIB as f64;
        println!("{name:<34} {ratio:6.3} of {peak:9.1} MiB, {per:9.1} ns per operation{calls}");
        per
    }
}

impl Target for Held {
    type Block = (DeviceBlock, u64);
    type Error = std::convert::Infallible;

    fn allocate(&mut self, bytes: u64) -> Result<Option<Self::Block>, Self::Error> {
        Ok(Held::allocate(self, bytes, 0).map(|block| (block, bytes)))
    }

    fn free(&mut self, (block, bytes): Self::Block) -> Result<(), Self::Error> {
        Held::free(self, block, bytes);
        Ok(())
    }
}

/// Replays a log in RMM's columns.
fn replay(setup: Setup<'_>, name: &str, log: &str) {
    let mut streams: HashMap<&str, usize> = HashMap::new();
    let rows: Vec<Vec<&str>> = log.lines().skip(1).map(|line| line.split(',').collect()).collect();
    for row in rows.iter().filter(|row| row.len() >= 6) {
        let next = streams.len();
        streams.entry(row[5]).or_insert(next);
    }
    let mut held = Held::new(setup, streams.len().max(1));
    let mut live: HashMap<&str, (DeviceBlock, u64)> = HashMap::new();
    for row in rows.iter().filter(|row| row.len() >= 6) {
        match row[2] {
            "allocate" => {
                let bytes: u64 = row[4].parse().unwrap_or(0);
                if bytes > 0
                    && let Some(block) = held.allocate(bytes, streams[row[5]])
                    && let Some((old, bytes)) = live.insert(row[3], (block, bytes))
                {
                    held.free(old, bytes);
                }
            }
            "free" => {
                if let Some((block, bytes)) = live.remove(row[3]) {
                    held.free(block, bytes);
                }
            }
            _ => {}
        }
    }
    held.print(name);
    live.into_values().for_each(|(block, bytes)| held.free(block, bytes));
}

/// Prints the figures of PyTorch's allocator: the last two columns of the log's row in its README.md.
fn print_pytorch(path: &Path, name: &str) {
    let readme = std::fs::read_to_string(path.with_file_name("README.md")).unwrap_or_default();
    let row = readme.lines().find(|line| line.starts_with(&format!("| `{name}`")));
    let cells: Vec<&str> = row.unwrap_or_default().split('|').map(str::trim).collect();
    if let [.., default, expandable, ""] = cells[..] {
        println!("{name:<34} {default:>6} PyTorch, {expandable} with expandable segments");
    }
}

fn generated(setup: Setup<'_>, name: &str, kind: LogKind) {
    let mut log = Vec::new();
    write_log(kind, &LogSettings::default(), Format::RmmCsv, &mut log).unwrap();
    replay(setup, name, &String::from_utf8(log).unwrap());
}

fn random(setup: Setup<'_>, name: &str, count: u64, max: u64) {
    let mut held = Held::new(setup, 1);
    let Ok(_) = RandomAllocations::new(count, max * MIB).run(&mut held);
    held.print(name);
}

/// Replaces random blocks of a live set of `slots` blocks by blocks of random size up to `max` bytes on one of `streams` streams.
fn spread(setup: Setup<'_>, name: &str, streams: usize, max: u64, slots: usize) -> f64 {
    let mut held = Held::new(setup, streams);
    let mut random = SplitMix::new(7);
    let mut live: Vec<Option<(DeviceBlock, u64)>> = (0..slots).map(|_| None).collect();
    for _ in 0..40 * slots {
        let at = random.below(slots);
        if let Some((block, bytes)) = live[at].take() {
            held.free(block, bytes);
        }
        let bytes = 1 + random.below(max as usize) as u64;
        let stream = random.below(streams);
        live[at] = held.allocate(bytes, stream).map(|block| (block, bytes));
    }
    let per = held.print(name);
    live.into_iter().flatten().for_each(|(block, bytes)| held.free(block, bytes));
    per
}

/// Allocates buffers of random size on one of four streams, uses them on the next one, and frees them. The host runs at most 16
/// buffers ahead of the streams.
fn handed_on(setup: Setup<'_>, name: &str) {
    let mut held = Held::new(setup, 4);
    let mut random = SplitMix::new(11);
    let mut live: Vec<(DeviceBlock, u64)> = Vec::new();
    for step in 0..20_000_usize {
        // Sizes are log-uniform from 1 KiB to 64 MiB.
        let bytes = 1024_u64 << random.below(16);
        let bytes = bytes + random.below(bytes as usize) as u64;
        let stream = step % 4;
        let Some(block) = held.allocate(bytes, stream) else { continue };
        let (id, next) = (BlockId::from_block(&block), held.id(stream + 1));
        held.resource.prepare_block_use(id, next, Access::Read).unwrap();
        held.resource.finish_block_use(id, next, Access::Read).unwrap();
        live.push((block, bytes));
        if step % 16 == 0 {
            held.streams.iter().for_each(|stream| stream.stream().synchronize().unwrap());
        }
        if live.len() > 100 {
            let (block, bytes) = live.swap_remove(random.below(live.len()));
            held.free(block, bytes);
        }
    }
    held.print(name);
    live.into_iter().for_each(|(block, bytes)| held.free(block, bytes));
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let spec = arguments.iter().position(|argument| argument == "--device").map(|at| {
        arguments.remove(at);
        arguments.remove(at)
    });
    let is_async = arguments.extract_if(.., |text| text == "--async").count() > 0;
    let behind = arguments.iter().position(|argument| argument == "--behind").map_or(0, |at| {
        arguments.remove(at);
        arguments.remove(at).parse().unwrap()
    });
    let setup = Setup { spec: spec.as_deref(), is_async, behind };
    let is_log = |text: &mut String| text.ends_with(".csv") || text.ends_with(".csv.gz");
    let logs: Vec<String> = arguments.extract_if(.., is_log).collect();
    for log in &logs {
        let path = Path::new(log);
        let name = path.file_name().map_or(log.clone(), |name| name.to_string_lossy().into_owned());
        let text = gzip::read_log(path);
        replay(setup, &name, &text);
        if spec.as_ref().is_some_and(|spec| spec.starts_with("cuda")) && !is_async {
            replay(Setup { is_async: true, ..setup }, &format!("{name}, driver's pool"), &text);
        }
        print_pytorch(path, &name);
    }
    let filter = arguments.pop();
    let wants = |name: &str| {
        filter.as_ref().map_or(logs.is_empty(), |filter| name.contains(filter.as_str()))
    };
    for kind in LogKind::ALL {
        let name = format!("log, {}", kind.name());
        if wants(&name) {
            generated(setup, &name, kind);
        }
    }
    for (count, max) in [1_000, 10_000, 100_000]
        .into_iter()
        .flat_map(|count| [1, 4, 64, 256, 1024, 4096].map(|max| (count, max)))
    {
        let name = format!("random, {count} to {max} MiB");
        if wants(&name) {
            random(setup, &name, count, max);
        }
    }
    if wants("handed on over 4 streams") {
        handed_on(setup, "handed on over 4 streams");
    }
    for max in [64, 1024, 4096, 16384] {
        let slots = (1434 * 1024 / (max / 2)) as usize;
        let mut of_one = None;
        for streams in [1, 4, 16, 64] {
            let name = format!("spread, {streams} streams to {max} KiB");
            if !wants(&name) {
                continue;
            }
            let per = spread(setup, &name, streams, max << 10, slots);
            let one = *of_one.get_or_insert(per);
            println!("{name:<34} {:6.3} operations per second against the first row", one / per);
        }
    }
}
