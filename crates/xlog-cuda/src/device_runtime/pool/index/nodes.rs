//! The records of an index: one node per range, addressed by a `u32` that stays valid while the range does.
//!
//! Nodes live in one vector; a node that is no longer needed is the next to be used again. An id that names nothing
//! reads as a vacant node and writes to a spare one: a wrong id is without effect, and costs no panic path.

use super::Range;

/// No node.
pub(super) const NIL: u32 = u32::MAX;

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

/// A range and its neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// The address; the state is kept in the low bits, which the unit leaves zero.
    place: u64,
    pub(super) bytes: u64,
    /// Of a free range; of a taken one, the stamp it had.
    pub(super) stamp: u64,
    /// The range that ends where this one begins, and the one that begins where it ends.
    pub(super) before: u32,
    pub(super) after: u32,
    /// Newer and older in the list of the class, of a free range; `next` also chains the vacant nodes.
    pub(super) prev: u32,
    pub(super) next: u32,
}

const STATE: u64 = 0b11;

impl Node {
    pub(super) const fn new(range: Range, state: State) -> Self {
        let Range { ptr, bytes, stamp } = range;
        let place = ptr & !STATE | state as u64;
        Self { place, bytes, stamp, before: NIL, after: NIL, prev: NIL, next: NIL }
    }

    pub(super) fn range(&self) -> Range {
        Range { ptr: self.ptr(), bytes: self.bytes, stamp: self.stamp }
    }

    #[inline]
    pub(super) fn ptr(&self) -> u64 {
        self.place & !STATE
    }

    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.ptr() + self.bytes
    }

    #[inline]
    pub(super) fn is(&self, state: State) -> bool {
        self.place & STATE == state as u64
    }

    #[inline]
    pub(super) fn set_ptr(&mut self, ptr: u64) {
        self.place = ptr & !STATE | self.place & STATE;
    }

    #[inline]
    pub(super) fn set_state(&mut self, state: State) {
        self.place = self.place & !STATE | state as u64;
    }
}

static VACANT: Node = Node::new(Range { ptr: 0, bytes: 0, stamp: 0 }, State::Vacant);

/// The nodes of one index.
#[derive(Debug)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    /// The first vacant node.
    vacant: u32,
    /// Takes the writes to ids that name nothing.
    spare: Node,
}

impl Default for Nodes {
    fn default() -> Self {
        Self { nodes: Vec::new(), vacant: NIL, spare: VACANT }
    }
}

impl Nodes {
    #[inline]
    pub(super) fn at(&self, id: u32) -> &Node {
        self.nodes.get(id as usize).unwrap_or(&VACANT)
    }

    #[inline]
    pub(super) fn at_mut(&mut self, id: u32) -> &mut Node {
        match self.nodes.get_mut(id as usize) {
            Some(node) => node,
            None => &mut self.spare,
        }
    }

    /// Puts a node between two neighbours; `None` when there are as many nodes as ids.
    #[inline]
    pub(super) fn put(&mut self, node: Node, before: u32, after: u32) -> Option<u32> {
        let id = self.vacant;
        let node = Node { before, after, ..node };
        let id = if let Some(slot) = self.nodes.get_mut(id as usize) {
            self.vacant = slot.next;
            *slot = node;
            id
        } else {
            self.push(node)?
        };
        self.at_mut(before).after = id;
        self.at_mut(after).before = id;
        Some(id)
    }

    #[cold]
    fn push(&mut self, node: Node) -> Option<u32> {
        let id = u32::try_from(self.nodes.len()).ok().filter(|&id| id != NIL)?;
        self.nodes.push(node);
        Some(id)
    }

    /// Takes a node out from between its neighbours.
    #[inline]
    pub(super) fn remove(&mut self, id: u32) {
        let Node { before, after, .. } = *self.at(id);
        self.at_mut(before).after = after;
        self.at_mut(after).before = before;
        let vacant = self.vacant;
        let node = self.at_mut(id);
        node.set_state(State::Vacant);
        node.next = vacant;
        self.vacant = id;
    }

    /// Whether `more` nodes can be put.
    pub(super) fn room(&self, more: usize) -> bool {
        self.nodes.len() + more <= NIL as usize
    }

    /// All nodes in a state, with their ids.
    pub(super) fn all(&self, state: State) -> impl Iterator<Item = (u32, &Node)> {
        (0..NIL).zip(&self.nodes).filter(move |(_, node)| node.is(state))
    }
}
