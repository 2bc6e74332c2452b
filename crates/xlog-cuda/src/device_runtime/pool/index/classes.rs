//! Lists of the free ranges by size class, and the bitmap that finds the next class with a range in it.
//!
//! Sizes are counted in units. Below 32 units each size is a class of its own; above, every power of two is divided
//! into 32 classes. A class knows the first node of its list, the newest, and that one knows the last.

use super::UNIT;
use super::nodes::{Id, NIL, Node, Nodes, Slots};

/// Divisions of a power of two.
const DIVISIONS: u32 = 32;
/// More than the classes that a 64-bit size can have, so that masks keep every access in bounds.
const CLASSES: usize = 2048;
const WORDS: usize = CLASSES / 64;

/// The class of a size in bytes. A larger size has the same class or a higher one.
#[inline(always)]
pub(super) fn class_of(bytes: u64) -> u32 {
    let units = bytes / UNIT;
    let shift = shift_of(units);
    shift * DIVISIONS + (units >> shift) as u32
}

/// How many low bits of a size in units its class does not tell.
#[inline(always)]
fn shift_of(units: u64) -> u32 {
    (units | u64::from(DIVISIONS)).ilog2() - DIVISIONS.ilog2()
}

/// Whether no size of its class is smaller.
#[inline(always)]
pub(super) fn is_least(bytes: u64) -> bool {
    let units = bytes / UNIT;
    units & ((1 << shift_of(units)) - 1) == 0
}

/// Whether all ranges of the class have one size.
#[inline(always)]
pub(super) fn exact(class: u32) -> bool {
    class < 2 * DIVISIONS
}

/// The lists.
#[derive(Debug)]
pub(super) struct Classes {
    first: [Id; CLASSES],
    filled: [u64; WORDS],
    /// One bit per word of `filled` that is not zero.
    words: u32,
}

impl Default for Classes {
    fn default() -> Self {
        Self { first: [NIL; CLASSES], filled: [0; WORDS], words: 0 }
    }
}

impl Classes {
    /// The first node of a class, or [`NIL`].
    #[inline(always)]
    pub(super) fn first(&self, class: u32) -> Id {
        self.first[class as usize % CLASSES]
    }

    /// The lowest class, from `class` upward, that has a range.
    #[inline(always)]
    pub(super) fn next_filled(&self, class: u32) -> Option<u32> {
        let word = class as usize / 64 % WORDS;
        let upward = !0 << (class % 64);
        let here = u32::from(self.filled[word] & upward != 0);
        // Whether it is this word or another cannot be guessed: no branch depends on it.
        let words = self.words & (!1 << word) | here << word;
        if words == 0 {
            return None;
        }
        let found = words.trailing_zeros() as usize % WORDS;
        let bits = self.filled[found] & if found == word { upward } else { !0 };
        Some(found as u32 * 64 + bits.trailing_zeros())
    }

    /// The highest class that has a range.
    pub(super) fn last_filled(&self) -> Option<u32> {
        let word = self.words.checked_ilog2()?;
        Some(word * 64 + self.filled[word as usize % WORDS].checked_ilog2()?)
    }

    /// The ranges of a class, newest first.
    pub(super) fn newest<'a>(
        &self,
        nodes: &'a Nodes,
        class: u32,
    ) -> impl Iterator<Item = (Id, &'a Node)> + use<'a> {
        let mut next = self.first(class);
        std::iter::from_fn(move || {
            let id = next;
            let node = nodes.at(id);
            next = node.next;
            (id != NIL).then_some((id, node))
        })
    }

    /// The ranges of a class, oldest first.
    pub(super) fn oldest<'a>(
        &self,
        nodes: &'a Nodes,
        class: u32,
    ) -> impl Iterator<Item = (Id, &'a Node)> + use<'a> {
        let first = self.first(class);
        let mut next = if first == NIL { NIL } else { nodes.at(first).prev };
        std::iter::from_fn(move || {
            let id = next;
            let node = nodes.at(id);
            next = if id == first { NIL } else { node.prev };
            (id != NIL).then_some((id, node))
        })
    }

    /// Puts a node at the front of the list of a class.
    #[inline(always)]
    pub(super) fn link(&mut self, slots: &mut Slots<'_>, id: Id, class: u32) {
        let at = class as usize % CLASSES;
        let next = self.first[at];
        self.first[at] = id;
        let front = slots.at_mut(next);
        let last = if next == NIL { id } else { front.prev };
        front.prev = id;
        let node = slots.at_mut(id);
        node.class = class;
        node.prev = last;
        node.next = next;
        let word = at / 64;
        self.filled[word] |= 1 << (class % 64);
        self.words |= 1 << word;
    }

    /// Takes a node out of the list it is in.
    #[inline(always)]
    pub(super) fn unlink(&mut self, slots: &mut Slots<'_>, id: Id) {
        let node = slots.at(id);
        let (prev, next, class) = (node.prev, node.next, node.class);
        let at = class as usize % CLASSES;
        let first = self.first[at];
        if first == id {
            self.first[at] = next;
            slots.at_mut(next).prev = prev;
            if next == NIL {
                let word = at / 64;
                let filled = self.filled[word] & !(1 << (class % 64));
                self.filled[word] = filled;
                self.words &= !(u32::from(filled == 0) << word);
            }
        } else {
            slots.at_mut(prev).next = next;
            let follower = if next == NIL { first } else { next };
            slots.at_mut(follower).prev = prev;
        }
    }
}
