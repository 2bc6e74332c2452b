//! How a shared runtime is built: in code, or from the environment.
//!
//! | variable | accepted | meaning |
//! |---|---|---|
//! | `XLOG_DEVICE` | `sim`, `sim:SEED` | every ordinal n is device n of a simulated machine |
//! | | `cuda:N`, or not set | ordinal n is GPU n, whatever N is: it only names a program's default GPU |
//! | `XLOG_DEVICE_RESOURCE` | `async`, `direct` | the memory resource |
//!
//! A value that is not accepted is an error that names it, never a default that nobody asked for. So are the settings this
//! build does not have: a program that was told to keep a budget and does not is worse than one that refuses to start.

use std::fmt;
use std::str::FromStr;

use crate::device_runtime::stream_pool::DEFAULT_MAX_STREAMS;
use crate::{DeviceSpec, Result, XlogError};

/// The environment variable that names the memory resource of shared runtimes.
pub const RESOURCE_VARIABLE: &str = "XLOG_DEVICE_RESOURCE";

/// Settings that are known by name and not part of this build.
const UNAVAILABLE: [&str; 3] = ["XLOG_DEVICE_BUDGET", "XLOG_DEVICE_LOG", "XLOG_DEVICE_GUARD"];

const ACCEPTED_RESOURCES: &str = "\"async\" and \"direct\"";

/// Which memory resource a shared runtime stands on.
///
/// ```
/// use xlog_cuda::device_runtime::ResourceKind;
///
/// assert_eq!("direct".parse(), Ok(ResourceKind::Direct));
/// assert_eq!(ResourceKind::default().to_string(), "async");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum ResourceKind {
    /// One raw driver allocation per block; tracks no uses.
    Direct,
    /// Stream-ordered allocation that tracks uses.
    #[default]
    Async,
}

impl FromStr for ResourceKind {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "async" => Ok(Self::Async),
            _ => Err(XlogError::BadSetting {
                name: "the memory resource",
                value: text.to_owned(),
                reason: match text {
                    "pool" => "it is not available in this build",
                    _ => "there is no such resource",
                },
                accepted: ACCEPTED_RESOURCES,
            }),
        }
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Async => "async",
        })
    }
}

/// How a shared runtime is built.
///
/// ```
/// use xlog_cuda::DeviceSpec;
/// use xlog_cuda::device_runtime::{ResourceKind, RuntimeConfig};
///
/// let config = RuntimeConfig::default().with_device(DeviceSpec::SimSeeded(7)).with_max_streams(4);
/// assert_eq!(config.resource, ResourceKind::Async);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuntimeConfig {
    /// The device; `None` is the GPU whose number is the runtime's ordinal.
    pub device: Option<DeviceSpec>,
    /// The memory resource.
    pub resource: ResourceKind,
    /// How many streams may be out at a time, the default one not counted; 0 is taken as 1.
    pub max_streams: usize,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self { device: None, resource: ResourceKind::default(), max_streams: DEFAULT_MAX_STREAMS }
    }
}

impl RuntimeConfig {
    /// What the environment asks for; where it says nothing, the default.
    ///
    /// `XLOG_DEVICE=cuda:N` names the default GPU of a program. It does not move other ordinals there, so it leaves
    /// [`RuntimeConfig::device`] at `None`.
    pub fn from_environment() -> Result<Self> {
        for name in UNAVAILABLE {
            if let Some(value) = std::env::var_os(name) {
                return Err(XlogError::BadSetting {
                    name,
                    value: value.to_string_lossy().into_owned(),
                    reason: "the setting is not available in this build",
                    accepted: "the variable not being set",
                });
            }
        }
        let device = DeviceSpec::from_environment()?.filter(|spec| spec.is_simulated());
        let mut config = Self { device, ..Self::default() };
        if let Some(value) = std::env::var_os(RESOURCE_VARIABLE) {
            config.resource = value.to_string_lossy().parse().map_err(|error| match error {
                XlogError::BadSetting { value, reason, accepted, .. } => {
                    XlogError::BadSetting { name: RESOURCE_VARIABLE, value, reason, accepted }
                }
                other => other,
            })?;
        }
        Ok(config)
    }

    /// The device. A GPU must be the one whose number is the runtime's ordinal.
    #[must_use]
    pub fn with_device(mut self, device: DeviceSpec) -> Self {
        self.device = Some(device);
        self
    }

    /// The memory resource.
    #[must_use]
    pub fn with_resource(mut self, resource: ResourceKind) -> Self {
        self.resource = resource;
        self
    }

    /// How many streams may be out at a time, the default one not counted.
    #[must_use]
    pub fn with_max_streams(mut self, max_streams: usize) -> Self {
        self.max_streams = max_streams;
        self
    }

    /// The device of the runtime of `ordinal`.
    pub(super) fn device_of(&self, ordinal: u32) -> DeviceSpec {
        self.device.unwrap_or(DeviceSpec::Cuda(ordinal as usize))
    }
}
