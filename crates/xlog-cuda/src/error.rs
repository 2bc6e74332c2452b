//! The errors of the runtime.
//!
//! Variants are what callers distinguish. The text names the value, and the accepted values or a remedy. A driver's error is wrapped
//! unchanged in [`XlogError::Driver`].

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use xlog_base::Mutex;
use xlog_driver::DriverError;

use crate::device_runtime::{ResourceError, StreamId, StreamPoolError};

/// The result of a runtime call.
pub type Result<T, E = XlogError> = std::result::Result<T, E>;

/// The failure of a runtime call.
///
/// `{:?}` prints the variant and the text, for a `main` that returns the error.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum XlogError {
    /// An operation of the runtime failed; the text says which and why. A typed cause is the error's source.
    Kernel(String),
    /// A driver call failed.
    Driver(DriverError),
    /// The text does not name a device.
    BadDeviceSpec {
        /// The text as given.
        spec: String,
        /// The reason why it is not accepted.
        reason: String,
        /// The accepted values.
        accepted: &'static str,
    },
    /// The named device cannot be opened.
    Open {
        /// The spec of the device.
        spec: String,
        /// The reason why it cannot be opened, and what to do.
        cause: DriverError,
    },
    /// The id belongs to no leased stream.
    UnknownStream {
        /// The id as given.
        id: StreamId,
    },
    /// A stream could not be leased.
    StreamPool(StreamPoolError),
    /// A memory resource refused or failed.
    Resource(ResourceError),
    /// A setting has a value that is not accepted.
    BadSetting {
        /// The setting: an environment variable, or a description.
        name: &'static str,
        /// The value as given.
        value: String,
        /// The reason why it is not accepted.
        reason: &'static str,
        /// The accepted values.
        accepted: &'static str,
    },
    /// The log file already has a writer, in this process or another.
    LogInUse {
        /// The file, after expansion of its pattern.
        path: PathBuf,
    },
    /// Two objects that must belong to one open device belong to two.
    DifferentDevices {
        /// The call that refused.
        call: &'static str,
        /// The object that the call was made on, and its device.
        left: String,
        /// The argument, and its device.
        right: String,
    },
}

/// The typed causes of [`XlogError::Kernel`] by its text, since the variant has no field for them. Entries are never removed, so only
/// failures to build a shared runtime have one.
static CAUSES: Mutex<BTreeMap<String, &'static XlogError>> = Mutex::new(BTreeMap::new());
/// The maximum number of texts with a cause.
const MAX_CAUSES: usize = 256;

impl XlogError {
    /// Returns [`XlogError::Kernel`] with this text, which includes that of its cause.
    pub(crate) fn kernel(text: String, cause: Self) -> Self {
        let mut causes = CAUSES.lock();
        if causes.len() < MAX_CAUSES && !causes.contains_key(&text) {
            causes.insert(text.clone(), Box::leak(Box::new(cause)));
        }
        Self::Kernel(text)
    }

    pub(crate) fn bad_setting(
        name: &'static str,
        value: impl Into<String>,
        reason: &'static str,
        accepted: &'static str,
    ) -> Self {
        Self::BadSetting { name, value: value.into(), reason, accepted }
    }
}

impl Error for XlogError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Kernel(text) => CAUSES.lock().get(text).map(|cause| *cause as _),
            // Transparent: the text is that of the inner error.
            Self::Driver(error) => error.source(),
            Self::StreamPool(error) => error.source(),
            Self::Resource(error) => error.source(),
            _ => None,
        }
    }
}

impl From<DriverError> for XlogError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<StreamPoolError> for XlogError {
    fn from(error: StreamPoolError) -> Self {
        Self::StreamPool(error)
    }
}

impl From<ResourceError> for XlogError {
    fn from(error: ResourceError) -> Self {
        Self::Resource(error)
    }
}

impl fmt::Debug for XlogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The text is its only field.
            Self::Kernel(text) => return f.debug_tuple("Kernel").field(text).finish(),
            Self::Driver(error) => write!(f, "Driver({error:?})")?,
            Self::StreamPool(error) => write!(f, "StreamPool({error:?})")?,
            Self::Resource(error) => write!(f, "Resource({error:?})")?,
            Self::BadDeviceSpec { spec, .. } => {
                write!(f, "BadDeviceSpec {{ spec: {spec:?}, .. }}")?
            }
            Self::Open { spec, cause } => {
                write!(f, "Open {{ spec: {spec:?}, cause: {cause:?} }}")?;
            }
            Self::UnknownStream { id } => write!(f, "UnknownStream {{ id: {id:?} }}")?,
            Self::BadSetting { name, value, .. } => {
                write!(f, "BadSetting {{ name: {name:?}, value: {value:?}, .. }}")?;
            }
            Self::LogInUse { path } => write!(f, "LogInUse {{ path: {path:?} }}")?,
            Self::DifferentDevices { call, .. } => {
                write!(f, "DifferentDevices {{ call: {call:?}, .. }}")?;
            }
        }
        write!(f, ": {self}")
    }
}

impl fmt::Display for XlogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(text) => f.write_str(text),
            Self::Driver(error) => error.fmt(f),
            Self::StreamPool(error) => error.fmt(f),
            Self::Resource(error) => error.fmt(f),
            Self::BadDeviceSpec { spec, reason, accepted } => {
                write!(f, "device spec {spec:?}: {reason}; accepted are {accepted}")
            }
            Self::Open { spec, cause } => write!(f, "cannot open device {spec:?}: {cause}"),
            Self::UnknownStream { id } => write!(
                f,
                "{id} does not resolve in this pool; accepted are {} and the ids this pool has out",
                StreamId::DEFAULT
            ),
            Self::BadSetting { name, value, reason, accepted } => {
                write!(f, "{name} = {value:?}: {reason}; accepted: {accepted}")
            }
            Self::LogInUse { path } => write!(
                f,
                "the log {} has a writer already, in this process or another, and a log file has one: give every runtime a \
                 file of its own; %p in the path stands for the process and %d for the device",
                path.display()
            ),
            Self::DifferentDevices { call, left, right } => write!(
                f,
                "{call}: {left} and {right} belong to different open devices; use streams of one device"
            ),
        }
    }
}
