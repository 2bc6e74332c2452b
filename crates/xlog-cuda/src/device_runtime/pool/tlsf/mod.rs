//! Free memory of one arena: two-level segregated fit (TLSF) over device addresses.
//!
//! All metadata lies in host memory; nothing here touches device memory.
//!
//! Invariants:
//! - Every inserted address belongs to exactly one range, free or allocated. A range knows its physical neighbours.
//! - Two free neighbours are always coalesced, except across the boundary of spans that were inserted without joining.
//! - Small blocks are split only from ranges up to the size of a [`CHUNK`]. A chunk is a span that was inserted without
//!   joining, until [`Tlsf::coalesce_chunks`].
//! - Sizes and addresses are multiples of [`UNIT`].
//! - A range carries the stamp of the last work on it. A split copies the stamp to both parts; a merge keeps the later
//!   one.
//!
//! Neither locks nor interprets stamps: both are the caller's job. Freeing takes constant time. Allocating probes a bounded
//! number of ranges, unless only the request's own class can hold it or it is aligned to more than a unit. Only growth of
//! the node vectors allocates host memory.

#![forbid(unsafe_code)]

mod classes;
mod nodes;
mod search;
mod span_boundaries;
#[cfg(test)]
mod tests;

use super::prefetch::prefetch;
use classes::{Classes, class_of, newest, spot_of};
use nodes::{Id, Node, Nodes, Slots, State};
use search::{FitRequest, find};
use span_boundaries::SpanBoundaries;

/// The unit of all sizes and addresses, in bytes.
pub(crate) const UNIT: u64 = 256;

/// The size of a chunk, which small blocks share: a live small block then splits no larger range.
pub(crate) const CHUNK: u64 = 2 << 20;
const CHUNK_CLASS: u32 = class_of(CHUNK);
/// Blocks below this size are small.
pub(crate) const SMALL: u64 = 256 << 10;

/// An allocated range, until its node is freed or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TlsfAllocation {
    /// The node of the range. The number is reused after the range is freed.
    pub(crate) node: u32,
    pub(crate) ptr: u64,
    /// The size: the requested bytes, rounded up to whole units.
    pub(crate) bytes: u64,
    /// The stamp that the range had while it was free.
    pub(crate) stamp: u64,
}

/// A range that is inserted or removed, or a view of a free range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    /// The stamp of the last work on the range; 0 if no work is pending on it.
    pub(crate) stamp: u64,
}

/// Free memory that was removed.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    pub(crate) ranges: Vec<Range>,
    /// The part of it that no request needed since the low water was restarted.
    pub(crate) unneeded: u64,
}

/// A request for at least `bytes`, and for up to `maximum` if that is more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundedFit {
    pub(crate) bytes: u64,
    pub(crate) maximum: u64,
    pub(crate) align: u64,
}

/// The free and allocated ranges of one arena.
#[derive(Debug, Default)]
pub(crate) struct Tlsf {
    nodes: Nodes,
    classes: Classes,
    boundaries: SpanBoundaries,
    bytes: u64,
    free_bytes: u64,
    /// The minimum of `free_bytes` since [`Tlsf::restart_low_water`], if an allocation or a removal lowered it.
    low_water: u64,
}

impl Tlsf {
    /// Allocates exactly `bytes`, rounded up to whole units, at a multiple of `align`.
    ///
    /// Returns `None` if no free range is large enough, or if `align` is not a power of two.
    #[inline]
    pub(crate) fn allocate(&mut self, bytes: u64, align: u64) -> Option<TlsfAllocation> {
        let request = FitRequest::new(bytes, align)?;
        if request.align > UNIT {
            let (id, head) = self.find_aligned(request)?;
            return self.allocate_at(id, head, request.bytes);
        }
        self.allocate_up_to(request.bytes, u32::MAX)
    }

    /// Allocates `bytes`, a positive number of whole units; small blocks only from ranges up to the size of a chunk.
    #[inline(always)]
    pub(crate) fn allocate_units(&mut self, bytes: u64) -> Option<TlsfAllocation> {
        self.allocate_up_to(bytes, if bytes < SMALL { CHUNK_CLASS } else { u32::MAX })
    }

    /// Splits a chunk for small blocks off a larger range. The chunk coalesces with no neighbour until [`Self::coalesce_chunks`].
    pub(crate) fn split_chunk(&mut self) -> bool {
        let low_water = self.low_water;
        let is_split = self.split_off_chunk();
        self.low_water = low_water;
        is_split
    }

    fn split_off_chunk(&mut self) -> bool {
        let taken = self.allocate(CHUNK, CHUNK).or_else(|| self.allocate(CHUNK, UNIT));
        let Some(taken) = taken else { return false };
        match self.remove_allocated(taken.node) {
            Some(range) => self.insert_span(range, false),
            None => {
                self.free(taken.node, taken.stamp);
                false
            }
        }
    }

    /// Coalesces chunks that are completely free with their neighbours.
    pub(crate) fn coalesce_chunks(&mut self) {
        let low_water = self.low_water;
        let chunks = self.remove_if(CHUNK, &mut |range| (range.bytes == CHUNK).then_some(*range));
        chunks.ranges.into_iter().for_each(|chunk| {
            self.insert_span(chunk, true);
        });
        self.low_water = low_water;
    }

    /// Allocates whole units from a range of class `highest` or below.
    #[inline(always)]
    fn allocate_up_to(&mut self, bytes: u64, highest: u32) -> Option<TlsfAllocation> {
        let (mut slots, vacant) = self.nodes.slots_with_vacant()?;
        let (id, class) = find(&slots, &self.classes, bytes)?;
        if class > highest {
            return None;
        }
        let taken = split_block(&mut slots, vacant, &mut self.classes, id, class, bytes)?;
        self.free_bytes -= bytes;
        self.low_water = self.low_water.min(self.free_bytes);
        Some(taken)
    }

    /// Allocates at least `bytes` from a range whose stamp is `usable`.
    ///
    /// A range of at most `maximum` bytes is allocated whole, so that no splinter is left. From a larger range it
    /// allocates `maximum`, or `bytes` if that is more. The search is bounded: `None` does not prove that no range
    /// fits.
    pub(crate) fn allocate_if(
        &mut self,
        fit: BoundedFit,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<TlsfAllocation> {
        let BoundedFit { bytes, maximum, align } = fit;
        let request = FitRequest::new(bytes, align)?;
        let (id, head) = self.find_if(request, usable)?;
        let has = self.nodes.at(id).bytes.checked_sub(head)?;
        let whole = if has <= maximum { has } else { maximum / UNIT * UNIT };
        self.allocate_at(id, head, whole.max(request.bytes))
    }

    fn allocate_at(&mut self, id: Id, head: u64, bytes: u64) -> Option<TlsfAllocation> {
        let taken = self.split_block_at(id, head, bytes)?;
        self.low_water = self.low_water.min(self.free_bytes);
        Some(taken)
    }

    /// Frees an allocated range with the stamp of the last work on it, and returns its size. Returns 0 and changes
    /// nothing if the node is not allocated.
    #[inline(always)]
    pub(crate) fn free(&mut self, node: u32, stamp: u64) -> u64 {
        let id = node as Id;
        if !self.nodes.has(id) {
            return 0;
        }
        let Some((mut slots, vacant)) = self.nodes.slots() else { return 0 };
        let node = slots.at(id);
        if !node.is(State::Allocated) {
            return 0;
        }
        let (ptr, bytes, prev, next) = (node.ptr(), node.bytes, node.phys.prev(), node.phys.next());
        self.free_bytes += bytes;
        let (left, right) = (slots.at(prev), slots.at(next));
        let classes = &mut self.classes;
        match (left.is(State::Free), right.is(State::Free)) {
            (false, false) => {
                let freed = slots.at_mut(id);
                freed.set(ptr, State::Free);
                freed.stamp = stamp;
                classes.link(&mut slots, id, class_of(bytes));
            }
            (true, false) => {
                let bytes = left.bytes + bytes;
                slots.remove(id, vacant);
                resize(&mut slots, classes, prev, bytes, stamp);
            }
            (false, true) => {
                let bytes = bytes + right.bytes;
                slots.remove(id, vacant);
                slots.at_mut(next).set(ptr, State::Free);
                resize(&mut slots, classes, next, bytes, stamp);
            }
            (true, true) => {
                // Keep the larger node: it is more likely to stay in its class, and so in its list.
                let (ptr, bytes) = (left.ptr(), left.bytes + bytes + right.bytes);
                let (stays, goes, gone) = if left.bytes > right.bytes {
                    (prev, next, *right)
                } else {
                    (next, prev, *left)
                };
                let stamp = stamp.max(gone.stamp);
                classes.unlink(&mut slots, goes, class_of(gone.bytes));
                slots.remove(goes, vacant);
                slots.remove(id, vacant);
                slots.at_mut(stays).set(ptr, State::Free);
                resize(&mut slots, classes, stays, bytes, stamp);
            }
        }
        bytes
    }

    /// Prefetches data for the next frees: the node `coming`, and the physical neighbours of the node `halfway`.
    #[inline(always)]
    pub(crate) fn prefetch(&mut self, coming: u32, halfway: u32) {
        let Some((slots, _)) = self.nodes.slots() else { return };
        prefetch(slots.at(coming as Id));
        let phys = slots.at(halfway as Id).phys;
        for near in [phys.prev(), phys.next()] {
            prefetch(slots.at(near));
            prefetch(slots.link(spot_of(near)));
        }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Returns the minimum of the free bytes since the last [`Self::restart_low_water`]: what no request needed.
    pub(crate) fn low_water(&self) -> u64 {
        self.low_water.min(self.free_bytes)
    }

    pub(crate) fn restart_low_water(&mut self) {
        self.low_water = self.free_bytes;
    }

    /// Notes that memory which no request needed was inserted.
    pub(crate) fn raise_low_water(&mut self, bytes: u64) {
        self.low_water = self.low_water() + bytes;
    }

    /// False if no free range holds `bytes`; true if one may.
    pub(crate) fn may_hold(&self, bytes: u64) -> bool {
        self.classes.next_nonempty(class_of(bytes)).is_some()
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.bytes - self.free_bytes
    }

    /// Counts the free ranges. Walks all nodes.
    pub(crate) fn free_ranges(&self) -> usize {
        self.nodes.all(State::Free).count()
    }

    /// Returns the size of the largest free range. Walks the list of the highest nonempty class.
    pub(crate) fn largest_free(&self) -> u64 {
        let Some(class) = self.classes.last_nonempty() else { return 0 };
        let ranges = newest(&self.nodes, class);
        ranges.map(|(_, node)| node.bytes).max().unwrap_or(0)
    }

    /// Iterates over all free ranges, in no order. Walks all nodes.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.nodes.all(State::Free).map(|(_, node)| node.range())
    }

    /// Allocates `bytes` at offset `head` in a free range; `None` if they do not fit.
    fn split_block_at(&mut self, id: Id, head: u64, bytes: u64) -> Option<TlsfAllocation> {
        let Node { phys, stamp, bytes: all, .. } = *self.nodes.at(id);
        let next = phys.next();
        let start = self.nodes.at(id).ptr() + head;
        let rest = all.checked_sub(head)?.checked_sub(bytes)?;
        if head == 0 {
            let (mut slots, vacant) = self.nodes.slots_with_vacant()?;
            self.free_bytes -= bytes;
            return split_block(&mut slots, vacant, &mut self.classes, id, class_of(all), bytes);
        }
        if !self.nodes.reserve(2) {
            return None;
        }
        let part = Range { ptr: start, bytes, stamp };
        let taken = self.nodes.put(Node::new(part, State::Allocated), id, next);
        let (mut slots, _) = self.nodes.slots()?;
        resize(&mut slots, &mut self.classes, id, head, stamp);
        if rest > 0 {
            let tail = Range { ptr: start + bytes, bytes: rest, stamp };
            let tail = self.nodes.put(Node::new(tail, State::Free), taken, next);
            let (mut slots, _) = self.nodes.slots()?;
            self.classes.link(&mut slots, tail, class_of(rest));
        }
        self.free_bytes -= bytes;
        Some(TlsfAllocation { node: taken as u32, ptr: start, bytes, stamp })
    }
}

/// Sets the size of a free range, raises its stamp to at least `stamp`, and moves it to the list of its new class.
#[inline(always)]
fn resize(slots: &mut Slots<'_>, classes: &mut Classes, id: Id, bytes: u64, stamp: u64) {
    let node = slots.at_mut(id);
    let (from, to) = (class_of(node.bytes), class_of(bytes));
    node.bytes = bytes;
    node.stamp = node.stamp.max(stamp);
    if from != to {
        classes.unlink(slots, id, from);
        classes.link(slots, id, to);
    }
}

/// Allocates the first `bytes` of a free range of class `from`. The caller has ensured that a node is vacant.
#[inline(always)]
fn split_block(
    slots: &mut Slots<'_>,
    vacant: &mut Id,
    classes: &mut Classes,
    id: Id,
    from: u32,
    bytes: u64,
) -> Option<TlsfAllocation> {
    let node = slots.at_mut(id);
    let (ptr, stamp) = (node.ptr(), node.stamp);
    let rest = node.bytes.checked_sub(bytes)?;
    if rest == 0 {
        node.set(ptr, State::Allocated);
        classes.unlink(slots, id, from);
        return Some(TlsfAllocation { node: id as u32, ptr, bytes, stamp });
    }
    // The free remainder keeps its node, and changes its list only if its class changes.
    let taken = *vacant;
    let prev = node.phys.prev();
    node.set(ptr + bytes, State::Free);
    node.bytes = rest;
    node.phys.set_prev(taken);
    let part = slots.at_mut(taken);
    *vacant = part.phys.next();
    let range = Range { ptr, bytes, stamp };
    *part = Node::new(range, State::Allocated).between(prev, id);
    slots.at_mut(prev).phys.set_next(taken);
    let to = class_of(rest);
    if from != to {
        classes.unlink(slots, id, from);
        classes.link(slots, id, to);
    }
    Some(TlsfAllocation { node: taken as u32, ptr, bytes, stamp })
}
