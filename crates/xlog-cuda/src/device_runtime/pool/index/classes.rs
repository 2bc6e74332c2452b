//! Lists of the free ranges by size class, and the bitmap that finds the next class with a range in it.
//!
//! Sizes are counted in units. Below 32 units each size is a class of its own; above, every power of two is divided
//! into 32 classes. A class knows the first node of its list, the newest, and the last.

use super::UNIT;
use super::nodes::{NIL, Node, Nodes};

/// Divisions of a power of two.
const DIVISIONS: u32 = 32;
/// More than the classes that a 64-bit size can have, so that masks keep every access in bounds.
const CLASSES: usize = 2048;
const WORDS: usize = CLASSES / 64;

/// The class of a size in bytes. A larger size has the same class or a higher one.
#[inline]
pub(super) fn class_of(bytes: u64) -> u32 {
    let units = bytes / UNIT;
    if units < u64::from(DIVISIONS) {
        return units as u32;
    }
    let shift = 63 - DIVISIONS.trailing_zeros() - units.leading_zeros();
    ((shift + 1) * DIVISIONS) | ((units >> shift) as u32 & (DIVISIONS - 1))
}

/// Whether all ranges of the class have one size.
#[inline]
pub(super) fn exact(class: u32) -> bool {
    class < 2 * DIVISIONS
}

/// The lists.
#[derive(Debug)]
pub(super) struct Classes {
    first: [u32; CLASSES],
    last: [u32; CLASSES],
    filled: [u64; WORDS],
    /// One bit per word of `filled` that is not zero.
    words: u32,
}

impl Default for Classes {
    fn default() -> Self {
        Self { first: [NIL; CLASSES], last: [NIL; CLASSES], filled: [0; WORDS], words: 0 }
    }
}

impl Classes {
    /// The first node of a class, or [`NIL`].
    #[inline]
    pub(super) fn first(&self, class: u32) -> u32 {
        self.first[class as usize % CLASSES]
    }

    /// The lowest class, from `class` upward, that has a range.
    #[inline]
    pub(super) fn next_filled(&self, class: u32) -> Option<u32> {
        let word = class as usize / 64 % WORDS;
        let here = self.filled[word] & (!0 << (class % 64));
        if here != 0 {
            return Some(word as u32 * 64 + here.trailing_zeros());
        }
        let above = self.words & (!1 << word);
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize % WORDS;
        Some(word as u32 * 64 + self.filled[word].trailing_zeros())
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
    ) -> impl Iterator<Item = (u32, &'a Node)> + use<'a> {
        walk(nodes, self.first(class), |node| node.next)
    }

    /// The ranges of a class, oldest first.
    pub(super) fn oldest<'a>(
        &self,
        nodes: &'a Nodes,
        class: u32,
    ) -> impl Iterator<Item = (u32, &'a Node)> + use<'a> {
        walk(nodes, self.last[class as usize % CLASSES], |node| node.prev)
    }

    /// Puts a node at the front of the list of a class.
    #[inline]
    pub(super) fn link(&mut self, nodes: &mut Nodes, id: u32, class: u32) {
        let at = class as usize % CLASSES;
        let next = self.first[at];
        self.first[at] = id;
        let node = nodes.at_mut(id);
        node.prev = NIL;
        node.next = next;
        if next == NIL {
            self.last[at] = id;
            let word = at / 64;
            self.filled[word] |= 1 << (class % 64);
            self.words |= 1 << word;
        } else {
            nodes.at_mut(next).prev = id;
        }
    }

    /// Takes a node out of the list of a class.
    #[inline]
    pub(super) fn unlink(&mut self, nodes: &mut Nodes, id: u32, class: u32) {
        let at = class as usize % CLASSES;
        let node = nodes.at(id);
        let (prev, next) = (node.prev, node.next);
        if next == NIL {
            self.last[at] = prev;
        } else {
            nodes.at_mut(next).prev = prev;
        }
        if prev != NIL {
            nodes.at_mut(prev).next = next;
            return;
        }
        self.first[at] = next;
        if next == NIL {
            let word = at / 64;
            self.filled[word] &= !(1 << (class % 64));
            if self.filled[word] == 0 {
                self.words &= !(1 << word);
            }
        }
    }
}

/// The nodes of a list from `first` on.
fn walk(nodes: &Nodes, first: u32, step: fn(&Node) -> u32) -> impl Iterator<Item = (u32, &Node)> {
    let mut next = first;
    std::iter::from_fn(move || {
        let id = next;
        let node = nodes.at(id);
        next = step(node);
        (id != NIL).then_some((id, node))
    })
}
