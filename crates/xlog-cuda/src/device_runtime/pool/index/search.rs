//! Which free range serves a request.
//!
//! Good fit, sharpened: the smallest of the first few ranges of the request's own class, else the smallest of the first
//! few of the next class that has any, where every range fits. Only when there is no such class is the request's own
//! list walked to its end, so that a request is refused only if no range can hold it. Lists are last in, first out; a
//! search for a usable stamp starts at the oldest.

use super::classes::{class_of, exact};
use super::nodes::{NIL, Node};
use super::{Index, UNIT};

/// Ranges looked at in one class.
const LOOKS: usize = 4;
/// Ranges looked at in all classes, when not every range will do.
const ALL_LOOKS: usize = 64;

/// A request in whole units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

impl Wish {
    #[inline]
    pub(super) fn new(bytes: u64, align: u64) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT)?;
        align.is_power_of_two().then_some(Self { bytes, align: align.max(UNIT) })
    }

    /// How far into a range the aligned request begins, if it fits there.
    #[inline]
    fn fits(&self, node: &Node) -> Option<u64> {
        let head = node.ptr().wrapping_neg() & (self.align - 1);
        (head <= node.bytes && node.bytes - head >= self.bytes).then_some(head)
    }
}

impl Index {
    /// A range of at least `bytes`, which is a multiple of the unit.
    #[inline]
    pub(super) fn find(&self, bytes: u64) -> Option<u32> {
        let class = class_of(bytes);
        if exact(class) {
            let class = self.classes.next_filled(class)?;
            return self.best(class, 0, LOOKS);
        }
        self.best(class, bytes, LOOKS).or_else(|| match self.classes.next_filled(class + 1) {
            Some(class) => self.best(class, 0, LOOKS),
            None => self.best(class, bytes, usize::MAX),
        })
    }

    /// The smallest range of at least `bytes` among the first `looks` of a class.
    #[inline]
    fn best(&self, class: u32, bytes: u64, looks: usize) -> Option<u32> {
        let first = self.classes.first(class);
        if exact(class) {
            return (first != NIL).then_some(first);
        }
        let (mut best, mut size, mut id) = (NIL, u64::MAX, first);
        for _ in 0..looks {
            let node = self.nodes.at(id);
            if node.bytes >= bytes && node.bytes < size && id != NIL {
                (best, size) = (id, node.bytes);
                if size == bytes {
                    break;
                }
            }
            id = node.next;
            if id == NIL {
                break;
            }
        }
        (best != NIL).then_some(best)
    }

    /// A range for a request that is aligned to more than a unit, and how far into it the request begins.
    pub(super) fn find_aligned(&self, wish: Wish) -> Option<(u32, u64)> {
        let near = self.find_if(wish, &mut |_| true);
        near.or_else(|| {
            // Large enough whatever its address is.
            let id = self.find(wish.bytes.checked_add(wish.align - UNIT)?)?;
            Some((id, wish.fits(self.nodes.at(id))?))
        })
        .or_else(|| {
            let mut from = self.classes.next_filled(class_of(wish.bytes));
            while let Some(class) = from {
                for (id, node) in self.classes.newest(&self.nodes, class) {
                    if let Some(head) = wish.fits(node) {
                        return Some((id, head));
                    }
                }
                from = self.classes.next_filled(class + 1);
            }
            None
        })
    }

    /// A range with a usable stamp: a few, oldest first, of each class upward, up to a number of ranges in all, and at
    /// last the highest class.
    pub(super) fn find_if(
        &self,
        wish: Wish,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<(u32, u64)> {
        let mut left = ALL_LOOKS;
        let mut from = self.classes.next_filled(class_of(wish.bytes));
        let top = self.classes.last_filled()?;
        while let Some(class) = from {
            for (id, node) in self.classes.oldest(&self.nodes, class).take(LOOKS) {
                match wish.fits(node) {
                    Some(head) if usable(node.stamp) => return Some((id, head)),
                    _ => left = left.saturating_sub(1),
                }
            }
            let above = if left == 0 { top.max(class) } else { class + 1 };
            from = if class == top { None } else { self.classes.next_filled(above) };
        }
        None
    }
}
