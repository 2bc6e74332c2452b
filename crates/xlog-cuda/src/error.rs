//! The errors above the driver seam.
//!
//! A variant is a decision that a caller can take; the text names the value and says what would have been accepted or
//! what to do. A driver's own error passes through unchanged in [`XlogError::Driver`].

use std::path::PathBuf;

use xlog_driver::DriverError;

use crate::device_runtime::{ResourceError, StreamId, StreamPoolError};

/// The result of a runtime call.
pub type Result<T, E = XlogError> = std::result::Result<T, E>;

/// The failure of a runtime call.
///
/// ```
/// use xlog_cuda::{CudaDevice, XlogError};
///
/// let error = CudaDevice::open("sim:-1").unwrap_err();
/// assert!(matches!(error, XlogError::BadDeviceSpec { .. }));
/// assert!(error.to_string().contains("\"sim:-1\""));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XlogError {
    /// An operation of the runtime failed; the text says which and why.
    #[error("{0}")]
    Kernel(String),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The text does not name a device.
    #[error("device spec {spec:?}: {reason}; accepted are {accepted}")]
    BadDeviceSpec {
        /// The text as given.
        spec: String,
        /// What is wrong with it.
        reason: String,
        /// What would have been accepted.
        accepted: &'static str,
    },
    /// The device is well named but cannot be opened.
    #[error("cannot open device {spec:?}: {cause}")]
    Open {
        /// The device asked for.
        spec: String,
        /// Why it cannot be opened, and what to do.
        cause: DriverError,
    },
    /// The id belongs to no stream that is out.
    #[error(
        "{id} does not resolve in this pool; accepted are {} and the ids this pool has out",
        StreamId::DEFAULT
    )]
    UnknownStream {
        /// The id as given.
        id: StreamId,
    },
    /// A stream could not be had.
    #[error(transparent)]
    StreamPool(#[from] StreamPoolError),
    /// A memory resource refused or failed.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// A setting has a value that is not accepted.
    #[error("{name} = {value:?}: {reason}; accepted: {accepted}")]
    BadSetting {
        /// The setting: an environment variable, or what it is in code.
        name: &'static str,
        /// The value as given.
        value: String,
        /// What is wrong with it.
        reason: &'static str,
        /// What would have been accepted.
        accepted: &'static str,
    },
    /// The log file has a writer: another runtime, in this process or another.
    #[error(
        "the log {} has a writer already, in this process or another, and a log file has one: give every runtime a file of \
         its own; %p in the path stands for the process and %d for the device",
        path.display()
    )]
    LogInUse {
        /// The file, with what its pattern stands for.
        path: PathBuf,
    },
    /// Two things that must belong to one open device belong to two.
    #[error(
        "{call}: {left} and {right} belong to different open devices; use streams of one device"
    )]
    DifferentDevices {
        /// The call that refused.
        call: &'static str,
        /// The thing the call was made on, and its device.
        left: String,
        /// The thing that was passed, and its device.
        right: String,
    },
}
