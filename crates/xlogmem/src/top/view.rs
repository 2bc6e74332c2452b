//! The difference of two readings of ledgers: rows in the shape of the JSON, and lines of text.
//!
//! Field names are the interface: a field may be added, none changes its name or meaning without a new `schema` number.
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use xlog_cuda::ledger::{LedgerResult, SlotSnapshot, Snapshot, TagUse};
use xlog_report::escape;
use xlog_report::text_report::size;

const SCHEMA: u32 = 1;
/// Where tags begin, under what is used.
const TAGS_AT: usize = 12;
/// Seconds after which published tags are shown as old.
const STALE: f64 = 3.0;

/// The columns that rows can be sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Column {
    Used,
    Peak,
    Rate,
    Pid,
    Name,
}

impl Column {
    const ALL: [Self; 5] = [Self::Used, Self::Peak, Self::Rate, Self::Pid, Self::Name];

    fn name(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Peak => "peak",
            Self::Rate => "rate",
            Self::Pid => "pid",
            Self::Name => "name",
        }
    }

    /// The one after it.
    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL.get(at + 1).copied().unwrap_or(Self::Used)
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|column| column.name() == text);
        found.ok_or_else(|| "expected used, peak, rate, pid or name".to_owned())
    }
}

/// The meaning of a line, which a terminal shows as a colour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tone {
    Plain,
    Heading,
    Faint,
    Good,
    Warning,
    Bad,
}

/// A line of a picture.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) tone: Tone,
    pub(super) text: String,
}

impl Shown {
    pub(super) fn plain(text: String) -> Self {
        Self { tone: Tone::Plain, text }
    }
}

/// One picture.
#[derive(Serialize, Debug)]
pub(super) struct Picture {
    schema: u32,
    /// Whether every ledger could be read.
    ok: bool,
    /// Why not, in one line.
    pub(super) error: Option<String>,
    /// The directory or file that was read.
    place: String,
    /// The seconds that rates are over; `None` at the first reading.
    seconds: Option<f64>,
    devices: Vec<Device>,
}

/// A device, which is one ledger.
#[derive(Serialize, Debug, Default)]
struct Device {
    path: String,
    error: Option<String>,
    device: Option<String>,
    limit_bytes: u64,
    used_bytes: u64,
    granted_bytes: u64,
    free_bytes: u64,
    /// Bytes that dead processes left, used or granted: the next request that needs it gets it. Part of the figures above.
    dead_bytes: u64,
    /// The part of `used_bytes` that living processes use.
    #[serde(skip)]
    used_alive: u64,
    /// Grants are being handed back because a request needed them.
    pressure: bool,
    processes: Vec<Process>,
}

#[derive(Serialize, Debug)]
struct Process {
    pid: u32,
    name: String,
    alive: bool,
    used_bytes: u64,
    granted_bytes: u64,
    peak_bytes: u64,
    /// By how much `used_bytes` grew, or shrank, each second; none for a process that was not there before.
    bytes_per_second: Option<f64>,
    /// How long it has taken part.
    seconds: Option<f64>,
    /// The largest tags that it has published; empty if it has published none.
    tags: Vec<Tag>,
    /// How long ago it said so.
    tags_age_seconds: Option<f64>,
}

/// Bytes of the blocks of a tag. A name that ends in an ellipsis was cut.
#[derive(Serialize, Debug)]
struct Tag {
    tag: String,
    bytes: u64,
}

/// The identity of a slot's owner: the file, the slot, the process and its start.
type Owner = (String, u32, u32, SystemTime);

/// The last reading, for the rates of the next one.
#[derive(Debug, Default)]
pub(super) struct Before {
    at: Option<Instant>,
    used: HashMap<Owner, u64>,
}

impl Picture {
    /// The ledgers found at `place`, with rates since `before`, which then becomes this reading.
    pub(super) fn new(
        place: String,
        found: Vec<(String, LedgerResult<Snapshot>)>,
        before: &mut Before,
    ) -> Self {
        let now = Instant::now();
        let passed = before.at.map(|at| now.duration_since(at));
        let last = std::mem::take(&mut before.used);
        before.at = Some(now);
        let mut devices = Vec::new();
        for (path, snapshot) in found {
            devices.push(match snapshot {
                Ok(snapshot) => Device::new(path, &snapshot, passed, &last, &mut before.used),
                Err(error) => Device::unreadable(path, error.to_string()),
            });
        }
        let error = devices.iter().find_map(|device| device.error.clone());
        let seconds = passed.map(|passed| passed.as_secs_f64());
        Self { schema: SCHEMA, ok: error.is_none(), error, place, seconds, devices }
    }

    /// Sorts the processes of each device.
    pub(super) fn sort(&mut self, by: Column) {
        for device in &mut self.devices {
            let rows = &mut device.processes;
            match by {
                Column::Used => rows.sort_by_key(|row| (Reverse(row.used_bytes), row.pid)),
                Column::Peak => rows.sort_by_key(|row| (Reverse(row.peak_bytes), row.pid)),
                Column::Rate => rows.sort_by(|one, other| {
                    let rate = |row: &Process| row.bytes_per_second.unwrap_or(0.0);
                    rate(other).total_cmp(&rate(one)).then(one.pid.cmp(&other.pid))
                }),
                Column::Pid => rows.sort_by_key(|row| row.pid),
                Column::Name => {
                    rows.sort_by(|one, other| {
                        one.name.cmp(&other.name).then(one.pid.cmp(&other.pid))
                    });
                }
            }
        }
    }

    /// As lines of text of about `width` columns: each device with its processes. Fit for a terminal, whatever names are in them.
    pub(super) fn lines(&self, width: usize) -> Vec<Shown> {
        let mut lines = Vec::new();
        if self.devices.is_empty() {
            let start = "'xlogmem demo' starts one to look at";
            lines.push(Shown::plain(format!("no ledger in {}; {start}", self.place)));
        }
        for device in &self.devices {
            if !lines.is_empty() {
                lines.push(Shown::plain(String::new()));
            }
            device.lines(width, &mut lines);
        }
        for line in &mut lines {
            line.text = escape::line(&line.text).into_owned();
        }
        lines
    }
}

impl Device {
    fn new(
        path: String,
        snapshot: &Snapshot,
        passed: Option<Duration>,
        last: &HashMap<Owner, u64>,
        used: &mut HashMap<Owner, u64>,
    ) -> Self {
        let row = |slot: &SlotSnapshot| {
            let owner = (path.clone(), slot.index, slot.pid, slot.started);
            let rate = last.get(&owner).zip(passed).map(|(before, passed)| {
                (slot.used as f64 - *before as f64) / passed.as_secs_f64().max(1e-3)
            });
            used.insert(owner, slot.used);
            // What a dead process held by tag is held no more.
            let published = slot.tags.as_ref().filter(|_| slot.alive);
            Process {
                pid: slot.pid,
                name: slot.name.clone(),
                alive: slot.alive,
                used_bytes: slot.used,
                granted_bytes: slot.granted,
                peak_bytes: slot.peak,
                bytes_per_second: rate,
                // A clock that was set back has no answer.
                seconds: slot.started.elapsed().ok().map(|passed| passed.as_secs_f64()),
                tags: published
                    .iter()
                    .flat_map(|published| &published.tags)
                    .map(Tag::new)
                    .collect(),
                tags_age_seconds: published
                    .and_then(|published| published.published_at().elapsed().ok())
                    .map(|passed| passed.as_secs_f64()),
            }
        };
        let processes = snapshot.slots.iter().map(row).collect();
        let alive = || snapshot.slots.iter().filter(|slot| slot.alive);
        Self {
            path: path.clone(),
            error: None,
            device: Some(snapshot.key.to_string()),
            limit_bytes: snapshot.limit,
            used_bytes: snapshot.used(),
            granted_bytes: snapshot.granted(),
            free_bytes: snapshot.free,
            dead_bytes: snapshot.left_by_the_dead(),
            used_alive: alive().map(|slot| slot.used).sum(),
            pressure: snapshot.pressure,
            processes,
        }
    }

    fn unreadable(path: String, error: String) -> Self {
        Self { path, error: Some(error), ..Self::default() }
    }

    fn lines(&self, width: usize, lines: &mut Vec<Shown>) {
        if let Some(error) = &self.error {
            let text = format!("{}: {error}", self.path);
            return lines.push(Shown { tone: Tone::Bad, text });
        }
        let text = self.device.clone().unwrap_or_default();
        lines.push(Shown { tone: Tone::Heading, text });
        // The bar shows living processes: what dead ones left is available.
        let share = self.used_alive as f64 / (self.limit_bytes.max(1)) as f64;
        let tone = match share {
            _ if self.pressure => Tone::Bad,
            0.9.. => Tone::Bad,
            0.75..0.9 => Tone::Warning,
            _ => Tone::Good,
        };
        let text = format!(
            "{} {:.0} % of {}, {} granted and not used, {} free{}",
            bar(share),
            share * 100.0,
            size(self.limit_bytes),
            size(self.granted_bytes),
            size(self.free_bytes),
            if self.pressure { ", under pressure" } else { "" }
        );
        lines.push(Shown { tone, text });
        if self.dead_bytes > 0 {
            let text =
                format!("{} left by dead processes, for whoever needs it", size(self.dead_bytes));
            lines.push(Shown { tone: Tone::Warning, text });
        }
        if self.processes.is_empty() {
            return lines.push(Shown::plain("no process takes part".to_owned()));
        }
        let text = row(["pid", "used", "peak", "rate /s", "granted", "since"], "name");
        lines.push(Shown { tone: Tone::Heading, text });
        for process in &self.processes {
            let cells = [
                process.pid.to_string(),
                size(process.used_bytes),
                size(process.peak_bytes),
                process.bytes_per_second.map_or_else(|| "-".to_owned(), rate),
                size(process.granted_bytes),
                process.seconds.map_or_else(|| "?".to_owned(), duration),
            ];
            let (tone, name) = match process.alive {
                true => (Tone::Plain, process.name.clone()),
                false => (Tone::Warning, format!("{} (dead)", process.name)),
            };
            lines.push(Shown { tone, text: row(cells.each_ref().map(String::as_str), &name) });
            let tags = process.tag_line(width);
            lines.extend(tags.map(|text| Shown { tone: Tone::Faint, text }));
        }
    }
}

impl Tag {
    fn new(published: &TagUse) -> Self {
        Self { tag: published.tag.clone(), bytes: published.bytes }
    }
}

impl Process {
    /// The tags, the largest first, as many as a line has room for.
    fn tag_line(&self, width: usize) -> Option<String> {
        let age = self.tags_age_seconds.filter(|age| *age >= STALE);
        let age = age.map_or_else(String::new, |age| format!(" ({} ago)", duration(age)));
        let mut line = String::new();
        for tag in &self.tags {
            let comma = if line.is_empty() { "" } else { ", " };
            let next = format!("{line}{comma}{} {}", tag.tag, size(tag.bytes));
            if TAGS_AT + next.chars().count() + age.chars().count() > width {
                break;
            }
            line = next;
        }
        (!line.is_empty()).then(|| format!("{:TAGS_AT$}{line}{age}", ""))
    }
}

/// Six cells to the right and a name.
fn row(cells: [&str; 6], name: &str) -> String {
    let [pid, used, peak, rate, granted, since] = cells;
    format!("{pid:>8} {used:>10} {peak:>10} {rate:>11} {granted:>10} {since:>8}  {name}")
}

fn bar(share: f64) -> String {
    const WIDTH: usize = 10;
    let filled = ((share * WIDTH as f64).round() as usize).min(WIDTH);
    format!("[{}{}]", "#".repeat(filled), "-".repeat(WIDTH - filled))
}

fn rate(bytes: f64) -> String {
    match bytes.round() as i64 {
        0 => "0".to_owned(),
        growth if growth > 0 => format!("+{}", size(growth.unsigned_abs())),
        growth => format!("-{}", size(growth.unsigned_abs())),
    }
}

fn duration(seconds: f64) -> String {
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
    fn sorting_goes_round_and_every_column_has_a_name() {
        let mut column = Column::Used;
        for _ in Column::ALL {
            assert_eq!(column.to_string().parse(), Ok(column));
            column = column.next();
        }
        assert_eq!(column, Column::Used);
        assert!("size".parse::<Column>().is_err());
    }

    #[test]
    fn figures_read_as_people_write_them() {
        assert_eq!((rate(0.2).as_str(), rate(-2048.0).as_str()), ("0", "-2 KiB"));
        assert_eq!((duration(59.9).as_str(), duration(3601.0).as_str()), ("59 s", "1:00:01"));
        assert_eq!((bar(0.0), bar(2.0)), ("[----------]".to_owned(), "[##########]".to_owned()));
    }
}
