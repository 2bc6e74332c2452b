//! PyTorch's memory snapshot: the pickle that `pytorch.org/memory_viz` opens.
//!
//! The viewer needs segments that contain all blocks, so the address ranges that the log touches stand for them, present
//! all the time. An allocation has one frame named after its tag, one for its call site, those of its sampled stack, and one
//! for its query. The viewer needs each device's trace in one piece, so the log is read once per device. All readings number
//! its names alike, because the numbers follow the order of its bytes. Memory grows with live blocks and address ranges, each
//! with a limit.

use std::collections::HashMap;
use std::io::Write;

use crate::error::TraceError;
use crate::import::STRETCHES;
use crate::live::{Change, LiveBlock, LiveBlocks};
use crate::names::{NameId, Names};
use crate::reader::Source;
use crate::record::Record;
use crate::stacks::{SITE_FRAME, SourceLine, StackId, split_frame};

use super::extents::Extents;
use super::pickle::{Memo, Pickle};

/// The number of devices exported; devices with higher ordinals are left out.
pub const MAX_SNAPSHOT_DEVICES: u32 = 64;

const WRITE_BYTES: usize = 256 << 10;

/// Counts of the written snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotCounts {
    /// Entries in the traces of all devices.
    pub trace_entries: u64,
    /// Address ranges.
    pub segments: u64,
    /// Blocks live at the end.
    pub live_blocks: u64,
    /// Records on devices that are left out.
    pub left_out: u64,
}

struct Snapshot<W> {
    pickle: Pickle,
    out: W,
    frames: HashMap<FrameKey, Memo>,
    counts: SnapshotCounts,
}

/// Writes a log as a snapshot. `open` opens the log from its beginning, once for every device.
pub fn write_torch_snapshot<S: Source, W: Write>(
    mut open: impl FnMut() -> Result<S, TraceError>,
    out: W,
) -> Result<SnapshotCounts, TraceError> {
    let mut snapshot = Snapshot {
        pickle: Pickle::new(),
        out,
        frames: HashMap::new(),
        counts: SnapshotCounts::default(),
    };
    let mut devices = Vec::new();
    let mut seen = 1u64;
    let mut last = None;
    snapshot.pickle.dict();
    snapshot.pickle.key("device_traces");
    snapshot.pickle.list();
    for device in 0..MAX_SNAPSHOT_DEVICES {
        if seen >> device == 0 {
            break;
        }
        snapshot.pickle.list();
        if seen >> device & 1 != 0 {
            let source = last.insert(open()?);
            let first = (device == 0).then_some(&mut seen);
            devices.push((device, snapshot.trace(source, device, first)?));
        }
        snapshot.pickle.append();
    }
    snapshot.pickle.key("segments");
    snapshot.pickle.list();
    if let Some(source) = &last {
        for (device, (extents, blocks)) in devices {
            snapshot.segments(device, &extents, &blocks, source.names())?;
        }
    }
    snapshot.pickle.key("allocator_settings");
    snapshot.pickle.dict();
    snapshot.pickle.number_at(STRETCHES, 1);
    snapshot.pickle.end_dict();
    snapshot.pickle.key("external_annotations");
    snapshot.pickle.list();
    snapshot.pickle.end_dict();
    snapshot.pickle.stop();
    snapshot.drain()?;
    snapshot.out.flush().map_err(TraceError::io("writing the snapshot"))?;
    Ok(snapshot.counts)
}

/// The kind and the text of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FrameKey {
    /// `None` for an allocation without a tag.
    Tag(Option<NameId>),
    Site(NameId),
    Frame(NameId),
}

impl FrameKey {
    /// Returns the file, the line and the function of the frame.
    fn parts(self, names: &Names) -> (SourceLine<'_>, &str) {
        match self {
            Self::Tag(tag) => {
                let name = tag.map_or("untagged", |tag| names.text_or_empty(Some(tag)));
                (SourceLine { file: "tag", line: 0 }, name)
            }
            Self::Site(site) => (SourceLine::parse(names.text_or_empty(Some(site))), SITE_FRAME),
            Self::Frame(frame) => {
                let (function, line) = split_frame(names.text_or_empty(Some(frame)));
                (line.unwrap_or(SourceLine { file: "", line: 0 }), function)
            }
        }
    }
}

/// The parts of an allocation's frames.
#[derive(Clone, Copy)]
struct Origin {
    tag: Option<NameId>,
    site: Option<NameId>,
    stack: Option<StackId>,
}

impl Origin {
    fn of_block(block: &LiveBlock) -> Self {
        Self { tag: block.tag, site: block.site, stack: block.stack }
    }

    fn of_record(record: &Record) -> Self {
        Self { tag: record.tag(), site: record.site(), stack: record.stack() }
    }

    fn frames(self, names: &Names) -> impl Iterator<Item = FrameKey> {
        let stack = self.stack.and_then(|stack| names.stack(stack)).unwrap_or(&[]);
        [FrameKey::Tag(self.tag)]
            .into_iter()
            .chain(self.site.map(FrameKey::Site))
            .chain(stack.iter().map(|frame| FrameKey::Frame(*frame)))
    }
}

impl<W: Write> Snapshot<W> {
    fn drain(&mut self) -> Result<(), TraceError> {
        self.out.write_all(&self.pickle.out).map_err(TraceError::io("writing the snapshot"))?;
        self.pickle.out.clear();
        Ok(())
    }

    /// Writes the entries of one device; the first reading also collects the devices.
    fn trace<S: Source>(
        &mut self,
        source: &mut S,
        device: u32,
        mut seen: Option<&mut u64>,
    ) -> Result<(Extents, Vec<LiveBlock>), TraceError> {
        let mut live = LiveBlocks::default();
        let mut extents = Extents::default();
        while let Some(record) = source.next_record()? {
            if let Some(seen) = seen.as_deref_mut() {
                if record.device < MAX_SNAPSHOT_DEVICES {
                    *seen |= 1 << record.device;
                } else {
                    self.counts.left_out += 1;
                }
            }
            if record.device != device {
                continue;
            }
            let change = live.apply(&record)?;
            if record.is_failure() {
                if record.ptr().is_none_or(|ptr| ptr == 0) {
                    let origin = Origin::of_record(&record);
                    self.entry(source, "oom", &record, record.bytes, origin);
                }
            } else {
                self.changed(source, &record, change, &mut extents);
            }
            if self.pickle.out.len() >= WRITE_BYTES {
                self.drain()?;
            }
        }
        Ok((extents, live.into_sorted()?))
    }

    fn changed<S: Source>(
        &mut self,
        source: &S,
        record: &Record,
        change: Change,
        extents: &mut Extents,
    ) {
        let free = |this: &mut Self, size: u64, origin| {
            this.entry(source, "free_requested", record, size, origin);
            this.entry(source, "free_completed", record, size, origin);
        };
        match change {
            Change::None => {}
            Change::Died(died) => free(self, died.bytes, Origin::of_block(&died)),
            Change::UnknownFree => {
                extents.add(record.ptr, record.charged_bytes());
                free(self, record.bytes, Origin::of_record(record));
            }
            Change::Born(born) => {
                extents.add(born.ptr, born.charged.max(born.bytes));
                self.entry(source, "alloc", record, born.bytes, Origin::of_block(&born));
            }
            Change::Replaced { born, lost } => {
                free(self, lost.bytes, Origin::of_block(&lost));
                extents.add(born.ptr, born.charged.max(born.bytes));
                self.entry(source, "alloc", record, born.bytes, Origin::of_block(&born));
            }
        }
    }

    fn entry<S: Source>(
        &mut self,
        source: &S,
        action: &'static str,
        record: &Record,
        size: u64,
        origin: Origin,
    ) {
        self.counts.trace_entries += 1;
        self.pickle.dict();
        self.pickle.word_at("action", action);
        if action == "oom" {
            // The log does not record how much memory was free.
            self.pickle.number_at("device_free", 0);
        } else {
            self.pickle.number_at("addr", record.ptr);
        }
        self.pickle.number_at("size", size);
        self.pickle.number_at("stream", u64::from(record.stream().unwrap_or(0)));
        self.pickle.number_at("time_us", source.header().unix_nanos(record.time) / 1000);
        self.pickle.key("frames");
        self.frames(origin, record.query_id(), source.names());
        self.pickle.end_dict();
        self.pickle.append();
    }

    fn frames(&mut self, origin: Origin, query: Option<u64>, names: &Names) {
        self.pickle.list();
        for key in origin.frames(names) {
            match self.frames.get(&key) {
                Some(&memo) => self.pickle.recall(memo),
                None => {
                    let (line, name) = key.parts(names);
                    self.frame(line, name);
                    let memo = self.pickle.memorize();
                    self.frames.insert(key, memo);
                }
            }
            self.pickle.append();
        }
        if let Some(query) = query {
            self.frame(SourceLine { file: "query", line: query }, "query");
            self.pickle.append();
        }
    }

    fn frame(&mut self, line: SourceLine<'_>, name: &str) {
        self.pickle.dict();
        self.pickle.key("filename");
        match line.file {
            "tag" => self.pickle.key("tag"),
            "query" => self.pickle.key("query"),
            file => self.pickle.text(file),
        }
        self.pickle.number_at("line", line.line);
        self.pickle.key("name");
        self.pickle.text(name);
        self.pickle.end_dict();
    }

    /// Writes the address ranges of one device, divided into live blocks and the gaps between them.
    fn segments(
        &mut self,
        device: u32,
        extents: &Extents,
        blocks: &[LiveBlock],
        names: &Names,
    ) -> Result<(), TraceError> {
        let mut blocks = blocks.iter().peekable();
        for (start, end) in extents.iter() {
            self.counts.segments += 1;
            self.pickle.dict();
            self.pickle.number_at("device", u64::from(device));
            self.pickle.number_at("address", start);
            self.pickle.number_at("total_size", end - start);
            self.pickle.number_at("stream", 0);
            self.pickle.word_at("segment_type", "large");
            self.pickle.number_at("segment_pool_id", 0);
            self.pickle.number(0);
            self.pickle.pair();
            self.pickle.key("is_expandable");
            self.pickle.no();
            self.pickle.key("frames");
            self.pickle.list();
            self.pickle.key("blocks");
            self.pickle.list();
            let (mut at, mut allocated, mut requested) = (start, 0u64, 0u64);
            while let Some(block) = blocks.next_if(|block| block.ptr < end) {
                let size = block.charged.max(block.bytes).min(end - block.ptr);
                // In a log with missing records two live blocks may overlap; the lower one is shown.
                if block.ptr < at || size == 0 {
                    continue;
                }
                self.gap(at, block.ptr);
                self.block(block.ptr, size, block.bytes.min(size), "active_allocated");
                self.frames(Origin::of_block(block), block.query_id, names);
                self.pickle.end_dict();
                self.pickle.append();
                at = block.ptr + size;
                allocated += size;
                requested += block.bytes.min(size);
                self.counts.live_blocks += 1;
                if self.pickle.out.len() >= WRITE_BYTES {
                    self.drain()?;
                }
            }
            self.gap(at, end);
            for (key, value) in [
                ("allocated_size", allocated),
                ("active_size", allocated),
                ("requested_size", requested),
            ] {
                self.pickle.number_at(key, value);
            }
            self.pickle.end_dict();
            self.pickle.append();
        }
        Ok(())
    }

    fn gap(&mut self, from: u64, to: u64) {
        if from < to {
            self.block(from, to - from, 0, "inactive");
            self.pickle.list();
            self.pickle.end_dict();
            self.pickle.append();
        }
    }

    /// Begins a block, up to the value of its frames.
    fn block(&mut self, address: u64, size: u64, requested: u64, state: &'static str) {
        self.pickle.dict();
        self.pickle.number_at("address", address);
        self.pickle.number_at("size", size);
        self.pickle.number_at("requested_size", requested);
        self.pickle.word_at("state", state);
        self.pickle.key("frames");
    }
}
