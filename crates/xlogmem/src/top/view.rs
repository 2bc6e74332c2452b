//! The difference between two readings of ledgers: rows for the JSON, and lines of text.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use xlog_cuda::ledger::{LedgerResult, SlotSnapshot, Snapshot, TagUse};
use xlog_report::escape;
use xlog_report::text_report::size;

use super::card::CardMemory;
use super::fields::{Field, duration};
use crate::ledger::Slot;

const SCHEMA: u32 = 1;
/// The indentation of tags, below the used bytes.
const TAGS_AT: usize = 12;
/// The number of readings kept for the history.
const HISTORY: usize = 120;
/// Columns beside the history.
const HISTORY_TEXT: usize = 30;
/// Seconds after which published tags are marked as stale.
const STALE: f64 = 3.0;

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

    /// Returns the next column.
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

/// The meaning of a line, shown as a colour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tone {
    Plain,
    Heading,
    Faint,
    Good,
    Warning,
    Bad,
}

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

/// One frame of the display.
#[derive(Serialize, Debug)]
pub(super) struct Picture {
    schema: u32,
    ok: bool,
    /// The reason why not, in one line.
    pub(super) error: Option<String>,
    /// The directory or file that was read.
    place: String,
    /// The interval of the rates in seconds; `None` at the first reading.
    seconds: Option<f64>,
    devices: Vec<Device>,
}

/// A device, which has one ledger.
#[derive(Serialize, Debug, Default)]
struct Device {
    path: String,
    error: Option<String>,
    device: Option<String>,
    limit_bytes: u64,
    used_bytes: u64,
    granted_bytes: u64,
    free_bytes: u64,
    /// Bytes of dead processes, used or granted, which the next request can reclaim. Part of the figures above.
    dead_bytes: u64,
    /// The part of `used_bytes` that living processes have cached and published.
    cached_bytes: u64,
    /// The published part of `used_bytes` in freed blocks that wait for work on streams.
    pending_bytes: u64,
    /// Bytes in use on the GPU by any program; `None` if the driver does not report them.
    card_used_bytes: Option<u64>,
    /// The part of `card_used_bytes` that the ledger does not count: contexts, modules, other programs.
    uncounted_bytes: Option<u64>,
    /// Guaranteed bytes that their processes do not hold. Part of `free_bytes`.
    kept_free_bytes: u64,
    /// `used_bytes` at the last readings, the newest last.
    history: Vec<u64>,
    /// The part of `used_bytes` that living processes use.
    #[serde(skip)]
    used_alive: u64,
    /// Whether processes return grants because a request needs them.
    pressure: bool,
    processes: Vec<Process>,
}

#[derive(Serialize, Debug)]
pub(super) struct Process {
    #[serde(flatten)]
    pub(super) slot: Slot,
    /// Bytes of its contexts and modules, which are not in `used_bytes`; `None` if the driver does not report them. For a process
    /// with several slots on one device, only the first has them.
    context_bytes: Option<u64>,
    /// The growth of `used_bytes` per second; `None` for a new process.
    pub(super) bytes_per_second: Option<f64>,
    /// The largest tags that it has published.
    tags: Vec<Tag>,
    /// The age of the published tags.
    tags_age_seconds: Option<f64>,
}

/// The bytes of a tag's blocks. A name that ends in an ellipsis is truncated.
#[derive(Serialize, Debug)]
struct Tag {
    tag: String,
    bytes: u64,
}

/// The identity of a slot's owner: the file, the slot, the process and its start.
type Owner = (String, u32, u32, SystemTime);

/// The previous reading, from which rates are computed.
#[derive(Debug, Default)]
pub(super) struct Before {
    at: Option<Instant>,
    used: HashMap<Owner, u64>,
    /// The used bytes of each ledger at the last readings.
    history: HashMap<String, Vec<u64>>,
}

impl Before {
    /// Adds a reading to the history of a ledger and returns the history.
    fn note(&mut self, path: &str, used: u64) -> Vec<u64> {
        let history = self.history.entry(path.to_owned()).or_default();
        history.push(used);
        let surplus = history.len().saturating_sub(HISTORY);
        history.drain(..surplus);
        history.clone()
    }
}

impl Picture {
    /// Creates a picture of the ledgers at `place`, with rates since `before`, which it replaces by this reading.
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
                Ok(snapshot) => {
                    let history = before.note(&path, snapshot.used());
                    let device = Device::new(path, &snapshot, passed, &last, &mut before.used);
                    Device { history, ..device }
                }
                Err(error) => Device::unreadable(path, error.to_string()),
            });
        }
        let error = devices.iter().find_map(|device| device.error.clone());
        let seconds = passed.map(|passed| passed.as_secs_f64());
        Self { schema: SCHEMA, ok: error.is_none(), error, place, seconds, devices }
    }

    /// Adds the driver's figures.
    pub(super) fn add_cards(&mut self, memory_of: impl Fn(&str) -> Option<CardMemory>) {
        for device in &mut self.devices {
            if let Some(card) = device.device.as_deref().and_then(&memory_of) {
                device.add_card(&card);
            }
        }
    }

    pub(super) fn sort(&mut self, by: Column) {
        for device in &mut self.devices {
            let rows = &mut device.processes;
            match by {
                Column::Used => {
                    rows.sort_by_key(|row| (Reverse(row.slot.used_bytes), row.slot.pid))
                }
                Column::Peak => {
                    rows.sort_by_key(|row| (Reverse(row.slot.peak_bytes), row.slot.pid))
                }
                Column::Rate => rows.sort_by(|one, other| {
                    let rate = |row: &Process| row.bytes_per_second.unwrap_or(0.0);
                    rate(other).total_cmp(&rate(one)).then(one.slot.pid.cmp(&other.slot.pid))
                }),
                Column::Pid => rows.sort_by_key(|row| row.slot.pid),
                Column::Name => {
                    rows.sort_by(|one, other| {
                        one.slot.name.cmp(&other.slot.name).then(one.slot.pid.cmp(&other.slot.pid))
                    });
                }
            }
        }
    }

    /// Returns lines of about `width` columns, each device with its processes. Names are escaped for a terminal.
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
            // The published tags of a dead process are stale.
            let published = slot.tags.as_ref().filter(|_| slot.alive);
            Process {
                slot: Slot::of(slot),
                context_bytes: None,
                bytes_per_second: rate,
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
            cached_bytes: snapshot.cached(),
            pending_bytes: snapshot.pending(),
            kept_free_bytes: snapshot.kept_free(),
            card_used_bytes: None,
            uncounted_bytes: None,
            history: Vec::new(),
            used_alive: alive().map(|slot| slot.used).sum(),
            pressure: snapshot.pressure,
            processes,
        }
    }

    fn add_card(&mut self, card: &CardMemory) {
        self.card_used_bytes = Some(card.used);
        self.uncounted_bytes = Some(card.used.saturating_sub(self.used_alive));
        let mut counted: HashMap<u32, u64> = HashMap::new();
        let alive = |process: &&mut Process| process.slot.alive;
        for process in self.processes.iter_mut().filter(alive) {
            *counted.entry(process.slot.pid).or_default() += process.slot.used_bytes;
        }
        for process in self.processes.iter_mut().filter(alive) {
            let held = card.processes.get(&process.slot.pid);
            process.context_bytes = held
                .zip(counted.remove(&process.slot.pid))
                .map(|(held, counted)| held.saturating_sub(counted));
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
        // The bar shows living processes: the bytes of dead ones are available.
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
        let shown = self.history.len().saturating_sub(width.saturating_sub(HISTORY_TEXT));
        let history = self.history.get(shown..).unwrap_or_default();
        if history.iter().any(|used| *used != self.used_bytes) {
            let text = format!("{} used, last {} readings", plot(history), history.len());
            lines.push(Shown { tone: Tone::Faint, text });
        }
        if self.kept_free_bytes > 0 {
            let text = format!("{} kept free for guaranteed shares", size(self.kept_free_bytes));
            lines.push(Shown::plain(text));
        }
        if self.cached_bytes > 0 || self.pending_bytes > 0 {
            let (cached, pending) = (size(self.cached_bytes), size(self.pending_bytes));
            let text =
                format!("of it {cached} cached, which others get on request, {pending} pending");
            lines.push(Shown::plain(text));
        }
        if let (Some(card), Some(uncounted)) = (self.card_used_bytes, self.uncounted_bytes) {
            let (card, uncounted) = (size(card), size(uncounted));
            let text =
                format!("{card} in use on the GPU, {uncounted} not counted (contexts, others)");
            lines.push(Shown::plain(text));
        }
        if self.dead_bytes > 0 {
            let text = format!("{} left by dead processes, free to take", size(self.dead_bytes));
            lines.push(Shown { tone: Tone::Warning, text });
        }
        if self.processes.is_empty() {
            return lines.push(Shown::plain("no process takes part".to_owned()));
        }
        let has_quotas = self.processes.iter().any(|process| process.slot.quota_bytes.is_some());
        let fields = Field::that_fit(width, has_quotas);
        let headings = fields.iter().map(|field| field.cell(field.heading()));
        lines.push(Shown { tone: Tone::Heading, text: headings.collect::<String>() + "  name" });
        for process in &self.processes {
            let (tone, name) = match (process.slot.alive, process.slot.answers) {
                (true, Some(false)) => (Tone::Warning, format!("{} (silent)", process.slot.name)),
                (true, _) => (Tone::Plain, process.slot.name.clone()),
                (false, _) => (Tone::Warning, format!("{} (dead)", process.slot.name)),
            };
            let name = match &process.slot.quota_name {
                Some(quota) if process.slot.alive => format!("{name} [{quota}]"),
                _ => name,
            };
            let cells: String = fields.iter().map(|field| field.cell(&field.of(process))).collect();
            lines.push(Shown { tone, text: format!("{cells}  {name}") });
            let tags = process.tag_line(width);
            lines.extend(tags.map(|text| Shown { tone: Tone::Faint, text }));
            if let Some(bytes) = process.context_bytes {
                let text =
                    format!("{:TAGS_AT$}contexts and modules {}, not counted", "", size(bytes));
                lines.push(Shown { tone: Tone::Faint, text });
            }
        }
        if self
            .processes
            .iter()
            .any(|process| process.slot.alive && process.slot.live_bytes.is_none())
        {
            let text = "-: caches of frameworks, which no other process gets on request";
            lines.push(Shown { tone: Tone::Faint, text: text.to_owned() });
        }
    }
}

impl Tag {
    fn new(published: &TagUse) -> Self {
        Self { tag: published.tag.clone(), bytes: published.bytes }
    }
}

impl Process {
    /// Returns the tags that fit on a line, the largest first.
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

/// Draws a figure over time on one line, each value by the height of its character.
fn plot(values: &[u64]) -> String {
    const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let highest = values.iter().copied().max().unwrap_or(0).max(1);
    let height = |value: &u64| {
        let at = (*value as f64 / highest as f64 * 7.0).round() as usize;
        HEIGHTS.get(at).copied().unwrap_or(' ')
    };
    values.iter().map(height).collect()
}

fn bar(share: f64) -> String {
    const WIDTH: usize = 10;
    let filled = ((share * WIDTH as f64).round() as usize).min(WIDTH);
    format!("[{}{}]", "#".repeat(filled), "-".repeat(WIDTH - filled))
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
    fn a_history_shows_the_course_and_keeps_the_last_readings() {
        assert_eq!((plot(&[]), plot(&[0, 0])), (String::new(), "▁▁".to_owned()));
        assert_eq!(plot(&[0, 7, 14, 7, 1]), "▁▅█▅▂");
        let mut before = Before::default();
        let last = (0..2 * HISTORY as u64).map(|used| before.note("a", used)).last().unwrap();
        assert_eq!((last.len(), last.first().copied()), (HISTORY, Some(HISTORY as u64)));
        assert_eq!(before.note("b", 5), [5]);
    }

    #[test]
    fn a_bar_is_within_its_brackets() {
        assert_eq!((bar(0.0), bar(2.0)), ("[----------]".to_owned(), "[##########]".to_owned()));
    }
}
