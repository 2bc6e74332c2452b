//! The free memory of one arena: two-level segregated fit over addresses, with all records in host memory.
//!
//! Every address that the index was given is in one range, free or taken, and a range knows the two beside it; free
//! ranges that touch are one range, except across the border of spans that were not joined. Sizes and addresses are
//! multiples of [`UNIT`]. A range carries a stamp, how far the owner's stream had come when it was freed: a split keeps
//! it on both parts, a merge takes the later one. What a stamp means is the caller's business, as is the lock: an index
//! is used by one thread at a time. Taking and giving look at a bounded number of ranges and allocate no host memory,
//! except that the vector of records grows. Nothing here touches the memory itself.

#![forbid(unsafe_code)]

mod borders;
mod classes;
mod nodes;
mod search;
#[cfg(test)]
mod tests;

use borders::Borders;
use classes::{Classes, class_of};
use nodes::{Node, Nodes, State};
use search::Wish;

/// What all sizes and addresses are multiples of, in bytes.
pub(crate) const UNIT: u64 = 256;

/// Memory that was taken, until its node is given back or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Names the range to the index. The number is used again once the range was given back.
    pub(crate) node: u32,
    /// The address.
    pub(crate) ptr: u64,
    /// The size: what was asked for in whole units.
    pub(crate) bytes: u64,
    /// The stamp that the memory had while it was free.
    pub(crate) stamp: u64,
}

/// Memory on its way into an index or out of it, or a view of a free range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// The address.
    pub(crate) ptr: u64,
    /// The size.
    pub(crate) bytes: u64,
    /// The stamp of the last work on it; 0 if nothing depends on it.
    pub(crate) stamp: u64,
}

/// The ranges of one arena.
#[derive(Debug, Default)]
pub(crate) struct Index {
    nodes: Nodes,
    classes: Classes,
    borders: Borders,
    bytes: u64,
    free_bytes: u64,
    free_ranges: usize,
}

impl Index {
    /// Takes memory of exactly `bytes`, rounded up to whole units, at a multiple of `align`.
    ///
    /// `None` when no free range can hold it, or when `align` is not a power of two.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64, align: u64) -> Option<Taken> {
        let wish = Wish::new(bytes, align)?;
        if wish.align > UNIT {
            let (id, head) = self.find_aligned(wish)?;
            return self.carve(id, head, wish.bytes);
        }
        let id = self.find(wish.bytes)?;
        self.carve(id, 0, wish.bytes)
    }

    /// Takes memory as [`take`](Self::take) does, but only from a range whose stamp is `usable`.
    ///
    /// The search is bounded: `None` says that nothing was found, not that there is nothing.
    pub(crate) fn take_if(
        &mut self,
        bytes: u64,
        align: u64,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Taken> {
        let wish = Wish::new(bytes, align)?;
        let (id, head) = self.find_if(wish, usable)?;
        self.carve(id, head, wish.bytes)
    }

    /// Gives a taken range back, with the stamp of the last work on it. A node that is not taken is left as it is.
    #[inline]
    pub(crate) fn give(&mut self, node: u32, stamp: u64) {
        let id = node;
        let node = *self.nodes.at(id);
        if !node.is(State::Taken) {
            return;
        }
        let bytes = node.bytes;
        self.free_bytes += bytes;
        let (before, after) = (*self.nodes.at(node.before), *self.nodes.at(node.after));
        match (before.is(State::Free), after.is(State::Free)) {
            (false, false) => {
                let freed = self.nodes.at_mut(id);
                freed.set_state(State::Free);
                freed.stamp = stamp;
                self.classes.link(&mut self.nodes, id, class_of(bytes));
                self.free_ranges += 1;
            }
            (true, false) => self.grow(node.before, before.ptr(), before.bytes + bytes, stamp, id),
            (false, true) => self.grow(node.after, node.ptr(), after.bytes + bytes, stamp, id),
            (true, true) => {
                // The larger node stays: it is more likely to keep its class, and with it its place in the list.
                let (stays, goes, gone) = if before.bytes > after.bytes {
                    (node.before, node.after, after)
                } else {
                    (node.after, node.before, before)
                };
                self.classes.unlink(&mut self.nodes, goes, class_of(gone.bytes));
                self.nodes.remove(goes);
                self.free_ranges -= 1;
                let bytes = before.bytes + bytes + after.bytes;
                self.grow(stays, before.ptr(), bytes, stamp.max(gone.stamp), id);
            }
        }
    }

    /// The bytes that are free.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The bytes that are taken.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.bytes - self.free_bytes
    }

    /// The number of free ranges.
    pub(crate) fn free_ranges(&self) -> usize {
        self.free_ranges
    }

    /// The size of the largest free range; walks the list of the highest class that has one.
    pub(crate) fn largest_free(&self) -> u64 {
        let Some(class) = self.classes.last_filled() else { return 0 };
        let ranges = self.classes.newest(&self.nodes, class);
        ranges.map(|(_, node)| node.bytes).max().unwrap_or(0)
    }

    /// All free ranges, in no order; walks all records.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.nodes.all(State::Free).map(|(_, node)| node.range())
    }

    /// Takes `bytes` that begin `head` bytes into a free range; `None` if they are not in it.
    #[inline]
    fn carve(&mut self, id: u32, head: u64, bytes: u64) -> Option<Taken> {
        let node = *self.nodes.at(id);
        let (start, stamp) = (node.ptr() + head, node.stamp);
        let rest = node.bytes.checked_sub(head)?.checked_sub(bytes)?;
        let class = class_of(node.bytes);
        let part = Node::new(Range { ptr: start, bytes, stamp }, State::Taken);
        let taken = if head == 0 && rest == 0 {
            self.classes.unlink(&mut self.nodes, id, class);
            self.nodes.at_mut(id).set_state(State::Taken);
            self.free_ranges -= 1;
            id
        } else if head == 0 {
            // The free range keeps its node and only moves to another list if it has to.
            let taken = self.nodes.put(part, node.before, id)?;
            let node = self.nodes.at_mut(id);
            node.set_ptr(start + bytes);
            node.bytes = rest;
            self.relink(id, class, class_of(rest));
            taken
        } else {
            if !self.nodes.room(2) {
                return None;
            }
            let taken = self.nodes.put(part, id, node.after)?;
            self.nodes.at_mut(id).bytes = head;
            self.relink(id, class, class_of(head));
            if rest > 0 {
                let tail = Range { ptr: start + bytes, bytes: rest, stamp };
                let tail = self.nodes.put(Node::new(tail, State::Free), taken, node.after)?;
                self.classes.link(&mut self.nodes, tail, class_of(rest));
                self.free_ranges += 1;
            }
            taken
        };
        self.free_bytes -= bytes;
        Some(Taken { node: taken, ptr: start, bytes, stamp })
    }

    /// Makes a free range larger, over the node `over` beside it, which goes.
    #[inline]
    fn grow(&mut self, id: u32, ptr: u64, bytes: u64, stamp: u64, over: u32) {
        self.nodes.remove(over);
        let node = self.nodes.at_mut(id);
        let class = class_of(node.bytes);
        node.set_ptr(ptr);
        node.bytes = bytes;
        node.stamp = node.stamp.max(stamp);
        self.relink(id, class, class_of(bytes));
    }

    /// Moves a free range from the list of one class to that of another.
    #[inline]
    fn relink(&mut self, id: u32, from: u32, to: u32) {
        if from != to {
            self.classes.unlink(&mut self.nodes, id, from);
            self.classes.link(&mut self.nodes, id, to);
        }
    }
}
