//! Sizes as people write them: `4GiB`, `512MB`, `1e9`, `4096`.
//!
//! A number, whole or with a fraction or an exponent, and a unit: decimal `KB`, `MB`, `GB`, `TB`, binary `KiB`, `MiB`, `GiB`, `TiB`,
//! or `B` or nothing for bytes. Case does not matter, nor does one space in between. What is not a whole number of bytes is
//! rounded down. Zero, negative numbers and what does not fit 64 bits are refused.

use xlog_cuda::{ByteSize, XlogError};

/// The accepted sizes, for messages.
const ACCEPTED: &str = "a number of bytes such as 4096 or 1e9, or one with a unit such as 512MB (decimal) or 4GiB (binary)";

/// Parses a number of bytes, at least one.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let reason = match text.trim().parse() {
        Ok(ByteSize::Bytes(bytes)) => return Ok(bytes),
        Ok(_) => "it is a share, and there is nothing it could be a share of",
        Err(XlogError::BadSetting { reason, .. }) => reason,
        Err(_) => "it is no number",
    };
    Err(format!("{text:?} is not a size: {reason}; expected {ACCEPTED}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_what_its_name_says() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("7b", 7),
            ("2KB", 2_000),
            ("2KiB", 2_048),
            ("512MB", 512_000_000),
            ("512mib", 512 << 20),
            ("3 GB", 3_000_000_000),
            ("4GiB", 4 << 30),
            ("1TB", 1_000_000_000_000),
            ("1TiB", 1 << 40),
            ("1e9", 1_000_000_000),
            ("1.5e3", 1_500),
            ("1.5GiB", 3 << 29),
            ("2e3KiB", 2_048_000),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_by_name() {
        for text in [
            "",
            " ",
            "GiB",
            "4G",
            "4 XiB",
            "4  GiB",
            "-1",
            "-1GiB",
            "0",
            "0KiB",
            "0.5",
            "1e-3",
            "nan",
            "inf",
            "1e30",
            "18446744073709551616",
            "17000000TiB",
            "0x10",
            "1,000",
            "4GiB4",
            "1e",
            "--",
        ] {
            let message = parse(text).unwrap_err();
            assert!(
                message.contains(&format!("{text:?}")) && message.contains("4GiB"),
                "{message}"
            );
        }
    }
}
