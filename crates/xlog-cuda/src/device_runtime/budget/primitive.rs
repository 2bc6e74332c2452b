//! The locks of the quotas, in one module so that a model checker can replace them.

/// A lock that is never held over a call. A seeded scheduler must not see it: which threads contend depends on the whole process.
pub(crate) use xlog_base::Mutex;
pub(crate) use xlog_driver::sync::Sharded;
