//! The report on ledgers, as it appears in JSON.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
//! Every field is always present; an unknown value is `null`.
use serde::Serialize;
use xlog_cuda::ledger::{SlotSnapshot, Snapshot};
use xlog_report::text_report::{TextReport, size};

const SCHEMA: u32 = 1;

#[derive(Serialize, Debug)]
pub(super) struct Report {
    schema: u32,
    /// Whether every ledger could be read.
    pub(super) ok: bool,
    /// The reason why not, in one line.
    pub(super) error: Option<String>,
    /// The directory or file that was read.
    place: String,
    pub(super) ledgers: Vec<Found>,
}

#[derive(Serialize, Debug, Default)]
pub(super) struct Found {
    path: String,
    /// The reason why it could not be read or changed.
    pub(super) error: Option<String>,
    device: Option<String>,
    limit_bytes: Option<u64>,
    used_bytes: Option<u64>,
    granted_bytes: Option<u64>,
    /// The part of `used_bytes` that living processes have cached and published.
    cached_bytes: Option<u64>,
    /// The published part of `used_bytes` in freed blocks that wait for work on streams.
    pending_bytes: Option<u64>,
    free_bytes: Option<u64>,
    /// Whether processes return grants because a request needs them.
    pressure: Option<bool>,
    capacity: Option<u32>,
    reclaimed: Option<Freed>,
    slots: Vec<Slot>,
}

#[derive(Serialize, Debug, Default)]
pub(super) struct Freed {
    slots: usize,
    bytes: u64,
}

/// A process in a ledger, as it appears in JSON.
#[derive(Serialize, Debug)]
pub(crate) struct Slot {
    slot: u32,
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) alive: bool,
    pub(crate) used_bytes: u64,
    pub(crate) granted_bytes: u64,
    pub(crate) peak_bytes: u64,
    /// The part of `used_bytes` in live blocks; `None`, like the next three, if the process does not publish it.
    pub(crate) live_bytes: Option<u64>,
    pub(crate) cached_bytes: Option<u64>,
    pub(crate) pending_bytes: Option<u64>,
    /// Whether it answered the last request of another process for cached memory.
    pub(crate) answers: Option<bool>,
    /// How long ago it joined; `None` if the clock was set back.
    pub(crate) seconds: Option<f64>,
    /// The limit of the process; `None` without one of its own.
    pub(crate) quota_bytes: Option<u64>,
    /// The share that other processes leave free for it.
    guaranteed_bytes: u64,
    pub(crate) quota_name: Option<String>,
}

impl Freed {
    /// Counts the bytes and slots of dead processes.
    pub(super) fn of_dead(snapshot: &Snapshot) -> Self {
        let dead = || snapshot.slots.iter().filter(|slot| !slot.alive);
        Self {
            slots: dead().count(),
            bytes: dead().map(|slot| slot.used.saturating_add(slot.granted)).sum(),
        }
    }
}

impl Found {
    pub(super) fn of(snapshot: &Snapshot, reclaimed: Option<Freed>) -> Self {
        Self {
            path: snapshot.path.display().to_string(),
            error: None,
            device: Some(snapshot.key.to_string()),
            limit_bytes: Some(snapshot.limit),
            used_bytes: Some(snapshot.used()),
            granted_bytes: Some(snapshot.granted()),
            cached_bytes: Some(snapshot.cached()),
            pending_bytes: Some(snapshot.pending()),
            free_bytes: Some(snapshot.free),
            pressure: Some(snapshot.pressure),
            capacity: Some(snapshot.capacity),
            reclaimed,
            slots: snapshot.slots.iter().map(Slot::of).collect(),
        }
    }

    pub(super) fn unreadable(path: String, error: String) -> Self {
        Self { path, error: Some(error), ..Self::default() }
    }

    fn render(&self, page: &mut TextReport) {
        page.title("Ledger");
        page.line("file", &self.path);
        if let Some(error) = &self.error {
            return page.line("error", error);
        }
        page.line("device", self.device.as_deref().unwrap_or_default());
        let bytes = |bytes: Option<u64>| size(bytes.unwrap_or(0));
        page.line("limit", &bytes(self.limit_bytes));
        page.line("used", &bytes(self.used_bytes));
        let parts = [("cached", self.cached_bytes), ("pending", self.pending_bytes)];
        for (label, part) in parts.iter().filter(|(_, part)| part.is_some_and(|part| part > 0)) {
            page.line(&format!("of it {label}"), &bytes(*part));
        }
        let granted = bytes(self.granted_bytes);
        page.line(
            "granted, not used",
            &match self.pressure {
                Some(true) => format!("{granted}, being handed back"),
                _ => granted,
            },
        );
        page.line("free", &bytes(self.free_bytes));
        if let Some(freed) = &self.reclaimed {
            let text = format!("{} of {} dead processes", size(freed.bytes), freed.slots);
            page.line("reclaimed", &text);
        }
        let (slots, capacity) = (self.slots.len(), self.capacity.unwrap_or(0));
        page.line("processes", &format!("{slots} of at most {capacity}"));
        if slots > 0 {
            page.columns(&["", "pid", "used", "granted", "peak", "since", "name"]);
        }
        for slot in &self.slots {
            slot.render(page);
        }
    }
}

impl Slot {
    pub(crate) fn of(slot: &SlotSnapshot) -> Self {
        Self {
            slot: slot.index,
            pid: slot.pid,
            name: slot.name.clone(),
            alive: slot.alive,
            used_bytes: slot.used,
            granted_bytes: slot.granted,
            peak_bytes: slot.peak,
            live_bytes: slot.live(),
            cached_bytes: slot.memory.map(|memory| memory.cached),
            pending_bytes: slot.memory.map(|memory| memory.pending),
            answers: slot.memory.map(|memory| memory.has_answered),
            seconds: slot.started.elapsed().ok().map(|passed| passed.as_secs_f64()),
            quota_bytes: slot.quota.limit,
            guaranteed_bytes: slot.quota.guaranteed,
            quota_name: slot.quota.name.clone(),
        }
    }

    /// Describes the quota, if there is one.
    fn quota(&self) -> Option<String> {
        let limit = self.quota_bytes.map(|bytes| format!("at most {}", size(bytes)));
        let guaranteed = (self.guaranteed_bytes > 0)
            .then(|| format!("{} guaranteed", size(self.guaranteed_bytes)));
        let parts: Vec<String> = [limit, guaranteed].into_iter().flatten().collect();
        let name = self.quota_name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        (!parts.is_empty() || !name.is_empty())
            .then(|| format!("quota{name}: {}", parts.join(", ")))
    }

    fn render(&self, page: &mut TextReport) {
        page.columns(&[
            if self.alive { "" } else { "dead" },
            &self.pid.to_string(),
            &size(self.used_bytes),
            &size(self.granted_bytes),
            &size(self.peak_bytes),
            &self.seconds.map_or_else(|| "-".to_owned(), age),
            &self.name,
        ]);
        if let (true, Some(live), Some(cached), Some(pending)) =
            (self.alive, self.live_bytes, self.cached_bytes, self.pending_bytes)
        {
            let silent = if self.answers == Some(false) { "; does not answer" } else { "" };
            let (live, cached, pending) = (size(live), size(cached), size(pending));
            let text = format!("{live} live, {cached} cached, {pending} pending{silent}");
            page.columns(&["", "", &text]);
        }
        if let (true, Some(quota)) = (self.alive, self.quota()) {
            page.columns(&["", "", &quota]);
        }
    }
}

/// Formats an age in a suitable unit.
fn age(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..120 => format!("{whole} s"),
        120..7200 => format!("{} min", whole / 60),
        7200..172_800 => format!("{} h", whole / 3600),
        _ => format!("{} d", whole / 86_400),
    }
}

impl Report {
    pub(super) fn new(place: String, ledgers: Vec<Found>) -> Self {
        let failed: Vec<&String> =
            ledgers.iter().filter_map(|found| found.error.as_ref()).collect();
        let error = match failed.as_slice() {
            [] => None,
            [one] => Some((*one).clone()),
            [first, rest @ ..] => Some(format!("{first} (and {} more)", rest.len())),
        };
        Self { schema: SCHEMA, ok: error.is_none(), error, place, ledgers }
    }

    pub(super) fn render(&self) -> String {
        let mut page = TextReport::default();
        for found in &self.ledgers {
            found.render(&mut page);
        }
        match (&self.error, self.ledgers.len()) {
            (Some(error), _) => page.close(error),
            (None, 0) => page
                .close(&format!("no ledger in {}: no process shares a device there", self.place)),
            (None, 1) => page.close("1 ledger"),
            (None, count) => page.close(&format!("{count} ledgers")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_the_unit_people_use() {
        let ages =
            [(0.4, "0 s"), (119.9, "119 s"), (120.0, "2 min"), (7200.0, "2 h"), (200_000.0, "2 d")];
        for (seconds, text) in ages {
            assert_eq!(age(seconds), text);
        }
    }

    #[test]
    fn what_could_not_be_read_is_the_verdict_and_nothing_is_no_failure() {
        let none = Report::new("/x".to_owned(), Vec::new());
        assert!(none.ok && none.render().contains("no ledger in /x"));
        let bad = |text: &str| Found::unreadable("/x/a.ledger".to_owned(), text.to_owned());
        let report = Report::new("/x".to_owned(), vec![bad("damaged"), bad("cut")]);
        assert_eq!(report.error.as_deref(), Some("damaged (and 1 more)"));
        assert!(!report.ok && report.render().contains("damaged"));
    }
}
