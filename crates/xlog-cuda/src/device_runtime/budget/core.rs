//! The shared state of a budget, which handles, scopes and reservations reach without the resource below.
//!
//! It joins the quotas, the charges of blocks, the tags and the scopes. It does not call the resource below.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::callbacks::Callbacks;
use super::in_flight::ShardId;
use super::policy::{OomPolicy, Pressure};
use super::primitive::Mutex;
use super::quota::{AuditSnapshot, Balance, Shard, ThreadQuotas};
use super::report::{OomReport, OtherUse, ScopeUsage, TagUsage};
use super::shard_id::SHARDS;
use super::tag_counts::{Freed, Pending, TagCounts, TagIndex, TagNames};
use super::tree::{DEVICE, ScopeIndex};
use super::waiting::WaitQueue;
use crate::device_runtime::resource::{AllocTag, PhysicalCap};
use crate::device_runtime::side_table::SideTable;

pub(crate) type OtherUseHook = Arc<dyn Fn() -> Option<OtherUse> + Send + Sync>;

pub(crate) struct BudgetCore {
    /// Never 0.
    pub(crate) id: u64,
    pub(crate) quotas: ThreadQuotas<TagCounts, SHARDS>,
    pub(crate) names: TagNames,
    /// The charges of live blocks.
    pub(crate) charges: SideTable<2>,
    /// A copy of the balance's limit that is read without its lock.
    limit: AtomicUsize,
    /// The cap that the resource below obeys for physical memory. It ends with the budget.
    cap: Weak<PhysicalCap>,
    pub(crate) scope_names: Mutex<HashMap<ScopeIndex, Arc<str>>>,
    pub(crate) policy: Mutex<OomPolicy>,
    pub(crate) pressure: Callbacks<Pressure>,
    pub(crate) refusals: Callbacks<OomReport>,
    pub(crate) other_use: Mutex<Option<OtherUseHook>>,
    pub(crate) last_oom: Mutex<Option<Arc<OomReport>>>,
    pub(crate) queue: WaitQueue,
}

/// A charge to make: its bytes, its scope and its tag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargeRequest {
    pub(crate) charge: usize,
    pub(crate) scope: ScopeIndex,
    pub(crate) tag: AllocTag,
    /// 0 for a reservation.
    pub(crate) blocks: u32,
}

impl BudgetCore {
    pub(crate) fn new(limit: usize, by_slot: bool, cap: Weak<PhysicalCap>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            quotas: ThreadQuotas::new(limit),
            names: TagNames::default(),
            charges: SideTable::new(by_slot),
            limit: AtomicUsize::new(limit),
            cap,
            scope_names: Mutex::default(),
            policy: Mutex::default(),
            pressure: Callbacks::default(),
            refusals: Callbacks::default(),
            other_use: Mutex::default(),
            last_oom: Mutex::default(),
            queue: WaitQueue::default(),
        }
    }

    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the limit. Returns the bytes that are charged above it.
    pub(crate) fn set_limit(&self, limit: usize) -> usize {
        let cap = self.cap.upgrade();
        let over = self.quotas.set_limit(limit, || {
            self.limit.store(limit, Ordering::Relaxed);
            if let Some(cap) = &cap {
                cap.set(limit);
            }
        });
        self.queue.wake();
        over
    }

    /// Charges one block to this thread's own credit, outside all scopes. The charge is in flight.
    #[inline(always)]
    pub(crate) fn try_charge_own(
        &self,
        shard_id: ShardId,
        charge: usize,
        tag: AllocTag,
    ) -> Option<TagIndex> {
        self.quotas.try_charge_own(shard_id, charge, |tag_counts| {
            let tag = tag_counts.index_of(tag, &self.names);
            tag_counts.add(tag, charge, 1);
            tag
        })
    }

    /// Charges this thread's shard or the balance. The charge is in flight. `None` declines: other shards may have the bytes.
    pub(crate) fn try_charge(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
    ) -> Option<TagIndex> {
        let note = |tag_counts: &mut TagCounts| self.note(tag_counts, request);
        self.quotas.try_charge(shard_id, request.charge, request.scope, note)
    }

    /// Charges in an audit, out of the credit of all shards and the balance. The charge is in flight.
    pub(crate) fn charge_audited(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
    ) -> Result<TagIndex, AuditSnapshot> {
        let note = |tag_counts: &mut TagCounts| self.note(tag_counts, request);
        self.quotas.charge_audited(shard_id, request.charge, request.scope, note)
    }

    /// Releases the pending blocks that are in `freed`, then charges as [`BudgetCore::charge_audited`] does. An error has the
    /// pending blocks of the same audit.
    pub(crate) fn charge_after_release(
        &self,
        shard_id: ShardId,
        request: &ChargeRequest,
        freed: &Freed,
    ) -> Result<TagIndex, (AuditSnapshot, Vec<Pending>)> {
        let (result, waited_for) = self.quotas.audit(|shards, balance| {
            let waited_for = release_pending(shards, balance, freed);
            let note = |tag_counts: &mut TagCounts| self.note(tag_counts, request);
            let charged = self.quotas.charge_in_audit(
                shards,
                balance,
                shard_id,
                request.charge,
                request.scope,
                note,
            );
            (charged.map_err(|snapshot| (snapshot, pending(shards))), waited_for)
        });
        if waited_for {
            self.queue.wake();
        }
        result
    }

    /// All pending blocks.
    pub(crate) fn pending(&self) -> Vec<Pending> {
        self.quotas.audit(|shards, _| pending(shards))
    }

    /// Releases the pending blocks that are in `freed`.
    pub(crate) fn release_freed(&self, freed: &Freed) {
        if self.quotas.audit(|shards, balance| release_pending(shards, balance, freed)) {
            self.queue.wake();
        }
    }

    /// [`BudgetCore::release_freed`] for this thread's shard alone.
    pub(crate) fn release_own_freed(&self, shard_id: ShardId, freed: &Freed) {
        let remove_ended = |tag_counts: &mut TagCounts| {
            let gone = tag_counts.remove_freed(freed);
            tag_counts.query_at = 2 * tag_counts.pending.len();
            gone.iter().map(|pending| (pending.charge, pending.scope)).collect()
        };
        if self.quotas.release_own_pending(shard_id, remove_ended) {
            self.queue.wake();
        }
    }

    fn note(&self, tag_counts: &mut TagCounts, request: &ChargeRequest) -> TagIndex {
        let tag = tag_counts.index_of(request.tag, &self.names);
        tag_counts.add(tag, request.charge, request.blocks);
        tag
    }

    /// Ends an operation in flight; its bytes stay charged.
    #[inline(always)]
    pub(crate) fn confirm(&self, shard_id: ShardId, charge: usize) {
        self.quotas.end(shard_id, charge);
    }

    /// Ends an operation in flight on one block, and releases its bytes.
    #[inline(always)]
    pub(crate) fn release_block(
        &self,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        tag: TagIndex,
    ) {
        let note = |tag_counts: &mut TagCounts| tag_counts.remove(tag, charge, 1);
        if scope != DEVICE || !self.quotas.release_own(shard_id, charge, note) {
            self.release(shard_id, charge, scope, tag, 1);
        }
    }

    /// Ends an operation in flight, and releases its bytes.
    #[cold]
    #[inline(never)]
    pub(crate) fn release(
        &self,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        tag: TagIndex,
        blocks: u32,
    ) {
        let note = |tag_counts: &mut TagCounts| tag_counts.remove(tag, charge, blocks);
        if self.quotas.release(shard_id, charge, scope, note) {
            self.queue.wake();
        }
    }

    /// The sums of an audit, and the room for a request.
    pub(crate) fn snapshot(&self, charge: usize, scope: ScopeIndex) -> AuditSnapshot {
        self.quotas.snapshot(charge, scope)
    }

    /// What each tag holds, the largest first.
    pub(crate) fn tags(&self) -> Vec<TagUsage> {
        let sums = self.quotas.audit(|shards, _| {
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
        self.quotas.with_scopes(|tree| {
            // The tree drops a closed scope with its last byte.
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

fn pending(shards: &[&mut Shard<TagCounts>]) -> Vec<Pending> {
    shards.iter().flat_map(|shard| shard.extra.pending.iter().copied()).collect()
}

fn release_pending(
    shards: &mut [&mut Shard<TagCounts>],
    balance: &mut Balance,
    freed: &Freed,
) -> bool {
    let mut waited_for = false;
    if freed.is_empty() {
        return waited_for;
    }
    for shard in shards {
        for pending in shard.extra.remove_freed(freed) {
            shard.end_pending(pending.charge);
            waited_for |= balance.release(pending.charge, pending.scope);
        }
    }
    waited_for
}

impl fmt::Debug for BudgetCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let snapshot = self.snapshot(0, DEVICE);
        f.debug_struct("Budget")
            .field("limit", &snapshot.limit)
            .field("reserved", &snapshot.charged)
            .field("in_flight", &snapshot.in_flight)
            .field("pending", &snapshot.pending)
            .finish_non_exhaustive()
    }
}
