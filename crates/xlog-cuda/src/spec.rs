//! Device specs, the texts that name devices.
//!
//! Parsing does not look at the hardware, so a bad spec and a missing device are different errors. There are exactly three forms, without
//! aliases; surrounding space is refused.

use std::fmt;
use std::str::FromStr;

use crate::{Result, XlogError};

/// The environment variable that names the default device.
pub const DEVICE_VARIABLE: &str = "XLOG_DEVICE";

const ACCEPTED: &str = "\"cuda:N\" (GPU number N, from 0), \"sim\" (simulated, streams on CPU threads) and \
                        \"sim:SEED\" (simulated, the order decided by SEED, 0 to 18446744073709551615)";

/// The device to open.
///
/// ```
/// use xlog_cuda::DeviceSpec;
///
/// assert_eq!("sim:17".parse(), Ok(DeviceSpec::SimSeeded(17)));
/// assert_eq!(DeviceSpec::Cuda(0).to_string(), "cuda:0");
/// assert!("gpu".parse::<DeviceSpec>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DeviceSpec {
    /// A GPU, by its ordinal among those that the CUDA driver shows to this process.
    Cuda(usize),
    /// The simulated device, its streams running concurrently on CPU threads.
    Sim,
    /// The simulated device under the deterministic scheduler with this seed.
    SimSeeded(u64),
}

impl DeviceSpec {
    /// Reads [`DEVICE_VARIABLE`]; `None` if it is not set. An empty value is an error.
    pub fn from_environment() -> Result<Option<Self>> {
        let Some(value) = std::env::var_os(DEVICE_VARIABLE) else {
            return Ok(None);
        };
        value.to_string_lossy().parse().map(Some).map_err(|error| match error {
            XlogError::BadDeviceSpec { spec, reason, accepted } => XlogError::BadDeviceSpec {
                spec,
                reason: format!("from the environment variable {DEVICE_VARIABLE}: {reason}"),
                accepted,
            },
            other => other,
        })
    }

    /// Returns whether this is a simulated device, seeded or not.
    #[must_use]
    pub fn is_simulated(self) -> bool {
        !matches!(self, Self::Cuda(_))
    }
}

impl FromStr for DeviceSpec {
    type Err = XlogError;

    fn from_str(spec: &str) -> Result<Self> {
        let refuse = |reason: String| {
            Err(XlogError::BadDeviceSpec { spec: spec.to_owned(), reason, accepted: ACCEPTED })
        };
        match spec.split_once(':') {
            None if spec == "sim" => Ok(Self::Sim),
            Some(("sim", seed)) => match number(seed) {
                Ok(seed) => Ok(Self::SimSeeded(seed)),
                Err(reason) => refuse(format!("the seed {seed:?} {reason}")),
            },
            Some(("cuda", ordinal)) => match number(ordinal) {
                Ok(ordinal) => Ok(Self::Cuda(ordinal)),
                Err(reason) => refuse(format!("the GPU number {ordinal:?} {reason}")),
            },
            None if spec == "cuda" => refuse("the GPU number is missing".to_owned()),
            None if spec.is_empty() => refuse("it is empty".to_owned()),
            _ if spec.trim() != spec => refuse("it has space around it".to_owned()),
            _ => refuse("there is no such kind of device".to_owned()),
        }
    }
}

/// Parses digits. Unlike the standard parser, it refuses a sign.
fn number<N: FromStr>(text: &str) -> std::result::Result<N, &'static str> {
    if text.is_empty() {
        return Err("is missing");
    }
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("is not a whole number of digits");
    }
    text.parse().map_err(|_| "is too large")
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Sim => f.write_str("sim"),
            Self::SimSeeded(seed) => write!(f, "sim:{seed}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_parses_and_prints_back() {
        for text in ["cuda:0", "cuda:15", "sim", "sim:0", "sim:18446744073709551615"] {
            let spec: DeviceSpec = text.parse().expect(text);
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn signs_spaces_and_overflow_are_refused_by_name() {
        let bad = [
            "",
            " ",
            "gpu",
            "cuda",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:+1",
            "cuda: 0",
            "cuda:0 ",
            "sim:",
            "sim:-1",
            "sim:+1",
            "sim:1.5",
            "sim:99999999999999999999",
            " sim",
            "sim ",
            "SIM",
            "cuda:99999999999999999999",
            "cuda:0:1",
            "sim:0x10",
            "sim:\u{0661}",
        ];
        for text in bad {
            let error = text.parse::<DeviceSpec>().expect_err(text);
            let message = error.to_string();
            assert!(matches!(error, XlogError::BadDeviceSpec { .. }), "{text:?} gave {error:?}");
            assert!(message.contains(&format!("{text:?}")), "{message} does not name {text:?}");
            assert!(message.contains("sim:SEED"), "{message} does not say what is accepted");
        }
    }
}
