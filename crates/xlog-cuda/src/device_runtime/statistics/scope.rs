//! Scopes: the peak during a block of code, of the whole resource and of this thread alone.
//!
//! Global peak: shards keep the peak since it was last read. The begin and each report of a scope, and each snapshot, folds these peaks
//! into all open scopes, so scopes of different threads may overlap.
//!
//! Thread peak: a thread with an open scope counts its operations in thread-locals.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;

use super::core::Statistics;
use super::shard::BytesAndBlocks;
use super::snapshot::Usage;

thread_local! {
    /// Open scopes of this thread.
    static OPEN: Cell<u32> = const { Cell::new(0) };
    static SCOPES: RefCell<Vec<ThreadScope>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct ThreadScope {
    scope: u64,
    core: u64,
    live_bytes: i64,
    live_blocks: i64,
    usage: ScopeStatistics,
}

/// The peaks of a resource and of its open scopes.
#[derive(Debug, Default)]
pub(super) struct Peaks {
    bytes: usize,
    blocks: usize,
    open: Vec<GlobalScope>,
    next: u64,
}

#[derive(Debug)]
struct GlobalScope {
    number: u64,
    peak_bytes: usize,
    peak_blocks: usize,
    start: Usage,
}

impl Peaks {
    /// Folds in the peak since the last call, and the current usage.
    pub(super) fn fold(&mut self, seen: BytesAndBlocks, now: &Usage) {
        let bytes = now.current_bytes.max(seen.bytes as usize);
        let blocks = now.current_blocks.max(seen.blocks as usize);
        self.bytes = self.bytes.max(bytes);
        self.blocks = self.blocks.max(blocks);
        for scope in &mut self.open {
            scope.peak_bytes = scope.peak_bytes.max(bytes);
            scope.peak_blocks = scope.peak_blocks.max(blocks);
        }
    }

    pub(super) fn overall(&self) -> (usize, usize) {
        (self.bytes, self.blocks)
    }
}

/// The usage during a scope.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ScopeStatistics {
    /// Bytes that were live when it began; 0 for a thread.
    pub start_bytes: usize,
    /// The peak of live bytes; for a thread, above its start.
    pub peak_bytes: usize,
    /// The peak of live blocks; for a thread, above its start.
    pub peak_blocks: usize,
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// Bytes freed, including those of blocks from before the scope.
    pub freed_bytes: u64,
    /// Blocks allocated.
    pub allocations: u64,
    /// Blocks freed, including those from before the scope.
    pub deallocations: u64,
}

/// The usage during a scope: of the whole resource and of its thread.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ScopeReport {
    /// The usage of the whole resource. Its peaks are as accurate as those of a snapshot.
    pub global: ScopeStatistics,
    /// The usage of the scope's thread. Exact.
    pub thread: ScopeStatistics,
}

/// Measures usage until it is dropped or finished. A scope belongs to its thread; scopes nest.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, StatisticsResource, StatisticsScope, StreamId,
/// };
///
/// let direct = DirectCudaResource::new(Arc::new(CudaDevice::open("sim")?), 0);
/// let resource = StatisticsResource::new(Box::new(direct));
/// let scope = StatisticsScope::enter(&resource.handle());
/// let block = resource.allocate(1000, StreamId::DEFAULT, AllocTag("rows"))?;
/// resource.deallocate(block)?;
/// assert_eq!(scope.finish().thread.peak_bytes, 1000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct StatisticsScope {
    statistics: Statistics,
    number: u64,
    _of_this_thread: PhantomData<*const ()>,
}

impl StatisticsScope {
    /// Begins a scope.
    pub fn enter(statistics: &Statistics) -> Self {
        let core = &statistics.0;
        let number = {
            let mut peaks = core.peaks.lock();
            let start = core.fold(&mut peaks);
            peaks.next += 1;
            let number = peaks.next;
            let (peak_bytes, peak_blocks) = (start.current_bytes, start.current_blocks);
            peaks.open.push(GlobalScope { number, peak_bytes, peak_blocks, start });
            number
        };
        SCOPES.with_borrow_mut(|scopes| {
            scopes.push(ThreadScope {
                scope: number,
                core: core.number,
                live_bytes: 0,
                live_blocks: 0,
                usage: ScopeStatistics::default(),
            });
            OPEN.set(scopes.len() as u32);
        });
        Self { statistics: statistics.clone(), number, _of_this_thread: PhantomData }
    }

    /// Returns the usage so far.
    pub fn report(&self) -> ScopeReport {
        let core = &self.statistics.0;
        let mut peaks = core.peaks.lock();
        let now = core.fold(&mut peaks);
        let found = peaks.open.iter().find(|scope| scope.number == self.number);
        let global = found.map_or_else(ScopeStatistics::default, |scope| {
            let start = &scope.start;
            ScopeStatistics {
                start_bytes: start.current_bytes,
                peak_bytes: scope.peak_bytes,
                peak_blocks: scope.peak_blocks,
                allocated_bytes: now.total_bytes.wrapping_sub(start.total_bytes),
                freed_bytes: now.freed_bytes.wrapping_sub(start.freed_bytes),
                allocations: now.allocations.wrapping_sub(start.allocations),
                deallocations: now.deallocations.wrapping_sub(start.deallocations),
            }
        });
        let thread = SCOPES.with_borrow(|scopes| {
            let mine =
                |scope: &&ThreadScope| scope.scope == self.number && scope.core == core.number;
            scopes.iter().find(mine).map(|scope| scope.usage).unwrap_or_default()
        });
        ScopeReport { global, thread }
    }

    /// Ends the scope and returns its usage.
    #[must_use]
    pub fn finish(self) -> ScopeReport {
        self.report()
    }
}

impl Drop for StatisticsScope {
    fn drop(&mut self) {
        let core = &self.statistics.0;
        {
            let mut peaks = core.peaks.lock();
            peaks.open.retain(|scope| scope.number != self.number);
        }
        // A scope in another thread-local may outlive the list.
        let _ = SCOPES.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            scopes.retain(|scope| scope.scope != self.number || scope.core != core.number);
            OPEN.set(scopes.len() as u32);
        });
    }
}

/// Counts an operation in the open scopes of this thread.
#[inline(always)]
pub(super) fn note(core: u64, bytes: usize, is_allocation: bool) {
    if OPEN.get() != 0 {
        note_in_scopes(core, bytes, is_allocation);
    }
}

#[inline(never)]
fn note_in_scopes(core: u64, bytes: usize, is_allocation: bool) {
    let _ = SCOPES.try_with(|scopes| {
        let Ok(mut scopes) = scopes.try_borrow_mut() else { return };
        for scope in scopes.iter_mut().filter(|scope| scope.core == core) {
            let usage = &mut scope.usage;
            if is_allocation {
                scope.live_bytes += bytes as i64;
                scope.live_blocks += 1;
                usage.allocated_bytes += bytes as u64;
                usage.allocations += 1;
                usage.peak_bytes = usage.peak_bytes.max(scope.live_bytes.max(0) as usize);
                usage.peak_blocks = usage.peak_blocks.max(scope.live_blocks.max(0) as usize);
            } else {
                scope.live_bytes -= bytes as i64;
                scope.live_blocks -= 1;
                usage.freed_bytes += bytes as u64;
                usage.deallocations += 1;
            }
        }
    });
}
