//! Merges the scripts of several lanes into one log.

use std::collections::{HashMap, VecDeque};
use std::io::Write;

use xlog_trace::{Action, Format, Header, LogWriter, NameId, Names, Record, TraceError};

use super::{LaneId, LogSettings, MadeLog, Minstd, Model, Script, Step};

/// The start of the synthetic addresses.
const BASE: u64 = 0x7f00_0000_0000;
/// 2026-01-01: a fixed epoch, so that settings determine the file.
const EPOCH_NANOS: u64 = 1_767_225_600_000_000_000;

#[derive(Clone, Copy, Debug)]
struct Block {
    ptr: u64,
    bytes: u64,
    room: u64,
    generation: u64,
    tag: NameId,
}

struct Lane {
    place: LaneId,
    script: Script,
    at: usize,
    blocks: Vec<Option<Block>>,
    query: u64,
}

struct Log<W: Write> {
    writer: LogWriter<W>,
    names: Names,
    random: Minstd,
    next: u64,
    /// Freed addresses by the size class of their block.
    free: HashMap<u64, Vec<u64>>,
    order: u64,
    time: u64,
    live_bytes: u64,
    live_blocks: u64,
    made: MadeLog,
}

/// Runs the lanes of a model until there are enough records.
pub(super) fn run<W: Write>(
    mut model: Box<dyn Model>,
    settings: &LogSettings,
    format: Format,
    out: W,
) -> Result<MadeLog, TraceError> {
    let header = Header::new()
        .with_process(1)
        .with_epoch_unix_nanos(EPOCH_NANOS)
        .with_device_name("generated");
    let mut log = Log {
        writer: LogWriter::new(format, &header, out),
        names: Names::new(),
        random: Minstd::new(settings.seed),
        next: BASE,
        free: HashMap::new(),
        order: 0,
        time: 0,
        live_bytes: 0,
        live_blocks: 0,
        made: MadeLog::default(),
    };
    let mut lanes: Vec<Lane> = model
        .lanes()
        .into_iter()
        .map(|place| Lane { place, script: Script::default(), at: 0, blocks: Vec::new(), query: 0 })
        .collect();
    let Some(first) = lanes.first().map(|lane| lane.place) else { return Ok(log.made) };
    let mut held = Vec::new();
    for (bytes, tag) in model.prologue() {
        held.push(log.allocate(first, 0, bytes, tag)?);
    }
    let mut kept: VecDeque<Block> = VecDeque::new();
    let mut kept_bytes = 0;
    while log.order < settings.records {
        let at = log.random.draw(0, lanes.len() as u64 - 1) as usize;
        let Some(lane) = lanes.get_mut(at) else { break };
        // A lane advances by a few steps at a time.
        for _ in 0..log.random.draw(1, 8) {
            if log.order >= settings.records {
                break;
            }
            let Some(&step) = lane.script.steps.get(lane.at) else {
                let script = model.script(&mut log.random);
                log.made.scripts += 1;
                lane.blocks = vec![None; script.slots];
                (lane.script, lane.at, lane.query) = (script, 0, log.made.scripts);
                continue;
            };
            lane.at += 1;
            match step {
                Step::Work(nanos) => log.time += nanos,
                Step::Allocate { slot, bytes, tag } => {
                    let block = log.allocate(lane.place, lane.query, bytes, tag)?;
                    if let Some(place) = lane.blocks.get_mut(slot) {
                        *place = Some(block);
                    }
                }
                Step::Free(slot) => {
                    if let Some(block) = lane.blocks.get_mut(slot).and_then(Option::take) {
                        log.deallocate(lane.place, lane.query, block)?;
                    }
                }
                Step::Keep(slot) => {
                    if let Some(block) = lane.blocks.get_mut(slot).and_then(Option::take) {
                        kept_bytes += block.bytes;
                        kept.push_back(block);
                    }
                    while kept_bytes > model.keep_bytes()
                        && let Some(oldest) = kept.pop_front()
                    {
                        kept_bytes -= oldest.bytes;
                        log.deallocate(lane.place, lane.query, oldest)?;
                    }
                }
            }
        }
    }
    for lane in &mut lanes {
        for block in lane.blocks.drain(..).flatten() {
            log.deallocate(lane.place, lane.query, block)?;
        }
    }
    for block in kept.into_iter().chain(held) {
        log.deallocate(first, 0, block)?;
    }
    log.made.records = log.writer.written();
    log.writer.finish()?;
    Ok(log.made)
}

impl<W: Write> Log<W> {
    fn record(&mut self, action: Action, place: LaneId, query: u64, block: &Block) -> Record {
        self.order += 1;
        let latency = self.random.draw(300, 3_000);
        let record = Record::new(action, 0, self.order, self.time)
            .with_process(1)
            .with_thread(place.thread)
            .with_stream(place.stream)
            .with_ptr(block.ptr)
            .with_bytes(block.bytes)
            .with_generation(block.generation)
            .with_query_id(query)
            .with_tag(block.tag)
            .with_latency_nanos(latency);
        self.time += latency + self.random.draw(200, 2_000);
        record
    }

    fn allocate(
        &mut self,
        place: LaneId,
        query: u64,
        bytes: u64,
        tag: &str,
    ) -> Result<Block, TraceError> {
        let room = room_of(bytes);
        let ptr = self.free.get_mut(&room).and_then(Vec::pop).unwrap_or_else(|| {
            self.next += room;
            self.next - room
        });
        let tag = self.names.intern(tag);
        let block = Block { ptr, bytes, room, generation: self.order + 1, tag };
        let record = self.record(Action::Allocate, place, query, &block);
        let record = record.with_granted(bytes.next_multiple_of(256)).with_alignment(256);
        self.writer.write(&record, &self.names)?;
        self.live_bytes += bytes;
        self.live_blocks += 1;
        self.made.peak_bytes = self.made.peak_bytes.max(self.live_bytes);
        self.made.peak_blocks = self.made.peak_blocks.max(self.live_blocks);
        Ok(block)
    }

    fn deallocate(&mut self, place: LaneId, query: u64, block: Block) -> Result<(), TraceError> {
        let record = self.record(Action::Deallocate, place, query, &block);
        self.writer.write(&record, &self.names)?;
        self.free.entry(block.room).or_default().push(block.ptr);
        self.live_bytes -= block.bytes;
        self.live_blocks -= 1;
        Ok(())
    }
}

/// Returns the size class: eight per power of two, so that addresses are reused and never run out.
fn room_of(bytes: u64) -> u64 {
    let step = (bytes.next_power_of_two() / 16).max(512);
    bytes.next_multiple_of(step)
}
