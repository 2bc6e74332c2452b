//! Segments: the large spans of device memory that a pool grows by.
//!
//! Three kinds: [`MappedSegments`] (virtual memory), [`PlainSegments`] (raw driver allocations), [`InnerSegments`]
//! (blocks of another resource).
//!
//! Invariants:
//! - The [`account`] charges bytes before they are taken from the device and releases them after they are returned; it
//!   never exceeds the limit.
//! - Two spans are adjacent only if a block may lie across them, so the pool may coalesce adjacent spans.
//! - An error changes nothing that is visible to the pool, unless the result names the parts that are gone.
//!
//! Segments do not know blocks or streams: the pool promises that a span is idle. Memory that the pool has not released
//! when it drops its segments stays allocated, since work may still run on it.

mod account;
mod inner;
mod mapped;
mod plain;
#[cfg(test)]
mod tests;
mod watched;

use std::fmt;
use std::sync::Arc;

use self::account::Account;
pub(crate) use inner::InnerSegments;
#[cfg(test)]
use mapped::HandleConfig;
pub(crate) use mapped::MappedSegments;
pub(crate) use plain::PlainSegments;
pub(crate) use watched::WatchedSegments;

use super::super::resource::{
    DeviceMemoryResource, PhysicalCap, PhysicalMeter, ResourceError, ResourceResult, StreamId,
};

/// The unit of every address and size of a span.
pub(crate) const UNIT: u64 = 256;

/// A range of device memory. Address and size are multiples of [`UNIT`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Span {
    pub ptr: u64,
    pub bytes: u64,
}

impl Span {
    /// The first address after the span.
    pub(crate) fn end(self) -> u64 {
        self.ptr.saturating_add(self.bytes)
    }

    /// Whether the span holds a request at its alignment.
    pub(crate) fn holds(self, size: u64, align: u64) -> bool {
        self.ptr
            .checked_next_multiple_of(align)
            .and_then(|start| self.end().checked_sub(start))
            .is_some_and(|bytes| bytes >= size)
    }

    /// Whether all of `other` lies inside the span.
    pub(crate) fn contains(self, other: Self) -> bool {
        self.ptr <= other.ptr && other.end() <= self.end()
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.ptr < other.end() && other.ptr < self.end()
    }

    /// Returns the parts that are in none of `others`, which are sorted and do not overlap.
    pub(crate) fn without(self, others: &[Self]) -> impl Iterator<Item = Self> {
        let first = others.partition_point(|other| other.end() <= self.ptr);
        let mut others = others[first..].iter().take_while(move |other| other.ptr < self.end());
        let mut start = self.ptr;
        std::iter::from_fn(move || {
            while start < self.end() {
                let next = others.next();
                let (ptr, end) =
                    next.map_or((self.end(), self.end()), |next| (next.ptr, next.end()));
                let before = std::mem::replace(&mut start, end);
                if before < ptr {
                    return Some(Self { ptr: before, bytes: ptr - before });
                }
            }
            None
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SpanRequest {
    pub(crate) bytes: u64,
    pub(crate) align: u64,
    /// The maximum of free handles that may be remapped for it.
    pub(crate) max_moved: usize,
}

/// The last work on memory: a stream's slot and its stamp. Segments only keep it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastWork {
    pub(crate) slot: u32,
    pub(crate) stamp: u64,
}

/// Free memory for a remap. No block lies there. Both lists are sorted and coalesced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeMemory<'a> {
    /// Without pending work.
    pub(crate) idle: &'a [Span],
    /// With pending work that the request follows. It may be mapped elsewhere, but is unmapped only after `last_work`.
    pub(crate) pending: &'a [Span],
    /// The last of the pending work.
    pub(crate) last_work: LastWork,
}

#[cfg(test)]
impl<'a> FreeMemory<'a> {
    /// Free memory without pending work.
    pub(crate) fn idle(idle: &'a [Span]) -> Self {
        Self { idle, pending: &[], last_work: LastWork { slot: 0, stamp: 0 } }
    }
}

/// The result of [`Segments::plan`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Remap {
    /// The parts of the free memory, by address.
    pub(crate) uses: Vec<Span>,
    /// Bytes of the free memory that stay mapped.
    pub(crate) stays: u64,
    /// Handles that are remapped or created.
    pub(crate) handles: usize,
    pub(crate) fresh: u64,
}

/// Takes memory from a device for one pool, and returns it.
///
/// Any thread may make any call at any time. No lock is held while the meter is charged.
pub(crate) trait Segments: Send + Sync {
    /// The resource that the memory comes from; `None` if it comes from the device.
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        None
    }

    /// Takes at least `bytes` of contiguous memory, rounded up to whole granules.
    ///
    /// The meter is charged first. The error is [`ResourceError::OutOfMemory`] if the device or the limit has too
    /// little; a refusal of the meter is passed on. Neither changes anything.
    fn grow(&self, bytes: u64, stream: StreamId) -> ResourceResult<Span>;

    /// Returns whole segments inside one of `idle` to the device, the highest first and at most `bytes` in all.
    ///
    /// No work is pending on `idle`, and no block lies there. A segment that is still mapped at an address that it has left is
    /// kept. The first result lists the spans that are gone, by
    /// address. A segment that the driver refuses to take back is kept; the second result is the first such failure.
    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>);

    /// Returns how many bytes of `idle` are whole segments, which [`release`](Self::release) can return.
    fn releasable(&self, idle: &[Span]) -> u64 {
        idle.iter().map(|span| span.bytes).sum()
    }

    /// Plans [`defragment`](Self::defragment) for a request. `None` if this kind cannot remap memory, or lacks addresses.
    fn plan(&self, _free: FreeMemory<'_>, _request: SpanRequest) -> Option<Remap> {
        None
    }

    /// Builds a contiguous span for a request from parts of the free memory that stay mapped, from whole free segments that
    /// are remapped beside them, and from fresh memory.
    ///
    /// Returns the new span, the parts of `free` that it took, and the failure. No span and no error means that this kind
    /// cannot remap memory. A failure leaves all segments where they were, except those that are reported as taken.
    /// Segments with pending work keep their old mapping too, until [`unmap_stale`](Self::unmap_stale).
    fn defragment(
        &self,
        _free: FreeMemory<'_>,
        _request: SpanRequest,
        _stream: StreamId,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        (None, Vec::new(), Ok(()))
    }

    /// Unmaps at most `most` of the addresses that remapped segments have left, where `is_complete` says that the host has seen the
    /// work complete.
    fn unmap_stale(&self, _most: usize, _is_complete: &dyn Fn(LastWork) -> bool) {}

    /// Whether [`defragment`](Self::defragment) can remap memory.
    fn can_move(&self) -> bool {
        false
    }

    /// Releases memory whose free was queued on a stream and has completed.
    fn reclaim(&self) -> ResourceResult<()> {
        Ok(())
    }

    /// Whether another stream may use a span only after the stream that it was taken for.
    fn is_stream_ordered(&self) -> bool {
        false
    }

    fn account(&self) -> &Account;

    /// Bytes taken from the device, or charged and about to be taken.
    fn reserved(&self) -> u64 {
        self.account().reserved()
    }

    /// The number of segments that can be returned one by one.
    fn segment_count(&self) -> usize;

    fn kind(&self) -> &'static str;

    /// The unit in which memory is taken from the device.
    fn granularity(&self) -> u64;

    /// Sets the maximum of [`reserved`](Self::reserved). Memory above it is kept.
    fn set_limit(&self, bytes: u64) {
        self.account().set_limit(bytes);
    }

    /// The maximum of [`reserved`](Self::reserved).
    fn limit(&self) -> u64 {
        self.account().limit()
    }

    /// Reports all memory that is taken and returned to `meter`, beginning with the memory held now.
    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.account().announce_to(meter)
    }

    /// Limits [`reserved`](Self::reserved) to `cap`, rounded up to the granularity.
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.account().cap(cap);
        Ok(())
    }
}

/// Sorts spans by address and joins those that are adjacent.
pub(super) fn coalesce(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable_by_key(|span| span.ptr);
    let mut coalesced: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match coalesced.last_mut() {
            Some(last) if last.end() == span.ptr => last.bytes += span.bytes,
            _ => coalesced.push(span),
        }
    }
    coalesced
}

/// Returns the next multiple of `unit`, if it does not overflow.
fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(unit.max(1))
}

/// Converts a device size, which fits into a host size.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn out_of_memory(requested: u64, detail: impl fmt::Display) -> ResourceError {
    ResourceError::OutOfMemory { requested: to_usize(requested), detail: detail.to_string() }
}

/// Returns the smallest size that serves `bytes`, or an error if a device of `total` bytes cannot.
fn min_size(bytes: u64, unit: u64, total: u64) -> ResourceResult<u64> {
    if bytes == 0 {
        return Err(ResourceError::zero_bytes());
    }
    let minimum = round_up(bytes, unit).filter(|&minimum| minimum <= total);
    minimum.ok_or_else(|| out_of_memory(bytes, format!("the device has {total} bytes in all")))
}
