//! Fit policy: selects a free range for a request.
//!
//! Good fit: it examines the first [`FIT_CANDIDATES`] ranges of the request's class and takes the smallest that fits;
//! otherwise the smallest of the first ranges of the next nonempty class, where every range fits. Without such a class it
//! walks the whole list of the request's class, so a request fails only if no range fits. A small block also fails if the found
//! range is larger than a chunk; then the caller splits off another chunk.
//!
//! Lists are last in, first out. A search for a usable stamp starts at the oldest range. After [`MAX_PROBES`] it skips to the
//! highest class.

use super::classes::{Classes, class_of, exact, first, is_class_minimum, newest, next, oldest};
use super::nodes::{Id, Node, Slots};
use super::{Tlsf, UNIT};

/// Ranges probed in one class.
const FIT_CANDIDATES: usize = 4;
/// Ranges probed in all classes together, when stamps may be unusable.
const MAX_PROBES: usize = 64;

/// A request in whole units.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitRequest {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

impl FitRequest {
    #[inline]
    pub(super) fn new(bytes: u64, align: u64) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT)?;
        align.is_power_of_two().then_some(Self { bytes, align: align.max(UNIT) })
    }

    /// Returns the offset in a range at which the aligned request begins; `None` if it does not fit.
    #[inline]
    fn fits(&self, node: &Node) -> Option<u64> {
        let head = node.ptr().wrapping_neg() & (self.align - 1);
        (head <= node.bytes && node.bytes - head >= self.bytes).then_some(head)
    }
}

/// Finds a range of at least `bytes`, a multiple of the unit, and its class.
#[inline(always)]
pub(super) fn find(slots: &Slots<'_>, classes: &Classes, bytes: u64) -> Option<(Id, u32)> {
    let class = class_of(bytes);
    if is_class_minimum(bytes) {
        good_fit(slots, classes.next_nonempty(class)?, bytes)
    } else {
        fit_within_class(slots, classes, class, bytes)
    }
}

/// Returns the smallest of the first ranges of a class in which every range fits.
#[inline(always)]
fn good_fit(slots: &Slots<'_>, class: u32, bytes: u64) -> Option<(Id, u32)> {
    let id = first(slots, class)?;
    // All ranges of an exact class have one size.
    if exact(class) || slots.at(id).bytes == bytes {
        return Some((id, class));
    }
    let (mut found, mut at) = (id, id);
    for _ in 1..FIT_CANDIDATES {
        let Some(id) = next(slots, at) else { break };
        if slots.at(id).bytes < slots.at(found).bytes {
            found = id;
        }
        at = id;
    }
    Some((found, class))
}

/// [`find`] for a size that some ranges of its class cannot hold.
#[inline(always)]
fn fit_within_class(
    slots: &Slots<'_>,
    classes: &Classes,
    class: u32,
    bytes: u64,
) -> Option<(Id, u32)> {
    if let Some(found) = best_fit(slots, class, bytes, FIT_CANDIDATES) {
        return Some(found);
    }
    // Every range of a higher class fits.
    match classes.next_nonempty(class + 1) {
        Some(above) => good_fit(slots, above, bytes),
        None => best_fit_of_all(slots, class, bytes),
    }
}

/// Returns the smallest range of at least `bytes` in a class.
#[cold]
#[inline(never)]
fn best_fit_of_all(slots: &Slots<'_>, class: u32, bytes: u64) -> Option<(Id, u32)> {
    best_fit(slots, class, bytes, usize::MAX)
}

/// Returns the smallest range of at least `bytes` among the first `candidates` of a class.
#[inline(always)]
fn best_fit(slots: &Slots<'_>, class: u32, bytes: u64, candidates: usize) -> Option<(Id, u32)> {
    let (mut best, mut size, mut at) = (None, u64::MAX, first(slots, class));
    for _ in 0..candidates {
        let Some(id) = at else { break };
        let node = slots.at(id);
        if node.bytes >= bytes && node.bytes < size {
            (best, size) = (Some(id), node.bytes);
            if size == bytes {
                break;
            }
        }
        at = next(slots, id);
    }
    best.map(|id| (id, class))
}

impl Tlsf {
    /// Finds a range for a request that is aligned to more than a unit, and the offset of the request in it.
    pub(super) fn find_aligned(&mut self, request: FitRequest) -> Option<(Id, u64)> {
        let near = self.find_if(request, &mut |_| true);
        near.or_else(|| {
            // A range of this size holds the request at any address.
            let (slots, _) = self.nodes.slots()?;
            let minimum = request.bytes.checked_add(request.align - UNIT)?;
            let (id, _) = find(&slots, &self.classes, minimum)?;
            Some((id, request.fits(self.nodes.at(id))?))
        })
        .or_else(|| {
            let mut from = self.classes.next_nonempty(class_of(request.bytes));
            while let Some(class) = from {
                for (id, node) in newest(&self.nodes, class) {
                    if let Some(head) = request.fits(node) {
                        return Some((id, head));
                    }
                }
                from = self.classes.next_nonempty(class + 1);
            }
            None
        })
    }

    /// Finds a range with a usable stamp: oldest first, the first ranges of each class upward. After [`MAX_PROBES`] it
    /// tries only the highest class.
    pub(super) fn find_if(
        &self,
        request: FitRequest,
        usable: &mut dyn FnMut(u64) -> bool,
    ) -> Option<(Id, u64)> {
        let mut left = MAX_PROBES;
        let mut from = self.classes.next_nonempty(class_of(request.bytes));
        let top = self.classes.last_nonempty()?;
        while let Some(class) = from {
            for (id, node) in oldest(&self.nodes, class).take(FIT_CANDIDATES) {
                match request.fits(node) {
                    Some(head) if usable(node.stamp) => return Some((id, head)),
                    _ => left = left.saturating_sub(1),
                }
            }
            let above = if left == 0 { top.max(class) } else { class + 1 };
            from = if class == top { None } else { self.classes.next_nonempty(above) };
        }
        None
    }
}
