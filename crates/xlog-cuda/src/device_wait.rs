//! The remaining time that the running call may wait for the device.
//!
//! A budget gives each request one deadline ([`DeviceWait::begin`]). Every host wait inside that call spends from it: the budget's own
//! polls for pending frees, and the waits of all resources below. The deadline is thread-local, so decorators do not pass it on.
//! Without a budget above it, a resource waits without a limit.
//!
//! Time is the sum of the pauses between polls, so that a seeded device replays it. Without a scheduler the clock counts too.

use std::cell::Cell;
use std::marker::PhantomData;
use std::thread;
use std::time::{Duration, Instant};

use xlog_driver::sync::{is_scheduled, scheduling_point};

/// A flag in `LEFT`: the call must not wait, because the budget above repeats it with a deadline. A budget below may wait, and spends
/// from the rest of the word.
const DEFERRED: u64 = 1 << 63;
/// No budget above: waits have no limit. Time spent is subtracted nevertheless.
const UNLIMITED: u64 = DEFERRED - 1;
/// The longest deadline. Larger values mean no limit.
const LONGEST: u64 = 1 << 62;

/// The number of polls that yield before the first one that sleeps.
const YIELDS: u32 = 8;
const FIRST_SLEEP: Duration = Duration::from_micros(2);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

thread_local! {
    /// Nanoseconds, with the constants above.
    static LEFT: Cell<u64> = const { Cell::new(UNLIMITED) };
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Returns the time that the running call may still wait; `None` without a limit.
pub(crate) fn left() -> Option<Duration> {
    match LEFT.get() {
        deferred if deferred & DEFERRED != 0 => Some(Duration::ZERO),
        unlimited if unlimited > LONGEST => None,
        nanoseconds => Some(Duration::from_nanos(nanoseconds)),
    }
}

/// Subtracts `time` that the running call has waited without a [`Backoff`].
pub(crate) fn spend(time: Duration) {
    let before = LEFT.get();
    if before <= LONGEST {
        LEFT.set(before.saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)));
    }
}

/// The deadline of a call, until this is dropped. A nested call has at most the remaining time of the outer one.
#[derive(Debug)]
#[must_use]
pub(crate) struct DeviceWait {
    before: u64,
    granted: u64,
    end_before: Option<Instant>,
    _not_send: PhantomData<*const ()>,
}

impl DeviceWait {
    /// Limits the sum of this thread's waits for the device to `limit`.
    pub(crate) fn begin(limit: Duration) -> Self {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).min(LONGEST);
        let before = LEFT.get();
        let granted = limit.min(before & !DEFERRED);
        LEFT.set(granted);
        let end = Instant::now().checked_add(Duration::from_nanos(granted));
        let end_before = END.replace(end);
        Self { before, granted, end_before, _not_send: PhantomData }
    }
}

impl Drop for DeviceWait {
    fn drop(&mut self) {
        let spent = self.granted.saturating_sub(LEFT.get());
        // Without an outer limit the time spent is not kept.
        LEFT.set(if self.before == UNLIMITED { UNLIMITED } else { self.before - spent });
        END.set(self.end_before);
    }
}

/// Makes calls fail instead of waiting for the device until this is dropped, except for calls that begin their own deadline.
#[derive(Debug)]
#[must_use]
pub(crate) struct Deferred {
    before: u64,
    _not_send: PhantomData<*const ()>,
}

/// Begins a call that must not wait: the caller repeats it with a deadline if it fails.
#[inline(always)]
pub(crate) fn defer() -> Deferred {
    let before = LEFT.get();
    LEFT.set(before | DEFERRED);
    Deferred { before, _not_send: PhantomData }
}

impl Deferred {
    /// Ends it. Returns the time that budgets below have spent meanwhile.
    pub(crate) fn end(self) -> Duration {
        Duration::from_nanos((self.before & !DEFERRED).saturating_sub(LEFT.get() & !DEFERRED))
    }
}

impl Drop for Deferred {
    #[inline(always)]
    fn drop(&mut self) {
        let before = self.before;
        LEFT.set(if before == UNLIMITED { before } else { LEFT.get() & (before | !DEFERRED) });
    }
}

/// Waits without a limit that do not spend from the deadline, until this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Suspended {
    before: u64,
    began: Instant,
    _not_send: PhantomData<*const ()>,
}

/// Suspends the deadline for a pressure callback, which is code of the user.
pub(crate) fn suspend() -> Suspended {
    let before = LEFT.replace(UNLIMITED);
    Suspended { before, began: Instant::now(), _not_send: PhantomData }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        LEFT.set(self.before);
        END.set(END.get().and_then(|end| end.checked_add(self.began.elapsed())));
    }
}

/// Pauses between polls, which grow from a yield to a millisecond.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    polls: u32,
}

impl Backoff {
    /// Pauses before the next poll. Returns false if the call may not wait any longer.
    pub(crate) fn pause(&mut self) -> bool {
        let sleeps = self.polls.checked_sub(YIELDS);
        self.polls = self.polls.saturating_add(1);
        let pause = match sleeps {
            None => Duration::from_micros(1),
            Some(sleeps) => (FIRST_SLEEP * (1 << sleeps.min(9))).min(LONGEST_SLEEP),
        };
        let left = left();
        if left.is_some_and(|left| left.is_zero()) {
            return false;
        }
        if left.is_some() && !is_scheduled() && END.get().is_some_and(|end| Instant::now() >= end) {
            LEFT.set(0);
            return false;
        }
        let pause = left.map_or(pause, |left| pause.min(left));
        if sleeps.is_some() {
            thread::sleep(pause);
        } else {
            thread::yield_now();
        }
        // Under a seeded scheduler another thread may run here.
        scheduling_point();
        if let Some(left) = left {
            LEFT.set((left - pause).as_nanos() as u64);
        }
        true
    }
}

/// Polls until `done` returns true. Returns false if the call may not wait any longer.
pub(crate) fn poll<E>(mut done: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    let mut backoff = Backoff::default();
    loop {
        if done()? {
            return Ok(true);
        }
        if !backoff.pause() {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never() -> Result<bool, ()> {
        Ok(false)
    }

    #[test]
    fn calls_inside_a_call_spend_the_same_deadline() {
        assert_eq!(left(), None);
        let outer = DeviceWait::begin(Duration::from_millis(3));
        {
            let _inner = DeviceWait::begin(Duration::from_millis(1));
            assert_eq!(poll(never), Ok(false));
            assert_eq!(left(), Some(Duration::ZERO));
        }
        let after = left().unwrap_or_default();
        assert!(after <= Duration::from_millis(2), "{after:?}");
        {
            let _inner = DeviceWait::begin(Duration::from_secs(3600));
            assert_eq!(poll(never), Ok(false));
        }
        assert_eq!(left(), Some(Duration::ZERO));
        drop(outer);
        assert_eq!(left(), None);
    }

    #[test]
    fn a_deferred_wait_ends_at_once_and_leaves_the_deadline_as_it_was() {
        let _call = DeviceWait::begin(Duration::from_secs(3600));
        let before = left();
        {
            let _deferred = defer();
            assert_eq!(poll(never), Ok(false));
            assert_eq!(poll(|| Ok::<_, ()>(true)), Ok(true));
            // A budget below has a deadline of its own.
            let _own = DeviceWait::begin(Duration::from_micros(1));
            assert_eq!(left(), Some(Duration::from_micros(1)));
        }
        assert_eq!(left(), before);
    }

    #[test]
    fn a_budget_below_a_deferred_call_spends_the_deadline_of_the_one_above() {
        let call = DeviceWait::begin(Duration::from_millis(3));
        {
            let _deferred = defer();
            let _own = DeviceWait::begin(Duration::from_secs(3600));
            assert_eq!(left(), Some(Duration::from_millis(3)));
            assert_eq!(poll(never), Ok(false));
        }
        assert_eq!(left(), Some(Duration::ZERO));
        drop(call);
        // Before there is a deadline above, the time spent is kept for the call that begins it.
        let deferred = defer();
        {
            let _own = DeviceWait::begin(Duration::from_millis(1));
            assert_eq!(poll(never), Ok(false));
        }
        assert_eq!(deferred.end(), Duration::from_millis(1));
        assert_eq!(left(), None);
    }
}
