//! What a budget costs over a resource that costs nothing.
//!
//!     cargo bench -p xlog-cuda --bench budget -- [--gate] [--csv] [FILTER]
//!
//! Batches of allocate+free pairs with and without the budget alternate; the best batch of each is compared, since whatever else the
//! machine does only adds. `--gate` ends with status 1 when a bar is missed; `--csv` prints the figures that have a bar as
//! `peer,variant,workload,parameter,value,unit` instead. The rows with several threads tell how far they scale; they
//! mean something on a machine with as many cores.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod support;

use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::Arguments;
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    GlobalDeviceBudget, ResourceResult, StreamId,
};

const BATCHES: usize = 400;
const PAIRS: usize = 4096;
const PAIR_BAR: f64 = 15.0;

/// Hands out numbers: one block at a time for each thread.
struct Null;

impl DeviceMemoryResource for Null {
    #[inline]
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        static THREADS: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static NEXT: Cell<u64> = const { Cell::new(0) };
        }
        let mut next = NEXT.get();
        if next == 0 {
            next = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        NEXT.set(next + (1 << 24));
        Ok(DeviceBlock {
            ptr: 1 << 20,
            device_ordinal: 0,
            alloc_stream: stream,
            bytes,
            align: 256,
            tag,
            generation: Generation(next),
            state: BlockState::Live,
        })
    }

    #[inline]
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        black_box(block.generation);
        Ok(())
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn bytes_outstanding(&self) -> usize {
        0
    }

    #[inline]
    fn block_state(&self, _block: BlockId) -> BlockState {
        BlockState::Freed
    }

    fn places_blocks(&self) -> bool {
        true
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::parse("budget", "--gate, --csv") {
        Ok(arguments) => arguments,
        Err(refused) => return refused,
    };
    let wants = |name: &str| arguments.wants(name);
    let mut missed = 0;
    if arguments.csv {
        let budget = GlobalDeviceBudget::over(Null, 1 << 30);
        let (ours, bare) = best(&budget, &Null);
        println!("xlog,budget,budget-added,1024,{:.3},ns", ours - bare);
        return ExitCode::SUCCESS;
    }
    if wants("pair") {
        missed += usize::from(!pair());
    }
    if wants("boxed") {
        boxed();
    }
    if wants("scoped") {
        scoped();
    }
    if wants("refusal") {
        refusal();
    }
    if wants("threads") {
        for count in [1, 2, 4, 8, 16] {
            threads(count);
        }
    }
    arguments.status("budget", missed)
}

/// Nanoseconds of one pair.
#[inline]
fn batch(resource: &impl DeviceMemoryResource) -> f64 {
    let start = Instant::now();
    for _ in 0..PAIRS {
        match resource.allocate(black_box(1024), StreamId::DEFAULT, AllocTag("bench")) {
            // Seen, not moved.
            Ok(block) => {
                black_box(block.ptr);
                resource.deallocate(block).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    start.elapsed().as_nanos() as f64 / PAIRS as f64
}

/// The best batches of two resources, which take turns.
fn best(ours: &impl DeviceMemoryResource, bare: &impl DeviceMemoryResource) -> (f64, f64) {
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..BATCHES {
        best.0 = best.0.min(batch(ours));
        best.1 = best.1.min(batch(bare));
    }
    best
}

fn pair() -> bool {
    let budget = GlobalDeviceBudget::over(Null, 1 << 30);
    let (ours, bare) = best(&budget, &Null);
    let added = ours - bare;
    let verdict = if added <= PAIR_BAR { "met" } else { "MISSED" };
    println!(
        "pair, one thread: {added:.1} ns added ({ours:.1} against {bare:.1})   goal <= {PAIR_BAR} ns   {verdict}"
    );
    assert_eq!(budget.reserved_bytes(), 0);
    added <= PAIR_BAR
}

fn boxed() {
    let budget = GlobalDeviceBudget::new(Box::new(Null), 1 << 30);
    let bare: Box<dyn DeviceMemoryResource + Send + Sync> = Box::new(Null);
    let (ours, bare) = best(&budget, &bare);
    println!("boxed, one thread: {:.1} ns added ({ours:.1} against {bare:.1})", ours - bare);
}

fn scoped() {
    let budget = GlobalDeviceBudget::over(Null, 1 << 30);
    let scope = budget.scope("tenant", 1 << 20, 1 << 30).unwrap();
    let _inside = scope.enter();
    let (ours, bare) = best(&budget, &Null);
    println!("scoped, one thread: {:.1} ns added ({ours:.1} against {bare:.1})", ours - bare);
}

fn refusal() {
    let budget = GlobalDeviceBudget::over(Null, 1 << 20);
    let kept = budget.allocate(1 << 20, StreamId::DEFAULT, AllocTag("bench")).unwrap();
    let mut best = f64::INFINITY;
    for _ in 0..100 {
        let start = Instant::now();
        for _ in 0..100 {
            budget.allocate(1, StreamId::DEFAULT, AllocTag("bench")).unwrap_err();
        }
        best = best.min(start.elapsed().as_nanos() as f64 / 100.0);
    }
    println!("refusal with its report: {best:.0} ns");
    budget.deallocate(kept).unwrap();
}

/// Pairs per second of several threads, with and without the budget.
fn threads(count: usize) {
    let budget = GlobalDeviceBudget::over(Null, 1 << 30);
    let ours = (0..3).map(|_| throughput(&budget, count)).fold(0.0, f64::max);
    let bare = (0..3).map(|_| throughput(&Null, count)).fold(0.0, f64::max);
    println!(
        "threads, {count:>2}: {ours:>8.1} M pairs/s, {:>6.2} per thread ({bare:.1} bare)",
        ours / count as f64
    );
    assert_eq!(budget.reserved_bytes(), 0);
}

fn throughput(resource: &impl DeviceMemoryResource, count: usize) -> f64 {
    let start = Barrier::new(count);
    let run = Duration::from_millis(200);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let begin = Instant::now();
                    let mut pairs = 0;
                    while begin.elapsed() < run {
                        batch(resource);
                        pairs += PAIRS;
                    }
                    pairs as f64 / begin.elapsed().as_secs_f64() / 1e6
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    rates.iter().sum()
}
