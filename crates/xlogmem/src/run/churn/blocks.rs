//! The lifecycle of a workload's blocks: allocate, write, verify and free, with a check for overlaps.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, DeviceBlock, DeviceMemoryResource, DeviceStream, PoolSnapshot,
    ResourceError, StreamLease,
};
use xlog_cuda::driver::sync::Mutex;
use xlog_cuda::{Result, XlogError};
use xlog_workloads::Target;
use xlog_workloads::stack::Stack;

use super::super::progress::Progress;
use super::witness::Witness;

const TAG: AllocTag = AllocTag("churn");

/// A block with its number and requested bytes.
pub(super) struct LiveBlock {
    pub(super) block: DeviceBlock,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) failures: u64,
    pub(super) allocate_nanos: u64,
    pub(super) free_nanos: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.allocations += other.allocations;
        self.frees += other.frees;
        self.failures += other.failures;
        self.allocate_nanos += other.allocate_nanos;
        self.free_nanos += other.free_nanos;
    }
}

pub(super) struct Checks<'a> {
    pub(super) stack: &'a Stack,
    resource: &'a (dyn DeviceMemoryResource + Send + Sync),
    pub(super) streams: &'a [StreamLease],
    witness: Option<&'a Witness>,
    /// Whether uses may be on any stream; otherwise they stay on the block's own.
    anywhere: bool,
    /// First and last addresses of live blocks, while blocks are verified.
    ranges: Mutex<BTreeMap<u64, u64>>,
    progress: Progress,
    overlaps: AtomicU64,
    live: AtomicU64,
    peak: AtomicU64,
}

impl<'a> Checks<'a> {
    pub(super) fn new(
        stack: &'a Stack,
        streams: &'a [StreamLease],
        witness: Option<&'a Witness>,
        max_blocks: u64,
    ) -> Self {
        let resource = stack.resource();
        let anywhere = streams.len() > 1 && resource.supports_block_use_tracking();
        Self {
            stack,
            resource,
            streams,
            witness,
            anywhere,
            ranges: Mutex::default(),
            progress: Progress::new(
                "allocating and freeing",
                "blocks at most",
                u32::try_from(max_blocks).unwrap_or(u32::MAX),
            ),
            overlaps: AtomicU64::new(0),
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }
    }

    pub(super) fn overlaps(&self) -> u64 {
        self.overlaps.load(Ordering::Relaxed)
    }

    /// Returns the maximum requested bytes live at a time.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    fn stream(&self, number: u64) -> &DeviceStream {
        // The command line guarantees at least one stream.
        &self.streams[(number % self.streams.len() as u64) as usize]
    }

    /// Allocates and writes a block; `None` if there is no memory for it.
    pub(super) fn allocate(
        &self,
        number: u64,
        bytes: u64,
        counts: &mut Counts,
    ) -> Result<Option<LiveBlock>> {
        let home = self.stream(number);
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let start = Instant::now();
        let made = self.resource.allocate(size, home.id(), TAG);
        counts.allocate_nanos += nanos_since(start);
        let block = match made {
            Ok(block) => block,
            Err(ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. }) => {
                counts.failures += 1;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        counts.allocations += 1;
        self.progress.step();
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
        let held = LiveBlock { block, number, bytes };
        if let Some(witness) = self.witness {
            self.note_range(&held);
            self.work(&held, 7 * number + 1, Access::Write, |stream| {
                witness.write(number, &held.block, bytes, stream)
            })?;
        }
        Ok(Some(held))
    }

    pub(super) fn free(&self, held: LiveBlock, counts: &mut Counts) -> Result<()> {
        let mut looked = Ok(());
        if let Some(witness) = self.witness {
            let (number, bytes) = (held.number, held.bytes);
            looked = self.work(&held, 3 * number + 2, Access::Read, |stream| {
                witness.read(number, &held.block, bytes, stream)
            });
            self.ranges.lock().remove(&held.block.ptr);
        }
        self.live.fetch_sub(held.bytes, Ordering::Relaxed);
        let start = Instant::now();
        let freed = self.resource.deallocate(held.block);
        counts.free_nanos += nanos_since(start);
        counts.frees += 1;
        looked.and(freed.map_err(XlogError::from))
    }

    /// Queues work on a block, on its own stream or, if the resource tracks uses, on any.
    fn work(
        &self,
        held: &LiveBlock,
        choice: u64,
        access: Access,
        queue: impl FnOnce(&DeviceStream) -> Result<()>,
    ) -> Result<()> {
        if !self.anywhere {
            return queue(self.stream(held.number));
        }
        let (stream, id) = (self.stream(choice), BlockId::from_block(&held.block));
        self.resource.prepare_block_use(id, stream.id(), access)?;
        let queued = queue(stream);
        let finished = self.resource.finish_block_use(id, stream.id(), access);
        queued.and(finished.map_err(XlogError::from))
    }

    fn note_range(&self, held: &LiveBlock) {
        let (from, to) = (held.block.ptr, held.block.ptr + held.block.bytes as u64);
        let mut ranges = self.ranges.lock();
        let before = ranges.range(..to).next_back();
        if before.is_some_and(|(_, end)| *end > from) {
            self.overlaps.fetch_add(1, Ordering::Relaxed);
        }
        ranges.insert(from, to);
    }
}

/// The target of a single-threaded workload.
pub(super) struct Blocks<'a> {
    checks: &'a Checks<'a>,
    next: u64,
    pub(super) counts: Counts,
    /// The calls after which the pool is sampled.
    pub(super) sample_at: [u64; 2],
    pub(super) samples: [Option<PoolSnapshot>; 2],
}

impl<'a> Blocks<'a> {
    pub(super) fn new(checks: &'a Checks<'a>) -> Self {
        let counts = Counts::default();
        Self { checks, next: 0, counts, sample_at: [u64::MAX; 2], samples: [None, None] }
    }

    fn sample_pool(&mut self) {
        let calls = self.counts.allocations + self.counts.frees;
        for (at, sample) in self.sample_at.into_iter().zip(&mut self.samples) {
            if at == calls {
                *sample = self.checks.stack.snapshot();
            }
        }
    }
}

impl Target for Blocks<'_> {
    type Block = LiveBlock;
    type Error = XlogError;

    fn allocate(&mut self, bytes: u64) -> Result<Option<LiveBlock>> {
        let held = self.checks.allocate(self.next, bytes, &mut self.counts)?;
        self.next += u64::from(held.is_some());
        self.sample_pool();
        Ok(held)
    }

    fn free(&mut self, held: LiveBlock) -> Result<()> {
        let freed = self.checks.free(held, &mut self.counts);
        self.sample_pool();
        freed
    }
}

/// A dry run that finds the call at the peak of live bytes.
#[derive(Debug, Default)]
pub(super) struct Dry {
    calls: u64,
    live: u64,
    peak: u64,
    pub(super) peak_at: u64,
}

impl Target for Dry {
    type Block = u64;
    type Error = Infallible;

    fn allocate(&mut self, bytes: u64) -> Result<Option<u64>, Infallible> {
        self.calls += 1;
        self.live += bytes;
        if self.live > self.peak {
            (self.peak, self.peak_at) = (self.live, self.calls);
        }
        Ok(Some(bytes))
    }

    fn free(&mut self, bytes: u64) -> Result<(), Infallible> {
        self.calls += 1;
        self.live -= bytes;
        Ok(())
    }
}

fn nanos_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_cuda::DeviceSpec;
    use xlog_cuda::device_runtime::{BlockState, Generation};
    use xlog_workloads::stack::StackKind;

    #[test]
    fn a_block_over_a_live_one_is_counted_wherever_they_meet() {
        let stack = Stack::open(DeviceSpec::Sim, StackKind::Direct, None, 1).unwrap();
        let streams = [stack.streams().lease().unwrap()];
        let checks = Checks::new(&stack, &streams, None, 5);
        let place = |ptr: u64, bytes: usize| {
            let block = DeviceBlock {
                ptr,
                device_ordinal: 0,
                alloc_stream: streams[0].id(),
                bytes,
                align: 256,
                tag: TAG,
                generation: Generation::next(),
                state: BlockState::Live,
            };
            checks.note_range(&LiveBlock { block, number: 0, bytes: 1 });
            checks.overlaps()
        };
        assert_eq!(place(0x1000, 0x1000), 0);
        assert_eq!((place(0x2000, 0x100), place(0x800, 0x800)), (0, 0), "they only touch");
        assert_eq!(place(0x1f00, 0x100), 1, "inside the first");
        assert_eq!(place(0x700, 0x101), 2, "into the beginning of another");
        assert_eq!(place(0x600, 0x5000), 3, "around all");
    }
}
