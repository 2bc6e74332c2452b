//! The accounting of a limit: credit per shard, a global balance behind it, and a final check that stops no thread.
//!
//! Every byte of the limit is in exactly one state: charged, unused credit of a shard, or the balance. A thread charges and releases
//! in its own shard. Shards refill from the balance in portions and return credit above their bound. No request is refused on this
//! path.
//!
//! What a shard cannot charge is decided by an *audit*: all shards locked for the time of some additions, so that the sums are those of
//! one instant. The audit moves the unused credit of all shards to the balance and charges from there. If the balance is too small, the
//! limit was used up by charges at that instant. No lock is held while a resource is called, so an audit waits for no device.
//!
//! Some charges may end soon:
//! - *In flight* are the bytes of operations whose result is open: an allocation that may fail, a free that may have happened.
//! - *Pending* are returned blocks that the resource below had not freed when it was last asked.
//!
//! A request that does not fit even without these is refused at once. Else its thread asks about the pending blocks and audits again,
//! until its deadline. After the deadline charges in flight count as used.
//!
//! Invariant: while the balance is below what scopes are guaranteed, or threads wait for memory, no shard has credit.

use super::in_flight::{InFlight, ShardId};
use super::primitive::{BiasedMutex, Mutex};
use super::tree::{DEVICE, ScopeIndex, ScopeTree};

/// The maximum credit that a shard takes ahead.
const MAX_AHEAD: usize = 64 << 20;

/// What one shard has. `T` is what else its users keep there.
#[derive(Debug)]
pub(crate) struct Shard<T> {
    credit: usize,
    /// More credit than this flows back to the balance.
    bound: usize,
    pending: usize,
    pub(crate) extra: T,
}

impl<T> Shard<T> {
    /// Bytes of returned blocks are no longer pending: the caller releases them.
    pub(crate) fn end_pending(&mut self, charge: usize) {
        self.pending = self.pending.saturating_sub(charge);
    }
}

/// A shard on a pair of cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct PaddedShard<T> {
    shard: BiasedMutex<Shard<T>>,
    in_flight: InFlight,
}

/// The bytes that no shard holds, and the scopes.
#[derive(Debug)]
pub(crate) struct Balance {
    /// Negative while the limit is below what is charged.
    free: i128,
    limit: usize,
    waiters: usize,
    pub(crate) scopes: ScopeTree,
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

/// The quotas of one budget, in `N` shards, a power of two.
#[derive(Debug)]
pub(crate) struct ThreadQuotas<T, const N: usize> {
    shards: Box<[PaddedShard<T>; N]>,
    balance: Mutex<Balance>,
}

impl Balance {
    /// Releases a charge. True when a thread waits for memory.
    pub(crate) fn release(&mut self, charge: usize, scope: ScopeIndex) -> bool {
        self.free += charge as i128;
        self.scopes.discharge(scope, charge);
        self.waiters > 0
    }

    fn unguaranteed(&self) -> usize {
        let unguaranteed = self.free - self.scopes.need() as i128;
        usize::try_from(unguaranteed.max(0)).unwrap_or(usize::MAX)
    }
}

impl<T: Default, const N: usize> ThreadQuotas<T, N> {
    pub(crate) fn new(limit: usize) -> Self {
        const { assert!(N.is_power_of_two()) };
        let shard = || Shard { credit: 0, bound: 0, pending: 0, extra: T::default() };
        let padded =
            || PaddedShard { shard: BiasedMutex::new(shard()), in_flight: InFlight::new() };
        let balance = Balance { free: limit as i128, limit, waiters: 0, scopes: ScopeTree::new() };
        Self { shards: Box::new(std::array::from_fn(|_| padded())), balance: Mutex::new(balance) }
    }
}

impl<T, const N: usize> ThreadQuotas<T, N> {
    #[inline(always)]
    fn padded(&self, shard_id: ShardId) -> &PaddedShard<T> {
        &self.shards[shard_id.index & (N - 1)]
    }

    fn in_flight(&self) -> usize {
        self.shards
            .iter()
            .fold(0, |sum: usize, padded| sum.saturating_add(padded.in_flight.bytes()))
    }

    /// [`ThreadQuotas::try_charge`] on the fast path: outside all scopes, and within this thread's own credit.
    #[inline(always)]
    pub(crate) fn try_charge_own<R>(
        &self,
        shard_id: ShardId,
        charge: usize,
        note: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let padded = self.padded(shard_id);
        let mut mine = padded.shard.enter()?;
        let left = mine.credit.checked_sub(charge)?;
        mine.credit = left;
        padded.in_flight.begin(shard_id, charge);
        Some(note(&mut mine.extra))
    }

    /// Charges without locking other shards. The charge is in flight. `None` declines: other shards may have the bytes.
    pub(crate) fn try_charge<R>(
        &self,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let padded = self.padded(shard_id);
        padded.shard.with(move |mine| {
            if scope == DEVICE && charge <= mine.credit {
                mine.credit -= charge;
            } else if !self.refill(mine, charge, scope) {
                return None;
            }
            padded.in_flight.begin(shard_id, charge);
            Some(note(&mut mine.extra))
        })
    }

    fn refill(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        let mut balance = self.balance.lock();
        // Waiting threads come first; requests that do not wait are decided in an audit.
        if balance.waiters > 0 {
            return false;
        }
        if scope != DEVICE {
            // A lower bound: credit of shards is free too.
            if !balance.scopes.admits(scope, charge, balance.free) {
                return false;
            }
            balance.scopes.charge(scope, charge);
            balance.free -= charge as i128;
            return true;
        }
        let missing = charge.saturating_sub(mine.credit);
        let unguaranteed = balance.unguaranteed();
        if unguaranteed < missing {
            return false;
        }
        let ahead = ((unguaranteed - missing) / (4 * N)).min(MAX_AHEAD);
        balance.free -= (missing + ahead) as i128;
        mine.credit = mine.credit + missing + ahead - charge;
        mine.bound = charge.saturating_add(2 * ahead);
        true
    }

    /// Begins an operation on charged bytes.
    #[inline(always)]
    pub(crate) fn begin(&self, shard_id: ShardId, charge: usize) {
        self.padded(shard_id).in_flight.begin(shard_id, charge);
    }

    /// Ends an operation; its bytes stay charged.
    #[inline(always)]
    pub(crate) fn end(&self, shard_id: ShardId, charge: usize) {
        self.padded(shard_id).in_flight.end(shard_id, charge);
    }

    /// [`ThreadQuotas::release`] on the fast path. Returns false, and changes nothing, if this thread's shard cannot keep the
    /// bytes.
    #[inline(always)]
    pub(crate) fn release_own(
        &self,
        shard_id: ShardId,
        charge: usize,
        note: impl FnOnce(&mut T),
    ) -> bool {
        let padded = self.padded(shard_id);
        let Some(mut mine) = padded.shard.enter() else { return false };
        let credit = mine.credit.saturating_add(charge);
        if credit > mine.bound {
            return false;
        }
        mine.credit = credit;
        note(&mut mine.extra);
        padded.in_flight.end(shard_id, charge);
        true
    }

    /// Ends an operation and releases its bytes. Returns true if a thread waits for memory.
    pub(crate) fn release(
        &self,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T),
    ) -> bool {
        let padded = self.padded(shard_id);
        padded.shard.with(move |mine| {
            note(&mut mine.extra);
            let waited_for = self.release_to_shard(mine, charge, scope);
            padded.in_flight.end(shard_id, charge);
            waited_for
        })
    }

    /// Ends an operation; its bytes are pending until the resource below reports the block as free.
    pub(crate) fn set_pending<R>(
        &self,
        shard_id: ShardId,
        charge: usize,
        note: impl FnOnce(&mut T) -> R,
    ) -> R {
        let padded = self.padded(shard_id);
        padded.shard.with(move |mine| {
            mine.pending += charge;
            padded.in_flight.end(shard_id, charge);
            note(&mut mine.extra)
        })
    }

    /// Changes the extra data of this thread's shard.
    pub(crate) fn with_extra<R>(&self, shard_id: ShardId, change: impl FnOnce(&mut T) -> R) -> R {
        self.padded(shard_id).shard.with(|mine| change(&mut mine.extra))
    }

    fn release_to_shard(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        if scope == DEVICE {
            mine.credit = mine.credit.saturating_add(charge);
            if mine.credit <= mine.bound {
                return false;
            }
        }
        self.release_to_balance(mine, charge, scope)
    }

    fn release_to_balance(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        let mut balance = self.balance.lock();
        if scope == DEVICE {
            let kept = mine.bound / 2;
            balance.free += (mine.credit - kept) as i128;
            mine.credit = kept;
            balance.waiters > 0
        } else {
            balance.release(charge, scope)
        }
    }

    /// Runs `body` with all shards and the balance at one instant. `body` calls nothing that could wait.
    pub(crate) fn audit<R>(&self, body: impl FnOnce(&mut [&mut Shard<T>], &mut Balance) -> R) -> R {
        let all: Vec<&BiasedMutex<Shard<T>>> =
            self.shards.iter().map(|padded| &padded.shard).collect();
        BiasedMutex::with_all(&all, |shards| body(shards, &mut self.balance.lock()))
    }

    /// The sums, and the room for a request of `charge`.
    pub(crate) fn snapshot(&self, charge: usize, scope: ScopeIndex) -> AuditSnapshot {
        self.audit(|shards, balance| self.summarize(shards, balance, charge, scope))
    }

    /// Charges in an audit, out of the credit of all shards and the balance. The charge is in flight. An error has the sums of the
    /// audit.
    pub(crate) fn charge_audited<R>(
        &self,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T) -> R,
    ) -> Result<R, AuditSnapshot> {
        self.audit(|shards, balance| {
            self.charge_in_audit(shards, balance, shard_id, charge, scope, note)
        })
    }

    /// [`ThreadQuotas::charge_audited`] inside an audit.
    pub(crate) fn charge_in_audit<R>(
        &self,
        shards: &mut [&mut Shard<T>],
        balance: &mut Balance,
        shard_id: ShardId,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T) -> R,
    ) -> Result<R, AuditSnapshot> {
        let index = shard_id.index & (N - 1);
        if !balance.scopes.admits(scope, charge, balance.free + credit(shards)) {
            return Err(self.summarize(shards, balance, charge, scope));
        }
        drain_shards(shards, balance);
        balance.free -= charge as i128;
        balance.scopes.charge(scope, charge);
        self.begin(shard_id, charge);
        Ok(note(&mut shards[index].extra))
    }

    fn summarize(
        &self,
        shards: &[&mut Shard<T>],
        balance: &Balance,
        charge: usize,
        scope: ScopeIndex,
    ) -> AuditSnapshot {
        let free = balance.free + credit(shards);
        let (in_flight, pending) =
            (self.in_flight(), shards.iter().map(|shard| shard.pending).sum());
        let open = in_flight.saturating_add(pending);
        AuditSnapshot {
            limit: balance.limit,
            charged: usize::try_from(balance.limit as i128 - free).unwrap_or(usize::MAX),
            in_flight,
            pending,
            room: balance.scopes.room(scope, free, charge),
            may_fit: balance.scopes.may_admit(scope, charge, free, open),
        }
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

    /// Announces a waiting thread: from now on releases report it.
    pub(crate) fn begin_waiting(&self) {
        self.audit(|shards, balance| {
            drain_shards(shards, balance);
            balance.waiters += 1;
        });
    }

    pub(crate) fn end_waiting(&self) {
        self.balance.lock().waiters -= 1;
    }

    /// Releases pending blocks of this thread's shard; `remove_ended` returns their charges and scopes. Returns true if a thread
    /// waits for memory.
    pub(crate) fn release_own_pending(
        &self,
        shard_id: ShardId,
        remove_ended: impl FnOnce(&mut T) -> Vec<(usize, ScopeIndex)>,
    ) -> bool {
        self.padded(shard_id).shard.with(move |mine| {
            let mut waited_for = false;
            for (charge, scope) in remove_ended(&mut mine.extra) {
                mine.end_pending(charge);
                waited_for |= self.release_to_shard(mine, charge, scope);
            }
            waited_for
        })
    }
}

/// Moves the credit of all shards to the balance. A shard gets a bound again with its next refill.
fn drain_shards<T>(shards: &mut [&mut Shard<T>], balance: &mut Balance) {
    for shard in shards {
        balance.free += shard.credit as i128;
        shard.credit = 0;
        shard.bound = 0;
    }
}

fn credit<T>(shards: &[&mut Shard<T>]) -> i128 {
    shards.iter().map(|shard| shard.credit as i128).sum()
}
