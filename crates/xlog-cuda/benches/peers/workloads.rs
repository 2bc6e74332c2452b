//! The workloads that need nothing but an allocator, as docs/benchmarks.md defines them, and what an allocator must be able to do.

use std::hint::black_box;
use std::time::Instant;

use crate::rows::Rows;

pub const MIB: usize = 1 << 20;

/// Timed runs of what is run as a whole: as many as the row's time allows, and three where they end in four times that.
const MOST_RUNS: usize = 25;
const FEW_RUNS: usize = 3;
/// Runs with an allocator that does nothing: as many as were timed, and no fewer than these.
pub const LEAST_IDLE_RUNS: usize = 5;
const PER_BATCH: usize = 1000;
const BATCHES: usize = 101;

/// Seconds after which a row is given up. The same for every peer and whatever a row's time is; docs/benchmarks.md defines them.
pub mod limits {
    pub const RANDOM: f64 = 1.0;
    pub const FILLING: f64 = 2.0;
    pub const SMALL: f64 = 2.0;
    pub const REPLAY: f64 = 1.0;
    pub const CHURN: f64 = 1.0;
}

/// Whether a run is timed after `turns` of them that took `spent` seconds, in a row of `seconds`.
pub fn runs_again(turns: usize, spent: f64, seconds: f64) -> bool {
    turns < MOST_RUNS
        && (turns == 0 || spent < seconds || turns < FEW_RUNS && spent < 4.0 * seconds)
}

/// Why a row was given up, and how near it was to the end.
pub fn given_up(limit: f64, done: usize, all: usize) -> String {
    format!("over {limit} s; {done} of {all} operations done")
}

/// An allocator with its streams.
pub trait Peer: Sync {
    type Stream: Clone + Send + Sync;
    type Block: Send;
    /// Why there is no block. What an allocator returns is not made into something else: that can take longer than to allocate.
    type Failure;

    /// Another stream.
    fn stream(&self) -> Result<Self::Stream, String>;
    fn allocate(&self, bytes: usize, stream: &Self::Stream) -> Result<Self::Block, Self::Failure>;
    /// Frees a block on the stream it was allocated on.
    fn free(&self, block: Self::Block);
    /// Another stream takes the block over, uses it, and it is freed after that.
    fn free_elsewhere(
        &self,
        block: Self::Block,
        allocated: &Self::Stream,
        used: &Self::Stream,
    ) -> Result<(), String>;
    /// Queues one thread that spins for `ticks` of the GPU's clock and stores into the block.
    fn spin(&self, stream: &Self::Stream, block: &Self::Block, ticks: u64) -> Result<(), String>;
    /// The device is idle afterwards.
    fn synchronize(&self);
}

/// Makes a new allocator for every row.
pub trait Maker {
    type Peer: Peer;

    /// A new allocator. Where it `grows`, it starts with little memory and takes what it needs.
    fn make(&self, grows: bool) -> Result<Self::Peer, String>;
    /// Bytes of the device that are taken, by anybody, and all there are; `None` where nobody can tell.
    fn taken_and_total(&self) -> Option<(u64, u64)>;

    fn taken(&self) -> Result<u64, String> {
        self.taken_and_total()
            .map(|both| both.0)
            .ok_or_else(|| "nothing counts what is held".to_owned())
    }
}

/// Does nothing, so that what a workload itself costs can be subtracted.
pub struct Nothing;

impl Peer for Nothing {
    type Stream = ();
    type Block = usize;
    type Failure = ();

    fn stream(&self) -> Result<(), String> {
        Ok(())
    }

    fn allocate(&self, bytes: usize, _: &()) -> Result<usize, ()> {
        Ok(bytes)
    }

    fn free(&self, block: usize) {
        black_box(block);
    }

    fn free_elsewhere(&self, _: usize, _: &(), _: &()) -> Result<(), String> {
        Ok(())
    }

    fn spin(&self, _: &(), _: &usize, _: u64) -> Result<(), String> {
        Ok(())
    }

    fn synchronize(&self) {}
}

pub fn failed() -> String {
    "an allocation failed".to_owned()
}

/// Prints the median and the best batch of allocate and free of `bytes`.
fn measure_pairs<P: Peer>(
    rows: &Rows<'_>,
    peer: &P,
    stream: &P::Stream,
    bytes: usize,
) -> Result<(), String> {
    let limit = rows.options.seconds;
    let batch = || {
        let start = Instant::now();
        for _ in 0..PER_BATCH {
            let Ok(block) = peer.allocate(black_box(bytes), stream) else { return Err(failed()) };
            peer.free(black_box(block));
        }
        Ok::<f64, String>(start.elapsed().as_nanos() as f64 / PER_BATCH as f64)
    };
    // By time and not by turns: a processor that has waited for a request takes its time to be fast again.
    let warming = Instant::now();
    batch()?;
    while warming.elapsed().as_secs_f64() < limit / 4.0 {
        batch()?;
    }
    let start = Instant::now();
    let mut times = Vec::with_capacity(BATCHES);
    while times.len() < BATCHES && (times.len() < 3 || start.elapsed().as_secs_f64() < limit) {
        times.push(batch()?);
    }
    peer.synchronize();
    times.sort_unstable_by(f64::total_cmp);
    rows.value(times[times.len() / 2], "ns");
    rows.also("-best", rows.request.parameter, times[0], "ns");
    Ok(())
}

pub fn pair<M: Maker>(rows: &Rows<'_>, maker: &M) -> Result<(), String> {
    let peer = maker.make(false)?;
    let stream = peer.stream()?;
    measure_pairs(rows, &peer, &stream, rows.request.parameter)
}

/// 1 KiB pairs among `count` blocks of `size`, of which every second one is freed where `with_holes`.
pub fn among<M: Maker>(
    rows: &Rows<'_>,
    count: usize,
    size: usize,
    with_holes: bool,
    maker: &M,
) -> Result<(), String> {
    let peer = maker.make(false)?;
    let stream = peer.stream()?;
    let all = count + if with_holes { count.div_ceil(2) } else { 0 };
    let is_late = |start: Instant| start.elapsed().as_secs_f64() > limits::FILLING;
    let start = Instant::now();
    let mut blocks = Vec::with_capacity(count);
    let mut outcome = Ok(());
    while blocks.len() < count && outcome.is_ok() {
        match peer.allocate(size, &stream) {
            Ok(block) => blocks.push(Some(block)),
            Err(_) => outcome = Err(failed()),
        }
        if is_late(start) && outcome.is_ok() {
            outcome = Err(given_up(limits::FILLING, blocks.len(), all));
        }
    }
    if with_holes && outcome.is_ok() {
        for (at, hole) in blocks.iter_mut().step_by(2).filter_map(Option::take).enumerate() {
            peer.free(hole);
            if is_late(start) {
                outcome = Err(given_up(limits::FILLING, count + at + 1, all));
                break;
            }
        }
    }
    peer.synchronize();
    let outcome = outcome.and_then(|()| measure_pairs(rows, &peer, &stream, 1024));
    blocks.into_iter().flatten().for_each(|block| peer.free(block));
    peer.synchronize();
    outcome
}
