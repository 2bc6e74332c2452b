//! Spans of a TLSF: memory that is inserted and removed.
//!
//! A span is a run of ranges between two boundary nodes. Two ordered maps find boundaries by address. Only inserting
//! and removing memory accesses them; allocating, freeing, splitting and coalescing never do.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::classes::{class_of, newest};
use super::nodes::{Id, NIL, Node, State};
use super::{Range, Removed, Tlsf, UNIT};

/// The boundary nodes by address.
#[derive(Debug, Default)]
pub(super) struct SpanBoundaries {
    begins: BTreeMap<u64, Id>,
    ends: BTreeMap<u64, Id>,
}

impl SpanBoundaries {
    /// Whether a span overlaps the addresses from `ptr` to `end`.
    fn overlap(&self, ptr: u64, end: u64) -> bool {
        let Some((&begin, _)) = self.begins.range(..end).next_back() else { return false };
        let ends = self.ends.range((Bound::Excluded(begin), Bound::Unbounded)).next();
        ends.is_some_and(|(&end, _)| end > ptr)
    }
}

impl Tlsf {
    /// Inserts free memory. With `join` it coalesces with adjacent free memory.
    ///
    /// Returns false and inserts nothing if the range is empty, is not made of whole units, or overlaps existing memory.
    pub(crate) fn insert_span(&mut self, range: Range, join: bool) -> bool {
        let inserted = self.insert_allocated(range, join);
        inserted.is_some_and(|node| self.free(node, range.stamp) > 0)
    }

    /// [`Self::insert_span`] for memory that becomes allocated; returns its node.
    pub(crate) fn insert_allocated(&mut self, range: Range, join: bool) -> Option<u32> {
        let Range { ptr, bytes, .. } = range;
        let end = ptr.checked_add(bytes)?;
        let whole = ptr % UNIT == 0 && bytes % UNIT == 0 && bytes > 0;
        if !whole || !self.nodes.reserve(3) || self.boundaries.overlap(ptr, end) {
            return None;
        }
        let left = if join { self.boundaries.ends.remove(&ptr) } else { None };
        let prev = match left {
            Some(boundary) => {
                let prev = self.nodes.at(boundary).phys.prev();
                self.nodes.remove(boundary);
                prev
            }
            None => self.boundary(ptr, NIL, NIL),
        };
        let right = if join { self.boundaries.begins.remove(&end) } else { None };
        let next = match right {
            Some(boundary) => {
                let next = self.nodes.at(boundary).phys.next();
                self.nodes.remove(boundary);
                next
            }
            None => self.boundary(end, NIL, NIL),
        };
        if left.is_none() {
            self.boundaries.begins.insert(ptr, prev);
        }
        if right.is_none() {
            self.boundaries.ends.insert(end, next);
        }
        let id = self.nodes.put(Node::new(range, State::Allocated), prev, next);
        self.bytes += bytes;
        Some(id as u32)
    }

    /// Removes an allocated range and returns it with the stamp that it was allocated with. `None` if the node is not
    /// allocated.
    pub(crate) fn remove_allocated(&mut self, node: u32) -> Option<Range> {
        let node = node as Id;
        let taken = self.nodes.at(node);
        if !taken.is(State::Allocated) {
            return None;
        }
        let range = taken.range();
        if !self.nodes.reserve(2) {
            return None;
        }
        self.bytes -= range.bytes;
        self.cut(node);
        Some(range)
    }

    /// Removes parts of free ranges of at least `min` bytes: `leave` gets a range and returns a part of it in whole units. The
    /// rest stays free, and `leave` gets it again if it has `min` bytes. What no request needed leaves first.
    pub(crate) fn remove_if(
        &mut self,
        min: u64,
        leave: &mut dyn FnMut(&Range) -> Option<Range>,
    ) -> Removed {
        let (low_water, free) = (self.low_water(), self.free_bytes);
        let mut ranges = Vec::new();
        let mut shown = self.ids_from(min);
        while let Some(id) = shown.pop() {
            let range = self.nodes.at(id).range();
            let Range { ptr, bytes, stamp } = range;
            let Some(part) = leave(&range) else { continue };
            let inside = part.ptr >= ptr
                && part.bytes > 0
                && part.bytes <= bytes
                && part.ptr - ptr <= bytes - part.bytes;
            let whole = part.ptr % UNIT == 0 && part.bytes % UNIT == 0;
            if !inside || !whole || !self.nodes.reserve(4) {
                continue;
            }
            let Some(taken) = self.split_block_at(id, part.ptr - ptr, part.bytes) else { continue };
            let phys = self.nodes.at(taken.node as Id).phys;
            for rest in [phys.prev(), phys.next()] {
                let node = self.nodes.at(rest);
                if node.is(State::Free) && node.bytes >= min {
                    shown.push(rest);
                }
            }
            self.bytes -= taken.bytes;
            self.cut(taken.node as Id);
            ranges.push(Range { ptr: part.ptr, bytes: part.bytes, stamp });
        }
        let unneeded = low_water.min(free - self.free_bytes);
        self.low_water = low_water - unneeded;
        Removed { ranges, unneeded }
    }

    fn ids_from(&self, min: u64) -> Vec<Id> {
        let mut ids = Vec::new();
        let mut from = self.classes.next_nonempty(class_of(min));
        while let Some(class) = from {
            let ranges = newest(&self.nodes, class);
            ids.extend(ranges.filter(|(_, node)| node.bytes >= min).map(|(id, _)| id));
            from = self.classes.next_nonempty(class + 1);
        }
        ids
    }

    /// Removes a node that is in no list, and inserts boundaries in its place.
    fn cut(&mut self, id: Id) {
        let phys = self.nodes.at(id).phys;
        let (prev, next) = (phys.prev(), phys.next());
        let (ptr, end) = (self.nodes.at(id).ptr(), self.nodes.at(id).end());
        self.nodes.remove(id);
        if let Some((mut slots, _)) = self.nodes.slots() {
            slots.at_mut(prev).phys.set_next(NIL);
            slots.at_mut(next).phys.set_prev(NIL);
        }
        if self.nodes.at(prev).is(State::Boundary) {
            self.boundaries.begins.remove(&ptr);
            self.nodes.remove(prev);
        } else {
            let boundary = self.boundary(ptr, prev, NIL);
            self.boundaries.ends.insert(ptr, boundary);
        }
        if self.nodes.at(next).is(State::Boundary) {
            self.boundaries.ends.remove(&end);
            self.nodes.remove(next);
        } else {
            let boundary = self.boundary(end, NIL, next);
            self.boundaries.begins.insert(end, boundary);
        }
    }

    fn boundary(&mut self, ptr: u64, prev: Id, next: Id) -> Id {
        let boundary = Range { ptr, bytes: 0, stamp: 0 };
        self.nodes.put(Node::new(boundary, State::Boundary), prev, next)
    }
}
