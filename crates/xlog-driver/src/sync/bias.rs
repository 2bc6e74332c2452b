//! The right of one thread to change something without locked instructions.
//!
//! A [`Bias`] lies beside what it protects. Its owner enters by plain stores. Every other thread that wants to change the thing
//! revokes the bias first: that waits until the owner is out and keeps it out, at the price of a barrier through all running threads.
//!
//! Invariants, kept by the user: [`Bias::claim`] and [`Bias::revoke`] are called under one lock; between `claim` and the end of
//! `revoke` only the owner changes the thing, and only while it has entered. What is done inside must be short: a revoking thread spins.
//!
//! The owner announces that it is inside and then reads whether it still is the owner; the revoking thread takes the ownership away and
//! then reads whether the owner has announced itself. With the barriers between the two, at least one of them sees the other.
//!
//! A thread that is about to enter while the bias is taken from it notices too late to leave no trace: it announces itself for a moment.
//! The announcement is in the record of the thread (`ThreadRecord`) and not in the bias, so a late former owner hides no other. Any
//! number of threads can own a bias by turns.

use std::marker::PhantomData;

use super::barrier::{self, AtomicU32, Ordering};
use super::thread_record::Announced;
use super::threads;

/// Which thread, if any, may change something without a lock.
#[derive(Debug, Default)]
pub struct Bias {
    /// The record of the owning thread; 0 when there is none.
    owner: AtomicU32,
}

/// The owner is inside, until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct BiasedSection<'a> {
    _announced: Announced,
    /// Only the thread that entered leaves, and the bias stays where it is.
    _bias: PhantomData<(&'a Bias, *const ())>,
}

impl Bias {
    /// Enters, if this thread is the owner and is not inside already.
    #[inline(always)]
    #[must_use]
    pub fn enter(&self) -> Option<BiasedSection<'_>> {
        let current = threads::current();
        if self.owner.load(Ordering::Relaxed) != current.id {
            return None;
        }
        let announced = current.announce(std::ptr::from_ref(self).addr())?;
        barrier::light();
        let held = BiasedSection { _announced: announced, _bias: PhantomData };
        // Acquire: what the last revoking thread changed before it restored the bias is seen.
        (self.owner.load(Ordering::Acquire) == current.id).then_some(held)
    }

    /// True when some thread owns it.
    #[inline]
    pub fn is_owned(&self) -> bool {
        self.owner() != 0
    }

    /// True when this thread owns it.
    #[inline]
    pub fn is_mine(&self) -> bool {
        self.owner() == threads::current().id
    }

    /// Makes this thread the owner of a bias without one. False where the system cannot take a bias away again, and for a thread
    /// that is about to end.
    pub fn claim(&self) -> bool {
        let Some(current) = threads::current_or_new().filter(|_| barrier::available()) else {
            return false;
        };
        self.owner.store(current.id, Ordering::Release);
        true
    }

    /// The owner, for [`Bias::restore`].
    pub(super) fn owner(&self) -> u32 {
        self.owner.load(Ordering::Relaxed)
    }

    /// True when another thread owns it that has not ended.
    pub(super) fn is_of_another(&self) -> bool {
        let owner = self.owner();
        is_foreign(owner)
            && threads::record(owner).is_some_and(|record| record.is_live.load(Ordering::Relaxed))
    }

    /// After [`Bias::revoke`], under the same lock: the former owner goes on.
    pub(super) fn restore(&self, owner: u32) {
        self.owner.store(owner, Ordering::Release);
    }

    /// Takes the ownership away and returns the owner. Called under the lock, so a bias without an owner stays so.
    fn take_owner(&self) -> u32 {
        match self.owner() {
            0 => 0,
            _ => self.owner.swap(0, Ordering::AcqRel),
        }
    }

    /// True when the owner is inside, or about to enter. Without a barrier only a hint.
    pub(super) fn is_entered(&self) -> bool {
        self.has_inside(self.owner())
    }

    /// True when `owner` is inside of this bias, or about to enter.
    fn has_inside(&self, owner: u32) -> bool {
        let address = std::ptr::from_ref(self).addr();
        owner != 0 && threads::record(owner).is_some_and(|record| record.announces(address))
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
        while self.has_inside(owner) {
            // What is done inside is short, unless the owner was preempted there.
            barrier::pause(turns);
            turns += 1;
        }
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

/// The owner itself is where it announced to be; of another thread a barrier makes sure.
fn is_foreign(owner: u32) -> bool {
    owner != 0 && owner != threads::current().id
}
