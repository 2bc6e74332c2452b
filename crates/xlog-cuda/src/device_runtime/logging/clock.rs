//! The order and the clock of records. One counter orders the records of the process, so that the logs of several resources in one sink
//! merge. The clock counts nanoseconds. The standard library's `Instant` reads the same clock, but its subtraction is slower.

use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_os = "linux")]
mod system {
    use rustix::time::{ClockId, Timespec, clock_gettime};

    #[inline]
    fn nanos(time: Timespec) -> u64 {
        (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
    }

    #[inline]
    pub(crate) fn now() -> u64 {
        nanos(clock_gettime(ClockId::Monotonic))
    }

    #[inline]
    pub(crate) fn coarse() -> u64 {
        nanos(clock_gettime(ClockId::MonotonicCoarse))
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::sync::OnceLock;
    use std::time::Instant;

    pub(crate) fn now() -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) use now as coarse;
}

/// Nanoseconds of a clock that never steps back, not even between threads.
pub(crate) use system::now;

/// The value of [`now`] at the last tick, at most a few milliseconds ago. Much cheaper to read.
pub(crate) use system::coarse;

/// On its own cache lines, since every logging thread writes it.
#[repr(align(128))]
struct OrderCounter(AtomicU64);

static NEXT_ORDER: OrderCounter = OrderCounter(AtomicU64::new(1));

/// Returns the next number. Relaxed suffices: threads pass a block on with a synchronisation, and the modification order of one atomic is
/// consistent with it.
#[inline]
pub(super) fn next_order() -> u64 {
    NEXT_ORDER.0.fetch_add(1, Ordering::Relaxed)
}
