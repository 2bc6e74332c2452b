//! Allocation logs of three kinds of synthetic programs.
//!
//! A kind is a model that produces scripts: steps that allocate, free and keep blocks. Lanes, each on a thread and a stream,
//! run scripts concurrently, in an order that the seed determines. Live blocks never overlap, and every block is freed
//! after its allocation. Settings and seed determine the bytes of the log.

mod dataframe;
mod datalog;
mod lanes;
mod llm;

use std::io::Write;
use std::str::FromStr;

use xlog_trace::{Format, TraceError};

use super::Minstd;

/// The kind of a synthetic program.
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
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Dataframe, Self::Llm, Self::Datalog];

    /// Returns its name on the command line.
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

/// The settings of a log.
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
        /// Sets the seed.
        with_seed(seed: u64) { seed: seed }
        /// Sets the scale.
        with_scale(scale: f64) { scale: scale }
    }
}

/// The counts of a generated log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MadeLog {
    /// Records written.
    pub records: u64,
    /// Scripts begun: queries, requests or strata.
    pub scripts: u64,
    /// The maximum requested bytes live at a time.
    pub peak_bytes: u64,
    /// The maximum number of live blocks.
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

/// One step of a script. Slots belong to the script; each is filled at most once.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate {
        slot: usize,
        bytes: u64,
        tag: &'static str,
    },
    Free(usize),
    /// Keeps the block beyond the script: it is freed when newer kept blocks exceed the limit.
    Keep(usize),
    /// Work of this duration in nanoseconds.
    Work(u64),
}

/// The thread and stream of a lane.
#[derive(Clone, Copy, Debug)]
struct LaneId {
    thread: u64,
    stream: u32,
}

trait Model {
    /// Returns the allocations that precede all scripts and are freed at the end.
    fn prologue(&self) -> Vec<(u64, &'static str)> {
        Vec::new()
    }

    /// Returns the lanes.
    fn lanes(&self) -> Vec<LaneId>;

    /// Returns the maximum bytes of kept blocks.
    fn keep_bytes(&self) -> u64 {
        0
    }

    /// Returns the next script.
    fn script(&mut self, random: &mut Minstd) -> Script;
}

/// A script under construction.
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

/// Returns `count` times `scale`, at least one.
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
            // If there are several threads and kept blocks, threads free what others allocated.
            assert_eq!(foreign > 0, kind != LogKind::Llm, "{}", kind.name());
        }
    }
}
