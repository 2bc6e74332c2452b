//! What a lock and a pool cost after they changed threads.
//!
//!     cargo bench -p xlog-cuda --bench migration -- [--gate] [--device SPEC] [FILTER]
//!
//! - *lock*: one biased lock, used by one thread after others that still live have owned it. Beside it, the standard mutex.
//! - *hop*: a task allocates and frees on one stream and moves to the next of 16 worker threads after a number of pairs. Compared
//!   with the same batches by one thread. Only the pairs are timed, not the hand-over between the workers.
//!
//! On a GPU the pool has the GPU's memory, else the simulated device's. `--gate` ends with status 1 when a bar is missed.

#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, PoolConfig, PoolResource, StreamId, StreamPool,
};
use xlog_driver::sync::BiasedMutex;

use support::{Arguments, Table, median};

const TAG: AllocTag = AllocTag("bench");
const WORKERS: usize = 16;
const LOCK_BAR: f64 = 20.0;

fn main() -> ExitCode {
    let arguments = match Arguments::parse("migration", "--gate, --device SPEC") {
        Ok(arguments) => arguments,
        Err(refused) => return refused,
    };
    let device = support::device(arguments.device.as_deref());
    println!("on {} ({})", device.spec(), device.properties().name);
    let mut table = Table { arguments, widths: (32, 76), missed: 0 };
    for owners in [0, 1, 4, 5, 16] {
        lock(&mut table, owners);
    }
    hop(&mut table, &device, 20_000, 6, Some(3.0));
    hop(&mut table, &device, 100, 60, Some(5.0));
    hop(&mut table, &device, 1, 200, None);
    table.arguments.status("migration", table.missed)
}

/// The median of batches, in nanoseconds for each repetition.
fn measure(mut once: impl FnMut()) -> f64 {
    const PER_BATCH: usize = 1000;
    let batch = |_| {
        let start = Instant::now();
        (0..PER_BATCH).for_each(|_| once());
        start.elapsed().as_nanos() as f64 / PER_BATCH as f64
    };
    median((0..111).map(batch).skip(10).collect())
}

/// One use of a lock by this thread, after `owners` threads that still live have owned it one after another.
fn lock(table: &mut Table, owners: usize) {
    let name = format!("lock, {owners} owners before");
    if !table.wants(&name) {
        return;
    }
    let (biased, plain) = (BiasedMutex::new(0_u64), Mutex::new(0_u64));
    let turn = Barrier::new(owners + 1);
    std::thread::scope(|scope| {
        for owner in 0..owners {
            let (biased, turn) = (&biased, &turn);
            scope.spawn(move || {
                for now in 0..owners {
                    if now == owner {
                        (0..10_000).for_each(|_| biased.with(|value| *value += 1));
                    }
                    turn.wait();
                }
                // Until the lock has been measured.
                turn.wait();
            });
        }
        (0..owners).for_each(|_| _ = turn.wait());
        let cost = measure(|| biased.with(|value| *black_box(value) += 1));
        let standard = measure(|| *black_box(plain.lock().unwrap()) += 1);
        turn.wait();
        let figure = format!("{cost:.1} ns, a standard mutex {standard:.1} ns");
        table.row(&name, &figure, Some((cost, LOCK_BAR)));
    });
}

struct Task {
    resource: PoolResource,
    stream: StreamId,
    pairs: usize,
}

impl Task {
    /// Nanoseconds a pair.
    fn run(&self) -> f64 {
        let start = Instant::now();
        for _ in 0..self.pairs {
            let block = self.resource.allocate(black_box(1024), self.stream, TAG).unwrap();
            self.resource.deallocate(black_box(block)).unwrap();
        }
        start.elapsed().as_nanos() as f64 / self.pairs as f64
    }
}

/// A task that moves to the next worker after `pairs`, for `rounds` through all of them.
fn hop(table: &mut Table, device: &Arc<CudaDevice>, pairs: usize, rounds: usize, bar: Option<f64>) {
    let name = format!("hop after {pairs} pairs");
    if !table.wants(&name) {
        return;
    }
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let lease = streams.lease().unwrap();
    let resource =
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), PoolConfig::default());
    let task = Task { resource: resource.unwrap(), stream: lease.id(), pairs };
    let (done, finished) = channel::<f64>();
    let by_worker: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let workers: Vec<Sender<()>> = (0..WORKERS)
            .map(|_| {
                let (go, turns) = channel();
                let (task, done) = (&task, done.clone());
                scope.spawn(move || turns.iter().for_each(|()| done.send(task.run()).unwrap()));
                go
            })
            .collect();
        let mut times = vec![Vec::new(); WORKERS];
        for round in 0..rounds + 2 {
            for (worker, go) in workers.iter().enumerate() {
                go.send(()).unwrap();
                let time = finished.recv().unwrap();
                if round >= 2 {
                    times[worker].push(time);
                }
            }
        }
        times
    });
    // One worker to the end, woken by the same means.
    let staying = std::thread::scope(|scope| {
        let (go, turns) = channel();
        let (task, done) = (&task, done.clone());
        scope.spawn(move || turns.iter().for_each(|()| done.send(task.run()).unwrap()));
        let hops = (0..rounds * WORKERS + 20).map(|_| {
            go.send(()).unwrap();
            finished.recv().unwrap()
        });
        let times: Vec<f64> = hops.skip(20).collect();
        drop(go);
        median(times)
    });
    let of = |workers: &[Vec<f64>]| {
        let medians: Vec<f64> = workers.iter().map(|times| median(times.clone())).collect();
        medians.iter().sum::<f64>() / medians.len() as f64
    };
    let (first, later, all) = (of(&by_worker[..4]), of(&by_worker[4..]), of(&by_worker));
    let ratio = all / staying;
    let figure = format!(
        "{all:.0} ns (workers 1 to 4 {first:.0}, others {later:.0}), staying {staying:.0} = {ratio:.1}x"
    );
    table.row(&name, &figure, bar.map(|bar| (ratio, bar)));
}
