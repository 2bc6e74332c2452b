//! The columns of the table of processes, and the format of their figures.

use xlog_report::text_report::size;

use super::view::Process;

/// The minimum width of a name: that of a command, and two columns before it.
const NAME: usize = 17;

/// A column of the table of processes, shown if the terminal is wide enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Field {
    Pid,
    Used,
    /// The limit of the process, if any process has one.
    Quota,
    Live,
    Cached,
    Pending,
    Peak,
    Rate,
    Granted,
    Since,
}

impl Field {
    /// From left to right.
    pub(super) const ALL: [Self; 10] = [
        Self::Pid,
        Self::Used,
        Self::Quota,
        Self::Live,
        Self::Cached,
        Self::Pending,
        Self::Peak,
        Self::Rate,
        Self::Granted,
        Self::Since,
    ];
    /// Omitted on narrow terminals, in this order.
    const OPTIONAL: [Self; 5] = [Self::Granted, Self::Peak, Self::Since, Self::Pending, Self::Live];

    /// Returns the columns that fit into `width`.
    pub(super) fn that_fit(width: usize, has_quotas: bool) -> Vec<Self> {
        let mut fields = Self::ALL.to_vec();
        fields.retain(|field| has_quotas || *field != Self::Quota);
        for optional in Self::OPTIONAL {
            let sum: usize = fields.iter().map(|field| field.width()).sum();
            if sum + NAME <= width {
                break;
            }
            fields.retain(|field| *field != optional);
        }
        fields
    }

    fn width(self) -> usize {
        match self {
            Self::Pid | Self::Since => 8,
            _ => 10,
        }
    }

    pub(super) fn heading(self) -> &'static str {
        match self {
            Self::Pid => "pid",
            Self::Used => "used",
            Self::Quota => "limit",
            Self::Live => "live",
            Self::Cached => "cached",
            Self::Pending => "pending",
            Self::Peak => "peak",
            Self::Rate => "rate /s",
            Self::Granted => "granted",
            Self::Since => "since",
        }
    }

    pub(super) fn of(self, process: &Process) -> String {
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
        match self {
            Self::Pid => process.slot.pid.to_string(),
            Self::Used => size(process.slot.used_bytes),
            Self::Quota => known(process.slot.quota_bytes),
            Self::Live => known(process.slot.live_bytes),
            Self::Cached => known(process.slot.cached_bytes),
            Self::Pending => known(process.slot.pending_bytes),
            Self::Peak => size(process.slot.peak_bytes),
            Self::Rate => process.bytes_per_second.map_or_else(|| "-".to_owned(), rate),
            Self::Granted => size(process.slot.granted_bytes),
            Self::Since => process.slot.seconds.map_or_else(|| "?".to_owned(), duration),
        }
    }

    pub(super) fn cell(self, text: &str) -> String {
        let width = self.width();
        format!("{text:>width$}")
    }
}

fn rate(bytes: f64) -> String {
    match bytes.round() as i64 {
        0 => "0".to_owned(),
        growth if growth > 0 => format!("+{}", size(growth.unsigned_abs())),
        growth => format!("-{}", size(growth.unsigned_abs())),
    }
}

pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes}:{seconds:02}"),
        (hours, minutes, seconds) => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_left_out_where_the_terminal_has_no_room() {
        assert_eq!(Field::that_fit(120, true), Field::ALL);
        use Field::{Cached, Live, Pending, Pid, Quota, Rate, Since, Used};
        assert_eq!(Field::that_fit(83, false), [Pid, Used, Live, Cached, Pending, Rate, Since]);
        assert_eq!(Field::that_fit(80, false), [Pid, Used, Live, Cached, Pending, Rate]);
        assert_eq!(Field::that_fit(20, false), [Pid, Used, Cached, Rate]);
        assert_eq!(Field::that_fit(20, true), [Pid, Used, Quota, Cached, Rate]);
        for width in 55..140 {
            let sum: usize = Field::that_fit(width, false).iter().map(|field| field.width()).sum();
            assert!(sum + NAME <= width, "{width}");
        }
    }

    #[test]
    fn figures_read_as_people_write_them() {
        assert_eq!((rate(0.2).as_str(), rate(-2048.0).as_str()), ("0", "-2 KiB"));
        assert_eq!((duration(59.9).as_str(), duration(3601.0).as_str()), ("59 s", "1:00:01"));
    }
}
