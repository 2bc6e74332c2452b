//! Free lists by size class, and the two-level bitmap of nonempty classes.
//!
//! Sizes are counted in units. Below 64 units each size is a class of its own; above, every power of two is divided
//! into 32 classes. A list is a ring of links through the link of its class, so linking and unlinking have no branch on
//! the position in the list.

use super::UNIT;
use super::nodes::{Id, Neighbors, Node, Nodes, Slots};

/// Classes for each power of two.
const DIVISIONS: u32 = 32;
/// The number of classes that a 64-bit size can have.
pub(super) const CLASSES: usize = 1664;
/// Words of the bitmap: a power of two, so that a mask keeps every access in bounds.
const WORDS: usize = 32;

/// Returns the class of a size in bytes. Larger sizes never have a smaller class.
#[inline(always)]
pub(super) const fn class_of(bytes: u64) -> u32 {
    let units = bytes / UNIT;
    let shift = shift_of(units);
    shift * DIVISIONS + (units >> shift) as u32
}

/// The number of low bits of a size in units that its class ignores.
#[inline(always)]
const fn shift_of(units: u64) -> u32 {
    (units | DIVISIONS as u64).ilog2() - DIVISIONS.ilog2()
}

/// Whether this is the smallest size of its class.
#[inline(always)]
pub(super) fn is_class_minimum(bytes: u64) -> bool {
    let units = bytes / UNIT;
    units & ((1 << shift_of(units)) - 1) == 0
}

/// Whether all ranges of the class have the same size.
#[inline(always)]
pub(super) fn exact(class: u32) -> bool {
    class < 2 * DIVISIONS
}

/// Returns the link of an empty list, or of a node in no list. Links of classes come first, those of nodes follow.
#[inline(always)]
pub(super) fn alone(spot: usize) -> Neighbors {
    Neighbors::new(spot, spot)
}

/// Returns the index of the link of a node.
#[inline(always)]
pub(super) fn spot_of(id: Id) -> usize {
    id + CLASSES
}

/// Returns the node of a link; `None` for the link of a class.
#[inline(always)]
fn node_at(spot: usize) -> Option<Id> {
    spot.checked_sub(CLASSES)
}

#[derive(Debug)]
pub(super) struct Classes {
    sl_bitmap: [u64; WORDS],
    /// One bit for each nonzero word of `sl_bitmap`.
    fl_bitmap: u32,
}

impl Default for Classes {
    fn default() -> Self {
        Self { sl_bitmap: [0; WORDS], fl_bitmap: 0 }
    }
}

/// Returns the newest node of a class.
#[inline(always)]
pub(super) fn first(slots: &Slots<'_>, class: u32) -> Option<Id> {
    node_at(slots.link(class as usize).next())
}

/// Returns the next node in the list of `id`.
#[inline(always)]
pub(super) fn next(slots: &Slots<'_>, id: Id) -> Option<Id> {
    node_at(slots.link(spot_of(id)).next())
}

/// Iterates over the ranges of a class, newest first.
pub(super) fn newest(nodes: &Nodes, class: u32) -> impl Iterator<Item = (Id, &Node)> {
    listed(nodes, class, Neighbors::next)
}

/// Iterates over the ranges of a class, oldest first.
pub(super) fn oldest(nodes: &Nodes, class: u32) -> impl Iterator<Item = (Id, &Node)> {
    listed(nodes, class, Neighbors::prev)
}

fn listed(
    nodes: &Nodes,
    class: u32,
    step: fn(Neighbors) -> usize,
) -> impl Iterator<Item = (Id, &Node)> {
    let mut spot = class as usize;
    std::iter::from_fn(move || {
        spot = step(nodes.link(spot));
        node_at(spot).map(|id| (id, nodes.at(id)))
    })
}

impl Classes {
    /// Returns the lowest nonempty class from `class` upward.
    #[inline(always)]
    pub(super) fn next_nonempty(&self, class: u32) -> Option<u32> {
        let word = class as usize / 64 % WORDS;
        let upward = !0 << (class % 64);
        let here = u32::from(self.sl_bitmap[word] & upward != 0);
        // Branch-free, because no processor predicts which word holds the bit.
        let words = self.fl_bitmap & (!1 << word) | here << word;
        if words == 0 {
            return None;
        }
        let found = words.trailing_zeros() as usize % WORDS;
        let bits = self.sl_bitmap[found] & if found == word { upward } else { !0 };
        Some(found as u32 * 64 + bits.trailing_zeros())
    }

    /// Returns the highest nonempty class.
    pub(super) fn last_nonempty(&self) -> Option<u32> {
        let word = self.fl_bitmap.checked_ilog2()?;
        Some(word * 64 + self.sl_bitmap[word as usize % WORDS].checked_ilog2()?)
    }

    /// Links a node at the front of the list of a class.
    #[inline(always)]
    pub(super) fn link(&mut self, slots: &mut Slots<'_>, id: Id, class: u32) {
        let spot = spot_of(id);
        let head = slots.link_mut(class as usize);
        let next = head.next();
        head.set_next(spot);
        slots.link_mut(next).set_prev(spot);
        *slots.link_mut(spot) = Neighbors::new(class as usize, next);
        let word = class as usize / 64 % WORDS;
        self.sl_bitmap[word] |= 1 << (class % 64);
        self.fl_bitmap |= 1 << word;
    }

    /// Unlinks a node from the list of its class, which is never class 0.
    #[inline(always)]
    pub(super) fn unlink(&mut self, slots: &mut Slots<'_>, id: Id, class: u32) {
        let link = *slots.link(spot_of(id));
        let (prev, next) = (link.prev(), link.next());
        slots.link_mut(prev).set_next(next);
        slots.link_mut(next).set_prev(prev);
        // Previous and next are equal only if both are the link of the class.
        let emptied = u64::from(prev == next);
        let word = class as usize / 64 % WORDS;
        let sl_bitmap = self.sl_bitmap[word] & !(emptied << (class % 64));
        self.sl_bitmap[word] = sl_bitmap;
        self.fl_bitmap &= !(u32::from(sl_bitmap == 0) << word);
    }
}
