//! The guard setting of a runtime, and its text form.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::device_runtime::debug_guard::{GuardConfig, GuardMode};
use crate::{Result, XlogError};

const ACCEPTED: &str =
    "\"off\", \"canary\", \"sync\", \"pages\" or \"sampled:N\", where one block in N is guarded";

/// The guard that a shared runtime wraps around its resource; the values of `XLOG_DEVICE_GUARD`.
///
/// ```
/// use xlog_cuda::device_runtime::{GuardMode, GuardSetting};
///
/// let setting: GuardSetting = "sampled:100000".parse()?;
/// assert!(matches!(setting.config().map(|config| config.mode), Some(GuardMode::Sampled(_))));
/// assert!("sampled:0".parse::<GuardSetting>().is_err());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum GuardSetting {
    /// No guard.
    #[default]
    Off,
    /// A guard with these settings.
    On(GuardConfig),
}

impl GuardSetting {
    /// The settings of the guard, if there is one.
    pub fn config(&self) -> Option<&GuardConfig> {
        match self {
            Self::Off => None,
            Self::On(config) => Some(config),
        }
    }
}

impl From<GuardConfig> for GuardSetting {
    fn from(config: GuardConfig) -> Self {
        Self::On(config)
    }
}

impl FromStr for GuardSetting {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason| Err(XlogError::bad_setting("the guard", text, reason, ACCEPTED));
        let config = GuardConfig::default();
        let config = match text.split_once(':') {
            None if text == "off" => return Ok(Self::Off),
            None if text == "canary" => config,
            None if text == "sync" => config.with_synchronous(true),
            None if text == "pages" => config.with_mode(GuardMode::Pages),
            Some(("sampled", count)) => match count.parse::<NonZeroU64>() {
                Ok(count) => config.with_mode(GuardMode::Sampled(count)),
                Err(_) => return refuse("what stands after the colon is no number above 0"),
            },
            _ => return refuse("there is no such guard"),
        };
        Ok(Self::On(config))
    }
}

impl fmt::Display for GuardSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::On(config) = self else { return f.write_str("off") };
        match config.mode {
            GuardMode::Canaries if config.synchronous => f.write_str("sync"),
            GuardMode::Canaries => f.write_str("canary"),
            GuardMode::Pages => f.write_str("pages"),
            GuardMode::Sampled(count) => write!(f, "sampled:{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_name_no_guard_are_refused_with_what_is_accepted() {
        for text in [
            "",
            "on",
            "Canary",
            "sampled",
            "sampled:",
            "sampled:0",
            "sampled:-1",
            "pages:2",
            "canary:",
        ] {
            let said = text.parse::<GuardSetting>().expect_err(text).to_string();
            assert!(said.contains(&format!("{text:?}")) && said.contains("sampled:N"), "{said}");
        }
        for text in ["off", "canary", "sync", "pages", "sampled:100000"] {
            assert_eq!(text.parse::<GuardSetting>().expect(text).to_string(), text);
        }
    }
}
