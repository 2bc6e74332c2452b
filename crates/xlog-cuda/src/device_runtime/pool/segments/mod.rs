//! Where a pool takes its memory from: large spans of the device, taken by growth and given back in whole pieces.
//!
//! Three kinds: [`MappedSegments`] (virtual memory), [`PlainSegments`] (raw driver allocations), [`InnerSegments`] (blocks of
//! another resource). All keep an [`account`] of what they hold of the device: charged before it is taken, released after it is
//! given back, never above the limit. An error changes nothing that the pool can see, unless the answer says which parts are gone.
//!
//! Invariant: two spans are adjacent only if one block may lie across them, so the pool may merge whatever is adjacent.
//! Segments know nothing of blocks and streams: that memory is idle is the pool's word. What the pool has not released when it
//! drops them stays taken, since work may still run on it.

mod account;
mod config;
mod inner;
mod mapped;
mod plain;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

pub(crate) use config::SegmentConfig;
pub(crate) use inner::InnerSegments;
pub(crate) use mapped::MappedSegments;
pub(crate) use plain::PlainSegments;

use super::super::resource::{
    DeviceMemoryResource, PhysicalCap, PhysicalMeter, ResourceError, ResourceResult, StreamId,
};

/// The unit of every address and size of a span.
pub(crate) const UNIT: u64 = 256;

/// A range of device memory. Address and size are multiples of [`UNIT`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Span {
    /// The device address.
    pub ptr: u64,
    /// The size.
    pub bytes: u64,
}

impl Span {
    /// The first address behind it.
    pub(crate) fn end(self) -> u64 {
        self.ptr.saturating_add(self.bytes)
    }

    /// True when all of `other` lies inside.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.ptr <= other.ptr && other.end() <= self.end()
    }
}

/// Takes memory from a device for one pool, and gives it back.
///
/// Every call may be made by any thread, also at the same time as another. No lock is held while the meter is asked for memory.
pub(crate) trait Segments: Send + Sync + fmt::Debug {
    /// The resource that the memory comes from; `None` where it comes from the device.
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        None
    }

    /// Takes contiguous memory of at least `bytes`; more where the growth step asks for it and there is room.
    ///
    /// It is announced to the meter before it is taken. Where the device or the limit has too little, the error is
    /// [`ResourceError::OutOfMemory`]; a refusal of the meter is passed on. Either changes nothing.
    fn grow(&self, bytes: u64, stream: StreamId) -> ResourceResult<Span>;

    /// Gives every whole piece that lies inside one of `idle` back to the device, the highest first and at most `bytes` in all.
    ///
    /// `idle` are ranges that nobody uses and on which the host has seen all work complete. The first answer are the parts
    /// that are no longer the pool's, in order of their addresses. A piece that the driver refuses to give back is kept, and
    /// the first such failure is returned beside.
    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>);

    /// Serves contiguous `bytes` by moving whole pieces inside `idle` to other addresses, with fresh memory for what they
    /// lack. `idle` is as for [`release`](Self::release).
    ///
    /// The answers are the new span, the parts of `idle` that are gone, and what failed. No span and no error: this kind
    /// cannot move memory. After a failure the pieces are where they were, but for those that are said to be gone.
    fn defragment(
        &self,
        _idle: &[Span],
        _bytes: u64,
        _stream: StreamId,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        (None, Vec::new(), Ok(()))
    }

    /// True where [`defragment`](Self::defragment) moves memory.
    fn can_move(&self) -> bool {
        false
    }

    /// Counts memory that was given back on a stream which has got there since.
    fn reclaim(&self) -> ResourceResult<()> {
        Ok(())
    }

    /// True when a span may be used at once on the stream it was taken for, and on others only in its order.
    fn is_stream_ordered(&self) -> bool {
        false
    }

    /// Bytes held of the device, or about to be.
    fn reserved(&self) -> u64;

    /// How many pieces can be given back one by one.
    fn segment_count(&self) -> usize;

    /// One word for this kind.
    fn kind(&self) -> &'static str;

    /// The unit in which memory is taken from the device.
    fn granularity(&self) -> u64;

    /// Lets [`reserved`](Self::reserved) never grow above `bytes`. What is held already is kept.
    fn set_limit(&self, bytes: u64);

    /// The most that may be held.
    fn limit(&self) -> u64;

    /// From now on tells `meter` of what is taken and given back. What is held already is announced at once.
    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()>;

    /// From now on never lets [`reserved`](Self::reserved) grow above `cap`, rounded up to the granularity.
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()>;
}

/// The next multiple of `unit`, if there is one.
fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(unit.max(1))
}

/// Addresses and sizes of the device are never wider than those of the host.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn out_of_memory(requested: u64, detail: impl fmt::Display) -> ResourceError {
    ResourceError::OutOfMemory { requested: to_usize(requested), detail: detail.to_string() }
}

/// The smallest size that serves `bytes`, or why no device of `total` bytes can.
fn min_size(bytes: u64, unit: u64, total: u64) -> ResourceResult<u64> {
    if bytes == 0 {
        return Err(ResourceError::zero_bytes());
    }
    let minimum = round_up(bytes, unit).filter(|&minimum| minimum <= total);
    minimum.ok_or_else(|| out_of_memory(bytes, format!("the device has {total} bytes in all")))
}

/// Tries the generous size first and, when there is too little memory for it, the least one.
fn generously<T, S: PartialEq>(
    generous: S,
    minimum: S,
    attempt: impl Fn(&S) -> ResourceResult<T>,
) -> ResourceResult<T> {
    match attempt(&generous) {
        Err(ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })
            if generous != minimum =>
        {
            attempt(&minimum)
        }
        outcome => outcome,
    }
}
