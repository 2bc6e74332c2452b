//! Inner segments: blocks of another resource.
//!
//! A block is allocated on the stream that made the pool grow, and freed when all of it is idle. As in plain segments,
//! the last unit is never handed out, so that no range lies across two blocks. The account counts what the blocks are
//! charged; the inner resource meters its own physical memory. No lock is held over a call of the inner resource.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_driver::sync::Mutex;

use super::super::super::resource::{
    AllocTag, DeviceBlock, DeviceMemoryResource, MIN_ALIGN, PhysicalCap, PhysicalMeter,
    ResourceError, ResourceResult, StreamId,
};
use super::account::Account;
use super::{Segments, Span, UNIT, min_size, to_usize};

/// The tag of segments in the logs of the inner resource.
const TAG: AllocTag = AllocTag("pool segment");

/// Blocks of an inner resource, for one pool.
pub(crate) struct InnerSegments {
    inner: Box<dyn DeviceMemoryResource + Send + Sync>,
    account: Account,
    /// By the address of their span.
    blocks: Mutex<BTreeMap<u64, InnerBlock>>,
}

struct InnerBlock {
    span: Span,
    block: DeviceBlock,
}

impl InnerSegments {
    /// Creates segments from `inner`, at most `maximum` bytes. Takes no memory yet.
    pub(crate) fn new(inner: Box<dyn DeviceMemoryResource + Send + Sync>, maximum: u64) -> Self {
        let account = Account::new(maximum, UNIT);
        Self { inner, account, blocks: Mutex::new(BTreeMap::new()) }
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &(dyn DeviceMemoryResource + Send + Sync) {
        &*self.inner
    }

    /// Allocates a block of `size` bytes; its span must have at least `minimum`.
    fn grow_by(&self, size: u64, minimum: u64, stream: StreamId) -> ResourceResult<Span> {
        let charge = self.inner.charge_for(to_usize(size), MIN_ALIGN) as u64;
        self.account.charge(charge)?;
        let allocated = self.inner.allocate(to_usize(size), stream, TAG);
        let block = allocated.inspect_err(|_| self.account.release(charge))?;
        let held = block.bytes as u64;
        self.account.adjust(charge, held);
        let Some(span) = handed_out(&block).filter(|span| span.bytes >= minimum) else {
            let given = format!("{held} bytes at {:#x}", block.ptr);
            self.account.release(held);
            self.inner.deallocate(block)?;
            return Err(ResourceError::Driver(format!(
                "the inner resource gave {given} for {size}: expected an address that is a multiple of {UNIT}"
            )));
        };
        self.blocks.lock().insert(span.ptr, InnerBlock { span, block });
        Ok(span)
    }

    /// Removes the blocks inside `idle` from the table, the highest first and at most `bytes` in all.
    fn remove_inside(&self, idle: &[Span], bytes: u64) -> Vec<InnerBlock> {
        let mut blocks = self.blocks.lock();
        let mut found: Vec<u64> = idle
            .iter()
            .flat_map(|range| {
                let blocks = blocks.range(range.ptr..range.end().max(range.ptr));
                blocks.filter(|(_, block)| range.contains(block.span)).map(|(&ptr, _)| ptr)
            })
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.dedup();
        let mut left = bytes;
        let mut taken = Vec::new();
        for ptr in found {
            let held = blocks.get(&ptr).map_or(u64::MAX, |block| block.block.bytes as u64);
            if held <= left
                && let Some(block) = blocks.remove(&ptr)
            {
                left -= held;
                taken.push(block);
            }
        }
        taken
    }
}

impl Segments for InnerSegments {
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&*self.inner)
    }

    fn grow(&self, bytes: u64, stream: StreamId) -> ResourceResult<Span> {
        let wanted = min_size(bytes, UNIT, u64::MAX - UNIT)?;
        self.grow_by(wanted + UNIT, wanted, stream)
    }

    /// A block that the inner resource fails to free also counts as gone: the inner resource keeps it, and a later reap
    /// frees it.
    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>) {
        let mut gone = Vec::new();
        let mut outcome = Ok(());
        for InnerBlock { span, block } in self.remove_inside(idle, bytes) {
            let held = block.bytes as u64;
            let this = self.inner.deallocate(block);
            self.account.release(held);
            gone.push(span);
            outcome = outcome.and(this);
        }
        if !gone.is_empty() {
            let trimmed = self.inner.reap_completed().and_then(|()| self.inner.trim());
            outcome = outcome.and(trimmed.map(|_| ()));
        }
        gone.reverse();
        (gone, outcome)
    }

    fn releasable(&self, idle: &[Span]) -> u64 {
        let blocks = self.blocks.lock();
        let inside = idle.iter().flat_map(|range| {
            let blocks = blocks.range(range.ptr..range.end().max(range.ptr));
            blocks.map(|(_, block)| block.span).filter(|span| range.contains(*span))
        });
        inside.map(|span| span.bytes).sum()
    }

    /// The inner resource queues its frees on streams.
    fn reclaim(&self) -> ResourceResult<()> {
        self.inner.reap_completed()?;
        self.inner.trim().map(|_| ())
    }

    fn is_stream_ordered(&self) -> bool {
        true
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn segment_count(&self) -> usize {
        self.blocks.lock().len()
    }

    fn kind(&self) -> &'static str {
        "inner"
    }

    fn granularity(&self) -> u64 {
        UNIT
    }

    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.inner.meter_physical(meter)
    }

    /// Forwards the cap to the inner resource, which takes the memory.
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.inner.cap_physical(cap)
    }
}

/// Returns the span that the pool gets of a block: its whole units except the last. `None` if the address is not a
/// multiple of a unit.
fn handed_out(block: &DeviceBlock) -> Option<Span> {
    let units = block.bytes as u64 / UNIT;
    let bytes = units.checked_sub(1)? * UNIT;
    block.ptr.is_multiple_of(UNIT).then_some(Span { ptr: block.ptr, bytes })
}
