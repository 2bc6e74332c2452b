//! Workloads for the command line and the benches, and the stacks they run on.
//!
//! | item | purpose |
//! |---|---|
//! | [`RandomAllocations`], [`SmallBlocks`] | sequences of allocations and frees, determined by a seed |
//! | [`logs`] | allocation logs of synthetic programs |
//! | [`relational`] | a hash join, a transitive closure and a sort whose data stays on the device |
//! | [`stack`] | a device with one resource on it |
//!
//! A sequence is independent of devices. It drives a [`Target`]: a resource, a model, or [`Nothing`]. While the target refuses
//! nothing, a seed determines the sequence, which [`RunCounts::check`] verifies as one number.

#![deny(unsafe_code)]

pub mod logs;
mod random_allocations;
pub mod relational;
mod small_blocks;
pub mod stack;

pub use random_allocations::{CAP_BYTES, RandomAllocations};
pub use small_blocks::{Sizes, SmallBlocks, draw_size};
pub use xlog_base::Minstd;

/// The allocator that a workload drives.
pub trait Target {
    /// A live block.
    type Block;
    /// An error that ends the run.
    type Error;

    /// Allocates a block; `None` if there is no memory for it, after which the workload continues.
    fn allocate(&mut self, bytes: u64) -> Result<Option<Self::Block>, Self::Error>;

    /// Frees a block.
    fn free(&mut self, block: Self::Block) -> Result<(), Self::Error>;
}

/// A target that does nothing, to measure the cost and the check value of a workload.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nothing;

impl Target for Nothing {
    type Block = ();
    type Error = std::convert::Infallible;

    fn allocate(&mut self, _bytes: u64) -> Result<Option<()>, Self::Error> {
        Ok(Some(()))
    }

    fn free(&mut self, (): ()) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// The counts of a workload. Blocks live at its end are freed afterwards and not counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RunCounts {
    /// Blocks allocated.
    pub allocations: u64,
    /// Blocks freed by the workload.
    pub frees: u64,
    /// Requests refused for lack of memory.
    pub failures: u64,
    /// The maximum number of live blocks.
    pub peak_blocks: u64,
    /// The maximum requested bytes live at a time.
    pub peak_bytes: u64,
    /// FNV-1a over the sequence: (1, size) for each allocation, (2, index) for each free, as little-endian 64-bit pairs.
    pub check: u64,
}

impl Default for RunCounts {
    fn default() -> Self {
        Self {
            allocations: 0,
            frees: 0,
            failures: 0,
            peak_blocks: 0,
            peak_bytes: 0,
            check: 14_695_981_039_346_656_037,
        }
    }
}

impl RunCounts {
    fn note(&mut self, kind: u64, value: u64) {
        for byte in kind.to_le_bytes().into_iter().chain(value.to_le_bytes()) {
            self.check = (self.check ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// The live blocks of a run, and its counts so far.
struct Run<'a, T: Target> {
    target: &'a mut T,
    live: Vec<(T::Block, u64)>,
    bytes: u64,
    counts: RunCounts,
}

impl<'a, T: Target> Run<'a, T> {
    fn new(target: &'a mut T) -> Self {
        Self { target, live: Vec::new(), bytes: 0, counts: RunCounts::default() }
    }

    /// Allocates a block; returns whether there was memory for it.
    fn allocate(&mut self, bytes: u64) -> Result<bool, T::Error> {
        let Some(block) = self.target.allocate(bytes)? else {
            self.counts.failures += 1;
            return Ok(false);
        };
        self.live.push((block, bytes));
        self.bytes += bytes;
        self.counts.allocations += 1;
        self.counts.peak_blocks = self.counts.peak_blocks.max(self.live.len() as u64);
        self.counts.peak_bytes = self.counts.peak_bytes.max(self.bytes);
        self.counts.note(1, bytes);
        Ok(true)
    }

    /// Frees the live block that `draw` selects; the last one takes its index.
    fn free(&mut self, draw: u64) -> Result<(), T::Error> {
        let Some(at) = draw.checked_rem(self.live.len() as u64) else { return Ok(()) };
        let (block, bytes) = self.live.swap_remove(at as usize);
        self.bytes -= bytes;
        self.counts.frees += 1;
        self.counts.note(2, at);
        self.target.free(block)
    }

    /// Frees the remaining blocks, even after a failure.
    fn end(mut self, outcome: Result<(), T::Error>) -> Result<RunCounts, T::Error> {
        let mut outcome = outcome;
        for (block, _) in self.live.drain(..) {
            let freed = self.target.free(block);
            outcome = outcome.and(freed);
        }
        outcome.map(|()| self.counts)
    }
}
