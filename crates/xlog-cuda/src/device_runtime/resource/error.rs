//! The errors of resource calls.
//!
//! A refusal prints its out-of-memory report in one line. The variants have no field for the report, so it is looked up by the text of
//! the error.

use std::fmt;
use std::sync::Arc;

use xlog_driver::DriverError;

use super::{BlockId, BlockState, DeviceMemoryResource, Generation, StreamId};
use crate::device_runtime::budget::{Line, OomReport};
use crate::device_runtime::graph::CaptureError;

/// The result of a resource call.
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
        /// The requested bytes.
        requested: usize,
        /// The reason, with the numbers known.
        detail: String,
    },
    /// The ledger that processes share cannot be used: locked for too long, removed, or inherited by a fork.
    #[error("ledger: {0}")]
    Ledger(String),
    /// The driver failed, or parts of different devices were combined.
    #[error("driver: {0}")]
    Driver(String),
    /// A stream was used in a way that cannot be ordered.
    #[error("stream misuse: {0}")]
    StreamMisuse(String),
    /// The block is not the live one at its address: freed, stale or forged.
    #[error("use after free: {generation} is not the live block at its address")]
    UseAfterFree {
        /// The generation that was passed.
        generation: Generation,
    },
    /// Bytes outside a block were written.
    #[error("out of bounds: bytes around the block of {generation} were written")]
    OutOfBounds {
        /// The generation of the block.
        generation: Generation,
    },
    /// The resource does not offer this call.
    #[error("{call} is unsupported: {detail}")]
    Unsupported {
        /// The call.
        call: &'static str,
        /// The reason, and what to do.
        detail: &'static str,
    },
    /// The request has a value that is never accepted.
    #[error("{value} is not accepted; expected {accepted}")]
    InvalidRequest {
        /// The value as given.
        value: String,
        /// The accepted values.
        accepted: String,
    },
    /// A stream capture does not allow the call.
    #[error("capture: {0}")]
    Capture(Box<CaptureError>),
}

impl ResourceError {
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

    #[cold]
    pub(crate) fn no_budget() -> Self {
        Self::invalid("a reservation", "none: there is no budget here (unsupported)")
    }

    /// Returns whether the failed free of a block changed nothing. Otherwise the resource has the block, and a later reap finishes the
    /// free.
    ///
    /// A free may also return the damage that a guard found in another block; that is no refusal.
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

    /// Returns the report of a refusal, which `{}` also prints in one line.
    ///
    /// It is the report of this thread's last refusal if the texts match, else the only recent report with this text. `None` for other
    /// errors, and for refusals that no budget, manager or runtime reported.
    pub fn report(&self) -> Option<Arc<OomReport>> {
        self.is_refusal().then(|| OomReport::of_text(&self.brief())).flatten()
    }

    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::OutOfBudget { .. } | Self::OutOfMemory { .. })
    }

    /// Returns the text without the report, for logs.
    pub(crate) fn brief(&self) -> String {
        match self {
            Self::OutOfBudget { requested, remaining } => out_of_budget(*requested, *remaining),
            Self::OutOfMemory { requested, detail } => out_of_memory(*requested, detail),
            other => other.to_string(),
        }
    }

    /// Returns the name of the variant, for logs.
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

/// Prints a refusal: its kind and the line of its report, or its own text if there is no report.
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
