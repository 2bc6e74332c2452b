//! Byte sizes as text, in settings and on the command line.
//!
//! | written | means |
//! |---|---|
//! | `1073741824`, `1e9` | bytes |
//! | `512MB` | 512 000 000 bytes: kB, MB, GB, TB count in thousands |
//! | `4GiB`, `1.5 GiB` | 4 294 967 296 bytes: KiB, MiB, GiB, TiB count in 1024s |
//! | `50%` | half of a whole, such as the memory of a device |
//!
//! Units are case-insensitive. Numbers are parsed exactly, without floating point, and rounded down to whole bytes.

use std::fmt;
use std::str::FromStr;

use crate::{Result, XlogError};

const ACCEPTED: &str = "bytes (\"1073741824\", \"1e9\"), a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB \
                        (\"4GiB\", \"512MB\"), or a part of the whole (\"50%\")";

const UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

/// 100 percent as a [`ByteSize::Share`].
const WHOLE: u32 = 100_000_000;

/// A number of bytes, or a share of a whole that is not known yet.
///
/// ```
/// use xlog_cuda::ByteSize;
///
/// let half: ByteSize = "50%".parse()?;
/// assert_eq!(half.of(16 << 30), 8 << 30);
/// assert_eq!(ByteSize::mib(512), ByteSize::from(512_usize << 20));
/// assert_eq!("1.5GiB".parse::<ByteSize>()?.of(0), 3 << 29);
/// assert!("4 apples".parse::<ByteSize>().unwrap_err().to_string().contains("4 apples"));
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ByteSize {
    /// A number of bytes.
    Bytes(u64),
    /// Millionths of a percent, at most 100 percent.
    Share(u32),
}

impl ByteSize {
    /// `count` times 1024² bytes.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self::Bytes(count.saturating_mul(1 << 20))
    }

    /// `count` times 1024³ bytes.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self::Bytes(count.saturating_mul(1 << 30))
    }

    /// Returns the bytes; a share is one of `whole`.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => {
                (u128::from(whole) * u128::from(share.min(WHOLE)) / u128::from(WHOLE)) as u64
            }
        }
    }
}

impl From<u64> for ByteSize {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<usize> for ByteSize {
    fn from(bytes: usize) -> Self {
        Self::Bytes(bytes as u64)
    }
}

impl FromStr for ByteSize {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        read(text).map_err(|reason| XlogError::bad_setting("a size", text, reason, ACCEPTED))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Share(share) => {
                let (percent, rest) = (share / 1_000_000, share % 1_000_000);
                match format!(".{rest:06}").trim_end_matches('0') {
                    "." => write!(f, "{percent}%"),
                    rest => write!(f, "{percent}{rest}%"),
                }
            }
        }
    }
}

fn read(text: &str) -> std::result::Result<ByteSize, &'static str> {
    if text.is_empty() {
        return Err("it is empty");
    }
    if text.starts_with(['-', '+']) {
        return Err("it has a sign");
    }
    let (number, rest) = Number::split(text)?;
    let unit = rest.strip_prefix(' ').unwrap_or(rest);
    if unit == "%" {
        let share = number.times(1_000_000)?;
        return match u32::try_from(share) {
            Ok(0) => Err("it is nothing at all"),
            Ok(share) if share <= WHOLE => Ok(ByteSize::Share(share)),
            _ => Err("it is more than the whole"),
        };
    }
    let scale = match unit {
        "" if rest.is_empty() => 1,
        _ => {
            let named = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
            named.ok_or("there is no such unit")?.1
        }
    };
    match number.times(scale)? {
        0 => Err("it is nothing at all"),
        bytes => Ok(ByteSize::Bytes(bytes)),
    }
}

/// `digits` × 10^`exponent`.
struct Number {
    digits: u128,
    exponent: i32,
}

impl Number {
    /// Parses the number at the beginning of a text. Returns it and the rest of the text.
    fn split(text: &str) -> std::result::Result<(Self, &str), &'static str> {
        const TOO_LONG: &str = "the number has too many digits";
        let mut number = Self { digits: 0, exponent: 0 };
        let (mut count, mut point, mut at) = (0, false, 0);
        for (index, letter) in text.char_indices() {
            at = index + letter.len_utf8();
            match letter {
                '0'..='9' => {
                    count += 1;
                    if count > 30 {
                        return Err(TOO_LONG);
                    }
                    number.digits = number.digits * 10 + u128::from(letter as u8 - b'0');
                    number.exponent -= i32::from(point);
                }
                '.' if !point => point = true,
                _ => {
                    at = index;
                    break;
                }
            }
        }
        if count == 0 {
            return Err("it does not begin with a number");
        }
        let mut rest = text.get(at..).unwrap_or_default();
        if let Some(power) = rest.strip_prefix(['e', 'E']) {
            let power = power.strip_prefix('+').unwrap_or(power);
            let end = power.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(power.len());
            let (digits, behind) = power.split_at(end);
            let power: i32 = match digits.parse() {
                Ok(power) if power <= 30 => power,
                Ok(_) => return Err("it is too large"),
                Err(_) => return Err("the exponent is no whole number"),
            };
            number.exponent += power;
            rest = behind;
        }
        Ok((number, rest))
    }

    fn times(&self, scale: u64) -> std::result::Result<u64, &'static str> {
        const TOO_LARGE: &str = "it is too large";
        let power = 10_u128.checked_pow(self.exponent.unsigned_abs()).ok_or(TOO_LARGE)?;
        let scaled = self.digits.checked_mul(u128::from(scale)).ok_or(TOO_LARGE)?;
        let value = match self.exponent {
            0.. => scaled.checked_mul(power).ok_or(TOO_LARGE)?,
            _ => scaled / power,
        };
        u64::try_from(value).map_err(|_| TOO_LARGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_means_what_the_table_says() {
        let cases = [
            ("1", 1),
            ("1073741824", 1 << 30),
            ("1e9", 1_000_000_000),
            ("1E+3", 1000),
            ("2.5e3", 2500),
            ("512MB", 512_000_000),
            ("512mb", 512_000_000),
            ("7B", 7),
            ("3 kB", 3000),
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("1.5 GiB", 3 << 29),
            ("0.5KiB", 512),
            ("1.9B", 1),
            (".5MiB", 512 << 10),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
            ("9007199254740993", (1 << 53) + 1),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize::Bytes(bytes)), "{text}");
        }
        for (text, of_thousand) in [("50%", 500), ("100%", 1000), ("0.1 %", 1), ("12.5%", 125)] {
            assert_eq!(text.parse::<ByteSize>().expect(text).of(1000), of_thousand, "{text}");
        }
        assert_eq!(ByteSize::Share(WHOLE).of(u64::MAX), u64::MAX);
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_value_and_what_is_accepted() {
        let bad = [
            "",
            " ",
            "0",
            "0GiB",
            "0.4B",
            "0%",
            "100.1%",
            "-1",
            "+1",
            "GiB",
            "four",
            "4 apples",
            "4G",
            "4 ",
            " 4",
            "4  GiB",
            "4GiB ",
            "1e",
            "1e-3",
            "1e99",
            "1.2.3",
            "0x10",
            "1_000",
            "18446744073709551616",
            "99999999999999TiB",
            "1234567890123456789012345678901",
            "4\u{0661}",
            ".",
            "50%%",
            "5%GiB",
        ];
        for text in bad {
            let error = text.parse::<ByteSize>().expect_err(text);
            assert!(matches!(error, XlogError::BadSetting { .. }), "{error:?}");
            let said = error.to_string();
            assert!(said.contains(&format!("{text:?}")), "{said} does not name {text:?}");
            assert!(said.contains("4GiB") && said.contains("50%"), "{said}");
        }
    }

    #[test]
    fn sizes_print_so_that_they_can_be_read_back() {
        for text in ["1", "4294967296", "50%", "12.5%", "0.000001%", "100%"] {
            let size: ByteSize = text.parse().expect(text);
            assert_eq!(size.to_string(), text);
        }
    }
}
