//! The records of an index: one node per range, addressed by a `u32` that stays valid while the range does.
//!
//! Nodes live in one vector, as many as a power of two, so that a mask keeps every id in bounds: no access can fail. A node that
//! is no longer needed is the next to be used again. The first node stands for no node: what is written to the neighbour or
//! the next of a range that has none goes there, and nobody reads it.

use super::Range;
use super::classes::class_of;

/// Names a node, in 32 bits; as wide as an address, so that nothing has to be widened.
pub(super) type Id = usize;

/// No node.
pub(super) const NIL: Id = 0;
/// The nodes that the first range brings with it.
const FIRST_NODES: usize = 16;
const MOST_NODES: usize = 1 << 31;

/// What a node stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing: the node waits to be used.
    Vacant,
    /// A free range; it is in the list of its class.
    Free,
    /// A range that was taken.
    Taken,
    /// The empty range at the beginning or the end of a span: nothing merges with it.
    Border,
}

/// A range and its neighbours, on one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Node {
    /// The address; the state is kept in the low bits, which the unit leaves zero.
    place: u64,
    pub(super) bytes: u64,
    /// Of a free range; of a taken one, the stamp it had.
    pub(super) stamp: u64,
    /// The range that ends where this one begins, and the one that begins where it ends.
    pub(super) before: Id,
    pub(super) after: Id,
    /// Newer and older in the list of the class, of a free range; before the newest comes the oldest. `next` also chains the
    /// vacant nodes.
    pub(super) prev: Id,
    pub(super) next: Id,
    /// The class in whose list a free range is.
    pub(super) class: u32,
}

const STATE: u64 = 0b11;

impl Node {
    pub(super) const VACANT: Self = Self::new(Range { ptr: 0, bytes: 0, stamp: 0 }, State::Vacant);

    pub(super) const fn new(range: Range, state: State) -> Self {
        let Range { ptr, bytes, stamp } = range;
        let place = ptr & !STATE | state as u64;
        let (before, after, prev, next) = (NIL, NIL, NIL, NIL);
        Self { place, bytes, stamp, before, after, prev, next, class: 0 }
    }

    pub(super) fn range(&self) -> Range {
        Range { ptr: self.ptr(), bytes: self.bytes, stamp: self.stamp }
    }

    #[inline(always)]
    pub(super) fn ptr(&self) -> u64 {
        self.place & !STATE
    }

    #[inline(always)]
    pub(super) fn end(&self) -> u64 {
        self.ptr() + self.bytes
    }

    #[inline(always)]
    pub(super) fn is(&self, state: State) -> bool {
        self.place & STATE == state as u64
    }

    #[inline(always)]
    pub(super) fn set(&mut self, ptr: u64, state: State) {
        self.place = ptr & !STATE | state as u64;
    }

    #[inline(always)]
    pub(super) fn set_state(&mut self, state: State) {
        self.place = self.place & !STATE | state as u64;
    }
}

/// The nodes as one operation sees them: at least one, and as many as a power of two.
#[derive(Debug)]
pub(super) struct Slots<'a>(&'a mut [Node]);

impl Slots<'_> {
    #[inline(always)]
    pub(super) fn at(&self, id: Id) -> &Node {
        &self.0[id & (self.0.len() - 1)]
    }

    #[inline(always)]
    pub(super) fn at_mut(&mut self, id: Id) -> &mut Node {
        let nodes = &mut *self.0;
        &mut nodes[id & (nodes.len() - 1)]
    }
}

/// The nodes of one index.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    /// The first vacant node.
    vacant: Id,
}

impl Nodes {
    /// The nodes, and the first vacant one; `None` if there are no nodes.
    #[inline(always)]
    pub(super) fn slots(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        (!self.nodes.is_empty()).then_some((Slots(&mut self.nodes), &mut self.vacant))
    }

    /// A node to look at; an id that names none reads as vacant.
    #[inline]
    pub(super) fn at(&self, id: Id) -> &Node {
        self.nodes.get(id).unwrap_or(&Node::VACANT)
    }

    /// Whether the id is one that a node can have.
    #[inline(always)]
    pub(super) fn has(&self, id: Id) -> bool {
        id < self.nodes.len()
    }

    /// The nodes with a vacant one among them; `None` if there cannot be one.
    #[inline(always)]
    pub(super) fn slots_with_room(&mut self) -> Option<(Slots<'_>, &mut Id)> {
        if self.vacant == NIL && !self.room(1) {
            return None;
        }
        self.slots()
    }

    /// Whether `more` nodes can be put, which then need no memory; looks at so many.
    #[cold]
    pub(super) fn room(&mut self, more: usize) -> bool {
        let vacant = std::iter::successors(Some(self.vacant), |id| Some(self.at(*id).next));
        if vacant.take(more).all(|id| id != NIL) {
            return true;
        }
        // Twice as many are enough: there are more than anyone asks for.
        let len = self.nodes.len();
        let doubled = len.max(FIRST_NODES / 2) * 2;
        if doubled > MOST_NODES {
            return false;
        }
        self.nodes.resize(doubled, Node::VACANT);
        for id in (len.max(1)..doubled).rev() {
            if let Some(node) = self.nodes.get_mut(id) {
                node.next = self.vacant;
                self.vacant = id;
            }
        }
        true
    }

    /// Puts a node between two neighbours; [`NIL`], and no node, where there is no [`room`](Self::room).
    pub(super) fn put(&mut self, node: Node, before: Id, after: Id) -> Id {
        let Some((mut slots, vacant)) = self.slots() else { return NIL };
        let id = *vacant;
        if id == NIL {
            return NIL;
        }
        let slot = slots.at_mut(id);
        *vacant = slot.next;
        *slot = Node { before, after, class: class_of(node.bytes), ..node };
        slots.at_mut(before).after = id;
        slots.at_mut(after).before = id;
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

impl Slots<'_> {
    /// Takes a node out from between its neighbours; it is then the first vacant one.
    #[inline(always)]
    pub(super) fn remove(&mut self, id: Id, vacant: &mut Id) {
        let node = self.at_mut(id);
        let (before, after) = (node.before, node.after);
        node.set_state(State::Vacant);
        node.next = *vacant;
        *vacant = id;
        self.at_mut(before).after = after;
        self.at_mut(after).before = before;
    }
}
