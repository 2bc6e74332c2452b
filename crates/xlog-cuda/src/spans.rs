//! Spans of the crate `tracing` around what may take long, with the feature `tracing`; nothing without it.
//!
//! | span | around | fields |
//! |---|---|---|
//! | `runtime_build` | building the runtime of an ordinal | `ordinal` |
//! | `segment_growth` | taking memory for a pool from the device | `bytes` |
//! | `out_of_memory_ladder` | what a budget does before it refuses | `bytes` |
//! | `reap_pending` | waiting for frees that are queued | |
//! | `trim` | giving unused memory back to the device | |
//! | `ledger_file_lock` | taking a ledger's file lock (the crate `xlog-ledger`) | `path` |
//!
//! No path that serves an operation from memory already at hand has one.

/// A span of the level `debug` to the end of the block it stands in.
#[cfg(feature = "tracing")]
macro_rules! slow_path {
    ($($span:tt)*) => {
        let _span = tracing::debug_span!($($span)*).entered();
    };
}

#[cfg(not(feature = "tracing"))]
macro_rules! slow_path {
    ($($span:tt)*) => {};
}

pub(crate) use slow_path;
