//! Spans of the crate `tracing` around slow operations, with the feature `tracing`; without it they compile to nothing.
//!
//! | span | around | fields |
//! |---|---|---|
//! | `runtime_build` | building the runtime of an ordinal | `ordinal` |
//! | `segment_growth` | taking memory for a pool from the device | `bytes` |
//! | `reclaim` | the steps of a budget before it refuses | `bytes` |
//! | `reap_pending` | waiting for frees that are queued | |
//! | `trim` | returning unused memory to the device | |
//! | `ledger_file_lock` | taking a ledger's file lock (the crate `xlog-ledger`) | `path` |
//!
//! The fast paths, which use cached memory, have no span.

/// Opens a span of the level `debug` until the end of the enclosing block.
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
