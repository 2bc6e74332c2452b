//! A biased mutex: the owner thread locks it without a locked instruction.
//!
//! After eight consecutive locks by one thread the mutex is biased to it, and that thread enters by plain stores. Another thread revokes
//! the bias with a process-wide barrier. Each new bias doubles the number of consecutive locks required for the next, up to 4096.
//! [`BiasedMutex::with_all`] revokes temporarily and restores the owners.
//!
//! The mutex does not poison, and a deterministic scheduler does not see it: the body must not call anything that could switch threads.
//! Locking it again inside blocks for ever, as with any mutex.

use super::bias::{Bias, BiasedSection};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

use xlog_base::{Mutex, MutexGuard};

/// Consecutive locks after which a thread becomes the owner.
const BIAS_THRESHOLD: u32 = 8;
/// The upper bound of the threshold. One barrier is cheap compared with so many locks.
const MAX_BIAS_THRESHOLD: u32 = 4096;

/// Mutual exclusion, biased to the thread that locks it most.
pub struct BiasedMutex<T> {
    bias: Bias,
    slow: Mutex<ConsecutiveUses>,
    value: UnsafeCell<T>,
}

#[derive(Debug)]
struct ConsecutiveUses {
    thread: u32,
    length: u32,
    threshold: u32,
}

// SAFETY: only the thread inside the bias touches `value`, or the thread that holds `slow` after revoking the bias; never both, see `Bias`.
// So the value moves between threads, which needs `Send`.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    /// Makes a mutex around `value`.
    pub fn new(value: T) -> Self {
        let consecutive = ConsecutiveUses { thread: 0, length: 0, threshold: BIAS_THRESHOLD };
        Self { bias: Bias::default(), slow: Mutex::new(consecutive), value: UnsafeCell::new(value) }
    }

    /// Enters if this thread is the owner and not inside already; otherwise use [`BiasedMutex::with`].
    #[inline(always)]
    pub fn enter(&self) -> Option<BiasedGuard<'_, T>> {
        let held = self.bias.enter()?;
        Some(BiasedGuard { value: &self.value, _held: held })
    }

    /// Runs `body` with the value.
    #[inline(always)]
    pub fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        match self.enter() {
            Some(mut value) => body(&mut value),
            None => self.with_lock(body),
        }
    }

    #[cold]
    #[inline(never)]
    fn with_lock<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let consecutive = self.slow.lock();
        // A temporary revocation may have ended meanwhile. While the lock is held no thread revokes the bias.
        if let Some(mut value) = self.enter() {
            return body(&mut value);
        }
        self.bias.revoke();
        let _guard = LockedGuard { mutex: self, consecutive };
        #[allow(unsafe_code)]
        // SAFETY: this thread holds the lock and has revoked the bias, so no other thread touches the value.
        body(unsafe { &mut *self.value.get() })
    }

    /// Counts a use through the lock. Biases the mutex to this thread after enough consecutive ones.
    #[cold]
    #[inline(never)]
    fn note_consecutive_use(&self, consecutive: &mut ConsecutiveUses) {
        let current = super::threads::thread_index();
        if consecutive.thread != current {
            consecutive.thread = current;
            consecutive.length = 0;
        }
        consecutive.length = consecutive.length.saturating_add(1);
        if consecutive.length >= consecutive.threshold && self.bias.claim() {
            consecutive.threshold = consecutive.threshold.saturating_mul(2).min(MAX_BIAS_THRESHOLD);
        }
    }

    /// True if another thread holds the mutex, so that `with_all` would wait. Only a hint.
    pub fn is_busy(&self) -> bool {
        self.slow.try_lock().is_none() || self.bias.is_entered()
    }

    /// True if no other live thread owns the bias.
    pub fn is_local(&self) -> bool {
        !self.bias.is_of_another()
    }

    /// Runs `body` with the values of all `mutexes`. All callers must pass them in the same order.
    pub fn with_all<R>(mutexes: &[&Self], body: impl FnOnce(&mut [&mut T]) -> R) -> R {
        let locks: Vec<_> = mutexes.iter().map(|mutex| mutex.slow.lock()).collect();
        let owners = Bias::revoke_all(mutexes.iter().map(|mutex| &mutex.bias));
        let mut values: Vec<&mut T> = mutexes
            .iter()
            .map(|mutex| {
                #[allow(unsafe_code)]
                // SAFETY: every lock is held and every bias revoked; each mutex gives its value once.
                unsafe {
                    &mut *mutex.value.get()
                }
            })
            .collect();
        let result = body(&mut values);
        drop(values);
        // The revocation was temporary: the owners keep their biases.
        for (mutex, owner) in mutexes.iter().zip(owners) {
            mutex.bias.restore(owner);
        }
        drop(locks);
        result
    }
}

/// Holds the lock. Counts the use and unlocks when dropped, also by a panic.
struct LockedGuard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    consecutive: MutexGuard<'a, ConsecutiveUses>,
}

impl<T> Drop for LockedGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.note_consecutive_use(&mut self.consecutive);
    }
}

/// The owner's access to the value, until dropped.
#[must_use]
pub struct BiasedGuard<'a, T> {
    value: &'a UnsafeCell<T>,
    _held: BiasedSection<'a>,
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        #[allow(unsafe_code)]
        // SAFETY: this thread owns the bias and is inside, and was not inside before; no other thread touches the value.
        unsafe {
            &*self.value.get()
        }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        #[allow(unsafe_code)]
        // SAFETY: as above, and this guard is borrowed exclusively.
        unsafe {
            &mut *self.value.get()
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for BiasedGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BiasedGuard").field(&**self).finish()
    }
}

impl<T: Default> Default for BiasedMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for BiasedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|value| f.debug_tuple("BiasedMutex").field(value).finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Two numbers that are equal whenever no thread is inside.
    #[derive(Default)]
    struct Twins(u64, u64);

    fn step(twins: &mut Twins) {
        assert_eq!(twins.0, twins.1);
        twins.0 += 1;
        std::hint::black_box(&mut *twins);
        twins.1 += 1;
    }

    #[test]
    fn an_owner_and_intruders_lose_no_step() {
        let mutex = BiasedMutex::new(Twins::default());
        let done = AtomicBool::new(false);
        let (mut owned, mut intruded) = (0, 0);
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let mut steps = 0_u64;
                while !done.load(Ordering::Relaxed) {
                    mutex.with(step);
                    steps += 1;
                }
                steps
            });
            let intruders: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for round in 0..2_000 {
                            mutex.with(step);
                            if round % 8 == 0 {
                                std::thread::yield_now();
                            }
                        }
                        2_000
                    })
                })
                .collect();
            for intruder in intruders {
                intruded += intruder.join().unwrap_or(0);
            }
            done.store(true, Ordering::Relaxed);
            owned = owner.join().unwrap_or(0);
        });
        assert_eq!(intruded, 6_000);
        mutex.with(|twins| assert_eq!((twins.0, twins.1), (owned + intruded, owned + intruded)));
    }

    #[test]
    fn a_visit_sees_all_values_stand_still_and_leaves_the_owners_theirs() {
        let mutexes = [BiasedMutex::new(Twins::default()), BiasedMutex::new(Twins::default())];
        let all: Vec<_> = mutexes.iter().collect();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for mutex in &mutexes {
                let done = &done;
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        mutex.with(step);
                    }
                });
            }
            for _ in 0..2_000 {
                BiasedMutex::with_all(&all, |values| {
                    let before: u64 = values.iter().map(|twins| twins.0 + twins.1).sum();
                    std::hint::black_box(&values);
                    let after: u64 = values.iter().map(|twins| twins.0 + twins.1).sum();
                    assert_eq!(before, after);
                });
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn an_owner_that_had_to_wait_for_visits_is_still_the_owner() {
        let mutexes = [BiasedMutex::new(Twins::default()), BiasedMutex::new(Twins::default())];
        let all: Vec<_> = mutexes.iter().collect();
        let done = AtomicBool::new(false);
        let (mut steps, mut visits) = (0, 0);
        std::thread::scope(|scope| {
            let owners: Vec<_> = mutexes
                .iter()
                .map(|mutex| {
                    let done = &done;
                    scope.spawn(move || {
                        let mut steps = 0_u64;
                        while !done.load(Ordering::Relaxed) {
                            mutex.with(step);
                            steps += 1;
                        }
                        steps
                    })
                })
                .collect();
            for round in 0..2_000 {
                let visit = |twins: &mut Twins| {
                    step(twins);
                    if round % 100 == 0 {
                        // Long enough that the owner tries to enter and waits.
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                };
                BiasedMutex::with_all(&all[..1], |values| visit(values[0]));
                BiasedMutex::with_all(&all[1..], |values| visit(values[0]));
                BiasedMutex::with_all(&all, |values| values.iter_mut().for_each(|v| step(v)));
                visits += 4;
            }
            done.store(true, Ordering::Relaxed);
            steps = owners.into_iter().map(|owner| owner.join().unwrap_or(0)).sum();
        });
        for mutex in &mutexes {
            // A lost bias would have doubled the threshold.
            assert!(
                mutex.slow.lock().threshold <= 2 * BIAS_THRESHOLD,
                "a visit has cost the owner its row"
            );
        }
        let found: u64 = mutexes.iter().map(|mutex| mutex.with(|twins| twins.0)).sum();
        assert_eq!(found, steps + visits, "a step was lost");
    }

    /// A mutex that an ended thread locked until it owned it, if the system can bias, and the owner's record id.
    fn mutex_of_an_ended_thread() -> (BiasedMutex<u32>, u32) {
        let mutex = BiasedMutex::new(0_u32);
        let used = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                (0..100).for_each(|_| mutex.with(|value| *value += 1));
                used.wait();
                // Stays alive until the other thread has checked.
                used.wait();
            });
            used.wait();
            // On a system without the barrier no thread owns a bias.
            assert_eq!(mutex.is_local(), !mutex.bias.is_owned());
            used.wait();
            assert!(owner.join().is_ok());
        });
        let owner = mutex.bias.owner();
        (mutex, owner)
    }

    #[test]
    fn what_a_thread_owned_that_has_ended_is_near_to_all() {
        // A thread of another test may take over the record before the check, and then owns the mutex.
        let is_near = || {
            let (mutex, owner) = mutex_of_an_ended_thread();
            super::super::threads::while_none_starts_or_ends(|free| {
                let has_no_owner = owner == 0 || free.contains(&owner);
                assert_eq!(mutex.is_local(), has_no_owner);
                has_no_owner
            })
        };
        assert!((0..1_000).any(|_| is_near()), "an ended thread keeps its record");
    }
}
