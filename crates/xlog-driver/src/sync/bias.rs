//! The right of one thread to change something without locked instructions.
//!
//! A [`Bias`] stands beside what it protects. Its owner enters by plain stores; whoever else wants to change the thing revokes
//! the bias first, which waits until the owner is out and keeps it out, at the price of a barrier through all running threads.
//!
//! Invariants, kept by the user: [`Bias::claim`] and [`Bias::revoke`] are called under one lock; between `claim` and the end of
//! `revoke` nobody changes the thing but the owner while it has entered. What is inside must be short: a revoker spins.
//!
//! The owner says that it is inside and then looks whether it still is the owner; the revoker takes the ownership away and then
//! looks whether the owner is inside. With the barriers between the two, at least one of them sees the other.

use std::marker::PhantomData;

use super::barrier::{self, AtomicBool, AtomicU32, Ordering};

/// Looks at an owner that is inside before one who can do without gives up.
const PATIENCE: u32 = 64;

/// Owners are told by name and seat; there are at most four seats.
const SEAT_BITS: u32 = 2;

/// Names from this one on own nothing.
const NAMES: u32 = (1 << (32 - SEAT_BITS)) - 1;
/// In the place of an owner: no owner has such a name.
const NO_THREAD: u32 = NAMES << SEAT_BITS;

/// A name as an owner in the first seat has it; of a name that owns nothing, nobody's.
pub(super) const fn sign_of(name: u32) -> u32 {
    if name.wrapping_sub(1) < NAMES - 1 { name << SEAT_BITS } else { NO_THREAD }
}

/// Which thread, if any, may change something without a lock.
///
/// A thread that is about to enter while the bias is taken from it notices too late to leave no trace: it says for a moment that
/// it is inside. So every owner has a seat of its own to say so, for as long as it lives, and hides nobody else.
///
/// `SEATS` threads, at most four, can own it by turns.
#[derive(Debug)]
pub struct Bias<const SEATS: usize = 4> {
    /// The name of the owning thread and its seat; 0 when there is none.
    owner: AtomicU32,
    /// Whose seats they are. A seat changes hands only when its thread is gone.
    seats: [AtomicU32; SEATS],
    /// The thread of the seat is inside. Only that thread writes it.
    inside: [AtomicBool; SEATS],
}

/// The owner is inside, until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct BiasedSection<'a> {
    inside: &'a AtomicBool,
    /// Only the thread that entered leaves.
    _not_send: PhantomData<*const ()>,
}

/// The running thread, for as long as a call lasts: who enters several things asks for its name once.
///
/// It cannot leave the call: a thread that is about to end loses its name.
#[derive(Clone, Copy, Debug)]
pub struct CurrentThread<'a> {
    /// As an owner in the first seat.
    owner: u32,
    _call: PhantomData<(&'a (), *const ())>,
}

impl CurrentThread<'_> {
    /// Runs `body` with the running thread; with nobody while it runs under a scheduler, or has no name. Nobody owns nothing and
    /// goes the long way everywhere.
    #[inline(always)]
    pub fn with<R>(body: impl for<'a> FnOnce(CurrentThread<'a>) -> R) -> R {
        body(CurrentThread { owner: barrier::own_sign(), _call: PhantomData })
    }

    /// Runs `body` with nobody.
    pub fn with_no_thread<R>(body: impl for<'a> FnOnce(CurrentThread<'a>) -> R) -> R {
        body(CurrentThread { owner: NO_THREAD, _call: PhantomData })
    }

    /// The name of the thread; of nobody it says nothing.
    #[inline(always)]
    #[must_use]
    pub fn name(self) -> u32 {
        name_of(self.owner)
    }
}

fn name_of(owner: u32) -> u32 {
    owner >> SEAT_BITS
}

impl<const SEATS: usize> Default for Bias<SEATS> {
    fn default() -> Self {
        const { assert!(SEATS > 0 && SEATS <= 1 << SEAT_BITS) };
        Self {
            owner: AtomicU32::new(0),
            seats: std::array::from_fn(|_| AtomicU32::new(0)),
            inside: std::array::from_fn(|_| AtomicBool::new(false)),
        }
    }
}

impl<const SEATS: usize> Bias<SEATS> {
    fn seat_of(&self, owner: u32) -> &AtomicBool {
        &self.inside[(owner & ((1 << SEAT_BITS) - 1)) as usize % SEATS]
    }

    /// Enters, if this thread is the owner and is not inside already.
    #[inline(always)]
    #[must_use]
    pub fn enter(&self) -> Option<BiasedSection<'_>> {
        let owner = self.owner.load(Ordering::Relaxed);
        let inside = self.seat_of(owner);
        if owner == 0 || !barrier::is_named(name_of(owner)) || inside.load(Ordering::Relaxed) {
            return None;
        }
        inside.store(true, Ordering::Relaxed);
        barrier::light();
        let held = BiasedSection { inside, _not_send: PhantomData };
        // Acquire: what the last revoker changed before it gave the bias back is seen.
        (self.owner.load(Ordering::Acquire) == owner).then_some(held)
    }

    /// [`Bias::enter`] for one who knows its name.
    #[inline(always)]
    #[must_use]
    pub fn enter_as(&self, current: CurrentThread<'_>) -> Option<BiasedSection<'_>> {
        let owner = self.owner.load(Ordering::Relaxed);
        // Of an owner with this name only the seat is left; of another one, or none, more than any seat.
        let inside = self.inside.get((owner ^ current.owner) as usize)?;
        if inside.load(Ordering::Relaxed) {
            return None;
        }
        inside.store(true, Ordering::Relaxed);
        barrier::light();
        let held = BiasedSection { inside, _not_send: PhantomData };
        // As in `enter`.
        (self.owner.load(Ordering::Acquire) == owner).then_some(held)
    }

    /// True when some thread owns it.
    #[inline]
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    /// True when this thread owns it.
    #[inline]
    #[must_use]
    pub fn is_mine(&self) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        owner != 0 && name_of(owner) == barrier::thread_name()
    }

    /// Makes this thread the owner of what nobody owns. False where the system cannot take a bias away again, or as many threads
    /// as there are seats have owned it before and are still there.
    pub fn claim(&self) -> bool {
        let name = barrier::thread_name();
        if name == 0 || name >= NAMES || !barrier::available() {
            return false;
        }
        let had = |seat: &AtomicU32| seat.load(Ordering::Relaxed);
        let seat = self.seats.iter().position(|seat| had(seat) == name).or_else(|| {
            self.seats.iter().position(|seat| had(seat) == 0 || barrier::has_exited(had(seat)))
        });
        let Some(seat) = seat else { return false };
        self.seats[seat].store(name, Ordering::Relaxed);
        self.owner.store(name << SEAT_BITS | seat as u32, Ordering::Release);
        true
    }

    /// Who owns it, for [`Bias::restore`].
    pub(super) fn owner(&self) -> u32 {
        self.owner.load(Ordering::Relaxed)
    }

    /// True when another thread owns it that has not ended.
    pub(super) fn is_of_another(&self) -> bool {
        let owner = self.owner();
        is_foreign(owner) && !barrier::has_exited(name_of(owner))
    }

    /// After [`Bias::revoke`], under the same lock: the former owner goes on.
    pub(super) fn restore(&self, owner: u32) {
        self.owner.store(owner, Ordering::Release);
    }

    /// Takes the ownership away, and makes sure that an owner which is inside is seen there; returns it.
    fn take_owner(&self) -> u32 {
        self.owner.swap(0, Ordering::AcqRel)
    }

    /// Takes the bias away. When this returns, the owner is out and cannot enter.
    pub fn revoke(&self) {
        let owner = self.take_owner();
        if is_foreign(owner) {
            barrier::heavy();
        }
        self.wait_until_out(owner);
    }

    fn wait_until_out(&self, owner: u32) {
        let mut turns = 0;
        while owner != 0 && self.seat_of(owner).load(Ordering::Acquire) {
            // What is done inside is short, unless the owner was preempted there.
            barrier::pause(turns);
            turns += 1;
        }
    }

    /// Takes the bias away unless the owner stays inside. False when it does: then nothing has changed.
    pub fn try_revoke(&self) -> bool {
        let owner = self.take_owner();
        if is_foreign(owner) {
            barrier::heavy();
        }
        for turns in 0..PATIENCE {
            if owner == 0 || !self.seat_of(owner).load(Ordering::Acquire) {
                return true;
            }
            barrier::pause(turns);
        }
        self.owner.store(owner, Ordering::Release);
        false
    }

    /// Takes several away, with one barrier for all; returns their owners.
    pub(super) fn revoke_all<'a>(biases: impl IntoIterator<Item = &'a Self> + Clone) -> Vec<u32> {
        let owners: Vec<u32> = biases.clone().into_iter().map(Self::take_owner).collect();
        if owners.iter().any(|owner| is_foreign(*owner)) {
            barrier::heavy();
        }
        for (bias, owner) in biases.into_iter().zip(&owners) {
            bias.wait_until_out(*owner);
        }
        owners
    }
}

/// The owner itself is where it says it is; of another thread that must be made sure.
fn is_foreign(owner: u32) -> bool {
    owner != 0 && name_of(owner) != barrier::thread_name()
}

impl Drop for BiasedSection<'_> {
    #[inline]
    fn drop(&mut self) {
        self.inside.store(false, Ordering::Release);
    }
}
