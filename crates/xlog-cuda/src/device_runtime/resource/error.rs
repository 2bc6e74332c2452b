//! Why a resource refused or failed.
//!
//! A refusal prints the report that was filed with it, in one line. The report is found by the text of the error, because the
//! variants have no room for it.

use std::fmt;
use std::sync::Arc;

use xlog_driver::DriverError;

use super::{BlockId, BlockState, DeviceMemoryResource, Generation, StreamId};
use crate::device_runtime::budget::{Line, OomReport};
use crate::device_runtime::graph::CaptureError;

/// Shorthand for the result of a resource call.
pub type ResourceResult<T> = Result<T, ResourceError>;

/// The failure of a resource call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// The request does not fit the budget.
    #[error("{}", Refusal("out of budget", &out_of_budget(*.requested, *.remaining)))]
    OutOfBudget {
        /// Bytes that would have been charged.
        requested: usize,
        /// Bytes that are left.
        remaining: usize,
    },
    /// The device has too little memory.
    #[error("{}", Refusal("out of device memory", &out_of_memory(*.requested, .detail)))]
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
    /// A stream capture does not allow the call.
    #[error("capture: {0}")]
    Capture(Box<CaptureError>),
}

impl ResourceError {
    /// A request that names a value which is not accepted, and what would have been.
    pub(crate) fn invalid(value: impl Into<String>, accepted: impl Into<String>) -> Self {
        Self::InvalidRequest { value: value.into(), accepted: accepted.into() }
    }

    pub(crate) fn untracked(call: &str) -> Self {
        Self::StreamMisuse(format!("{call} is unsupported: this resource tracks no uses"))
    }

    pub(crate) fn unknown_stream(stream: StreamId) -> Self {
        Self::StreamMisuse(format!("{stream} is not a stream of this resource's pool"))
    }

    pub(crate) fn zero_bytes() -> Self {
        Self::invalid("an allocation of 0 bytes", "at least one byte")
    }

    /// A resource without a budget was given a reservation.
    #[cold]
    pub(crate) fn no_budget() -> Self {
        Self::invalid("a reservation", "none: there is no budget here (unsupported)")
    }

    /// Whether the failed free of a block changed nothing. Otherwise the resource has the block, and a later reap finishes the free.
    ///
    /// Damage of another block, which a guard returns with a free, is no refusal.
    #[cold]
    #[inline(never)]
    pub(crate) fn is_refused_free(
        &self,
        block: BlockId,
        resource: &impl DeviceMemoryResource,
    ) -> bool {
        matches!(self, Self::UseAfterFree { generation } if *generation == block.generation)
            || block.device_ordinal != resource.device_ordinal()
            || resource.block_state(block) == BlockState::Live
    }

    /// The report of a refusal, which also prints with `{}`: of this thread's last one if that is this error, or else of the only
    /// recent one with the same numbers. `None` for other errors, and for refusals that no budget, manager or runtime reported.
    pub fn report(&self) -> Option<Arc<OomReport>> {
        self.is_refusal().then(|| OomReport::of_text(&self.brief())).flatten()
    }

    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::OutOfBudget { .. } | Self::OutOfMemory { .. })
    }

    /// The text without a report, as logs have it.
    pub(crate) fn brief(&self) -> String {
        match self {
            Self::OutOfBudget { requested, remaining } => out_of_budget(*requested, *remaining),
            Self::OutOfMemory { requested, detail } => out_of_memory(*requested, detail),
            other => other.to_string(),
        }
    }

    /// A short name for logs: one word per variant.
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
            Self::Capture(_) => "capture",
        }
    }
}

fn out_of_budget(requested: usize, remaining: usize) -> String {
    format!("out of budget: {requested} bytes requested, {remaining} remain")
}

fn out_of_memory(requested: usize, detail: &str) -> String {
    format!("out of device memory: {requested} bytes requested; {detail}")
}

/// A refusal: its kind with the line of its report, or else its own text.
struct Refusal<'a>(&'a str, &'a str);

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match OomReport::of_text(self.1) {
            Some(report) => write!(f, "{}: {}", self.0, Line(&report)),
            None => f.write_str(self.1),
        }
    }
}

impl From<CaptureError> for ResourceError {
    fn from(error: CaptureError) -> Self {
        Self::Capture(Box::new(error))
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
