//! Allocation logs as programs of three kinds would write them, made from a seed.
//!
//! A kind is a model that writes scripts: steps that allocate, free and keep blocks. Lanes run scripts side by side, in turns that
//! the seed decides; each lane is a place in a thread and on a stream. Live blocks never overlap, no block is freed before it
//! is allocated, and all are freed at the end. The same settings and seed give the same bytes.

mod dataframe;
mod datalog;
mod lanes;
mod llm;

use std::io::Write;
use std::str::FromStr;

use xlog_trace::{Format, TraceError};

use super::Minstd;

/// The kind of program that the log is of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LogKind {
    /// Queries over columns: filters, joins, aggregations; results are kept for a while and freed by any thread.
    Dataframe,
    /// A language model that serves requests: weights, pages of the key-value cache, activations by prompt length.
    Llm,
    /// Relations that grow to a fixed point: joins into new facts, duplicates removed, full relations rebuilt.
    Datalog,
}

impl LogKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Dataframe, Self::Llm, Self::Datalog];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dataframe => "dataframe",
            Self::Llm => "llm",
            Self::Datalog => "datalog",
        }
    }
}

impl FromStr for LogKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| "expected dataframe, llm or datalog".to_owned())
    }
}

/// How a log is made.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct LogSettings {
    /// The approximate number of records: no script begins after it, and live blocks are freed.
    pub records: u64,
    /// The seed of the generator.
    pub seed: u64,
    /// Multiplies rows, model width and facts, and so the bytes; 1 has a peak of 0.5 to 3 GiB.
    pub scale: f64,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { records: 100_000, seed: 1, scale: 1.0 }
    }
}

impl LogSettings {
    xlog_base::setters! {
        /// Sets the approximate number of records.
        with_records(records: u64) { records: records }
        /// From this seed.
        with_seed(seed: u64) { seed: seed }
        /// With sizes multiplied by this.
        with_scale(scale: f64) { scale: scale }
    }
}

/// The counts of a generated log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MadeLog {
    /// Records written.
    pub records: u64,
    /// Scripts that were begun: queries, requests or strata.
    pub scripts: u64,
    /// Most requested bytes live at a time.
    pub peak_bytes: u64,
    /// Most blocks live at a time.
    pub peak_blocks: u64,
}

/// Writes a log of `kind` to `out`.
pub fn write_log<W: Write>(
    kind: LogKind,
    settings: &LogSettings,
    format: Format,
    out: W,
) -> Result<MadeLog, TraceError> {
    let model: Box<dyn Model> = match kind {
        LogKind::Dataframe => Box::new(dataframe::Dataframe::new(settings.scale)),
        LogKind::Llm => Box::new(llm::Llm::new(settings.scale)),
        LogKind::Datalog => Box::new(datalog::Datalog::new(settings.scale)),
    };
    lanes::run(model, settings, format, out)
}

/// One step of a script. Slots are the script's own; one is filled at most once.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate {
        slot: usize,
        bytes: u64,
        tag: &'static str,
    },
    Free(usize),
    /// Gives the block to all: it is freed once newer ones take its room.
    Keep(usize),
    /// Work of this duration in nanoseconds.
    Work(u64),
}

/// Where a lane runs.
#[derive(Clone, Copy, Debug)]
struct LaneId {
    thread: u64,
    stream: u32,
}

/// A kind of program.
trait Model {
    /// Allocations before everything else, freed at the very end.
    fn prologue(&self) -> Vec<(u64, &'static str)> {
        Vec::new()
    }

    /// Where the lanes run.
    fn lanes(&self) -> Vec<LaneId>;

    /// Bytes of kept blocks.
    fn keep_bytes(&self) -> u64 {
        0
    }

    /// The next step of a lane.
    fn script(&mut self, random: &mut Minstd) -> Script;
}

/// A script that is being written.
#[derive(Clone, Debug, Default)]
struct Script {
    steps: Vec<Step>,
    slots: usize,
}

impl Script {
    fn allocate(&mut self, bytes: u64, tag: &'static str) -> usize {
        let slot = self.slots;
        self.slots += 1;
        self.steps.push(Step::Allocate { slot, bytes: bytes.max(1), tag });
        slot
    }

    fn free(&mut self, slot: usize) {
        self.steps.push(Step::Free(slot));
    }

    fn free_all(&mut self, slots: impl IntoIterator<Item = usize>) {
        slots.into_iter().for_each(|slot| self.free(slot));
    }

    fn keep(&mut self, slot: usize) {
        self.steps.push(Step::Keep(slot));
    }

    fn work(&mut self, nanos: u64) {
        self.steps.push(Step::Work(nanos));
    }
}

/// `count` times `scale`, at least one.
fn scaled(count: u64, scale: f64) -> u64 {
    ((count as f64 * scale) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Cursor;

    use super::*;
    use xlog_trace::{Action, Reader, Strictness};

    #[test]
    fn live_blocks_never_overlap_and_the_history_is_legal() {
        for (kind, seed) in LogKind::ALL.into_iter().zip([1, 77, 4711]) {
            let settings = LogSettings::default().with_records(20_000).with_seed(seed);
            let mut bytes = Vec::new();
            let made = write_log(kind, &settings, Format::Binary, &mut bytes).unwrap();
            let reader = Reader::from_stream(Cursor::new(bytes), Strictness::Strict).unwrap();
            let (mut order, mut time, mut records) = (0, 0, 0);
            let mut live: BTreeMap<u64, (u64, Option<u64>)> = BTreeMap::new();
            let (mut foreign, mut homes) = (0, BTreeMap::new());
            for record in reader {
                let record = record.unwrap();
                let context = format!("{} from seed {seed}: {record:?}", kind.name());
                assert!(record.order() > order && record.time_nanos() >= time, "{context}");
                (order, time) = (record.order(), record.time_nanos());
                records += 1;
                let ptr = record.ptr().unwrap();
                match record.action() {
                    Action::Allocate => {
                        let end = ptr + record.bytes().unwrap();
                        let before = live.range(..end).next_back();
                        assert!(before.is_none_or(|(_, (end, _))| *end <= ptr), "{context}");
                        live.insert(ptr, (end, record.generation()));
                        homes.insert(ptr, record.thread());
                    }
                    _ => {
                        let (_, generation) = live.remove(&ptr).expect(&context);
                        assert_eq!(generation, record.generation(), "{context}");
                        foreign += u64::from(homes.get(&ptr) != Some(&record.thread()));
                    }
                }
            }
            assert_eq!((records, live.len()), (made.records, 0));
            // Threads free what others allocated, where there are several and something is kept.
            assert_eq!(foreign > 0, kind != LogKind::Llm, "{}", kind.name());
        }
    }
}
