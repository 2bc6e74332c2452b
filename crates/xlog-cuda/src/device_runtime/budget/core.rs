//! The shared state of a budget, which handles, scopes and reservations reach without the resource below.
//!
//! It joins the quotas, the charges of blocks, the tags and the scopes. It does not call the resource below.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::callbacks::Callbacks;
use super::pending::{Freed, Pending, PendingList};
use super::policy::{OomPolicy, Pressure};
use super::primitive::Mutex;
use super::quota::{self, AuditSnapshot, Charge, Shard, TagCount, ThreadQuotas};
use super::report::{OomReport, OtherUse, ScopeUsage, TagUsage};
use super::tags;
use super::tree::{DEVICE, ScopeIndex};
use super::waiting::WaitQueue;
use crate::device_runtime::resource::{Generation, PhysicalCap};
use crate::device_runtime::side_table::SideTable;

/// Shards of a budget. Threads beyond this number share them.
const SHARDS: usize = 64;

pub(crate) type OtherUseHook = Arc<dyn Fn() -> Option<OtherUse> + Send + Sync>;

pub(crate) struct BudgetCore {
    /// Never 0.
    pub(crate) id: u64,
    pub(crate) quotas: ThreadQuotas<PendingList, SHARDS>,
    /// The charges of live blocks: the bytes; the tag in the low half of a word and the scope in the high one.
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

impl BudgetCore {
    pub(crate) fn new(limit: usize, by_slot: bool, cap: Weak<PhysicalCap>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            quotas: ThreadQuotas::new(limit),
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

    /// Stores the charge of a block that is about to be handed out.
    #[inline(always)]
    pub(crate) fn record(&self, generation: Generation, charge: &Charge) {
        let tag_and_scope = u64::from(charge.tag) | u64::from(charge.scope) << 32;
        self.charges.insert(generation, [charge.bytes as u64, tag_and_scope]);
    }

    /// Returns the charge of a block; `None` if it did not come from this budget.
    #[inline(always)]
    pub(crate) fn charge_of(&self, generation: Generation) -> Option<Charge> {
        let [bytes, tag_and_scope] = self.charges.find(generation)?;
        let (tag, scope) = (tag_and_scope as u32, (tag_and_scope >> 32) as u32);
        Some(Charge { bytes: bytes as usize, tag, scope, blocks: 1 })
    }

    /// Charges in an audit, out of the credit of all shards and the balance. The charge is in flight.
    pub(crate) fn charge_audited(&self, charge: &Charge) -> Result<(), AuditSnapshot> {
        self.quotas.charge_audited(charge, |_, _| {}, |_, snapshot| snapshot)
    }

    /// Releases the pending blocks that are in `freed`, then charges as [`BudgetCore::charge_audited`] does. An error has the
    /// pending blocks of the same audit.
    pub(crate) fn charge_after_release(
        &self,
        charge: &Charge,
        freed: &Freed,
    ) -> Result<(), (AuditSnapshot, Vec<Pending>)> {
        let mut is_waited_for = false;
        let result = self.quotas.charge_audited(
            charge,
            |shards, balance| {
                let remove = |list: &mut PendingList| list.remove(freed);
                is_waited_for = quota::release_pending(shards, balance, remove);
            },
            |shards, snapshot| (snapshot, pending(shards)),
        );
        if is_waited_for {
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
        let remove = |list: &mut PendingList| list.remove(freed);
        let release = |shards: &mut [&mut Shard<PendingList>], balance: &mut _| {
            quota::release_pending(shards, balance, remove)
        };
        if self.quotas.audit(release) {
            self.queue.wake();
        }
    }

    /// Ends an operation in flight, and releases its bytes.
    #[inline(always)]
    pub(crate) fn release(&self, charge: &Charge) {
        if self.quotas.release(charge) {
            self.queue.wake();
        }
    }

    /// What each tag holds, the largest first.
    pub(crate) fn tags(&self) -> Vec<TagUsage> {
        let sums = self.quotas.tags().into_iter().enumerate();
        let held = sums.filter(|(_, sum)| *sum != TagCount::default());
        let mut tags: Vec<TagUsage> = held
            .map(|(index, TagCount { bytes, blocks })| TagUsage {
                tag: tags::name_of_count(index),
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

fn pending(shards: &[&mut Shard<PendingList>]) -> Vec<Pending> {
    shards.iter().flat_map(|shard| shard.extra.blocks.iter().copied()).collect()
}

impl fmt::Debug for BudgetCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let snapshot = self.quotas.snapshot(0, DEVICE);
        f.debug_struct("Budget")
            .field("limit", &snapshot.limit)
            .field("reserved", &snapshot.charged)
            .field("in_flight", &snapshot.in_flight)
            .field("pending", &snapshot.pending)
            .finish_non_exhaustive()
    }
}
