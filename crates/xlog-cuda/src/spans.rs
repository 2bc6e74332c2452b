//! Spans of the crate `tracing` around slow operations, with the feature `tracing`; without it they compile to nothing. docs/logging.md
//! lists them.
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
