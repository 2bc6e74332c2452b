//! A mutex that costs the thread which mostly uses it no locked instruction.
//!
//! It is an ordinary mutex until one thread has locked it several times in a row; from then on that thread enters by plain
//! stores. The first other thread takes the bias away, which costs a barrier through all running threads, and the mutex is an
//! ordinary one again until another row; each loss makes the next row longer, so threads that alternate do not pay for it.
//! A visit ([`BiasedMutex::with_all`]) is no loss: an owner that had to wait for it goes on as the owner.
//!
//! It does not poison, and it does not tell a deterministic scheduler: nothing may be called inside that could hand over to
//! another thread. Locking it again inside blocks for ever, as with any mutex.

use super::bias::{Bias, BiasedSection};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

use xlog_base::{Mutex, MutexGuard};

/// Uses in a row after which a thread becomes the owner.
const BIAS_THRESHOLD: u32 = 8;
/// The longest row. One barrier costs little beside as many uses.
const MAX_BIAS_THRESHOLD: u32 = 4096;

/// Mutual exclusion, biased to the thread that uses it most.
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

// SAFETY: `value` is only touched by the thread that is inside the bias, or by the one that holds `slow` after it revoked the
// bias; never by both, see `Bias`. So it moves between threads, which needs `Send`.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    /// A mutex around `value`.
    pub fn new(value: T) -> Self {
        let consecutive = ConsecutiveUses { thread: 0, length: 0, threshold: BIAS_THRESHOLD };
        Self { bias: Bias::default(), slow: Mutex::new(consecutive), value: UnsafeCell::new(value) }
    }

    /// The value, if this thread is the owner and not inside already; otherwise take [`BiasedMutex::with`].
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
        // A visitor kept the owner out and has given the bias back by now. While the lock is held no thread revokes it.
        if let Some(mut value) = self.enter() {
            return body(&mut value);
        }
        self.bias.revoke();
        let _guard = LockedGuard { mutex: self, consecutive };
        #[allow(unsafe_code)]
        // SAFETY: this thread holds the lock and has revoked the bias, so no other thread touches the value.
        body(unsafe { &mut *self.value.get() })
    }

    /// One more use by this thread through the lock; after enough in a row it owns the bias.
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

    /// Whether another thread is inside, so that a visit would wait. Only a hint.
    pub fn is_busy(&self) -> bool {
        self.slow.try_lock().is_none() || self.bias.is_entered()
    }

    /// True when no other thread owns it: a visit disturbs nobody.
    pub fn is_local(&self) -> bool {
        !self.bias.is_of_another()
    }

    /// Runs `body` with the values of all of `mutexes`, in the order given, which must be the same for all callers.
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
        // It was a visit: the owners go on as before.
        for (mutex, owner) in mutexes.iter().zip(owners) {
            mutex.bias.restore(owner);
        }
        drop(locks);
        result
    }
}

/// This thread has the lock, and leaves it, also by a panic, when this is dropped.
struct LockedGuard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    consecutive: MutexGuard<'a, ConsecutiveUses>,
}

impl<T> Drop for LockedGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.note_consecutive_use(&mut self.consecutive);
    }
}

/// The owner has the value, until this is dropped.
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
        // SAFETY: this thread owns the bias and is inside, and was not inside before; nobody else touches the value.
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

    /// Two numbers that are equal whenever nobody is inside.
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
                        // Long enough that the owner comes by and has to wait.
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
            // A row that was lost would have made the next one longer.
            assert!(
                mutex.slow.lock().threshold <= 2 * BIAS_THRESHOLD,
                "a visit has cost the owner its row"
            );
        }
        let found: u64 = mutexes.iter().map(|mutex| mutex.with(|twins| twins.0)).sum();
        assert_eq!(found, steps + visits, "a step was lost");
    }

    /// A mutex that a thread used until it owned it, if it could, and the owner's record.
    fn mutex_of_an_ended_thread() -> (BiasedMutex<u32>, u32) {
        let mutex = BiasedMutex::new(0_u32);
        let used = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                (0..100).for_each(|_| mutex.with(|value| *value += 1));
                used.wait();
                // Alive, until the other thread has looked.
                used.wait();
            });
            used.wait();
            // Without a barrier through all threads no thread owns anything.
            assert_eq!(mutex.is_local(), !mutex.bias.is_owned());
            used.wait();
            assert!(owner.join().is_ok());
        });
        let owner = mutex.bias.owner();
        (mutex, owner)
    }

    #[test]
    fn what_a_thread_owned_that_has_ended_is_near_to_all() {
        // A new thread of a test beside this one may take the record over before the mutex is looked at, and is then its owner.
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
