//! The accounting of a limit: credit per shard, a global balance, and audits.
//!
//! Every byte of the limit is in exactly one state: charged, unused credit of a shard, or the balance. A thread charges and releases
//! in its own shard. Shards refill from the balance in portions and return credit above their bound. This path refuses no request.
//!
//! An *audit* decides a request that a shard cannot charge. It locks all shards for a few additions, so that the sums are those of one
//! instant, moves the unused credit of all shards to the balance, and charges from there. If the balance is too small, the limit was
//! used up by charges at that instant. No lock is held while a resource is called, so an audit never waits for a device.
//!
//! Some charges may end soon:
//! - *In flight* are the bytes of allocations and frees that have not returned. Each thread counts its own, without a lock.
//! - *Pending* are freed blocks that the resource below had not freed at the last query.
//!
//! A request that does not fit even without these is refused at once. Otherwise its thread queries the pending blocks and audits again,
//! until its deadline. After the deadline, charges in flight count as used.
//!
//! Invariants:
//! - While the balance is below what scopes are guaranteed, or threads wait for memory, no shard has credit.
//! - The sums over all shards are exact. Those of one shard may wrap below zero, since a thread may release what another one charged.
//! - An operation is in flight before its charge is visible, until the charge is released or recorded.

use super::primitive::{AtomicU64, Mutex, Ordering, Sharded, thread_index};
use super::tree::{DEVICE, ScopeIndex, ScopeTree};

/// The maximum credit that a shard takes in advance.
const MAX_AHEAD: usize = 64 << 20;
pub(crate) type TagIndex = u32;

/// Bytes of the limit that a block or a reservation uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Charge {
    pub(crate) bytes: usize,
    pub(crate) tag: TagIndex,
    pub(crate) scope: ScopeIndex,
}

/// The credit and the pending bytes of one shard, and other data `T` of its users.
#[derive(Debug, Default)]
pub(crate) struct Shard<T> {
    credit: usize,
    /// More credit than this flows back to the balance.
    bound: usize,
    pending: usize,
    pub(crate) extra: T,
}

/// The bytes that no shard holds, and the scopes.
#[derive(Debug)]
pub(crate) struct Balance {
    /// Negative while the limit is below what is charged.
    free: i128,
    limit: usize,
    waiters: usize,
    scopes: ScopeTree,
}

/// The sums of an audit: the budget at one instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AuditSnapshot {
    pub(crate) limit: usize,
    pub(crate) charged: usize,
    pub(crate) in_flight: usize,
    pub(crate) pending: usize,
    /// The largest charge that would have been admitted.
    pub(crate) room: usize,
    /// Whether the request could fit once what is in flight and pending has ended.
    pub(crate) may_fit: bool,
}

impl AuditSnapshot {
    /// The limit less what is charged.
    pub(crate) fn free(&self) -> usize {
        self.limit.saturating_sub(self.charged)
    }
}

/// Bytes in flight, by thread. An operation ends on the thread that it began on, so a sum is never below zero while threads count.
#[derive(Debug)]
struct InFlight<const N: usize> {
    /// Bytes of the thread with this index; only that thread stores here.
    own: Box<[OwnBytes; N]>,
    /// Bytes of all threads with higher indices, and of those without one, which have the index 0.
    others: AtomicU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct OwnBytes(AtomicU64);

impl<const N: usize> InFlight<N> {
    fn new() -> Self {
        let own = Box::new(std::array::from_fn(|_| OwnBytes(AtomicU64::new(0))));
        Self { own, others: AtomicU64::new(0) }
    }

    fn sum(&self) -> usize {
        let own = self.own.iter().map(|OwnBytes(own)| own.load(Ordering::Acquire));
        own.fold(self.others.load(Ordering::Acquire), u64::wrapping_add) as usize
    }
}

/// The quotas of one budget.
#[derive(Debug)]
pub(crate) struct ThreadQuotas<T, const N: usize> {
    shards: Sharded<Shard<T>, N>,
    in_flight: InFlight<N>,
    balance: Mutex<Balance>,
}

impl Balance {
    fn unguaranteed(&self) -> usize {
        let unguaranteed = self.free - self.scopes.need() as i128;
        usize::try_from(unguaranteed.max(0)).unwrap_or(usize::MAX)
    }
}

impl<T: Default, const N: usize> ThreadQuotas<T, N> {
    pub(crate) fn new(limit: usize) -> Self {
        let balance = Balance { free: limit as i128, limit, waiters: 0, scopes: ScopeTree::new() };
        Self {
            shards: Sharded::new(Shard::default),
            in_flight: InFlight::new(),
            balance: Mutex::new(balance),
        }
    }
}

impl<T, const N: usize> ThreadQuotas<T, N> {
    /// Charges without locking other shards. The charge is in flight. Returns false if other shards may have the bytes.
    #[inline(always)]
    pub(crate) fn charge(&self, charge: &Charge) -> bool {
        self.shards.own().with(|mine| {
            if charge.scope == DEVICE && charge.bytes <= mine.credit {
                mine.credit -= charge.bytes;
            } else if !self.refill(mine, charge) {
                return false;
            }
            self.begin(charge.bytes);
            true
        })
    }

    /// Charges to the balance, and takes credit in advance.
    #[cold]
    #[inline(never)]
    fn refill(&self, mine: &mut Shard<T>, charge: &Charge) -> bool {
        let mut balance = self.balance.lock();
        // Waiting threads come first; an audit decides requests that do not wait.
        if balance.waiters > 0 {
            return false;
        }
        if charge.scope != DEVICE {
            // `free` is a lower bound: credit of shards is free too.
            if !balance.scopes.admits(charge.scope, charge.bytes, balance.free) {
                return false;
            }
            balance.scopes.charge(charge.scope, charge.bytes);
            balance.free -= charge.bytes as i128;
            return true;
        }
        let missing = charge.bytes.saturating_sub(mine.credit);
        let unguaranteed = balance.unguaranteed();
        if unguaranteed < missing {
            return false;
        }
        let ahead = ((unguaranteed - missing) / (4 * N)).min(MAX_AHEAD);
        balance.free -= (missing + ahead) as i128;
        mine.credit = mine.credit + missing + ahead - charge.bytes;
        mine.bound = charge.bytes.saturating_add(2 * ahead);
        true
    }

    /// Begins an operation on charged bytes.
    #[inline(always)]
    pub(crate) fn begin(&self, bytes: usize) {
        let InFlight { own, others } = &self.in_flight;
        let index = thread_index() as usize;
        match own.get(index).filter(|_| index > 0) {
            // Release: a thread that sees the end of an operation sees its earlier stores.
            Some(OwnBytes(own)) => {
                own.store(
                    own.load(Ordering::Relaxed).wrapping_add(bytes as u64),
                    Ordering::Release,
                );
            }
            None => {
                others.fetch_add(bytes as u64, Ordering::AcqRel);
            }
        }
    }

    /// Ends an operation; its bytes stay charged. The sums wrap.
    #[inline(always)]
    pub(crate) fn end(&self, bytes: usize) {
        self.begin(bytes.wrapping_neg());
    }

    /// Ends an operation and releases its bytes. Returns true if a thread waits for memory.
    #[inline(always)]
    pub(crate) fn release(&self, charge: &Charge) -> bool {
        self.shards.own().with(|mine| {
            let is_waited_for = self.release_to(mine, charge);
            self.end(charge.bytes);
            is_waited_for
        })
    }

    /// Releases bytes to a shard, or to the balance beyond the shard's bound.
    #[inline(always)]
    fn release_to(&self, mine: &mut Shard<T>, charge: &Charge) -> bool {
        if charge.scope == DEVICE {
            mine.credit = mine.credit.saturating_add(charge.bytes);
            if mine.credit <= mine.bound {
                return false;
            }
        }
        self.release_to_balance(mine, charge)
    }

    #[cold]
    #[inline(never)]
    fn release_to_balance(&self, mine: &mut Shard<T>, charge: &Charge) -> bool {
        let mut balance = self.balance.lock();
        if charge.scope == DEVICE {
            let kept = mine.bound / 2;
            balance.free += (mine.credit - kept) as i128;
            mine.credit = kept;
        } else {
            balance.free += charge.bytes as i128;
            balance.scopes.discharge(charge.scope, charge.bytes);
        }
        balance.waiters > 0
    }

    /// Ends an operation; its bytes are pending until the resource below reports the block as free.
    pub(crate) fn set_pending<R>(&self, bytes: usize, note: impl FnOnce(&mut T) -> R) -> R {
        self.shards.own().with(|mine| {
            mine.pending = mine.pending.wrapping_add(bytes);
            self.end(bytes);
            note(&mut mine.extra)
        })
    }

    /// Runs `body` with all shards and the balance at one instant. `body` calls nothing that could wait.
    pub(crate) fn audit<R>(&self, body: impl FnOnce(&mut [&mut Shard<T>], &mut Balance) -> R) -> R {
        self.shards.with_all(|shards| body(shards, &mut self.balance.lock()))
    }

    /// The sums, and the room for a request.
    pub(crate) fn snapshot(&self, bytes: usize, scope: ScopeIndex) -> AuditSnapshot {
        self.audit(|shards, balance| self.summarize(shards, balance, bytes, scope))
    }

    /// Charges out of the credit of all shards and the balance, after `prepare`. The charge is in flight. `explain` makes the error from
    /// the sums of the audit.
    pub(crate) fn charge_audited<E>(
        &self,
        charge: &Charge,
        prepare: impl FnOnce(&mut [&mut Shard<T>], &mut Balance),
        explain: impl FnOnce(&[&mut Shard<T>], AuditSnapshot) -> E,
    ) -> Result<(), E> {
        self.audit(|shards, balance| {
            prepare(shards, balance);
            if !balance.scopes.admits(charge.scope, charge.bytes, balance.free + credit(shards)) {
                let snapshot = self.summarize(shards, balance, charge.bytes, charge.scope);
                return Err(explain(shards, snapshot));
            }
            drain_shards(shards, balance);
            balance.free -= charge.bytes as i128;
            balance.scopes.charge(charge.scope, charge.bytes);
            self.begin(charge.bytes);
            Ok(())
        })
    }

    /// Sets the limit. Returns the bytes that are charged above it. `note` runs inside the audit, in the order of the changes.
    pub(crate) fn set_limit(&self, limit: usize, note: impl FnOnce()) -> usize {
        self.audit(|shards, balance| {
            note();
            drain_shards(shards, balance);
            balance.free += limit as i128 - balance.limit as i128;
            balance.limit = limit;
            usize::try_from((-balance.free).max(0)).unwrap_or(usize::MAX)
        })
    }

    /// Changes the scopes. Their guarantees hold from now on.
    pub(crate) fn change_scopes<R>(&self, change: impl FnOnce(&mut ScopeTree) -> R) -> R {
        self.audit(|shards, balance| {
            drain_shards(shards, balance);
            change(&mut balance.scopes)
        })
    }

    /// Reads the scopes.
    pub(crate) fn with_scopes<R>(&self, read: impl FnOnce(&ScopeTree) -> R) -> R {
        read(&self.balance.lock().scopes)
    }

    /// Announces a waiting thread: releases then report that a thread waits.
    pub(crate) fn begin_waiting(&self) {
        self.audit(|shards, balance| {
            drain_shards(shards, balance);
            balance.waiters += 1;
        });
    }

    pub(crate) fn end_waiting(&self) {
        self.balance.lock().waiters -= 1;
    }

    /// Releases pending blocks of this thread's shard; `remove_ended` returns their charges. Returns true if a thread waits for memory.
    pub(crate) fn release_own_pending(
        &self,
        remove_ended: impl FnOnce(&mut T) -> Vec<Charge>,
    ) -> bool {
        self.shards.own().with(|mine| {
            let mut is_waited_for = false;
            for charge in remove_ended(&mut mine.extra) {
                mine.pending = mine.pending.wrapping_sub(charge.bytes);
                is_waited_for |= self.release_to(mine, &charge);
            }
            is_waited_for
        })
    }

    fn summarize(
        &self,
        shards: &[&mut Shard<T>],
        balance: &Balance,
        bytes: usize,
        scope: ScopeIndex,
    ) -> AuditSnapshot {
        let free = balance.free + credit(shards);
        let pending = shards.iter().fold(0, |sum: usize, shard| sum.wrapping_add(shard.pending));
        let in_flight = self.in_flight.sum();
        let ending = in_flight.saturating_add(pending);
        AuditSnapshot {
            limit: balance.limit,
            charged: usize::try_from(balance.limit as i128 - free).unwrap_or(usize::MAX),
            in_flight,
            pending,
            room: balance.scopes.room(scope, free, bytes),
            may_fit: balance.scopes.may_admit(scope, bytes, free, ending),
        }
    }
}

/// Releases pending blocks inside an audit; `remove_ended` returns their charges. Returns true if a thread waits for memory.
pub(crate) fn release_pending<T>(
    shards: &mut [&mut Shard<T>],
    balance: &mut Balance,
    mut remove_ended: impl FnMut(&mut T) -> Vec<Charge>,
) -> bool {
    let mut is_released = false;
    for shard in shards {
        for charge in remove_ended(&mut shard.extra) {
            shard.pending = shard.pending.wrapping_sub(charge.bytes);
            balance.free += charge.bytes as i128;
            balance.scopes.discharge(charge.scope, charge.bytes);
            is_released = true;
        }
    }
    is_released && balance.waiters > 0
}

/// Moves the credit of all shards to the balance. The next refill of a shard sets its bound.
fn drain_shards<T>(shards: &mut [&mut Shard<T>], balance: &mut Balance) {
    for shard in shards {
        balance.free += shard.credit as i128;
        (shard.credit, shard.bound) = (0, 0);
    }
}

fn credit<T>(shards: &[&mut Shard<T>]) -> i128 {
    shards.iter().map(|shard| shard.credit as i128).sum()
}
