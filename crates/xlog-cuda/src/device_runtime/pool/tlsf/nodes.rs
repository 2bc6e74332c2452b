//! Nodes of a TLSF: one per range, addressed by a `u32` that stays valid while the range exists.
//!
//! Nodes and the links of their lists lie in two vectors. Each has a power of two as its length, so a mask keeps every
//! index in bounds and no access can fail. Two nodes or eight links share a cache line: allocating and freeing in
//! random order is bound by the lines that it touches.
//!
//! Vacant nodes form a stack. Node 0 stands for "no node": it absorbs writes to the missing neighbour of a range, and
//! nothing reads it.

use super::Range;
use super::classes::{CLASSES, alone};

/// The number of a node; it fits into 32 bits.
pub(super) type Id = usize;

pub(super) const NIL: Id = 0;
/// The number of nodes that the first range allocates.
const FIRST_NODES: usize = 16;
const MAX_NODES: usize = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Unused; the node is on the stack of vacant nodes.
    Vacant,
    /// A free range, in the list of its class.
    Free,
    Allocated,
    /// The empty range at the beginning or end of a span. Nothing coalesces with it.
    Boundary,
}

/// A previous and a next index of 32 bits each, which are written and read separately.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbors {
    prev: u32,
    next: u32,
}

impl Neighbors {
    #[inline(always)]
    pub(super) const fn new(prev: usize, next: usize) -> Self {
        Self { prev: prev as u32, next: next as u32 }
    }

    #[inline(always)]
    pub(super) fn prev(self) -> usize {
        self.prev as usize
    }

    #[inline(always)]
    pub(super) fn next(self) -> usize {
        self.next as usize
    }

    #[inline(always)]
    pub(super) fn set_prev(&mut self, prev: usize) {
        self.prev = prev as u32;
    }

    #[inline(always)]
    pub(super) fn set_next(&mut self, next: usize) {
        self.next = next as u32;
    }
}

/// A range and its physical neighbours, on half a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Node {
    /// The address, with the state in the low bits that the unit leaves zero.
    address: u64,
    pub(super) bytes: u64,
    /// The stamp of a free range; of an allocated one, the stamp that it had.
    pub(super) stamp: u64,
    /// The physical neighbours. In a vacant node, `next` is the next vacant node.
    pub(super) phys: Neighbors,
}

const STATE: u64 = 0b11;

impl Node {
    const VACANT: Self = Self::new(Range { ptr: 0, bytes: 0, stamp: 0 }, State::Vacant);

    #[inline(always)]
    pub(super) const fn new(range: Range, state: State) -> Self {
        let Range { ptr, bytes, stamp } = range;
        let address = ptr & !STATE | state as u64;
        Self { address, bytes, stamp, phys: Neighbors::new(NIL, NIL) }
    }

    #[inline(always)]
    pub(super) fn between(self, prev: Id, next: Id) -> Self {
        Self { phys: Neighbors::new(prev, next), ..self }
    }

    pub(super) fn range(&self) -> Range {
        Range { ptr: self.ptr(), bytes: self.bytes, stamp: self.stamp }
    }

    #[inline(always)]
    pub(super) fn ptr(&self) -> u64 {
        self.address & !STATE
    }

    #[inline(always)]
    pub(super) fn end(&self) -> u64 {
        self.ptr() + self.bytes
    }

    #[inline(always)]
    pub(super) fn is(&self, state: State) -> bool {
        self.address & STATE == state as u64
    }

    #[inline(always)]
    pub(super) fn set(&mut self, ptr: u64, state: State) {
        self.address = ptr & !STATE | state as u64;
    }

    /// Pushes the node on the stack of vacant nodes, in front of `next`.
    #[inline(always)]
    pub(super) fn vacate(&mut self, next: Id) {
        self.set(0, State::Vacant);
        self.phys.set_next(next);
    }
}

/// The nodes and links during one operation. Each length is a power of two.
#[derive(Debug)]
pub(super) struct Slots<'a> {
    nodes: &'a mut [Node],
    links: &'a mut [Neighbors],
}

impl Slots<'_> {
    #[inline(always)]
    pub(super) fn at(&self, id: Id) -> &Node {
        &self.nodes[id & (self.nodes.len() - 1)]
    }

    #[inline(always)]
    pub(super) fn at_mut(&mut self, id: Id) -> &mut Node {
        let nodes = &mut *self.nodes;
        &mut nodes[id & (nodes.len() - 1)]
    }

    #[inline(always)]
    pub(super) fn link(&self, spot: usize) -> &Neighbors {
        &self.links[spot & (self.links.len() - 1)]
    }

    #[inline(always)]
    pub(super) fn link_mut(&mut self, spot: usize) -> &mut Neighbors {
        let links = &mut *self.links;
        &mut links[spot & (links.len() - 1)]
    }

    /// Unlinks a node from its physical neighbours and pushes it on the stack of vacant nodes.
    #[inline(always)]
    pub(super) fn remove(&mut self, id: Id, vacant: &mut Id) {
        let node = self.at_mut(id);
        let (prev, next) = (node.phys.prev(), node.phys.next());
        node.vacate(*vacant);
        *vacant = id;
        self.at_mut(prev).phys.set_next(next);
        self.at_mut(next).phys.set_prev(prev);
    }
}

#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    /// The links of the classes, then those of the nodes.
    links: Vec<Neighbors>,
    /// The top of the stack of vacant nodes.
    vacant: Id,
}

impl Nodes {
    /// Returns the nodes and the top of the vacant stack; `None` if there are no nodes.
    #[inline(always)]
    pub(super) fn slots(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        let is_empty = self.nodes.is_empty() || self.links.is_empty();
        let slots = Slots { nodes: &mut self.nodes, links: &mut self.links };
        (!is_empty).then_some((slots, &mut self.vacant))
    }

    /// Reads a node. A number without a node reads as a vacant node.
    #[inline]
    pub(super) fn at(&self, id: Id) -> &Node {
        self.nodes.get(id).unwrap_or(&Node::VACANT)
    }

    /// Reads a link. A number without a link reads as a link to itself.
    pub(super) fn link(&self, spot: usize) -> Neighbors {
        self.links.get(spot).copied().unwrap_or(alone(spot))
    }

    /// Whether a node can have this number.
    #[inline(always)]
    pub(super) fn has(&self, id: Id) -> bool {
        id < self.nodes.len()
    }

    /// Returns the nodes, of which at least one is vacant; `None` if no node can be added.
    #[inline(always)]
    pub(super) fn slots_with_vacant(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        if self.vacant == NIL && !self.reserve(1) {
            return None;
        }
        self.slots()
    }

    /// Ensures that `more` nodes can be inserted without an allocation. Probes at most that many vacant nodes.
    #[cold]
    pub(super) fn reserve(&mut self, more: usize) -> bool {
        let vacant = std::iter::successors(Some(self.vacant), |id| Some(self.at(*id).phys.next()));
        if vacant.take(more).all(|id| id != NIL) {
            return true;
        }
        // Doubling is enough: callers ask for at most four.
        let len = self.nodes.len();
        let doubled = len.max(FIRST_NODES / 2) * 2;
        if doubled > MAX_NODES {
            return false;
        }
        self.nodes.resize(doubled, Node::VACANT);
        let links = (CLASSES + doubled).next_power_of_two();
        self.links.extend((self.links.len()..links).map(alone));
        for id in (len.max(1)..doubled).rev() {
            if let Some(node) = self.nodes.get_mut(id) {
                node.phys.set_next(self.vacant);
                self.vacant = id;
            }
        }
        true
    }

    /// Inserts a node between two neighbours. Returns [`NIL`] without a preceding [`reserve`](Self::reserve).
    pub(super) fn put(&mut self, node: Node, prev: Id, next: Id) -> Id {
        let Some((mut slots, vacant)) = self.slots() else { return NIL };
        let id = *vacant;
        if id == NIL {
            return NIL;
        }
        let slot = slots.at_mut(id);
        *vacant = slot.phys.next();
        *slot = node.between(prev, next);
        slots.at_mut(prev).phys.set_next(id);
        slots.at_mut(next).phys.set_prev(id);
        id
    }

    /// Removes a node from between its physical neighbours.
    pub(super) fn remove(&mut self, id: Id) {
        if let Some((mut slots, vacant)) = self.slots() {
            slots.remove(id, vacant);
        }
    }

    /// Iterates over all nodes in a state, with their numbers.
    pub(super) fn all(&self, state: State) -> impl Iterator<Item = (Id, &Node)> {
        (0..).zip(&self.nodes).filter(move |(_, node)| node.is(state))
    }
}
