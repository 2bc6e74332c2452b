//! The atomics and locks of the concurrent core.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use xlog_driver::sync::Mutex;
