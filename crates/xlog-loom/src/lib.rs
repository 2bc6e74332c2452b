//! The concurrent core of ordering and the quotas of the budget, under a model checker.
//!
//! `bias`, `clock`, `state_word` and `quota` are compiled here from the runtime's own files, with loom's atomics and locks. Loom runs every
//! interleaving of the threads below. A model driver represents a stream: an ordered list of its queued work behind one lock, which is all
//! that the core requires of a driver.

#![forbid(unsafe_code)]

#[cfg(test)]
mod barrier;
#[cfg(test)]
#[allow(dead_code, unreachable_pub)]
#[path = "../../xlog-driver/src/sync/bias.rs"]
mod bias;
#[cfg(test)]
mod bias_tests;
/// As in `xlog_driver::sync`.
#[cfg(test)]
mod biased_mutex {
    pub(crate) use crate::primitive::BiasedMutex;
}
#[cfg(test)]
mod block_tests;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/ordering/clock/stream_clock.rs"]
mod clock;
#[cfg(test)]
mod clock_tests;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/ordering/clock/events.rs"]
mod events;
#[cfg(test)]
mod primitive;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/budget/quota.rs"]
mod quota;
#[cfg(test)]
mod quota_tests;
#[cfg(test)]
#[allow(dead_code, unreachable_pub)]
#[path = "../../xlog-driver/src/sync/sharded.rs"]
mod sharded;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/ordering/block/state_word.rs"]
mod state_word;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-driver/src/sync/thread_record.rs"]
mod thread_record;
#[cfg(test)]
mod threads;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/budget/tree.rs"]
mod tree;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../xlog-cuda/src/device_runtime/ordering/clock/vector_clock.rs"]
mod vector_clock;
