//! Why a resource refused or failed.

use xlog_driver::DriverError;

use super::{Generation, StreamId};

/// Shorthand for the result of a resource call.
pub type ResourceResult<T> = Result<T, ResourceError>;

/// The failure of a resource call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// The request does not fit the budget.
    #[error("out of budget: {requested} bytes requested, {remaining} remain")]
    OutOfBudget {
        /// Bytes that would have been charged.
        requested: usize,
        /// Bytes that are left.
        remaining: usize,
    },
    /// The device has too little memory.
    #[error("out of device memory: {requested} bytes requested; {detail}")]
    OutOfMemory {
        /// The bytes asked for.
        requested: usize,
        /// What the driver said.
        detail: String,
    },
    /// The ledger that processes share could not be asked: locked for too long, removed, or another process's.
    #[error("ledger: {0}")]
    Ledger(String),
    /// The driver failed, or the parts belong to different devices.
    #[error("driver: {0}")]
    Driver(String),
    /// A stream was used in a way that cannot be ordered.
    #[error("stream misuse: {0}")]
    StreamMisuse(String),
    /// Not the live block at its address: freed, stale or forged.
    #[error("use after free: {generation} is not the live block at its address")]
    UseAfterFree {
        /// The generation that was passed.
        generation: Generation,
    },
    /// Bytes outside a block were written.
    #[error("out of bounds: bytes around the block of {generation} were written")]
    OutOfBounds {
        /// The block.
        generation: Generation,
    },
    /// The resource does not offer this call.
    #[error("{call} is unsupported: {detail}")]
    Unsupported {
        /// The call.
        call: &'static str,
        /// Why, and what to do.
        detail: &'static str,
    },
    /// The request itself makes no sense.
    #[error("{value} is not accepted; expected {accepted}")]
    InvalidRequest {
        /// The value as given.
        value: String,
        /// What would have been accepted.
        accepted: String,
    },
}

impl ResourceError {
    pub(crate) fn untracked(call: &str) -> Self {
        Self::StreamMisuse(format!("{call} is unsupported: this resource tracks no uses"))
    }

    pub(crate) fn unknown_stream(stream: StreamId) -> Self {
        Self::StreamMisuse(format!("{stream} is not a stream of this resource's pool"))
    }

    pub(crate) fn zero_bytes() -> Self {
        Self::InvalidRequest {
            value: "an allocation of 0 bytes".to_owned(),
            accepted: "at least one byte".to_owned(),
        }
    }

    /// A short name for logs: one word per variant.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::OutOfBudget { .. } => "out_of_budget",
            Self::OutOfMemory { .. } => "out_of_memory",
            Self::Ledger(_) => "ledger",
            Self::Driver(_) => "driver",
            Self::StreamMisuse(_) => "stream_misuse",
            Self::UseAfterFree { .. } => "use_after_free",
            Self::OutOfBounds { .. } => "out_of_bounds",
            Self::InvalidRequest { .. } => "invalid_request",
            Self::Unsupported { .. } => "unsupported",
        }
    }
}

impl From<DriverError> for ResourceError {
    fn from(error: DriverError) -> Self {
        match error {
            DriverError::OutOfMemory { requested, .. }
            | DriverError::OutOfHostMemory { requested, .. } => Self::OutOfMemory {
                requested: usize::try_from(requested).unwrap_or(usize::MAX),
                detail: error.to_string(),
            },
            other => Self::Driver(other.to_string()),
        }
    }
}
