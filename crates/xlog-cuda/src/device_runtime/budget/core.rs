//! The books of a budget: what a handle, a scope or a reservation reaches without the resource below.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::callbacks::Callbacks;
use super::credit::{Balance, Credits, Shard, Sight};
use super::flights::Seat;
use super::policy::{OomPolicy, Pressure};
use super::primitive::Mutex;
use super::records::Records;
use super::report::{OomReport, OtherUse, ScopeUsage, TagUsage};
use super::seats::SEATS;
use super::tally::{Freed, Pending, TagIndex, TagNames, Tally};
use super::tree::{DEVICE, ScopeIndex};
use super::waiting::Queue;
use crate::device_runtime::resource::{AllocTag, PhysicalCap};

pub(crate) type OtherUseHook = Arc<dyn Fn() -> Option<OtherUse> + Send + Sync>;

pub(crate) struct Core {
    /// Never 0.
    pub(crate) id: u64,
    pub(crate) credits: Credits<Tally, SEATS>,
    pub(crate) names: TagNames,
    pub(crate) records: Records,
    /// What the balance says, to be read without it.
    limit: AtomicUsize,
    /// The limit as the resource below knows it, for what it takes from the card. It ends with the budget.
    cap: Weak<PhysicalCap>,
    pub(crate) scope_names: Mutex<HashMap<ScopeIndex, Arc<str>>>,
    pub(crate) policy: Mutex<OomPolicy>,
    pub(crate) pressure: Callbacks<Pressure>,
    pub(crate) refusals: Callbacks<OomReport>,
    pub(crate) other_use: Mutex<Option<OtherUseHook>>,
    pub(crate) last_oom: Mutex<Option<Arc<OomReport>>>,
    pub(crate) queue: Queue,
}

/// Whom a charge is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) charge: usize,
    pub(crate) scope: ScopeIndex,
    pub(crate) tag: AllocTag,
    /// 0 for what only sets bytes aside.
    pub(crate) blocks: u32,
}

impl Core {
    pub(crate) fn new(limit: usize, placed: bool, cap: Weak<PhysicalCap>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            credits: Credits::new(limit),
            names: TagNames::default(),
            records: Records::new(placed),
            limit: AtomicUsize::new(limit),
            cap,
            scope_names: Mutex::default(),
            policy: Mutex::default(),
            pressure: Callbacks::default(),
            refusals: Callbacks::default(),
            other_use: Mutex::default(),
            last_oom: Mutex::default(),
            queue: Queue::default(),
        }
    }

    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Another limit; returns by how much it is exceeded.
    pub(crate) fn set_limit(&self, limit: usize) -> usize {
        let cap = self.cap.upgrade();
        let over = self.credits.set_limit(limit, || {
            self.limit.store(limit, Ordering::Relaxed);
            if let Some(cap) = &cap {
                cap.set(limit);
            }
        });
        self.queue.wake();
        over
    }

    /// Takes a charge of one block out of this thread's own credit, outside all scopes; it is in flight.
    #[inline(always)]
    pub(crate) fn take_own(&self, seat: Seat, charge: usize, tag: AllocTag) -> Option<TagIndex> {
        self.credits.take_own(seat, charge, |tally| {
            let tag = tally.index_of(tag, &self.names);
            tally.add(tag, charge, 1);
            tag
        })
    }

    /// Takes a charge from this thread's shard or the balance; it is in flight. `None` declines: other shards may have the bytes.
    pub(crate) fn take(&self, seat: Seat, claim: &Claim) -> Option<TagIndex> {
        let note = |tally: &mut Tally| self.note(tally, claim);
        self.credits.take(seat, claim.charge, claim.scope, note)
    }

    /// Takes a charge out of everything that is free, wherever it is; it is in flight.
    pub(crate) fn gather(&self, seat: Seat, claim: &Claim) -> Result<TagIndex, Sight> {
        let note = |tally: &mut Tally| self.note(tally, claim);
        self.credits.gather(seat, claim.charge, claim.scope, note)
    }

    /// Releases what is `freed` of the pending blocks, then [`Core::gather`]. A deficit comes with the pending blocks of its instant.
    pub(crate) fn gather_after(
        &self,
        seat: Seat,
        claim: &Claim,
        freed: &Freed,
    ) -> Result<TagIndex, (Sight, Vec<Pending>)> {
        let (result, waited_for) = self.credits.audit(|shards, balance| {
            let waited_for = release_pending(shards, balance, freed);
            let note = |tally: &mut Tally| self.note(tally, claim);
            let granted =
                self.credits.grant(shards, balance, seat, claim.charge, claim.scope, note);
            (granted.map_err(|sight| (sight, pending(shards))), waited_for)
        });
        if waited_for {
            self.queue.wake();
        }
        result
    }

    /// All pending blocks.
    pub(crate) fn pending(&self) -> Vec<Pending> {
        self.credits.audit(|shards, _| pending(shards))
    }

    /// Releases what is `freed` of the pending blocks.
    pub(crate) fn release_freed(&self, freed: &Freed) {
        if self.credits.audit(|shards, balance| release_pending(shards, balance, freed)) {
            self.queue.wake();
        }
    }

    /// [`Core::release_freed`] of this thread's shard alone.
    pub(crate) fn release_own_freed(&self, seat: Seat, freed: &Freed) {
        let take = |tally: &mut Tally| {
            let gone = tally.take_freed(freed);
            tally.ask_at = 2 * tally.pending.len();
            gone.iter().map(|pending| (pending.charge, pending.scope)).collect()
        };
        if self.credits.release_own_pending(seat, take) {
            self.queue.wake();
        }
    }

    fn note(&self, tally: &mut Tally, claim: &Claim) -> TagIndex {
        let tag = tally.index_of(claim.tag, &self.names);
        tally.add(tag, claim.charge, claim.blocks);
        tag
    }

    /// What was in flight is charged as before.
    #[inline(always)]
    pub(crate) fn keep(&self, seat: Seat, charge: usize) {
        self.credits.end(seat, charge);
    }

    /// What was in flight, a block, is free.
    #[inline(always)]
    pub(crate) fn release_block(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        tag: TagIndex,
    ) {
        let note = |tally: &mut Tally| tally.remove(tag, charge, 1);
        if scope != DEVICE || !self.credits.release_own(seat, charge, note) {
            self.release(seat, charge, scope, tag, 1);
        }
    }

    /// What was in flight is free.
    #[cold]
    #[inline(never)]
    pub(crate) fn release(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        tag: TagIndex,
        blocks: u32,
    ) {
        let note = |tally: &mut Tally| tally.remove(tag, charge, blocks);
        if self.credits.release(seat, charge, scope, note) {
            self.queue.wake();
        }
    }

    /// The books as they are, and the room for a request.
    pub(crate) fn sight(&self, charge: usize, scope: ScopeIndex) -> Sight {
        self.credits.sight(charge, scope)
    }

    /// What each tag holds, the largest first.
    pub(crate) fn tags(&self) -> Vec<TagUsage> {
        let sums = self.credits.audit(|shards, _| {
            let mut sums = Vec::new();
            shards.iter().for_each(|shard| shard.extra.sum_into(&mut sums));
            sums
        });
        let held = sums.into_iter().enumerate().filter(|(_, sum)| *sum != (0, 0));
        let mut tags: Vec<TagUsage> = held
            .map(|(index, (bytes, blocks))| TagUsage {
                tag: self.names.name(index),
                bytes,
                blocks: blocks as usize,
            })
            .collect();
        tags.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.tag.0.cmp(b.tag.0)));
        tags
    }

    /// What each scope holds, the largest first.
    pub(crate) fn scopes(&self) -> Vec<ScopeUsage> {
        let mut scopes = Vec::new();
        let mut names = self.scope_names.lock();
        self.credits.with_scopes(|tree| {
            // A scope that was left open by nobody and has no bytes is gone.
            names.retain(|&index, name| match tree.figures(index) {
                Some(figures) => {
                    scopes.push(ScopeUsage {
                        name: name.to_string(),
                        used: figures.used,
                        soft: figures.soft,
                        hard: figures.hard,
                    });
                    true
                }
                None => false,
            });
        });
        drop(names);
        scopes.sort_by(|a, b| b.used.cmp(&a.used).then(a.name.cmp(&b.name)));
        scopes
    }

    pub(crate) fn policy(&self) -> OomPolicy {
        self.policy.lock().clone()
    }
}

fn pending(shards: &[&mut Shard<Tally>]) -> Vec<Pending> {
    shards.iter().flat_map(|shard| shard.extra.pending.iter().copied()).collect()
}

fn release_pending(shards: &mut [&mut Shard<Tally>], balance: &mut Balance, freed: &Freed) -> bool {
    let mut waited_for = false;
    if freed.is_empty() {
        return waited_for;
    }
    for shard in shards {
        for pending in shard.extra.take_freed(freed) {
            shard.end_pending(pending.charge);
            waited_for |= balance.release(pending.charge, pending.scope);
        }
    }
    waited_for
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sight = self.sight(0, DEVICE);
        f.debug_struct("Budget")
            .field("limit", &sight.limit)
            .field("reserved", &sight.charged)
            .field("in_flight", &sight.in_flight)
            .field("pending", &sight.pending)
            .finish_non_exhaustive()
    }
}
