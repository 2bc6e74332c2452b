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

use super::barrier::{self, AtomicBool, AtomicU32, Ordering};

/// Which thread, if any, may change something without a lock.
#[derive(Debug, Default)]
pub struct Bias {
    /// The name of the owning thread; 0 when there is none.
    owner: AtomicU32,
    /// The owner is inside. Only the owner writes it.
    inside: AtomicBool,
}

/// The owner is inside, until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Held<'a> {
    bias: &'a Bias,
    /// Only the thread that entered leaves.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Bias {
    /// Enters, if this thread is the owner and is not inside already.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> Option<Held<'_>> {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner == 0 || owner != barrier::thread_name() || self.inside.load(Ordering::Relaxed) {
            return None;
        }
        self.inside.store(true, Ordering::Relaxed);
        barrier::light();
        let held = Held { bias: self, _not_send: std::marker::PhantomData };
        // Acquire: what the last revoker changed before it gave the bias back is seen.
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
        owner != 0 && owner == barrier::thread_name()
    }

    /// Makes this thread the owner of what nobody owns. False where the system cannot take a bias away again.
    pub fn claim(&self) -> bool {
        let name = barrier::thread_name();
        if name == 0 || !barrier::available() {
            return false;
        }
        self.owner.store(name, Ordering::Release);
        true
    }

    /// Who owns it, for [`Bias::restore`].
    pub(super) fn owner(&self) -> u32 {
        self.owner.load(Ordering::Relaxed)
    }

    /// After [`Bias::revoke`], under the same lock: the former owner goes on.
    pub(super) fn restore(&self, owner: u32) {
        self.owner.store(owner, Ordering::Release);
    }

    /// Takes the bias away. When this returns, the owner is out and cannot enter.
    pub fn revoke(&self) {
        Self::revoke_all([self]);
    }

    /// Takes several away, with one barrier for all.
    pub fn revoke_all<'a>(biases: impl IntoIterator<Item = &'a Self> + Clone) {
        let mut foreign = false;
        for bias in biases.clone() {
            let owner = bias.owner.swap(0, Ordering::AcqRel);
            // The owner itself is where it says it is.
            foreign |= owner != 0 && owner != barrier::thread_name();
        }
        if foreign {
            barrier::heavy();
        }
        for bias in biases {
            let mut turns = 0_u32;
            while bias.inside.load(Ordering::Acquire) {
                // What is done inside is short, unless the owner was preempted there.
                turns += 1;
                barrier::pause(turns);
            }
        }
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        self.bias.inside.store(false, Ordering::Release);
    }
}
