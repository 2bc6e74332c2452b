//! The text form of the setting of sampled stacks.

use std::str::FromStr;

use crate::device_runtime::statistics::Backtraces;
use crate::{Result, XlogError};

const ACCEPTED: &str = "off, all, or sampled:N for one in N allocations";

impl FromStr for Backtraces {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason| Err(XlogError::bad_setting("the stacks", text, reason, ACCEPTED));
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "all" => Ok(Self::All),
            Some(("sampled", count)) => match count.parse() {
                Ok(count) => Ok(Self::Sampled(count)),
                Err(_) => refuse("what stands after the colon is no number above 0"),
            },
            _ => refuse("there is no such setting"),
        }
    }
}
