//! The shared state of a budget, which handles, scopes and reservations use: quotas, charges of blocks, tags and scopes.
//!
//! It does not call the resource below.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::callbacks::Callbacks;
use super::pending::{Freed, Pending, PendingList};
use super::policy::{OomPolicy, Pressure};
use super::primitive::Mutex;
use super::quota::{self, AuditSnapshot, Charge, Shard, ThreadQuotas};
use super::report::{OomReport, OtherProcess, OtherUse, ScopeUsage, TagUsage};
use super::reservation::RESERVED;
use super::tags;
use super::tree::{DEVICE, ScopeIndex};
use super::waiting::WaitQueue;
use crate::device_runtime::resource::{AllocTag, Generation, PhysicalCap, ResourceResult};
use crate::device_runtime::side_table::{SideTable, TakenEntry};

/// Shards of a budget. Threads beyond this number share them.
const SHARDS: usize = 64;

pub(crate) type OtherUseHook = Arc<dyn Fn() -> Option<(OtherUse, Vec<OtherProcess>)> + Send + Sync>;

pub(crate) struct BudgetCore {
    /// Never 0.
    pub(crate) id: u64,
    pub(crate) quotas: ThreadQuotas<PendingList, SHARDS>,
    /// The charges of live blocks: the bytes; the tag in the low half of a word and the scope in the high one.
    charges: SideTable<2>,
    /// Reserved bytes that are not allocated yet.
    pub(crate) reserved: AtomicUsize,
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

/// The charge of a block whose free is in progress.
pub(crate) type TakenCharge<'a> = TakenEntry<'a, 2>;

/// The reason why an audit did not charge a request.
#[derive(Debug)]
pub(crate) struct Deficit {
    pub(crate) snapshot: AuditSnapshot,
    /// The pending blocks.
    pub(crate) pending: Vec<Pending>,
}

impl BudgetCore {
    pub(crate) fn new(limit: usize, by_slot: bool, cap: Weak<PhysicalCap>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            quotas: ThreadQuotas::new(limit),
            charges: SideTable::new(by_slot),
            reserved: AtomicUsize::new(0),
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

    /// Stores the charge of a new block, before its allocation returns.
    #[inline(always)]
    pub(crate) fn record(&self, generation: Generation, charge: &Charge) {
        let tag_and_scope = u64::from(charge.tag) | u64::from(charge.scope) << 32;
        self.charges.insert(generation, [charge.bytes as u64, tag_and_scope]);
    }

    /// Takes the charge of a block that is about to be freed; `None` if this budget did not charge it.
    #[inline(always)]
    pub(crate) fn take_charge(
        &self,
        generation: Generation,
    ) -> ResourceResult<Option<(Charge, TakenCharge<'_>)>> {
        let taken = self.charges.take(generation)?;
        Ok(taken.map(|taken| (charge_of(taken.words), taken)))
    }

    /// Charges in an audit, out of the credit of all shards and the balance. The charge is in flight.
    pub(crate) fn charge_audited(&self, charge: &Charge) -> Result<(), AuditSnapshot> {
        self.quotas.charge_audited(charge, |_, _| {}, |_, snapshot| snapshot)
    }

    /// Releases the pending blocks that are in `freed`, then charges as [`BudgetCore::charge_audited`] does.
    pub(crate) fn charge_after_release(
        &self,
        charge: &Charge,
        freed: &Freed,
    ) -> Result<(), Deficit> {
        let mut is_waited_for = false;
        let result = self.quotas.charge_audited(
            charge,
            |shards, balance| {
                let remove = |list: &mut PendingList| list.remove(freed);
                is_waited_for = quota::release_pending(shards, balance, remove);
            },
            |shards, snapshot| Deficit { snapshot, pending: pending(shards) },
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

    /// Returns the bytes of live blocks, pending blocks and reservations by tag, the largest first.
    pub(crate) fn tags(&self) -> Vec<TagUsage> {
        let mut sums: Vec<TagUsage> = Vec::new();
        let none = TagUsage { tag: AllocTag::UNTAGGED, bytes: 0, blocks: 0, pending: 0 };
        let mut add = |charge: Charge, blocks: usize, is_pending: bool| {
            let index = charge.tag as usize;
            if index >= sums.len() {
                sums.resize(index + 1, none);
            }
            let sum = &mut sums[index];
            sum.bytes = sum.bytes.saturating_add(charge.bytes);
            sum.blocks += blocks;
            sum.pending = sum.pending.saturating_add(if is_pending { charge.bytes } else { 0 });
        };
        // Before the live blocks, so that a block that becomes pending meanwhile is not counted twice.
        self.pending().into_iter().for_each(|pending| add(pending.charge, 1, true));
        self.charges.for_each(|_, words| add(charge_of(words), 1, false));
        let reserved = self.reserved.load(Ordering::Acquire);
        if reserved > 0 {
            add(Charge { bytes: reserved, tag: tags::index_of(RESERVED), scope: DEVICE }, 0, false);
        }
        let held = (0..).zip(sums).filter(|(_, sum)| sum.bytes > 0 || sum.blocks > 0);
        let named = held.map(|(index, sum)| TagUsage { tag: tags::name(index), ..sum });
        let mut tags: Vec<TagUsage> = named.collect();
        tags.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.tag.0.cmp(b.tag.0)));
        tags
    }

    /// Returns the usage of each scope, the largest first.
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

/// The charge that [`BudgetCore::record`] stored.
fn charge_of([bytes, tag_and_scope]: [u64; 2]) -> Charge {
    let (tag, scope) = (tag_and_scope as u32, (tag_and_scope >> 32) as u32);
    Charge { bytes: bytes as usize, tag, scope }
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
