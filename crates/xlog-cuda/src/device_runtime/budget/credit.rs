//! Who may take how many bytes: credits per shard, a pot behind them, and a way to refuse that is never wrong.
//!
//! Every byte of the limit is in exactly one place: charged, in the credit of a shard, or in the pot. A thread takes from and gives
//! to its own shard; shards take from the pot in pieces and give back what exceeds their bound. Nothing is refused by that.
//! A refusal is decided with all shards locked:
//!
//! - *In flight* are the bytes of operations that have told the budget but whose result is open: an allocation that may fail, a free
//!   that may have happened. *Pending* are returned blocks that the resource below had not freed when it was last asked; while it is
//!   asked again they are both.
//! - If the request would not fit even without these, it is refused: the other bytes are with the resource at this instant.
//! - Else the pot is closed, so that no allocation begins; what is in flight ends; pending blocks are asked for. What is charged then
//!   was with the resource below at the instant the last one in flight ended, and a refusal is true for that instant.
//!
//! Invariant: while the pot holds less than scopes are guaranteed, or waiters wait, no shard has credit.

use super::flights::{Flights, Seat};
use super::primitive::{BiasedMutex, Mutex, Turnstile, pause};
use super::tree::{DEVICE, ScopeIndex, ScopeTree};

/// More than this a shard never takes ahead.
const MOST_AHEAD: usize = 64 << 20;

/// What one shard has. `T` is what else its users keep there.
#[derive(Debug)]
pub(crate) struct Shard<T> {
    credit: usize,
    /// More credit than this flows back to the pot.
    bound: usize,
    pending: usize,
    /// Of the pending ones, those that are being looked through.
    looked_at: usize,
    pub(crate) extra: T,
}

/// Shards of different threads share no cache line, nor the one that is fetched along with it.
#[derive(Debug)]
#[repr(align(128))]
struct Place<T> {
    shard: BiasedMutex<Shard<T>>,
    flights: Flights,
}

/// What is nobody's, and the rules.
#[derive(Debug)]
pub(crate) struct Pot {
    /// Below zero when the limit was lowered below what is charged.
    free: i128,
    limit: usize,
    closed: bool,
    waiters: usize,
    pub(crate) scopes: ScopeTree,
}

/// The books at one instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sight {
    pub(crate) limit: usize,
    pub(crate) charged: usize,
    pub(crate) in_flight: usize,
    pub(crate) pending: usize,
    /// The most that would have been admitted.
    pub(crate) room: usize,
}

impl Sight {
    /// The limit less what is charged.
    pub(crate) fn free(&self) -> usize {
        self.limit.saturating_sub(self.charged)
    }

    /// True when a request is not admitted, and would not be if everything in flight and pending had ended.
    pub(crate) fn is_final(&self, charge: usize) -> bool {
        let open = self.in_flight.saturating_add(self.pending);
        self.room < charge && (open == 0 || charge > self.free().saturating_add(open))
    }
}

/// The credits of one budget, in `N` shards, a power of two.
#[derive(Debug)]
pub(crate) struct Credits<T, const N: usize> {
    shards: Box<[Place<T>; N]>,
    pot: Mutex<Pot>,
    deciding: Turnstile<()>,
}

impl Pot {
    fn spare(&self) -> usize {
        let spare = self.free - self.scopes.need() as i128;
        usize::try_from(spare.max(0)).unwrap_or(usize::MAX)
    }
}

impl<T: Default, const N: usize> Credits<T, N> {
    pub(crate) fn new(limit: usize) -> Self {
        const { assert!(N.is_power_of_two()) };
        let shard = || Shard { credit: 0, bound: 0, pending: 0, looked_at: 0, extra: T::default() };
        let place = || Place { shard: BiasedMutex::new(shard()), flights: Flights::new() };
        let pot =
            Pot { free: limit as i128, limit, closed: false, waiters: 0, scopes: ScopeTree::new() };
        Self {
            shards: Box::new(std::array::from_fn(|_| place())),
            pot: Mutex::new(pot),
            deciding: Turnstile::new(()),
        }
    }
}

impl<T, const N: usize> Credits<T, N> {
    #[inline(always)]
    fn place(&self, seat: Seat) -> &Place<T> {
        &self.shards[seat.index & (N - 1)]
    }

    fn in_flight(&self) -> usize {
        self.shards.iter().fold(0, |sum: usize, place| sum.saturating_add(place.flights.bytes()))
    }

    /// [`Credits::take`] where this thread's own credit covers a charge outside all scopes.
    #[inline(always)]
    pub(crate) fn take_own<R>(
        &self,
        seat: Seat,
        charge: usize,
        note: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let place = self.place(seat);
        let mut mine = place.shard.enter()?;
        let left = mine.credit.checked_sub(charge)?;
        mine.credit = left;
        place.flights.begin(seat, charge);
        Some(note(&mut mine.extra))
    }

    /// Takes a charge, in flight from now on, without a look at other shards. `None`: this says nothing about whether it fits.
    pub(crate) fn take<R>(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            if scope == DEVICE && charge <= mine.credit {
                mine.credit -= charge;
            } else if !self.refill(mine, charge, scope) {
                return None;
            }
            place.flights.begin(seat, charge);
            Some(note(&mut mine.extra))
        })
    }

    fn refill(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        let mut pot = self.pot.lock();
        // Past waiters goes only who does not wait, and by another way.
        if pot.closed || pot.waiters > 0 {
            return false;
        }
        if scope != DEVICE {
            // The credit in shards only adds to what is free.
            if !pot.scopes.admits(scope, charge, pot.free) {
                return false;
            }
            pot.scopes.charge(scope, charge);
            pot.free -= charge as i128;
            return true;
        }
        let missing = charge.saturating_sub(mine.credit);
        let spare = pot.spare();
        if spare < missing {
            return false;
        }
        let ahead = ((spare - missing) / (4 * N)).min(MOST_AHEAD);
        pot.free -= (missing + ahead) as i128;
        mine.credit = mine.credit + missing + ahead - charge;
        mine.bound = charge.saturating_add(2 * ahead);
        true
    }

    /// An operation on charged bytes begins whose result is open.
    #[inline(always)]
    pub(crate) fn begin(&self, seat: Seat, charge: usize) {
        self.place(seat).flights.begin(seat, charge);
    }

    /// It has ended, and the bytes are as charged as before.
    #[inline(always)]
    pub(crate) fn end(&self, seat: Seat, charge: usize) {
        self.place(seat).flights.end(seat, charge);
    }

    /// [`Credits::release`] where this thread's own shard keeps the bytes. False when it was not done.
    #[inline(always)]
    pub(crate) fn release_own(&self, seat: Seat, charge: usize, note: impl FnOnce(&mut T)) -> bool {
        let place = self.place(seat);
        let Some(mut mine) = place.shard.enter() else { return false };
        let credit = mine.credit.saturating_add(charge);
        if credit > mine.bound {
            return false;
        }
        mine.credit = credit;
        note(&mut mine.extra);
        place.flights.end(seat, charge);
        true
    }

    /// It has ended, and the bytes are free. True when somebody waits for them.
    pub(crate) fn release(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T),
    ) -> bool {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            note(&mut mine.extra);
            let waited_for = self.give(mine, charge, scope);
            place.flights.end(seat, charge);
            waited_for
        })
    }

    /// It has ended, and the bytes are free once the resource below says so.
    pub(crate) fn set_pending<R>(
        &self,
        seat: Seat,
        charge: usize,
        note: impl FnOnce(&mut T) -> R,
    ) -> R {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            mine.pending += charge;
            place.flights.end(seat, charge);
            note(&mut mine.extra)
        })
    }

    /// What this shard keeps.
    pub(crate) fn with_extra<R>(&self, seat: Seat, change: impl FnOnce(&mut T) -> R) -> R {
        self.place(seat).shard.with(|mine| change(&mut mine.extra))
    }

    fn give(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        if scope == DEVICE {
            mine.credit = mine.credit.saturating_add(charge);
            if mine.credit <= mine.bound {
                return false;
            }
        }
        self.give_back(mine, charge, scope)
    }

    fn give_back(&self, mine: &mut Shard<T>, charge: usize, scope: ScopeIndex) -> bool {
        let mut pot = self.pot.lock();
        if scope == DEVICE {
            let kept = mine.bound / 2;
            pot.free += (mine.credit - kept) as i128;
            mine.credit = kept;
        } else {
            pot.free += charge as i128;
            pot.scopes.discharge(scope, charge);
        }
        pot.waiters > 0
    }

    /// Runs `body` with everything standing still.
    pub(crate) fn audit<R>(&self, body: impl FnOnce(&mut [&mut Shard<T>], &mut Pot) -> R) -> R {
        let all: Vec<&BiasedMutex<Shard<T>>> =
            self.shards.iter().map(|place| &place.shard).collect();
        BiasedMutex::with_all(&all, |shards| body(shards, &mut self.pot.lock()))
    }

    /// The books, and the room for a request of `charge`.
    pub(crate) fn sight(&self, charge: usize, scope: ScopeIndex) -> Sight {
        self.audit(|shards, pot| self.look(shards, pot, charge, scope))
    }

    /// Takes a charge out of everything that is free, wherever it is.
    pub(crate) fn gather<R>(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Sight> {
        self.audit(|shards, pot| {
            if pot.closed {
                return Err(self.look(shards, pot, charge, scope));
            }
            let granted = self.grant(shards, pot, seat, charge, scope, note);
            granted.map_err(|_| self.look(shards, pot, charge, scope))
        })
    }

    /// Takes a charge, or refuses what did not fit at some instant of this call. `ask` ends what is pending and is free by now.
    pub(crate) fn decide<R>(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        ask: impl FnOnce(),
        note: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Sight> {
        let _turn = self.deciding.lock();
        let mut note = note;
        let mut round = 0;
        loop {
            let attempt = self.audit(|shards, pot| {
                pot.closed = false;
                self.grant(shards, pot, seat, charge, scope, note).map_err(|note| {
                    drain(shards, pot);
                    pot.closed = true;
                    (note, self.in_flight())
                })
            });
            let in_flight;
            (note, in_flight) = match attempt {
                Ok(granted) => return Ok(granted),
                Err(left) => left,
            };
            if in_flight == 0 || !pause(round) {
                break;
            }
            round += 1;
        }
        ask();
        self.audit(|shards, pot| {
            pot.closed = false;
            let granted = self.grant(shards, pot, seat, charge, scope, note);
            granted.map_err(|_| self.look(shards, pot, charge, scope))
        })
    }

    fn grant<R, F: FnOnce(&mut T) -> R>(
        &self,
        shards: &mut [&mut Shard<T>],
        pot: &mut Pot,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        note: F,
    ) -> Result<R, F> {
        let index = seat.index & (N - 1);
        if !pot.scopes.admits(scope, charge, pot.free + credit(shards)) {
            return Err(note);
        }
        drain(shards, pot);
        pot.free -= charge as i128;
        pot.scopes.charge(scope, charge);
        self.begin(seat, charge);
        Ok(note(&mut shards[index].extra))
    }

    fn look(&self, shards: &[&mut Shard<T>], pot: &Pot, charge: usize, scope: ScopeIndex) -> Sight {
        let free = pot.free + credit(shards);
        Sight {
            limit: pot.limit,
            charged: usize::try_from(pot.limit as i128 - free).unwrap_or(usize::MAX),
            in_flight: self.in_flight(),
            pending: shards.iter().map(|shard| shard.pending).sum(),
            room: pot.scopes.room(scope, free, charge),
        }
    }

    /// Another limit; what is charged stays. Returns by how much it is exceeded. `note` is called in the order of the changes.
    pub(crate) fn set_limit(&self, limit: usize, note: impl FnOnce()) -> usize {
        self.audit(|shards, pot| {
            note();
            drain(shards, pot);
            pot.free += limit as i128 - pot.limit as i128;
            pot.limit = limit;
            usize::try_from((-pot.free).max(0)).unwrap_or(usize::MAX)
        })
    }

    /// Changes the scopes. Their guarantees hold from now on.
    pub(crate) fn change_scopes<R>(&self, change: impl FnOnce(&mut ScopeTree) -> R) -> R {
        self.audit(|shards, pot| {
            drain(shards, pot);
            change(&mut pot.scopes)
        })
    }

    /// Reads the scopes.
    pub(crate) fn with_scopes<R>(&self, read: impl FnOnce(&ScopeTree) -> R) -> R {
        read(&self.pot.lock().scopes)
    }

    /// From now on whoever releases bytes is told that somebody waits.
    pub(crate) fn begin_waiting(&self) {
        self.audit(|shards, pot| {
            drain(shards, pot);
            pot.waiters += 1;
        });
    }

    pub(crate) fn end_waiting(&self) {
        self.pot.lock().waiters -= 1;
    }

    /// Takes what the shards keep as pending, for `extra` to be looked through. The bytes stay pending, here, and are in flight too
    /// until [`Credits::release_pending`] or [`Credits::put_back_pending`].
    pub(crate) fn take_pending<R>(
        &self,
        seat: Seat,
        take: impl FnOnce(&mut [&mut Shard<T>]) -> R,
    ) -> R {
        self.audit(|shards, _| {
            // What others are looking through is theirs.
            let taken: usize = shards.iter().map(|shard| shard.pending - shard.looked_at).sum();
            for shard in shards.iter_mut() {
                shard.pending = shard.looked_at;
            }
            let mine = &mut shards[seat.index & (N - 1)];
            mine.pending += taken;
            mine.looked_at += taken;
            self.begin(seat, taken);
            take(shards)
        })
    }

    /// [`Credits::take_pending`] of one shard.
    pub(crate) fn take_own_pending<R>(&self, seat: Seat, take: impl FnOnce(&mut T) -> R) -> R {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            place.flights.begin(seat, mine.pending - mine.looked_at);
            mine.looked_at = mine.pending;
            take(&mut mine.extra)
        })
    }

    /// Of what was taken to be looked through, this is free. True when somebody waits for it.
    pub(crate) fn release_pending(
        &self,
        seat: Seat,
        charge: usize,
        scope: ScopeIndex,
        note: impl FnOnce(&mut T),
    ) -> bool {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            mine.pending -= charge;
            mine.looked_at -= charge;
            note(&mut mine.extra);
            let waited_for = self.give(mine, charge, scope);
            place.flights.end(seat, charge);
            waited_for
        })
    }

    /// Of what was taken to be looked through, this is pending still.
    pub(crate) fn put_back_pending(&self, seat: Seat, charge: usize, note: impl FnOnce(&mut T)) {
        let place = self.place(seat);
        place.shard.with(move |mine| {
            mine.looked_at -= charge;
            note(&mut mine.extra);
            place.flights.end(seat, charge);
        });
    }
}

/// Puts all credit into the pot. Shards get a bound again with their next refill.
fn drain<T>(shards: &mut [&mut Shard<T>], pot: &mut Pot) {
    for shard in shards {
        pot.free += shard.credit as i128;
        shard.credit = 0;
        shard.bound = 0;
    }
}

fn credit<T>(shards: &[&mut Shard<T>]) -> i128 {
    shards.iter().map(|shard| shard.credit as i128).sum()
}
