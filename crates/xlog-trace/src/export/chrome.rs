//! Chrome's trace-event JSON, which Perfetto and `chrome://tracing` open.
//!
//! Every device of a process is a process of the trace, and every stream a track in it. Calls are complete events on
//! their stream's track, block lifetimes are async events, live bytes are a counter, failures are instants. Memory
//! grows with the live blocks and the tracks.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use serde::{Serialize, Serializer};

use crate::action::Action;
use crate::error::TraceError;
use crate::live::{Change, LiveBlock, LiveBlocks};
use crate::names::{NameId, Names};
use crate::reader::Source;
use crate::record::Record;
use crate::reserved::Reserved;
use crate::stacks::StackId;

const WRITE_BYTES: usize = 256 << 10;

/// Counts of the written trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChromeCounts {
    /// Events, including those that name tracks.
    pub events: u64,
    /// Blocks without a free in the log.
    pub open_blocks: u64,
}

#[derive(Debug, Default)]
struct Track {
    pid: u64,
    live_bytes: u64,
    reserved: Reserved,
    /// Streams already named in the trace.
    named: HashSet<u64>,
}

/// Nanoseconds, written as microseconds.
struct Micros(u64);

impl Serialize for Micros {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 % 1000 {
            0 => serializer.serialize_u64(self.0 / 1000),
            _ => serializer.serialize_f64(self.0 as f64 / 1000.0),
        }
    }
}

/// Process and thread of the trace that an event belongs to.
#[derive(Clone, Copy)]
struct TrackId {
    pid: u64,
    tid: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    ph: &'static str,
    cat: &'static str,
    pid: u64,
    tid: u64,
    ts: Micros,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<Micros>,
    /// Scope of an instant: process or thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args<'a>>,
}

impl<'a> Event<'a> {
    fn new(ph: &'static str, cat: &'static str, track: TrackId, at: u64, name: &'a str) -> Self {
        let TrackId { pid, tid } = track;
        Self { ph, cat, pid, tid, ts: Micros(at), dur: None, s: None, id: None, name, args: None }
    }
}

/// Metadata of the whole trace.
#[derive(Serialize)]
struct OtherData<'a> {
    epoch_unix_nanos: String,
    device_name: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Name {
        name: &'a str,
    },
    Call {
        thread: u64,
        order: u64,
        path: String,
    },
    Failure {
        kind: &'a str,
        message: &'a str,
        tag: &'a str,
        bytes: u64,
        #[serde(flatten)]
        origin: Origin<'a>,
    },
    Block {
        bytes: u64,
        charged: u64,
        pointer: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        query_id: Option<String>,
        #[serde(flatten)]
        origin: Origin<'a>,
    },
    Count {
        live: u64,
    },
    Reserved {
        reserved: u64,
    },
}

/// Call site and stack of an allocation, if the log has them.
#[derive(Serialize)]
struct Origin<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<&'a str>,
    /// One line per frame, the innermost first.
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<String>,
}

impl<'a> Origin<'a> {
    fn new(site: Option<NameId>, stack: Option<StackId>, names: &'a Names) -> Self {
        Self {
            site: site.map(|site| names.text_or_empty(Some(site))),
            stack: stack.map(|stack| names.stack_texts(Some(stack)).collect::<Vec<_>>().join("\n")),
        }
    }
}

struct Chrome {
    out: Vec<u8>,
    events: u64,
    /// Time of the first record, subtracted from all: nanoseconds since 1970 are too large for a JSON number.
    base: Option<u64>,
    tracks: HashMap<(u32, u32), Track>,
}

/// Writes the rest of `source` as trace-event JSON.
pub fn write_chrome_trace<W: Write>(
    source: &mut impl Source,
    mut out: W,
) -> Result<ChromeCounts, TraceError> {
    let mut chrome = Chrome { out: Vec::new(), events: 0, base: None, tracks: HashMap::new() };
    chrome.out.extend_from_slice(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    let mut live = LiveBlocks::default();
    while let Some(record) = source.next_record()? {
        let change = live.apply(&record)?;
        chrome.record(&record, change, source.names())?;
        if chrome.out.len() >= WRITE_BYTES {
            out.write_all(&chrome.out).map_err(TraceError::io("writing the trace"))?;
            chrome.out.clear();
        }
    }
    let other = OtherData {
        epoch_unix_nanos: source.header().unix_nanos(chrome.base.unwrap_or(0)).to_string(),
        device_name: &source.header().device_name,
    };
    chrome.out.extend_from_slice(b"\n],\"otherData\":");
    write_json(&other, &mut chrome.out)?;
    chrome.out.extend_from_slice(b"}\n");
    out.write_all(&chrome.out).map_err(TraceError::io("writing the trace"))?;
    out.flush().map_err(TraceError::io("writing the trace"))?;
    Ok(ChromeCounts { events: chrome.events, open_blocks: live.len() as u64 })
}

impl Chrome {
    fn record(&mut self, record: &Record, change: Change, names: &Names) -> Result<(), TraceError> {
        let base = *self.base.get_or_insert(record.time);
        let at = record.time.saturating_sub(base);
        let track = self.track(record, names)?;

        if record.is_failure() {
            let failure = record.failure();
            let name = format!("{} failed", record.action());
            let args = Args::Failure {
                kind: names.text_or_empty(failure.map(|failure| failure.kind)),
                message: names.text_or_empty(failure.map(|failure| failure.message)),
                tag: tag_name(names, record.tag()),
                bytes: record.bytes,
                origin: Origin::new(record.site(), record.stack(), names),
            };
            let event = Event::new("i", "failure", track, at, &name);
            return self.event(&Event { s: Some("p"), args: Some(args), ..event });
        }
        if matches!(record.action(), Action::SegmentTake | Action::SegmentReturn) {
            return self.reserved(record, track.pid, at);
        }
        let name = record.action().to_string();
        let args = Args::Call {
            thread: record.thread,
            order: record.order,
            path: record.served_by().to_string(),
        };
        let dur = Some(Micros(u64::from(record.latency)));
        let event = Event::new("X", "call", track, at, &name);
        self.event(&Event { dur, args: Some(args), ..event })?;

        let end = at.saturating_add(u64::from(record.latency));
        match change {
            Change::None => Ok(()),
            Change::UnknownFree if record.action() != Action::Deallocate => Ok(()),
            Change::UnknownFree => {
                let name = "free of a block not in the log";
                let event = Event::new("i", "failure", track, at, name);
                self.event(&Event { s: Some("t"), ..event })
            }
            Change::Born(born) => {
                self.block("b", track.pid, end, &born, names)?;
                self.count(record, track.pid, end, born.charged, 0)
            }
            Change::Replaced { born, lost } => {
                self.block("e", track.pid, end, &lost, names)?;
                self.block("b", track.pid, end, &born, names)?;
                self.count(record, track.pid, end, born.charged, lost.charged)
            }
            Change::Died(died) => {
                self.block("e", track.pid, at, &died, names)?;
                self.count(record, track.pid, at, 0, died.charged)
            }
        }
    }

    /// Returns the trace's process and track of a record; names them when they are new.
    fn track(&mut self, record: &Record, names: &Names) -> Result<TrackId, TraceError> {
        let next = self.tracks.len() as u64 + 1;
        let device = self.tracks.entry((record.process, record.device)).or_default();
        let new = device.pid == 0;
        if new {
            device.pid = next;
        }
        let track = TrackId { pid: device.pid, tid: track_of(record.stream()) };
        let new_stream = device.named.insert(track.tid);
        if new {
            let name = format!("device {} (process {})", record.device, record.process);
            self.name_track("process_name", TrackId { tid: 0, ..track }, &name)?;
        }
        if new_stream {
            let name = match record.stream() {
                None => "no stream".to_owned(),
                Some(stream) => match names.stream_name(stream) {
                    Some(name) => format!("stream {stream} ({name})"),
                    None => format!("stream {stream}"),
                },
            };
            self.name_track("thread_name", track, &name)?;
        }
        Ok(track)
    }

    fn name_track(&mut self, what: &str, track: TrackId, name: &str) -> Result<(), TraceError> {
        let event = Event::new("M", "__metadata", track, 0, what);
        self.event(&Event { args: Some(Args::Name { name }), ..event })
    }

    fn block(
        &mut self,
        phase: &'static str,
        pid: u64,
        at: u64,
        block: &LiveBlock,
        names: &Names,
    ) -> Result<(), TraceError> {
        let args = (phase == "b").then(|| Args::Block {
            bytes: block.bytes,
            charged: block.charged,
            pointer: format!("{:#x}", block.ptr),
            query_id: block.query_id.map(|query| query.to_string()),
            origin: Origin::new(block.site, block.stack, names),
        });
        let track = TrackId { pid, tid: track_of(block.stream) };
        let event = Event::new(phase, "block", track, at, tag_name(names, block.tag));
        self.event(&Event { id: Some(format!("{:#x}", block.number)), args, ..event })
    }

    fn count(
        &mut self,
        record: &Record,
        pid: u64,
        at: u64,
        more: u64,
        less: u64,
    ) -> Result<(), TraceError> {
        let Some(track) = self.tracks.get_mut(&(record.process, record.device)) else {
            return Ok(());
        };
        track.live_bytes = track.live_bytes.saturating_add(more).saturating_sub(less);
        let args = Some(Args::Count { live: track.live_bytes });
        let event = Event::new("C", "memory", TrackId { pid, tid: 0 }, at, "live bytes");
        self.event(&Event { args, ..event })
    }

    fn reserved(&mut self, record: &Record, pid: u64, at: u64) -> Result<(), TraceError> {
        let Some(track) = self.tracks.get_mut(&(record.process, record.device)) else {
            return Ok(());
        };
        track.reserved.apply(record, |_| {});
        let args = Some(Args::Reserved { reserved: track.reserved.bytes() });
        let event = Event::new("C", "memory", TrackId { pid, tid: 0 }, at, "reserved bytes");
        self.event(&Event { args, ..event })
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), TraceError> {
        self.out.extend_from_slice(if self.events == 0 { b"\n" } else { b",\n" });
        self.events += 1;
        write_json(event, &mut self.out)
    }
}

/// Returns the track of a stream; track 0 stands for no stream.
fn track_of(stream: Option<u32>) -> u64 {
    stream.map_or(0, |stream| u64::from(stream) + 1)
}

fn tag_name(names: &Names, tag: Option<NameId>) -> &str {
    match names.text_or_empty(tag) {
        "" => "untagged",
        name => name,
    }
}

fn write_json(value: &impl Serialize, out: &mut Vec<u8>) -> Result<(), TraceError> {
    serde_json::to_writer(out, value)
        .map_err(|error| TraceError::io("writing the trace")(error.into()))
}
