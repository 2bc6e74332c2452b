//! The records of an index: one node per range, addressed by a `u32` that stays valid while the range does.
//!
//! Nodes and the links of their lists live in two vectors, each of as many as a power of two, so that a mask keeps every number in
//! bounds: no access can fail. Two nodes share a cache line, and eight links do, since what frees and takes ranges in any order is
//! slow by the lines it touches. A node that is no longer needed is the next to be used again. The first node stands for no
//! node: what is written to the neighbour of a range that has none goes there, and nobody reads it.

use super::Range;
use super::classes::{CLASSES, alone};

/// Names a node, in 32 bits.
pub(super) type Id = usize;

/// No node.
pub(super) const NIL: Id = 0;
/// The nodes that the first range brings with it.
const FIRST_NODES: usize = 16;
const MAX_NODES: usize = 1 << 31;

/// What a node stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing: the node waits to be used.
    Vacant,
    /// A free range; it is in the list of its class.
    Free,
    /// A range that was taken.
    Allocated,
    /// The empty range at the beginning or the end of a span: nothing merges with it.
    Boundary,
}

/// What is before something, and what is after it: two numbers of 32 bits, each read as it is written, by itself.
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

/// A range and its neighbours, on half a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Node {
    /// The address; the state is kept in the low bits, which the unit leaves zero.
    address: u64,
    pub(super) bytes: u64,
    /// Of a free range; of a taken one, the stamp it had.
    pub(super) stamp: u64,
    /// The range that ends where this one begins, and the one that begins where it ends; of a vacant node, the next vacant one.
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

    /// Makes the node vacant, before another vacant one.
    #[inline(always)]
    pub(super) fn vacate(&mut self, next: Id) {
        self.set(0, State::Vacant);
        self.phys.set_next(next);
    }
}

/// The nodes and links as one operation sees them: at least one of each, and as many as a power of two.
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

    /// Takes a node out from between its neighbours; it is then the first vacant one.
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

/// The nodes of one index.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    /// Of the classes, then of the nodes.
    links: Vec<Neighbors>,
    /// The first vacant node.
    vacant: Id,
}

impl Nodes {
    /// The nodes, and the first vacant one; `None` if there are no nodes.
    #[inline(always)]
    pub(super) fn slots(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        let is_empty = self.nodes.is_empty() || self.links.is_empty();
        let slots = Slots { nodes: &mut self.nodes, links: &mut self.links };
        (!is_empty).then_some((slots, &mut self.vacant))
    }

    /// A node to look at; an id that names none reads as vacant.
    #[inline]
    pub(super) fn at(&self, id: Id) -> &Node {
        self.nodes.get(id).unwrap_or(&Node::VACANT)
    }

    /// A link to look at; where there is none, it leads to itself.
    pub(super) fn link(&self, spot: usize) -> Neighbors {
        self.links.get(spot).copied().unwrap_or(alone(spot))
    }

    /// Whether the id is one that a node can have.
    #[inline(always)]
    pub(super) fn has(&self, id: Id) -> bool {
        id < self.nodes.len()
    }

    /// The nodes with a vacant one among them; `None` if there cannot be one.
    #[inline(always)]
    pub(super) fn slots_with_vacant(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        if self.vacant == NIL && !self.reserve(1) {
            return None;
        }
        self.slots()
    }

    /// Whether `more` nodes can be put, which then need no memory; looks at so many.
    #[cold]
    pub(super) fn reserve(&mut self, more: usize) -> bool {
        let vacant = std::iter::successors(Some(self.vacant), |id| Some(self.at(*id).phys.next()));
        if vacant.take(more).all(|id| id != NIL) {
            return true;
        }
        // Twice as many are enough: there are more than anyone asks for.
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

    /// Puts a node between two neighbours; [`NIL`], and no node, where there is no [`reserve`](Self::reserve).
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

    /// Takes a node out from between its neighbours.
    pub(super) fn remove(&mut self, id: Id) {
        if let Some((mut slots, vacant)) = self.slots() {
            slots.remove(id, vacant);
        }
    }

    /// All nodes in a state, with their ids.
    pub(super) fn all(&self, state: State) -> impl Iterator<Item = (Id, &Node)> {
        (0..).zip(&self.nodes).filter(move |(_, node)| node.is(state))
    }
}
