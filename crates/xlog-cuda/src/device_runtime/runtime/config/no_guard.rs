//! The guard setting of a runtime in a build without the feature `guard`: only `off` is accepted.

use std::fmt;
use std::str::FromStr;

use crate::{Result, XlogError};

/// The guard that a shared runtime wraps around its resource; the values of `XLOG_DEVICE_GUARD`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardSetting {
    /// No guard.
    #[default]
    Off,
}

impl FromStr for GuardSetting {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            _ => Err(XlogError::bad_setting(
                "the guard",
                text,
                "this program was built without the feature `guard` of xlog-cuda",
                "\"off\"",
            )),
        }
    }
}

impl fmt::Display for GuardSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("off")
    }
}
