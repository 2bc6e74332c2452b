//! The arithmetic of scopes: use, guarantees, admission. It has no locks.
//!
//! A scope has a soft limit (a guarantee) and a hard limit (a bound). Its *need* is what must stay free so that it and its
//! children can still reach their guarantees:
//!
//! `need = min(max(soft - used, sum of the children's needs), hard - used)`, never below 0.
//!
//! With `free` bytes on the device, a request of `c` is admitted when `c <= free`, no scope of its chain passes its hard limit, and
//! either what is left covers all needs that remain, or the request lies wholly within its own guarantees (it lowers the sum
//! of needs by `c`). The second condition also applies if the guarantees exceed the limit.

/// The index of a scope; [`DEVICE`] is the whole budget.
pub(crate) type ScopeIndex = u32;

/// The index of charges outside all scopes.
pub(crate) const DEVICE: ScopeIndex = 0;

#[derive(Clone, Debug)]
struct Node {
    parent: ScopeIndex,
    soft: usize,
    hard: usize,
    used: usize,
    need: u128,
    children_need: u128,
    /// The number of children, which keep it.
    children: u32,
    /// Whether a handle exists, so that threads can enter it.
    open: bool,
    free: bool,
}

impl Node {
    fn need_with(&self, used: usize, children_need: u128) -> u128 {
        let own = self.soft.saturating_sub(used) as u128;
        own.max(children_need).min(self.hard.saturating_sub(used) as u128)
    }
}

/// All scopes of a budget.
#[derive(Clone, Debug)]
pub(crate) struct ScopeTree {
    nodes: Vec<Node>,
}

/// The limits and the use of one scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ScopeFigures {
    pub(crate) soft: usize,
    pub(crate) hard: usize,
    pub(crate) used: usize,
}

impl ScopeTree {
    pub(crate) fn new() -> Self {
        Self { nodes: vec![Node::new(DEVICE, 0, usize::MAX)] }
    }

    /// Opens a scope below `parent`.
    pub(crate) fn open(&mut self, parent: ScopeIndex, soft: usize, hard: usize) -> ScopeIndex {
        let node = Node::new(parent, soft, hard);
        let index = match self.nodes.iter().position(|node| node.free) {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        if let Some(parent) = self.nodes.get_mut(parent as usize) {
            parent.children += 1;
        }
        self.refresh(index as ScopeIndex);
        index as ScopeIndex
    }

    /// Closes a scope: its guarantee ends at once, the scope itself with its last byte.
    pub(crate) fn close(&mut self, scope: ScopeIndex) {
        if let Some(node) = self.nodes.get_mut(scope as usize) {
            node.open = false;
            node.soft = 0;
        }
        self.refresh(scope);
        self.sweep(scope);
    }

    pub(crate) fn set_limits(&mut self, scope: ScopeIndex, soft: usize, hard: usize) {
        if let Some(node) = self.nodes.get_mut(scope as usize) {
            (node.soft, node.hard) = (soft, hard);
        }
        self.refresh(scope);
    }

    pub(crate) fn figures(&self, scope: ScopeIndex) -> Option<ScopeFigures> {
        let node = self.nodes.get(scope as usize).filter(|node| !node.free)?;
        Some(ScopeFigures { soft: node.soft, hard: node.hard, used: node.used })
    }

    /// Returns the bytes that must stay free for the guarantees of all scopes.
    #[inline]
    pub(crate) fn need(&self) -> u128 {
        self.nodes.first().map_or(0, |device| device.children_need)
    }

    /// Returns the scopes from this one upwards, without the device.
    fn chain(&self, scope: ScopeIndex) -> impl Iterator<Item = &Node> {
        let mut next = scope;
        std::iter::from_fn(move || {
            let node = self.nodes.get(next as usize).filter(|_| next != DEVICE)?;
            next = node.parent;
            Some(node)
        })
    }

    /// Returns the minimum of what the hard limits of the chain leave.
    pub(crate) fn hard_room(&self, scope: ScopeIndex) -> usize {
        self.chain(scope)
            .map(|node| node.hard.saturating_sub(node.used))
            .min()
            .unwrap_or(usize::MAX)
    }

    /// The minimum of the chain's hard limits.
    pub(crate) fn hard_limit(&self, scope: ScopeIndex) -> usize {
        self.chain(scope).map(|node| node.hard).min().unwrap_or(usize::MAX)
    }

    /// Returns the sum of needs that would remain after a charge.
    fn need_after(&self, scope: ScopeIndex, charge: usize) -> u128 {
        let (mut before, mut after) = (0, 0);
        for node in self.chain(scope) {
            let children = node.children_need - before + after;
            before = node.need;
            after = node.need_with(node.used.saturating_add(charge), children);
        }
        self.need() - before + after
    }

    /// Applies the rule of the module to a request, with `free` bytes free on the device.
    pub(crate) fn admits(&self, scope: ScopeIndex, charge: usize, free: i128) -> bool {
        self.may_admit(scope, charge, free, 0)
    }

    /// Returns whether a request could be admitted after up to `open` charged bytes, of any scopes, are released.
    pub(crate) fn may_admit(
        &self,
        scope: ScopeIndex,
        charge: usize,
        free: i128,
        open: usize,
    ) -> bool {
        let (wanted, open_bytes) = (charge as i128, open as i128);
        let free = free + open_bytes;
        if wanted > free || charge > self.hard_room(scope).saturating_add(open) {
            return false;
        }
        let after = self.need_after(scope, charge) as i128;
        free - wanted >= after || after + wanted <= self.need() as i128 + open_bytes
    }

    /// The largest charge that would be admitted, up to `max`.
    pub(crate) fn room(&self, scope: ScopeIndex, free: i128, max: usize) -> usize {
        // If a charge is admitted, every smaller one is: bisect.
        let (mut yes, mut no) = (0, max);
        if self.admits(scope, max, free) {
            return max;
        }
        while no - yes > 1 {
            let middle = yes + (no - yes) / 2;
            if self.admits(scope, middle, free) { yes = middle } else { no = middle }
        }
        yes
    }

    /// Adds an admitted charge to the chain.
    pub(crate) fn charge(&mut self, scope: ScopeIndex, charge: usize) {
        self.change(scope, |used| used.saturating_add(charge));
    }

    /// Removes a charge from the chain.
    pub(crate) fn discharge(&mut self, scope: ScopeIndex, charge: usize) {
        self.change(scope, |used| used.saturating_sub(charge));
        self.sweep(scope);
    }

    fn change(&mut self, scope: ScopeIndex, change: impl Fn(usize) -> usize) {
        let mut next = scope;
        while next != DEVICE {
            let Some(node) = self.nodes.get_mut(next as usize) else { break };
            node.used = change(node.used);
            next = node.parent;
        }
        self.refresh(scope);
    }

    /// Recomputes the needs of a chain.
    fn refresh(&mut self, scope: ScopeIndex) {
        let mut next = scope;
        while next != DEVICE {
            let Some(node) = self.nodes.get_mut(next as usize) else { break };
            let before = node.need;
            node.need = node.need_with(node.used, node.children_need);
            let (after, parent) = (node.need, node.parent);
            if let Some(parent) = self.nodes.get_mut(parent as usize) {
                parent.children_need = parent.children_need - before + after;
            }
            next = parent;
        }
    }

    /// Removes closed scopes without bytes and children, from this one up.
    fn sweep(&mut self, scope: ScopeIndex) {
        let mut next = scope;
        while next != DEVICE {
            let Some(node) = self.nodes.get_mut(next as usize) else { break };
            if node.open || node.free || node.used > 0 || node.children > 0 {
                break;
            }
            node.free = true;
            next = node.parent;
            if let Some(parent) = self.nodes.get_mut(next as usize) {
                parent.children -= 1;
            }
        }
    }
}

impl Node {
    fn new(parent: ScopeIndex, soft: usize, hard: usize) -> Self {
        Self {
            parent,
            soft,
            hard,
            used: 0,
            need: 0,
            children_need: 0,
            children: 0,
            open: true,
            free: false,
        }
    }
}
