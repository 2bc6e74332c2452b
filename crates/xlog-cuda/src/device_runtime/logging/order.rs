//! The order of records: one counter for the process, so that the logs of several resources in one sink merge.

use std::sync::atomic::{AtomicU64, Ordering};

/// On its own cache lines, since every logging thread writes it.
#[repr(align(128))]
struct OrderCounter(AtomicU64);

static NEXT: OrderCounter = OrderCounter(AtomicU64::new(1));

/// Returns the next number. Relaxed suffices: threads pass a block on with a synchronisation, and the modification order of one atomic is
/// consistent with it.
#[inline]
pub(super) fn next_order() -> u64 {
    NEXT.0.fetch_add(1, Ordering::Relaxed)
}
