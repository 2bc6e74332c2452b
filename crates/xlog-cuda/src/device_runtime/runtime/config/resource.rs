//! The memory resource of a runtime, and its text form.

use std::fmt;
use std::str::FromStr;

use crate::{Result, XlogError};

const ACCEPTED: &str = "\"async\", \"pool\" and \"direct\"";

/// The memory resource of a shared runtime.
///
/// ```
/// use xlog_cuda::device_runtime::ResourceKind;
///
/// assert_eq!("direct".parse(), Ok(ResourceKind::Direct));
/// assert_eq!(ResourceKind::default().to_string(), "pool");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum ResourceKind {
    /// One raw driver allocation per block; tracks no uses.
    Direct,
    /// Stream-ordered allocation that tracks uses.
    Async,
    /// Sub-allocation that tracks uses; reuse makes no driver calls.
    #[default]
    Pool,
}

impl FromStr for ResourceKind {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "async" => Ok(Self::Async),
            "pool" => Ok(Self::Pool),
            _ => Err(XlogError::bad_setting(
                "the memory resource",
                text,
                "there is no such resource",
                ACCEPTED,
            )),
        }
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Async => "async",
            Self::Pool => "pool",
        })
    }
}
