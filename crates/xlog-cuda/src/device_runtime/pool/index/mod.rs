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

use super::prefetch::prefetch;
use borders::Borders;
use classes::{Classes, class_of, newest, spot_of};
use nodes::{Id, Node, Nodes, Slots, State};
use search::{Wish, find, find_any};

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
            return self.carve_at(id, head, wish.bytes);
        }
        self.take_units::<true>(wish.bytes)
    }

    /// Takes memory of `bytes`, which are whole units and not none; mostly whole classes, unless it is `ANY`.
    #[inline(always)]
    pub(crate) fn take_units<const ANY: bool>(&mut self, bytes: u64) -> Option<Taken> {
        let (mut slots, vacant) = self.nodes.slots_with_room()?;
        let find = if ANY { find_any } else { find };
        let found = find(&slots, &self.classes, bytes)?;
        let taken = carve(&mut slots, vacant, &mut self.classes, found, bytes)?;
        // The next one is cut into this.
        prefetch(slots.at(*vacant));
        self.free_bytes -= bytes;
        Some(taken)
    }

    /// Takes memory of at least `bytes` from a range whose stamp is `usable`: all of the range where it has no more than `most`, so
    /// that no splinter of it is left, and otherwise `most` of it, or `bytes` if that is more.
    ///
    /// The search is bounded: `None` says that nothing was found, not that there is nothing.
    pub(crate) fn take_if(
        &mut self,
        (bytes, most): (u64, u64),
        align: u64,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Taken> {
        let wish = Wish::new(bytes, align)?;
        let (id, head) = self.find_if(wish, usable)?;
        let has = self.nodes.at(id).bytes.checked_sub(head)?;
        let whole = if has <= most { has } else { most / UNIT * UNIT };
        self.carve_at(id, head, whole.max(wish.bytes))
    }

    /// Gives a taken range back, with the stamp of the last work on it, and says its size. A node that is not taken is left as it
    /// is, and has none.
    #[inline(always)]
    pub(crate) fn give(&mut self, node: u32, stamp: u64) -> u64 {
        let id = node as Id;
        if !self.nodes.has(id) {
            return 0;
        }
        let Some((mut slots, vacant)) = self.nodes.slots() else { return 0 };
        let node = slots.at(id);
        if !node.is(State::Taken) {
            return 0;
        }
        let (ptr, bytes, before, after) =
            (node.ptr(), node.bytes, node.beside.before(), node.beside.after());
        self.free_bytes += bytes;
        let (left, right) = (slots.at(before), slots.at(after));
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
                resize(&mut slots, classes, before, bytes, stamp);
            }
            (false, true) => {
                let bytes = bytes + right.bytes;
                slots.remove(id, vacant);
                slots.at_mut(after).set(ptr, State::Free);
                resize(&mut slots, classes, after, bytes, stamp);
            }
            (true, true) => {
                // The larger node stays: it is more likely to keep its class, and with it its place in the list.
                let (ptr, bytes) = (left.ptr(), left.bytes + bytes + right.bytes);
                let (stays, goes, gone) = if left.bytes > right.bytes {
                    (before, after, *right)
                } else {
                    (after, before, *left)
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

    /// Asks the processor for what will be looked at soon, when ranges are given back: the node `coming`, and what lies beside
    /// the node `halfway`.
    #[inline(always)]
    pub(crate) fn prefetch(&mut self, coming: u32, halfway: u32) {
        let Some((slots, _)) = self.nodes.slots() else { return };
        prefetch(slots.at(coming as Id));
        let beside = slots.at(halfway as Id).beside;
        for near in [beside.before(), beside.after()] {
            prefetch(slots.at(near));
            prefetch(slots.link(spot_of(near)));
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

    /// The number of free ranges; walks all records.
    pub(crate) fn free_ranges(&self) -> usize {
        self.nodes.all(State::Free).count()
    }

    /// The size of the largest free range; walks the list of the highest class that has one.
    pub(crate) fn largest_free(&self) -> u64 {
        let Some(class) = self.classes.last_filled() else { return 0 };
        let ranges = newest(&self.nodes, class);
        ranges.map(|(_, node)| node.bytes).max().unwrap_or(0)
    }

    /// All free ranges, in no order; walks all records.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.nodes.all(State::Free).map(|(_, node)| node.range())
    }

    /// Takes `bytes` that begin `head` bytes into a free range; `None` if they are not in it.
    fn carve_at(&mut self, id: Id, head: u64, bytes: u64) -> Option<Taken> {
        let Node { beside, stamp, bytes: all, .. } = *self.nodes.at(id);
        let after = beside.after();
        let start = self.nodes.at(id).ptr() + head;
        let rest = all.checked_sub(head)?.checked_sub(bytes)?;
        if head == 0 {
            let (mut slots, vacant) = self.nodes.slots_with_room()?;
            self.free_bytes -= bytes;
            return carve(&mut slots, vacant, &mut self.classes, (id, class_of(all)), bytes);
        }
        if !self.nodes.room(2) {
            return None;
        }
        let part = Range { ptr: start, bytes, stamp };
        let taken = self.nodes.put(Node::new(part, State::Taken), id, after);
        let (mut slots, _) = self.nodes.slots()?;
        resize(&mut slots, &mut self.classes, id, head, stamp);
        if rest > 0 {
            let tail = Range { ptr: start + bytes, bytes: rest, stamp };
            let tail = self.nodes.put(Node::new(tail, State::Free), taken, after);
            let (mut slots, _) = self.nodes.slots()?;
            self.classes.link(&mut slots, tail, class_of(rest));
        }
        self.free_bytes -= bytes;
        Some(Taken { node: taken as u32, ptr: start, bytes, stamp })
    }
}

/// Gives a free range its new size, a stamp that is not before `stamp`, and a place in the list of its class.
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

/// Takes the first `bytes` of a free range of a class that has as many. There is a vacant node.
#[inline(always)]
fn carve(
    slots: &mut Slots<'_>,
    vacant: &mut Id,
    classes: &mut Classes,
    (id, from): (Id, u32),
    bytes: u64,
) -> Option<Taken> {
    let node = slots.at_mut(id);
    let (ptr, stamp) = (node.ptr(), node.stamp);
    let rest = node.bytes.checked_sub(bytes)?;
    if rest == 0 {
        node.set(ptr, State::Taken);
        classes.unlink(slots, id, from);
        return Some(Taken { node: id as u32, ptr, bytes, stamp });
    }
    // The free range keeps its node and only moves to another list if it has to.
    let taken = *vacant;
    let before = node.beside.before();
    node.set(ptr + bytes, State::Free);
    node.bytes = rest;
    node.beside.set_before(taken);
    let part = slots.at_mut(taken);
    *vacant = part.beside.after();
    let range = Range { ptr, bytes, stamp };
    *part = Node::new(range, State::Taken).between(before, id);
    slots.at_mut(before).beside.set_after(taken);
    let to = class_of(rest);
    if from != to {
        classes.unlink(slots, id, from);
        classes.link(slots, id, to);
    }
    Some(Taken { node: taken as u32, ptr, bytes, stamp })
}
