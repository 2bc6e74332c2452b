//! Human-readable sizes.

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Formats bytes in the largest unit that gives at least 1: quarters exactly, other values rounded to one decimal.
///
/// The page of `xlogmem report` implements the same rule in JavaScript.
///
/// ```
/// use xlog_base::size_text;
///
/// let sizes = [256, 2 << 20, 5 << 28, (1 << 20) - 1];
/// assert_eq!(sizes.map(size_text), ["256 bytes", "2 MiB", "1.25 GiB", "1.0 MiB"]);
/// ```
#[must_use]
pub fn size_text(bytes: u64) -> String {
    if bytes < 1 << 10 {
        return format!("{bytes} bytes");
    }
    let (bytes, mut unit, mut text) = (u128::from(bytes), 1, String::new());
    for name in UNITS {
        unit <<= 10;
        // Rounds half a tenth up: 1023.95 KiB becomes 1.0 MiB, never 1024.0 KiB.
        let tenths = (10 * bytes + unit / 2) / unit;
        text = match 4 * bytes % unit {
            0 => format!("{} {name}", bytes as f64 / unit as f64),
            _ => format!("{}.{} {name}", tenths / 10, tenths % 10),
        };
        if tenths < 10_240 {
            break;
        }
    }
    text
}

/// Formats bytes in hundredths of the largest unit, rounded up, so that a limit of the printed size suffices.
///
/// ```
/// use xlog_base::size_text_up;
///
/// let sizes = [256, 2 << 20, (1 << 30) + 1];
/// assert_eq!(sizes.map(size_text_up), ["256 bytes", "2 MiB", "1.01 GiB"]);
/// ```
#[must_use]
pub fn size_text_up(bytes: u64) -> String {
    let power = bytes.max(1).ilog2() / 10;
    let Some(name) = power.checked_sub(1).and_then(|at| UNITS.get(at as usize)) else {
        return size_text(bytes);
    };
    let hundredths = (100 * u128::from(bytes)).div_ceil(1 << (10 * power));
    format!("{} {name}", hundredths as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1025, "1.0 KiB"),
            (1280, "1.25 KiB"),
            (1332, "1.3 KiB"),
            (1536, "1.5 KiB"),
            (1_048_524, "1023.9 KiB"),
            (1_048_525, "1.0 MiB"),
            (200 << 20, "200 MiB"),
            ((139 << 30) + (512 << 20), "139.5 GiB"),
            (3 << 50, "3 PiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size_text(bytes), text);
        }
    }
}
