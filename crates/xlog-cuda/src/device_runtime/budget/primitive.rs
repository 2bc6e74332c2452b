//! The locks and atomics of the quotas, in one module so that a model checker can replace them.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// A lock that is never held over a call. It is hidden from seeded schedulers: contention depends on all threads of the process.
pub(crate) use xlog_base::Mutex;
pub(crate) use xlog_driver::sync::{Sharded, thread_index};
