//! Converts PyTorch's memory snapshot (`torch.cuda.memory._dump_snapshot`) to a log.
//!
//! The traces of all devices are merged by time. `alloc` becomes an allocation, `free_completed` a free, and `oom` a failed
//! allocation. The tag is the innermost Python frame outside of PyTorch. Blocks that were live before the recording began
//! are allocated at its beginning. `segment_alloc` and `segment_map` reserve segments; `segment_free` and `segment_unmap`
//! return them. Entries without a record (`free_requested`, `snapshot`) are counted.
//!
//! The file is read whole, up to [`MAX_SNAPSHOT_BYTES`]. The work is linear in its length, even for a hostile file.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use crate::action::Action;
use crate::encoder::{Format, LogWriter};
use crate::error::TraceError;
use crate::header::Header;
use crate::names::{NameId, Names};
use crate::record::{Failure, Record};
use crate::reserved::Reserved;
use crate::stacks::{SITE_FRAME, StackId};

use super::pickle::{self, Loaded, MAX_VALUE_BYTES, PickleError, Value};

/// The maximum size of a snapshot.
pub const MAX_SNAPSHOT_BYTES: usize = 1 << 30;
/// The key of `allocator_settings` that marks the export of a log.
pub(crate) const STRETCHES: &str = "segments are stretches of a log";
/// The maximum number of keys in an entry, frame, segment or block.
const MAX_KEYS: usize = 64;
/// Bytes of a text that are read.
const MAX_TEXT: usize = 1 << 10;
/// Frames of one stack that are read.
const MAX_FRAMES: usize = 256;

/// The reason why a snapshot cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The pickle cannot be read.
    #[error("not a snapshot that can be read: {0}")]
    Pickle(#[from] PickleError),
    /// The pickle is not a memory snapshot.
    #[error("the pickle is no memory snapshot: expected {expected}")]
    Shape {
        /// The missing part.
        expected: &'static str,
    },
    /// The file is larger than the limit.
    #[error("the snapshot has {bytes} bytes; expected at most {limit}")]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}

/// Counts of the converted snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotRead {
    /// Records written.
    pub records: u64,
    /// Trace entries without a record.
    pub left_out: u64,
    /// Blocks that were live before the recording began.
    pub live_before: u64,
}

/// Returns whether a file begins like a pickle of protocol 2 to 5.
pub fn looks_like_snapshot(head: &[u8]) -> bool {
    matches!(head, [0x80, 2..=5, ..])
}

/// A trace entry that becomes a record, or a block of a segment.
#[derive(Clone, Copy)]
struct Entry {
    kind: Kind,
    device: u32,
    time_us: u64,
    address: u64,
    bytes: u64,
    stream: u64,
    frames: Option<Value>,
    device_free: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocate,
    Free,
    OutOfMemory,
    SegmentTake,
    SegmentReturn,
}

impl Kind {
    fn is_segment(self) -> bool {
        matches!(self, Self::SegmentTake | Self::SegmentReturn)
    }

    fn action(self) -> Action {
        match self {
            Self::Free => Action::Deallocate,
            Self::Allocate | Self::OutOfMemory => Action::Allocate,
            Self::SegmentTake => Action::SegmentTake,
            Self::SegmentReturn => Action::SegmentReturn,
        }
    }
}

/// Converts a snapshot to a binary log.
pub fn convert_torch_snapshot<W: Write>(input: &[u8], out: W) -> Result<SnapshotRead, TraceError> {
    if input.len() > MAX_SNAPSHOT_BYTES {
        let (bytes, limit) = (input.len(), MAX_SNAPSHOT_BYTES);
        return Err(SnapshotError::TooLarge { bytes, limit }.into());
    }
    let loaded = pickle::load(input, MAX_VALUE_BYTES).map_err(SnapshotError::from)?;
    let mut read = SnapshotRead::default();
    let mut budget = input.len();
    let mut entries = traces(&loaded, &mut budget, &mut read)?;
    let mut before = reserved_before(&loaded, &mut budget, &entries)?;
    let blocks = live_before(&loaded, &mut budget, &entries)?;
    read.live_before = blocks.len() as u64;
    before.extend(blocks);
    // The sort is stable: entries of one device keep their order, and their times never decrease.
    entries.sort_by_key(|entry| entry.time_us);
    let first = entries.first().map_or(0, |entry| entry.time_us);
    let header = Header::new().with_epoch_unix_nanos(first.saturating_mul(1000));
    let mut log = Log {
        loaded: &loaded,
        names: Names::new(),
        writer: LogWriter::new(Format::Binary, &header, out),
        origins: HashMap::new(),
        frames: HashMap::new(),
        streams: HashMap::new(),
        order: 0,
        first,
    };
    let untraced = log.names.intern("allocated before the recording");
    for mut entry in before {
        entry.time_us = first;
        log.write(&entry, Some(untraced))?;
    }
    for entry in &entries {
        log.write(entry, None)?;
    }
    read.records = log.order;
    log.writer.finish()?;
    Ok(read)
}

/// Consumes one of the entries that a file of this length can contain.
fn spend(budget: &mut usize) -> Result<(), SnapshotError> {
    *budget = budget
        .checked_sub(1)
        .ok_or(SnapshotError::Shape { expected: "each entry once, not one entry many times" })?;
    Ok(())
}

fn small_dict(
    loaded: &Loaded<'_>,
    value: Value,
    expected: &'static str,
) -> Result<(), SnapshotError> {
    match loaded.dict(value) {
        Some(items) if items.len() <= MAX_KEYS => Ok(()),
        _ => Err(SnapshotError::Shape { expected }),
    }
}

/// Returns the entries of all devices. Times never decrease within a device.
fn traces(
    loaded: &Loaded<'_>,
    budget: &mut usize,
    read: &mut SnapshotRead,
) -> Result<Vec<Entry>, SnapshotError> {
    let root = loaded.root;
    small_dict(loaded, root, "a dict with the keys `segments` and `device_traces`")?;
    let mut entries = Vec::new();
    let Some(devices) = loaded.get(root, "device_traces") else {
        // Older snapshots and `memory_snapshot()` have no history.
        return Ok(entries);
    };
    let expected = "`device_traces` to be a list of lists";
    for (device, trace) in
        loaded.list(devices).ok_or(SnapshotError::Shape { expected })?.iter().enumerate()
    {
        spend(budget)?;
        let mut time = 0;
        for entry in loaded.list(*trace).ok_or(SnapshotError::Shape { expected })? {
            spend(budget)?;
            small_dict(loaded, *entry, "entries of `device_traces` to be dicts of few keys")?;
            let action = loaded.get(*entry, "action").and_then(|action| loaded.bytes(action));
            let action =
                action.ok_or(SnapshotError::Shape { expected: "an `action` in each entry" })?;
            let kind = match action {
                b"alloc" => Kind::Allocate,
                b"free_completed" | b"free" => Kind::Free,
                b"oom" => Kind::OutOfMemory,
                b"segment_alloc" | b"segment_map" => Kind::SegmentTake,
                b"segment_free" | b"segment_unmap" => Kind::SegmentReturn,
                _ => {
                    read.left_out += 1;
                    continue;
                }
            };
            // Older snapshots have no times: their entries are a microsecond apart.
            time = loaded.number(*entry, "time_us").unwrap_or(time + 1).max(time);
            let size = loaded.number(*entry, "size");
            entries.push(Entry {
                kind,
                device: device as u32,
                time_us: time,
                address: loaded.number(*entry, "addr").unwrap_or(0),
                bytes: size.ok_or(SnapshotError::Shape { expected: "a `size` in each entry" })?,
                stream: loaded.number(*entry, "stream").unwrap_or(0),
                frames: loaded.get(*entry, "frames"),
                device_free: loaded.number(*entry, "device_free"),
            });
        }
    }
    Ok(entries)
}

/// Finds the segments that a trace returns without reserving them, and those present at the end that no trace reserved.
fn reserved_before(
    loaded: &Loaded<'_>,
    budget: &mut usize,
    entries: &[Entry],
) -> Result<Vec<Entry>, SnapshotError> {
    let (mut before, mut reserved) = (Vec::new(), Reserved::default());
    for entry in entries.iter().filter(|entry| entry.kind.is_segment()) {
        let record = Record::new(entry.kind.action(), entry.device, 0, 0);
        let record = record.with_ptr(entry.address).with_bytes(entry.bytes);
        let mut known = false;
        reserved.apply(&record, |_| known = true);
        if entry.kind == Kind::SegmentReturn && !known {
            before.push(Entry { kind: Kind::SegmentTake, ..*entry });
        }
    }
    // An exported log has address ranges in place of segments.
    let settings = loaded.get(loaded.root, "allocator_settings");
    if settings.is_some_and(|settings| loaded.get(settings, STRETCHES).is_some()) {
        return Ok(before);
    }
    let Some(segments) = loaded.get(loaded.root, "segments") else { return Ok(before) };
    let held: HashSet<_> = reserved.ranges().map(|range| (range.device, range.start)).collect();
    for segment in loaded.list(segments).unwrap_or(&[]) {
        spend(budget)?;
        small_dict(loaded, *segment, "`segments` to be a list of dicts")?;
        let device = loaded.number(*segment, "device").unwrap_or(0) as u32;
        let bytes = loaded.number(*segment, "total_size").unwrap_or(0);
        let address = loaded.number(*segment, "address").unwrap_or(0);
        if bytes > 0 && address > 0 && !held.contains(&(device, address)) {
            before.push(Entry {
                kind: Kind::SegmentTake,
                device,
                time_us: 0,
                address,
                bytes,
                stream: loaded.number(*segment, "stream").unwrap_or(0),
                frames: None,
                device_free: None,
            });
        }
    }
    Ok(before)
}

/// Finds the blocks that a trace frees without an allocation, and those live at the end that no trace allocated.
fn live_before(
    loaded: &Loaded<'_>,
    budget: &mut usize,
    entries: &[Entry],
) -> Result<Vec<Entry>, SnapshotError> {
    let mut before = Vec::new();
    // Whether the address is live or free; addresses without an entry are absent.
    let mut touched = HashMap::new();
    let is_block = |entry: &&Entry| matches!(entry.kind, Kind::Allocate | Kind::Free);
    for entry in entries.iter().filter(is_block) {
        let key = (entry.device, entry.address);
        if touched.insert(key, ()).is_none() && entry.kind == Kind::Free {
            before.push(Entry { kind: Kind::Allocate, frames: None, ..*entry });
        }
    }
    let Some(segments) = loaded.get(loaded.root, "segments") else { return Ok(before) };
    let expected = "`segments` to be a list of dicts";
    for segment in loaded.list(segments).ok_or(SnapshotError::Shape { expected })? {
        spend(budget)?;
        small_dict(loaded, *segment, expected)?;
        let device = loaded.number(*segment, "device").unwrap_or(0) as u32;
        let stream = loaded.number(*segment, "stream").unwrap_or(0);
        let mut address = loaded.number(*segment, "address").unwrap_or(0);
        let blocks = loaded.get(*segment, "blocks").and_then(|blocks| loaded.list(blocks));
        for block in blocks.unwrap_or(&[]) {
            spend(budget)?;
            small_dict(loaded, *block, "`blocks` to be dicts of few keys")?;
            let bytes = loaded.number(*block, "size").unwrap_or(0);
            // Older snapshots lack block addresses: blocks are consecutive.
            let at = loaded.number(*block, "address").unwrap_or(address);
            address = at.saturating_add(bytes);
            let state = loaded.get(*block, "state").and_then(|state| loaded.bytes(state));
            let is_live = state.is_some_and(|state| state.starts_with(b"active"));
            if is_live && touched.insert((device, at), ()).is_none() {
                before.push(Entry {
                    kind: Kind::Allocate,
                    device,
                    time_us: 0,
                    address: at,
                    bytes: loaded.number(*block, "requested_size").unwrap_or(bytes),
                    stream,
                    frames: loaded.get(*block, "frames"),
                    device_free: None,
                });
            }
        }
    }
    Ok(before)
}

#[derive(Clone, Copy, Default)]
struct Origin {
    tag: Option<NameId>,
    site: Option<NameId>,
    stack: Option<StackId>,
}

/// The frame of a stack that names an allocation.
#[derive(Default)]
struct Place {
    tag: Option<String>,
    site: Option<String>,
    /// Whether the snapshot is the export of a log.
    is_exported: bool,
}

struct Log<'a, W: Write> {
    loaded: &'a Loaded<'a>,
    names: Names,
    writer: LogWriter<W>,
    /// Origins by list of frames, which entries share.
    origins: HashMap<u32, Origin>,
    /// Names by frame, which lists share.
    frames: HashMap<u32, Option<NameId>>,
    /// Maps the snapshot's stream addresses to the log's stream numbers.
    streams: HashMap<u64, u32>,
    order: u64,
    first: u64,
}

impl<W: Write> Log<'_, W> {
    fn write(&mut self, entry: &Entry, otherwise: Option<NameId>) -> Result<(), TraceError> {
        let time = entry.time_us.saturating_sub(self.first).saturating_mul(1000);
        let stream = self.stream(entry.stream);
        let mut record = Record::new(entry.kind.action(), entry.device, self.order, time)
            .with_bytes(entry.bytes)
            .with_stream(stream);
        if entry.kind != Kind::OutOfMemory {
            record = record.with_ptr(entry.address);
        }
        let is_segment = entry.kind.is_segment();
        let origin = if is_segment { Origin::default() } else { self.origin(entry.frames) };
        if let Some(tag) = origin.tag.or(otherwise).filter(|_| !is_segment) {
            record = record.with_tag(tag);
        }
        if let Some(site) = origin.site {
            record = record.with_site(site);
        }
        if let Some(stack) = origin.stack {
            record = record.with_stack(stack);
        }
        if entry.kind == Kind::OutOfMemory {
            let message = match entry.device_free {
                Some(free) => format!("out of memory; {free} bytes were free on the device"),
                None => "out of memory".to_owned(),
            };
            let kind = self.names.intern("out_of_memory");
            let message = self.names.intern(&message);
            record = record.with_failure(Failure { kind, message });
        }
        self.order += 1;
        self.writer.write(&record, &self.names)?;
        Ok(())
    }

    fn stream(&mut self, handle: u64) -> u32 {
        let next = self.streams.len() as u32;
        let stream = *self.streams.entry(handle).or_insert(next);
        if stream == next && handle != 0 {
            self.names.name_stream(stream, &format!("{handle:#x}"));
        }
        stream
    }

    /// Returns tag, call site and stack of a list of frames. Entries share lists, so each list is read once.
    fn origin(&mut self, frames: Option<Value>) -> Origin {
        let Some(Value::List(at)) = frames else { return Origin::default() };
        if let Some(origin) = self.origins.get(&at) {
            return *origin;
        }
        let place = self.place_of(Value::List(at));
        let mut origin = Origin {
            tag: place.tag.map(|text| self.names.intern(&text)),
            site: place.site.map(|text| self.names.intern(&text)),
            stack: None,
        };
        // Frames fill at most half of the table, so that tags and call sites always have space.
        if !self.names.is_half_full() {
            origin.stack = self.stack(Value::List(at), place.is_exported);
        }
        self.origins.insert(at, origin);
        origin
    }

    fn stack(&mut self, frames: Value, is_exported: bool) -> Option<StackId> {
        let loaded = self.loaded;
        let frames = loaded.list(frames)?;
        let mut stack = Vec::new();
        for frame in frames.iter().take(MAX_FRAMES) {
            let Value::Dict(at) = *frame else { continue };
            let name = match self.frames.get(&at) {
                Some(name) => *name,
                None => {
                    let text = self.frame_text(*frame, is_exported);
                    let name = text.map(|text| self.names.intern(&text));
                    self.frames.insert(at, name);
                    name
                }
            };
            stack.extend(name);
        }
        (!stack.is_empty()).then(|| self.names.intern_stack(&stack))
    }

    /// Returns the text of a frame; `None` if it is not a frame of the program.
    fn frame_text(&self, frame: Value, is_exported: bool) -> Option<String> {
        self.loaded.dict(frame).filter(|items| items.len() <= MAX_KEYS)?;
        let name = String::from_utf8_lossy(self.end_of_text(frame, "name"));
        let file = String::from_utf8_lossy(self.end_of_text(frame, "filename"));
        if is_exported && (file == "tag" || file == "query" || name == SITE_FRAME) {
            return None;
        }
        let line = self.loaded.number(frame, "line").unwrap_or(0);
        Some(match &*file {
            "" | "??" => name.into_owned(),
            file => format!("{name} ({file}:{line})"),
        })
    }

    /// Returns the last bytes of a frame's text, which bounds the work when all frames share one long text.
    fn end_of_text(&self, frame: Value, key: &str) -> &[u8] {
        let text = self.loaded.get(frame, key).and_then(|text| self.loaded.bytes(text));
        let text = text.unwrap_or(&[]);
        text.get(text.len().saturating_sub(MAX_TEXT)..).unwrap_or(text)
    }

    /// Finds the innermost Python frame outside of PyTorch, else the innermost Python frame, else the innermost frame.
    fn place_of(&self, frames: Value) -> Place {
        let Some(frames) = self.loaded.list(frames) else { return Place::default() };
        let few = frames.get(..frames.len().min(MAX_FRAMES)).unwrap_or(frames);
        let small =
            |frame: &&Value| self.loaded.dict(**frame).is_some_and(|items| items.len() <= MAX_KEYS);
        let file = |frame: &Value| self.end_of_text(*frame, "filename");
        let is_python = |frame: &&Value| file(frame).ends_with(b".py");
        let is_own = |frame: &&Value| {
            is_python(frame) && !file(frame).windows(7).any(|part| part == b"/torch/")
        };
        let all = || few.iter().filter(small);
        let found = all().find(is_own).or_else(|| all().find(is_python));
        let Some(frame) = found.or_else(|| all().next()) else { return Place::default() };
        let name = String::from_utf8_lossy(self.end_of_text(*frame, "name"));
        let path = String::from_utf8_lossy(file(frame));
        let line = |frame: &Value| self.loaded.number(*frame, "line").unwrap_or(0);
        // In the export of a log, the first frame is the tag and the next may be the call site.
        let is_tag = |frame: &&Value| file(frame) == b"tag";
        if let Some(tag) = all().next().filter(is_tag) {
            let name = String::from_utf8_lossy(self.end_of_text(*tag, "name"));
            let is_site =
                |frame: &&Value| self.end_of_text(**frame, "name") == SITE_FRAME.as_bytes();
            let site = all().nth(1).filter(is_site);
            return Place {
                tag: (name != "untagged").then(|| name.into_owned()),
                site: site
                    .map(|site| format!("{}:{}", String::from_utf8_lossy(file(site)), line(site))),
                is_exported: true,
            };
        }
        let line = line(frame);
        let file = path.rsplit(['/', '\\']).next().unwrap_or("");
        if file.is_empty() || file == "??" {
            return Place { tag: Some(name.into_owned()), ..Place::default() };
        }
        Place {
            tag: Some(format!("{name} ({file}:{line})")),
            site: Some(format!("{path}:{line}")),
            is_exported: false,
        }
    }
}
