//! Parses sizes (`4GiB`, `512MB`, `1e9`, `4096`), counts (`1e6`, `300`) and durations (`0.5s`, `200ms`, `2`).
//!
//! A size is a number, optionally with a fraction or an exponent, and a unit: decimal `KB`, `MB`, `GB`, `TB`, binary `KiB`,
//! `MiB`, `GiB`, `TiB`, or `B` or none for bytes. Case and one space before the unit are ignored. Fractions of a byte are
//! rounded down. Zero, negative numbers and numbers beyond 64 bits are refused. A count is a whole number. A duration
//! without a unit is in seconds.

use std::ops::RangeInclusive;
use std::time::Duration;

use xlog_cuda::{ByteSize, XlogError};

/// The accepted sizes, for error messages.
const ACCEPTED: &str = "a number of bytes such as 4096 or 1e9, or one with a unit such as 512MB (decimal) or 4GiB (binary)";

/// Parses a positive number of bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let reason = match text.trim().parse() {
        Ok(ByteSize::Bytes(bytes)) => return Ok(bytes),
        Ok(_) => "it is a share, and there is nothing it could be a share of",
        Err(XlogError::BadSetting { reason, .. }) => reason,
        Err(_) => "it is no number",
    };
    Err(format!("{text:?} is not a size: {reason}; expected {ACCEPTED}"))
}

/// Parses a positive number of bytes, or a share such as `50%`.
pub(crate) fn parse_or_share(text: &str) -> Result<ByteSize, String> {
    match text.trim().parse() {
        Ok(share @ ByteSize::Share(_)) => Ok(share),
        _ => parse(text).map(ByteSize::Bytes),
    }
}

/// Returns a parser of whole numbers in a range, with an optional exponent.
pub(crate) fn count<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        // Beyond 2^53 a fraction or an exponent would be rounded.
        let inexact = |number: &f64| number.fract() == 0.0 && (0.0..=9e15).contains(number);
        let number = text
            .parse()
            .ok()
            .or_else(|| text.parse::<f64>().ok().filter(inexact).map(|number| number as u64));
        let number = number.filter(|number| range.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| match *range.end() {
            u64::MAX => format!("expected a whole number from {}, such as 1e6", range.start()),
            end => format!("expected a whole number from {} to {end}, such as 1e6", range.start()),
        })
    }
}

/// Returns a parser of durations in a range of seconds.
pub(crate) fn duration(
    seconds: RangeInclusive<f64>,
) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    const UNITS: [(&str, f64); 5] =
        [("ms", 1e-3), ("us", 1e-6), ("min", 60.0), ("h", 3600.0), ("s", 1.0)];
    move |text| {
        let unit = UNITS.iter().find_map(|(unit, in_seconds)| {
            Some((text.strip_suffix(unit)?.trim_end(), *in_seconds))
        });
        let (number, unit) = unit.unwrap_or((text, 1.0));
        let parsed = number.parse::<f64>().ok().map(|number| number * unit);
        parsed.filter(|parsed| seconds.contains(parsed)).map(Duration::from_secs_f64).ok_or_else(
            || {
                let (from, to) = (seconds.start(), seconds.end());
                format!("expected {from} to {to} seconds, such as 0.5s, 200ms or 2")
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_durations_are_read_in_every_notation_and_within_their_range() {
        let rows = |text: &str| count::<u32>(1..=2_000_000)(text);
        for (text, number) in [("1", 1), ("300", 300), ("1e6", 1_000_000), ("1.5e3", 1500)] {
            assert_eq!(rows(text), Ok(number), "{text}");
        }
        for text in ["0", "2000001", "1e7", "1.5", "-1", "", "1e-3", "nan", "inf", "12x"] {
            assert!(rows(text).unwrap_err().contains("from 1 to 2000000"), "{text}");
        }
        assert_eq!(count::<u64>(0..=u64::MAX)("18446744073709551615"), Ok(u64::MAX));
        assert!(count::<u64>(0..=u64::MAX)("1e16").is_err(), "it is not exact");
        let every = |text: &str| duration(0.01..=3600.0)(text);
        for (text, millis) in
            [("1", 1000), ("0.5", 500), ("0.5s", 500), ("200ms", 200), ("2 min", 120_000)]
        {
            assert_eq!(every(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "0", "1e9", "5 years", "-1s", "nan"] {
            assert!(every(text).unwrap_err().contains("0.01 to 3600"), "{text}");
        }
    }

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
