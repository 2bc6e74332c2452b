//! The errors of driver calls.

/// Shorthand for the result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// The failure of one driver call. Each variant is one decision of the caller; see the crate documentation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The device has too little free memory for the request.
    #[error("{call}: out of device memory ({requested} bytes requested)")]
    OutOfMemory {
        /// The call that failed.
        call: &'static str,
        /// The bytes asked for.
        requested: u64,
    },
    /// The host has no more memory that can be page-locked. Freeing device memory does not help.
    #[error("{call}: out of page-locked host memory ({requested} bytes requested)")]
    OutOfHostMemory {
        /// The call that failed.
        call: &'static str,
        /// The bytes asked for.
        requested: u64,
    },
    /// The device or its driver does not offer this call.
    #[error("{call}: not supported by this device or driver")]
    Unsupported {
        /// The call that failed.
        call: &'static str,
    },
    /// The device faulted or is gone. Every later call fails in the same way.
    #[error(
        "{call}: the device is lost (driver code {code}: {reason}); end the process to recover"
    )]
    DeviceLost {
        /// The call that reported it.
        call: &'static str,
        /// The driver's code.
        code: u32,
        /// The driver's description of the cause.
        reason: String,
    },
    /// The driver returned a code that has no variant of its own.
    #[error("{call}: driver code {code} ({name})")]
    Code {
        /// The call that failed.
        call: &'static str,
        /// The driver's code.
        code: u32,
        /// The driver's name for the code, or a phrase that it has none.
        name: String,
    },
    /// An argument was refused and nothing was changed.
    #[error("{call}: {value} is not accepted; expected {accepted}")]
    Invalid {
        /// The call that refused.
        call: &'static str,
        /// The value as given.
        value: String,
        /// The values that would have been accepted.
        accepted: String,
    },
    /// The simulated device found a race that involves the synchronised stream.
    #[error("{call}: {report}")]
    Race {
        /// The synchronising call that reports it.
        call: &'static str,
        /// The first report; the device lists all of them.
        report: String,
    },
    /// The simulated device proved, or after its patience assumes, that the wait never ends.
    #[error("{call}: the wait cannot end: {reason}")]
    Deadlock {
        /// The waiting call.
        call: &'static str,
        /// The blocked stream and its operation.
        reason: String,
    },
    /// No device could be opened.
    #[error("{what}; {remedy}")]
    Unavailable {
        /// The missing or wrong part.
        what: String,
        /// The remedy.
        remedy: String,
    },
}

impl DriverError {
    /// An argument error that names the value and the accepted values.
    pub fn invalid(
        call: &'static str,
        value: impl std::fmt::Display,
        accepted: impl std::fmt::Display,
    ) -> Self {
        Self::Invalid { call, value: value.to_string(), accepted: accepted.to_string() }
    }

    /// True when freeing memory and calling again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// True when no later call on this device can succeed.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }
}
