//! Chrome's trace-event JSON, which Perfetto and `chrome://tracing` open.
//!
//! Every device of a process is a process of the trace, every stream a track in it. Calls are
//! complete events on their stream's track, the lives of blocks are async events, live bytes are a
//! counter, failures are instants. Memory grows with the live blocks and the tracks.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use crate::action::Action;
use crate::csv::fields::put_decimal;
use crate::error::TraceError;
use crate::live::{Change, LiveBlock, LiveBlocks};
use crate::names::Names;
use crate::reader::Source;
use crate::record::Record;

const WRITE_BYTES: usize = 256 << 10;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChromeCounts {
    /// Events, those that name tracks included.
    pub events: u64,
    /// Blocks whose life has no end in the log.
    pub open_blocks: u64,
}

#[derive(Debug, Default)]
struct Track {
    pid: u64,
    live_bytes: u64,
    /// Streams that already have a name in the trace.
    named: HashSet<u64>,
}

struct Chrome {
    out: Vec<u8>,
    events: u64,
    /// Time of the first record: times of day since 1970 are too large for a JSON number.
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
        chrome.record(&record, change, source.names());
        if chrome.out.len() >= WRITE_BYTES {
            out.write_all(&chrome.out).map_err(TraceError::io("writing the trace"))?;
            chrome.out.clear();
        }
    }
    chrome.out.extend_from_slice(b"\n],\"otherData\":{\"epoch_unix_nanos\":\"");
    put_decimal(source.header().unix_nanos(chrome.base.unwrap_or(0)), &mut chrome.out);
    chrome.out.extend_from_slice(b"\",\"device_name\":");
    put_json(&source.header().device_name, &mut chrome.out);
    chrome.out.extend_from_slice(b"}}\n");
    out.write_all(&chrome.out).map_err(TraceError::io("writing the trace"))?;
    out.flush().map_err(TraceError::io("writing the trace"))?;
    Ok(ChromeCounts { events: chrome.events, open_blocks: live.len() as u64 })
}

impl Chrome {
    fn record(&mut self, record: &Record, change: Change, names: &Names) {
        let base = *self.base.get_or_insert(record.time);
        let at = record.time.saturating_sub(base);
        let pid = self.track(record, names);
        let tid = record.stream().map_or(0, |stream| u64::from(stream) + 1);
        let tag = tag_name(names, record.tag());

        if record.is_failure() {
            self.event("i", "failure", pid, tid, at);
            self.field("s", |out| out.extend_from_slice(b"\"p\""));
            let kind = names.text_or_empty(record.failure().map(|failure| failure.kind));
            let name = format!("{} failed", record.action());
            self.field("name", |out| put_json(&name, out));
            self.out.extend_from_slice(b",\"args\":{\"kind\":");
            put_json(kind, &mut self.out);
            self.field("message", |out| {
                put_json(names.text_or_empty(record.failure().map(|f| f.message)), out);
            });
            self.field("tag", |out| put_json(tag, out));
            self.field("bytes", |out| put_decimal(record.bytes, out));
            self.out.extend_from_slice(b"}}");
            return;
        }
        self.event("X", "call", pid, tid, at);
        self.field("dur", |out| put_micros(u64::from(record.latency), out));
        let name = record.action().to_string();
        self.field("name", |out| put_json(&name, out));
        self.out.extend_from_slice(b",\"args\":{\"thread\":");
        put_decimal(record.thread, &mut self.out);
        self.field("order", |out| put_decimal(record.order, out));
        let path = record.served_by().to_string();
        self.field("path", |out| put_json(&path, out));
        self.out.extend_from_slice(b"}}");

        let end = at.saturating_add(u64::from(record.latency));
        match change {
            Change::None => {}
            Change::UnknownFree => {
                if record.action() == Action::Deallocate {
                    self.event("i", "failure", pid, tid, at);
                    self.field("s", |out| out.extend_from_slice(b"\"t\""));
                    self.field("name", |out| put_json("free of a block not in the log", out));
                    self.out.push(b'}');
                }
            }
            Change::Born(born) => {
                self.block("b", pid, end, &born, names);
                self.count(record, pid, end, born.charged, 0);
            }
            Change::Replaced { born, lost } => {
                self.block("e", pid, end, &lost, names);
                self.block("b", pid, end, &born, names);
                self.count(record, pid, end, born.charged, lost.charged);
            }
            Change::Died(died) => {
                self.block("e", pid, at, &died, names);
                self.count(record, pid, at, 0, died.charged);
            }
        }
    }

    /// The trace's process of a record; names it and its stream on first sight.
    fn track(&mut self, record: &Record, names: &Names) -> u64 {
        let next = self.tracks.len() as u64 + 1;
        let track = self.tracks.entry((record.process, record.device)).or_default();
        let new = track.pid == 0;
        if new {
            track.pid = next;
        }
        let pid = track.pid;
        let tid = record.stream().map_or(0, |stream| u64::from(stream) + 1);
        let new_stream = track.named.insert(tid);
        if new {
            let name = format!("device {} (process {})", record.device, record.process);
            self.name_track("process_name", pid, 0, &name);
        }
        if new_stream {
            let name = match record.stream() {
                None => "no stream".to_owned(),
                Some(stream) => match names.stream_name(stream) {
                    Some(name) => format!("stream {stream} ({name})"),
                    None => format!("stream {stream}"),
                },
            };
            self.name_track("thread_name", pid, tid, &name);
        }
        pid
    }

    fn name_track(&mut self, what: &str, pid: u64, tid: u64, name: &str) {
        self.event("M", "__metadata", pid, tid, 0);
        self.field("name", |out| put_json(what, out));
        self.out.extend_from_slice(b",\"args\":{\"name\":");
        put_json(name, &mut self.out);
        self.out.extend_from_slice(b"}}");
    }

    fn block(&mut self, phase: &str, pid: u64, at: u64, block: &LiveBlock, names: &Names) {
        let tid = block.stream.map_or(0, |stream| u64::from(stream) + 1);
        self.event(phase, "block", pid, tid, at);
        self.field("id", |out| put_json(&format!("{:#x}", block.number), out));
        self.field("name", |out| put_json(tag_name(names, block.tag), out));
        if phase == "b" {
            self.out.extend_from_slice(b",\"args\":{\"bytes\":");
            put_decimal(block.bytes, &mut self.out);
            self.field("charged", |out| put_decimal(block.charged, out));
            self.field("pointer", |out| put_json(&format!("{:#x}", block.ptr), out));
            if let Some(query) = block.query_id {
                self.field("query_id", |out| put_json(&query.to_string(), out));
            }
            self.out.push(b'}');
        }
        self.out.push(b'}');
    }

    fn count(&mut self, record: &Record, pid: u64, at: u64, more: u64, less: u64) {
        let Some(track) = self.tracks.get_mut(&(record.process, record.device)) else { return };
        track.live_bytes = track.live_bytes.saturating_add(more).saturating_sub(less);
        let live = track.live_bytes;
        self.event("C", "memory", pid, 0, at);
        self.field("name", |out| put_json("live bytes", out));
        self.out.extend_from_slice(b",\"args\":{\"live\":");
        put_decimal(live, &mut self.out);
        self.out.extend_from_slice(b"}}");
    }

    /// Begins an event; the caller adds its other fields and the closing brace.
    fn event(&mut self, phase: &str, category: &str, pid: u64, tid: u64, at: u64) {
        self.out.extend_from_slice(if self.events == 0 { b"\n" } else { b",\n" });
        self.events += 1;
        self.out.extend_from_slice(b"{\"ph\":");
        put_json(phase, &mut self.out);
        self.field("cat", |out| put_json(category, out));
        self.field("pid", |out| put_decimal(pid, out));
        self.field("tid", |out| put_decimal(tid, out));
        self.field("ts", |out| put_micros(at, out));
    }

    fn field(&mut self, name: &str, value: impl FnOnce(&mut Vec<u8>)) {
        self.out.extend_from_slice(b",\"");
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(b"\":");
        value(&mut self.out);
    }
}

fn tag_name(names: &Names, tag: Option<crate::NameId>) -> &str {
    match names.text_or_empty(tag) {
        "" => "untagged",
        name => name,
    }
}

/// Microseconds with the nanoseconds as a fraction.
fn put_micros(nanos: u64, out: &mut Vec<u8>) {
    put_decimal(nanos / 1000, out);
    let rest = nanos % 1000;
    if rest > 0 {
        out.push(b'.');
        for place in [100, 10, 1] {
            out.push(b'0' + (rest / place % 10) as u8);
        }
    }
}

fn put_json(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            0..0x20 | 0x7f => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}
