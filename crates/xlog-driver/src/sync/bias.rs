//! Biased access: one thread changes data without locked instructions.
//!
//! A [`Bias`] lies beside the data it protects. Its owner enters by plain stores. Every other thread revokes the bias before it changes the
//! data: it issues a process-wide barrier, waits until the owner is out, and keeps it out.
//!
//! Invariants, which the caller keeps: [`Bias::claim`] and [`Bias::revoke`] are called under one lock. Between `claim` and the end of
//! `revoke` only the owner changes the data, and only while inside. Sections must be short, because a revoking thread spins.
//!
//! The owner announces its entry and then reads whether it is still the owner. The revoking thread clears the owner and then reads the
//! announcements. With the barriers between the two steps, at least one of them sees the other.
//!
//! A thread that enters during a revocation announces itself for a moment before it notices. Announcements are in the thread's
//! `ThreadRecord`, not in the bias, so a late former owner does not hide a new one. Any number of threads can own a bias in turn.

use std::marker::PhantomData;

use super::barrier::{self, AtomicU32, Ordering};
use super::thread_record::Announced;
use super::threads;

/// Ownership of data by at most one thread, which changes it without a lock.
#[derive(Debug, Default)]
pub struct Bias {
    /// The id of the owner's record; 0 if there is no owner.
    owner: AtomicU32,
}

/// Keeps the owner inside until dropped.
#[derive(Debug)]
#[must_use]
pub struct BiasedSection<'a> {
    _announced: Announced,
    /// Only the thread that entered may leave, and the bias must not move.
    _bias: PhantomData<(&'a Bias, *const ())>,
}

impl Bias {
    /// Enters if this thread is the owner and not inside already.
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
        // Acquire: sees what the last revoking thread changed before it restored the bias.
        (self.owner.load(Ordering::Acquire) == current.id).then_some(held)
    }

    /// True if any thread owns the bias.
    #[inline]
    pub fn is_owned(&self) -> bool {
        self.owner() != 0
    }

    /// True if this thread owns the bias.
    #[inline]
    pub fn is_mine(&self) -> bool {
        self.owner() == threads::current().id
    }

    /// Makes this thread the owner of a bias without one. Returns false if the system lacks the barrier, the thread is ending, or there is
    /// no free thread record.
    pub fn claim(&self) -> bool {
        let Some(current) = threads::current_or_new().filter(|_| barrier::available()) else {
            return false;
        };
        self.owner.store(current.id, Ordering::Release);
        true
    }

    /// The owner's record id, for [`Bias::restore`].
    pub(super) fn owner(&self) -> u32 {
        self.owner.load(Ordering::Relaxed)
    }

    /// True if another live thread owns the bias.
    pub(super) fn is_of_another(&self) -> bool {
        let owner = self.owner();
        is_foreign(owner)
            && threads::record(owner).is_some_and(|record| record.is_live.load(Ordering::Relaxed))
    }

    /// Makes `owner` the owner again after [`Bias::revoke_all`], under the same lock.
    pub(super) fn restore(&self, owner: u32) {
        self.owner.store(owner, Ordering::Release);
    }

    /// Clears and returns the owner. Called under the lock, so no thread claims the bias meanwhile.
    fn take_owner(&self) -> u32 {
        match self.owner() {
            0 => 0,
            _ => self.owner.swap(0, Ordering::AcqRel),
        }
    }

    /// True if the owner is inside or about to enter. Only a hint without a barrier.
    pub(super) fn is_entered(&self) -> bool {
        self.has_inside(self.owner())
    }

    fn has_inside(&self, owner: u32) -> bool {
        let address = std::ptr::from_ref(self).addr();
        owner != 0 && threads::record(owner).is_some_and(|record| record.announces(address))
    }

    /// Revokes the bias. On return the owner is out and cannot enter.
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
            // Sections are short, unless the owner was preempted inside.
            barrier::pause(turns);
            turns += 1;
        }
    }

    /// Revokes several biases with one barrier, and returns their owners.
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

/// True if the owner is another thread, whose announcements need a barrier to be seen.
fn is_foreign(owner: u32) -> bool {
    owner != 0 && owner != threads::current().id
}
