//! PyTorch's memory snapshot: the pickle that `pytorch.org/memory_viz` opens.
//!
//! The log does not know segments, so the stretches of address space it touches stand for them,
//! present all the time. A tag takes the place of a stack trace: one frame named after it, and one
//! more for the query. The viewer wants the trace of each device in one piece, so the log is read
//! once for every device in it. Memory grows with live blocks and stretches.

use std::collections::HashMap;
use std::io::Write;

use crate::error::TraceError;
use crate::live::{Change, LiveBlock, LiveBlocks};
use crate::names::NameId;
use crate::reader::Source;
use crate::record::Record;

use super::extents::Extents;
use super::pickle::{Memo, Pickle};

/// Devices from this number on are left out.
pub const MAX_SNAPSHOT_DEVICES: u32 = 64;

const WRITE_BYTES: usize = 256 << 10;

/// Counts of what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotCounts {
    /// Entries in the traces of all devices.
    pub trace_entries: u64,
    /// Stretches of address space.
    pub segments: u64,
    /// Blocks alive at the end.
    pub live_blocks: u64,
    /// Records on devices that have no place.
    pub left_out: u64,
}

struct Snapshot<W> {
    pickle: Pickle,
    out: W,
    /// Frames by tag: from the tag's text, since numbers differ between readings of one log.
    frames: HashMap<String, Memo>,
    counts: SnapshotCounts,
}

/// Writes a log as a snapshot. `open` gives the log from its beginning, once for every device.
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
    snapshot.pickle.dict();
    snapshot.pickle.key("device_traces");
    snapshot.pickle.list();
    for device in 0..MAX_SNAPSHOT_DEVICES {
        if seen >> device == 0 {
            break;
        }
        snapshot.pickle.list();
        if seen >> device & 1 != 0 {
            let mut source = open()?;
            let first = (device == 0).then_some(&mut seen);
            devices.push((device, snapshot.trace(&mut source, device, first)?));
        }
        snapshot.pickle.append();
    }
    snapshot.pickle.key("segments");
    snapshot.pickle.list();
    for (device, (extents, blocks)) in devices {
        snapshot.segments(device, &extents, blocks)?;
    }
    snapshot.pickle.key("allocator_settings");
    snapshot.pickle.dict();
    snapshot.pickle.end_dict();
    snapshot.pickle.key("external_annotations");
    snapshot.pickle.list();
    snapshot.pickle.end_dict();
    snapshot.pickle.stop();
    snapshot.drain()?;
    snapshot.out.flush().map_err(TraceError::io("writing the snapshot"))?;
    Ok(snapshot.counts)
}

type Rest = (Extents, Vec<(LiveBlock, Option<String>)>);

impl<W: Write> Snapshot<W> {
    fn drain(&mut self) -> Result<(), TraceError> {
        self.out.write_all(&self.pickle.out).map_err(TraceError::io("writing the snapshot"))?;
        self.pickle.out.clear();
        Ok(())
    }

    /// The entries of one device; on the first reading also which devices there are.
    fn trace<S: Source>(
        &mut self,
        source: &mut S,
        device: u32,
        mut seen: Option<&mut u64>,
    ) -> Result<Rest, TraceError> {
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
                    self.entry(source, "oom", &record, record.bytes, record.tag());
                }
            } else {
                self.changed(source, &record, change, &mut extents);
            }
            if self.pickle.out.len() >= WRITE_BYTES {
                self.drain()?;
            }
        }
        let names = source.names();
        let mut blocks: Vec<_> = live
            .into_blocks()
            .map(|block| (block, block.tag.map(|tag| names.text_or_empty(Some(tag)).to_owned())))
            .collect();
        blocks.sort_unstable_by_key(|(block, _)| block.ptr);
        Ok((extents, blocks))
    }

    fn changed<S: Source>(
        &mut self,
        source: &S,
        record: &Record,
        change: Change,
        extents: &mut Extents,
    ) {
        let free = |this: &mut Self, size: u64, tag| {
            this.entry(source, "free_requested", record, size, tag);
            this.entry(source, "free_completed", record, size, tag);
        };
        match change {
            Change::None => {}
            Change::Died(died) => free(self, died.bytes, died.tag),
            Change::UnknownFree => {
                extents.add(record.ptr, record.charged_bytes());
                free(self, record.bytes, record.tag());
            }
            Change::Born(born) => {
                extents.add(born.ptr, born.charged.max(born.bytes));
                self.entry(source, "alloc", record, born.bytes, born.tag);
            }
            Change::Replaced { born, lost } => {
                free(self, lost.bytes, lost.tag);
                extents.add(born.ptr, born.charged.max(born.bytes));
                self.entry(source, "alloc", record, born.bytes, born.tag);
            }
        }
    }

    fn entry<S: Source>(
        &mut self,
        source: &S,
        action: &'static str,
        record: &Record,
        size: u64,
        tag: Option<NameId>,
    ) {
        self.counts.trace_entries += 1;
        self.pickle.dict();
        self.pickle.word_at("action", action);
        if action == "oom" {
            // What was free then is not in the log.
            self.pickle.number_at("device_free", 0);
        } else {
            self.pickle.number_at("addr", record.ptr);
        }
        self.pickle.number_at("size", size);
        self.pickle.number_at("stream", u64::from(record.stream().unwrap_or(0)));
        self.pickle.number_at("time_us", source.header().unix_nanos(record.time) / 1000);
        self.pickle.key("frames");
        self.frames(tag.map(|_| source.names().text_or_empty(tag)), record.query_id());
        self.pickle.end_dict();
        self.pickle.append();
    }

    fn frames(&mut self, tag: Option<&str>, query: Option<u64>) {
        self.pickle.list();
        match self.frames.get(tag.unwrap_or("untagged")) {
            Some(&memo) => self.pickle.recall(memo),
            None => {
                let tag = tag.unwrap_or("untagged");
                self.frame("tag", 0, tag);
                let memo = self.pickle.memorize();
                self.frames.insert(tag.to_owned(), memo);
            }
        }
        self.pickle.append();
        if let Some(query) = query {
            self.frame("query", query, "query");
            self.pickle.append();
        }
    }

    fn frame(&mut self, filename: &'static str, line: u64, name: &str) {
        self.pickle.dict();
        self.pickle.word_at("filename", filename);
        self.pickle.number_at("line", line);
        self.pickle.key("name");
        self.pickle.text(name);
        self.pickle.end_dict();
    }

    /// The stretches of one device, cut into live blocks and the gaps between them.
    fn segments(
        &mut self,
        device: u32,
        extents: &Extents,
        blocks: Vec<(LiveBlock, Option<String>)>,
    ) -> Result<(), TraceError> {
        let mut blocks = blocks.into_iter().peekable();
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
            while let Some((block, tag)) = blocks.next_if(|(block, _)| block.ptr < end) {
                let size = block.charged.max(block.bytes).min(end - block.ptr);
                // A log with gaps can have two blocks in one place; the lower one is shown.
                if block.ptr < at || size == 0 {
                    continue;
                }
                self.gap(at, block.ptr);
                self.block(block.ptr, size, block.bytes.min(size), "active_allocated");
                self.frames(tag.as_deref(), block.query_id);
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

    /// Begins a block up to the value of its frames.
    fn block(&mut self, address: u64, size: u64, requested: u64, state: &'static str) {
        self.pickle.dict();
        self.pickle.number_at("address", address);
        self.pickle.number_at("size", size);
        self.pickle.number_at("requested_size", requested);
        self.pickle.word_at("state", state);
        self.pickle.key("frames");
    }
}
