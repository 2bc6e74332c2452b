//! A log prepared for replay: every relevant record, with its block, stream and thread as numbers.
//!
//! All lookups happen here, so a replay only calls the resource. Faults of the log (frees of unknown blocks, allocations at
//! live addresses) are counted and repaired if possible: a block whose address is allocated again is freed first.
//! Operations on one block are numbered, and every replay keeps their order.
//!
//! Memory: 56 bytes per operation, and a limit of live blocks. Tables grow before each record; without memory for that the
//! log is refused.

use std::collections::{HashMap, HashSet, TryReserveError, VecDeque};
use std::time::Duration;

use serde::Serialize;
use xlog_cuda::device_runtime::{Access, AllocTag};
use xlog_trace::{Action, Names, Record, Source, TraceError, UseAccess, reserve_live};

/// The maximum number of separate streams; further ones share them.
pub(super) const MAX_STREAMS: usize = 128;
/// The maximum number of separate threads; further ones share them.
pub(super) const MAX_THREADS: usize = 64;
/// The maximum number of operations in a replay.
const MAX_OPERATIONS: usize = u32::MAX as usize;

/// The maximum duration of a replay in recorded time: a day.
const MAX_RECORDED: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    Allocate {
        bytes: u64,
        /// An alignment above the default, or 0.
        align: u32,
        tag: u32,
    },
    /// The operation's `stream` is the recorded stream of the free.
    Free,
    Prepare(Access),
    Finish(Access),
    Reap,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub(super) what: What,
    pub(super) block: u32,
    /// Its number among the operations on its block.
    pub(super) turn: u32,
    pub(super) stream: u16,
    pub(super) thread: u16,
    pub(super) time: u64,
    pub(super) order: u64,
}

/// The figures of the log, as they appear in JSON.
#[derive(Serialize, Clone, Debug, Default)]
pub(super) struct LogFigures {
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) uses: u64,
    pub(super) threads: usize,
    pub(super) streams: usize,
    /// Devices of all processes; the replay uses one.
    pub(super) devices: usize,
    /// The maximum requested bytes live at a time, in recorded order.
    pub(super) peak_live_bytes: u64,
    pub(super) peak_live_blocks: u64,
    /// Blocks that the log never frees; they are freed after the replay.
    pub(super) never_freed: u64,
    /// Frees on another stream than the allocation's.
    pub(super) cross_stream_frees: u64,
    /// Calls that failed when recorded; not replayed.
    pub(super) recorded_failures: u64,
    /// Allocations of zero bytes and frees of null; not replayed.
    pub(super) empty: u64,
    /// Frees and uses of blocks whose allocation the log lacks; not replayed.
    pub(super) unknown_blocks: u64,
    /// Allocations at the address of a live block; the missing free is inserted before.
    pub(super) missing_frees: u64,
    /// Records of actions that are not replayed.
    pub(super) other: u64,
    /// Records that arrived too late to be ordered.
    pub(super) late_records: u64,
    /// The first fault of the log.
    pub(super) first_problem: Option<String>,
}

impl LogFigures {
    /// Returns the number of inconsistent records.
    pub(super) fn problems(&self) -> u64 {
        self.unknown_blocks + self.missing_frees
    }
}

/// A log prepared for replay.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) operations: Vec<Operation>,
    pub(super) blocks: u32,
    pub(super) tags: Vec<AllocTag>,
    /// The recorded threads, then streams, by number.
    threads: Vec<u64>,
    streams: Vec<Option<u32>>,
    /// The operation at the peak of live bytes.
    pub(super) peak_at: usize,
    pub(super) figures: LogFigures,
}

/// The key of a block in a log: process, device, address.
type Key = (u32, u32, u64);

#[derive(Clone, Copy)]
struct Live {
    block: u32,
    bytes: u64,
    stream: u16,
    generation: Option<u64>,
}

#[derive(Default)]
struct Linker {
    plan: Plan,
    live: HashMap<Key, Live>,
    /// The number of operations on each block so far.
    turns: Vec<u32>,
    streams: HashMap<Option<u32>, u16>,
    threads: HashMap<(u32, u64), u16>,
    tags: HashMap<Option<xlog_trace::NameId>, u32>,
    /// Indices of the operations that opened a use, by block, stream and access.
    open: HashMap<(Key, u16, u8), VecDeque<u32>>,
    devices: HashSet<(u32, u32)>,
    live_bytes: u64,
}

/// The reason why a plan could not be made.
#[derive(Debug)]
pub(super) enum Problem {
    /// The log cannot be read further.
    Reading(TraceError),
    /// The log is too long for a replay.
    TooLong(String),
    /// A strict reader found a fault in the log.
    Found(String),
}

impl Plan {
    /// Reads a log to its end. With `strict`, the first fault is an error.
    pub(super) fn read(source: &mut impl Source, strict: bool) -> Result<Self, Problem> {
        let mut linker = Linker::default();
        while let Some(record) = source.next_record().map_err(Problem::Reading)? {
            linker.push(&record, source.names())?;
            if let (true, Some(problem)) = (strict, &linker.plan.figures.first_problem) {
                return Err(Problem::Found(problem.clone()));
            }
            if linker.plan.operations.len() >= MAX_OPERATIONS {
                let line = format!("a replay has at most {MAX_OPERATIONS} operations");
                return Err(Problem::TooLong(line));
            }
        }
        linker.finish()
    }

    /// Refuses a replay in recorded time that would take more than a day: time stamps may be arbitrary.
    pub(super) fn check_recorded_time(&self, speed: f64) -> Result<(), String> {
        let by_time = |operation: &&Operation| operation.time;
        let (first, last) = (
            self.operations.iter().min_by_key(by_time),
            self.operations.iter().max_by_key(by_time),
        );
        let (Some(first), Some(last)) = (first, last) else { return Ok(()) };
        let seconds = (last.time - first.time) as f64 / 1e9;
        if seconds / speed <= MAX_RECORDED.as_secs_f64() {
            return Ok(());
        }
        Err(format!(
            "the records of order {} and {} are {:.1} hours apart, so that a replay in recorded time takes {:.1} hours; \
             expected at most {}: use a --speed of {:.3e} or more, or --mode threads",
            first.order,
            last.order,
            seconds / 3600.0,
            seconds / speed / 3600.0,
            MAX_RECORDED.as_secs() / 3600,
            (seconds / MAX_RECORDED.as_secs_f64()).max(speed)
        ))
    }

    /// Returns the recorded thread of an operation; `None` if several share its number.
    pub(super) fn thread_of(&self, operation: &Operation) -> Option<u64> {
        let told_apart = self.figures.threads <= MAX_THREADS;
        self.threads.get(operation.thread as usize).copied().filter(|_| told_apart)
    }

    /// Returns the recorded stream of an operation; `None` if several share its number, or if it had none.
    pub(super) fn stream_of(&self, operation: &Operation) -> Option<u32> {
        let told_apart = self.figures.streams <= MAX_STREAMS;
        self.streams.get(operation.stream as usize).copied().flatten().filter(|_| told_apart)
    }
}

impl Linker {
    /// Reserves space for all that a record can add, except a live block.
    fn reserve(&mut self) -> Result<(), TryReserveError> {
        // An allocation may first free the block at its address.
        self.plan.operations.try_reserve(2)?;
        self.plan.tags.try_reserve(1)?;
        self.plan.threads.try_reserve(1)?;
        self.plan.streams.try_reserve(1)?;
        self.turns.try_reserve(1)?;
        self.streams.try_reserve(1)?;
        self.threads.try_reserve(1)?;
        self.tags.try_reserve(1)?;
        self.open.try_reserve(1)?;
        self.devices.try_reserve(1)
    }

    fn push(&mut self, record: &Record, names: &Names) -> Result<(), Problem> {
        if record.is_failure() {
            self.plan.figures.recorded_failures += 1;
            return Ok(());
        }
        self.reserve().map_err(|_| too_large(self.plan.operations.len()))?;
        let key = record
            .ptr()
            .filter(|ptr| *ptr != 0)
            .map(|ptr| (record.process(), record.device(), ptr));
        match (record.action(), key) {
            (Action::Allocate, Some(key)) if record.bytes().unwrap_or(0) > 0 => {
                reserve_live(&mut self.live).map_err(Problem::Reading)?;
                self.allocate(record, key, names);
            }
            (Action::Deallocate, Some(key)) => self.free(record, key),
            (Action::UsePrepare, Some(key)) => self.open_use(record, key)?,
            (Action::UseFinish, Some(key)) => self.close_use(record, key),
            (Action::ReapPending, _) => {
                let operation = self.operation(record, What::Reap, 0);
                self.plan.operations.push(operation);
            }
            (Action::Allocate | Action::Deallocate, _) => self.plan.figures.empty += 1,
            // The replayed resource has its own segments.
            (Action::SegmentTake | Action::SegmentReturn, _) => {}
            _ => self.plan.figures.other += 1,
        }
        Ok(())
    }

    fn allocate(&mut self, record: &Record, key: Key, names: &Names) {
        if let Some(lost) = self.live.remove(&key) {
            self.plan.figures.missing_frees += 1;
            self.problem(record, "allocates at the address of a live block, whose free is missing");
            let mut operation = self.on_block(record, What::Free, lost.block);
            operation.stream = lost.stream;
            self.plan.operations.push(operation);
            self.live_bytes -= lost.bytes;
        }
        let next = self.tags.len() as u32;
        let tag = *self.tags.entry(record.tag()).or_insert(next);
        if tag == next {
            self.plan.tags.push(match names.text_or_empty(record.tag()) {
                "" => AllocTag::UNTAGGED,
                text => AllocTag::intern(text),
            });
        }
        let bytes = record.bytes().unwrap_or(0);
        let align = record.alignment().filter(|align| *align > 256).unwrap_or(0);
        let block = self.turns.len() as u32;
        self.turns.push(0);
        let what = What::Allocate { bytes, align: u32::try_from(align).unwrap_or(u32::MAX), tag };
        let operation = self.on_block(record, what, block);
        let live = Live { block, bytes, stream: operation.stream, generation: record.generation() };
        self.live.insert(key, live);
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        let figures = &mut self.plan.figures;
        figures.allocations += 1;
        figures.peak_live_blocks = figures.peak_live_blocks.max(self.live.len() as u64);
        if self.live_bytes > figures.peak_live_bytes {
            figures.peak_live_bytes = self.live_bytes;
            self.plan.peak_at = self.plan.operations.len();
        }
        self.plan.operations.push(operation);
    }

    fn free(&mut self, record: &Record, key: Key) {
        let Some(live) = self.find(record, key) else {
            self.plan.figures.unknown_blocks += 1;
            self.problem(record, "frees a block whose allocation is not in the log");
            return;
        };
        self.live.remove(&key);
        self.live_bytes -= live.bytes;
        let mut operation = self.on_block(record, What::Free, live.block);
        if record.stream().is_none() {
            operation.stream = live.stream;
        }
        self.plan.figures.frees += 1;
        self.plan.figures.cross_stream_frees += u64::from(operation.stream != live.stream);
        self.plan.operations.push(operation);
    }

    fn open_use(&mut self, record: &Record, key: Key) -> Result<(), Problem> {
        let Some(live) = self.find(record, key) else {
            self.plan.figures.unknown_blocks += 1;
            self.problem(record, "uses a block whose allocation is not in the log");
            return Ok(());
        };
        let access = access_of(record);
        let operation = self.on_block(record, What::Prepare(access), live.block);
        let at = self.plan.operations.len();
        let open = self.open.entry((key, operation.stream, access as u8)).or_default();
        open.try_reserve(1).map_err(|_| too_large(at))?;
        open.push_back(at as u32);
        self.plan.figures.uses += 1;
        self.plan.operations.push(operation);
        Ok(())
    }

    /// Adds the end of a use. Its block may be freed by now, so it is the block of the open use.
    fn close_use(&mut self, record: &Record, key: Key) {
        let access = access_of(record);
        let stream = self.operation(record, What::Reap, 0).stream;
        let place = (key, stream, access as u8);
        let begun = self.open.get_mut(&place).and_then(VecDeque::pop_front);
        if self.open.get(&place).is_some_and(VecDeque::is_empty) {
            self.open.remove(&place);
        }
        match begun.and_then(|at| self.plan.operations.get(at as usize)).map(|begun| begun.block) {
            Some(block) => {
                let operation = self.on_block(record, What::Finish(access), block);
                self.plan.operations.push(operation);
            }
            None => {
                self.plan.figures.unknown_blocks += 1;
                self.problem(record, "closes a use that the log does not open");
            }
        }
    }

    fn find(&self, record: &Record, key: Key) -> Option<Live> {
        let stale = |live: &Live| matches!((live.generation, record.generation()), (Some(a), Some(b)) if a != b);
        self.live.get(&key).copied().filter(|live| !stale(live))
    }

    fn operation(&mut self, record: &Record, what: What, block: u32) -> Operation {
        let count = self.streams.len();
        let stream = *self.streams.entry(record.stream()).or_insert_with(|| {
            self.plan.streams.push(record.stream());
            (count % MAX_STREAMS) as u16
        });
        let count = self.threads.len();
        let thread = (record.process(), record.thread());
        let thread = *self.threads.entry(thread).or_insert_with(|| {
            self.plan.threads.push(record.thread());
            (count % MAX_THREADS) as u16
        });
        self.devices.insert((record.process(), record.device()));
        let (time, order) = (record.time_nanos(), record.order());
        Operation { what, block, turn: 0, stream, thread, time, order }
    }

    fn on_block(&mut self, record: &Record, what: What, block: u32) -> Operation {
        let mut operation = self.operation(record, what, block);
        if let Some(turns) = self.turns.get_mut(block as usize) {
            operation.turn = *turns;
            *turns += 1;
        }
        operation
    }

    fn problem(&mut self, record: &Record, what: &str) {
        if self.plan.figures.first_problem.is_none() {
            self.plan.figures.first_problem = Some(format!(
                "the record of order {} by thread {} {what} ({:#x})",
                record.order(),
                record.thread(),
                record.ptr().unwrap_or(0)
            ));
        }
    }

    fn finish(mut self) -> Result<Plan, Problem> {
        // An open use would keep its block alive forever, so the plan closes it.
        let operations = self.plan.operations.len();
        let refuse = |_| too_large(operations);
        let count = self.open.values().map(VecDeque::len).sum();
        let mut open: Vec<u32> = Vec::new();
        open.try_reserve_exact(count).map_err(refuse)?;
        open.extend(self.open.drain().flat_map(|(_, begun)| begun));
        open.sort_unstable();
        self.plan.operations.try_reserve_exact(count).map_err(refuse)?;
        for at in open {
            let Some(begun) = self.plan.operations.get(at as usize).copied() else { continue };
            let (What::Prepare(access), Some(turns)) =
                (begun.what, self.turns.get_mut(begun.block as usize))
            else {
                continue;
            };
            self.plan.operations.push(Operation {
                what: What::Finish(access),
                turn: *turns,
                ..begun
            });
            *turns += 1;
        }
        let figures = &mut self.plan.figures;
        figures.never_freed = self.live.len() as u64;
        figures.threads = self.threads.len();
        figures.streams = self.streams.len();
        figures.devices = self.devices.len();
        self.plan.blocks = self.turns.len() as u32;
        Ok(self.plan)
    }
}

fn access_of(record: &Record) -> Access {
    match record.access() {
        Some(UseAccess::Read) => Access::Read,
        Some(UseAccess::Write) => Access::Write,
        _ => Access::ReadWrite,
    }
}

/// Refuses a log of more operations than memory is available for.
fn too_large(operations: usize) -> Problem {
    // The vector of operations doubles, and the old one is copied; the other tables are smaller.
    let bytes = operations.max(1).saturating_mul(3 * size_of::<Operation>());
    Problem::TooLong(format!(
        "a replay of its first {operations} operations and more takes {} MiB of memory, which the system does not give",
        bytes.div_ceil(1 << 20)
    ))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use xlog_trace::{Format, Header, LogWriter, Reader, Strictness};
    use xlog_workloads::Minstd;

    fn plan_of(records: &[Record]) -> Plan {
        let names = Names::new();
        let mut writer = LogWriter::new(Format::Binary, &Header::new(), Vec::new());
        for record in records {
            writer.write(record, &names).unwrap();
        }
        let bytes = Cursor::new(writer.finish().unwrap());
        Plan::read(&mut Reader::from_stream(bytes, Strictness::Strict).unwrap(), false).unwrap()
    }

    /// Random records with few addresses, so that missing records of every kind are frequent.
    fn nonsense(seed: u64) -> Vec<Record> {
        let mut random = Minstd::new(seed);
        let actions = [Action::Allocate, Action::Deallocate, Action::UsePrepare, Action::UseFinish];
        let record = |order| {
            let action = actions[random.draw(0, 3) as usize];
            let record = Record::new(action, 0, order, order)
                .with_thread(random.draw(0, 3))
                .with_stream(random.draw(0, 2) as u32)
                .with_ptr(random.draw(0, 4) * 4096)
                .with_access(UseAccess::Read);
            match action {
                Action::Allocate => record.with_bytes(random.draw(0, 9)),
                _ => record,
            }
        };
        (0..400).map(record).collect()
    }

    #[test]
    fn whatever_a_log_says_a_plan_can_be_done() {
        for seed in 1..200 {
            let plan = plan_of(&nonsense(seed));
            // A resource's view of each block: its next operation, whether it is live, and its open uses.
            let mut blocks = vec![(0, false, 0_i64); plan.blocks as usize];
            let (mut live, mut peak) = (0, (0, 0));
            let mut sizes = HashMap::new();
            for (at, operation) in plan.operations.iter().enumerate() {
                let (turns, alive, open) = &mut blocks[operation.block as usize];
                assert_eq!(*turns, operation.turn, "seed {seed}, operation {at}");
                *turns += 1;
                match operation.what {
                    What::Allocate { bytes, .. } => {
                        assert!(operation.turn == 0 && bytes > 0, "seed {seed}, operation {at}");
                        *alive = true;
                        sizes.insert(operation.block, bytes);
                        live += bytes;
                        if live > peak.0 {
                            peak = (live, at);
                        }
                    }
                    What::Free => {
                        assert!(std::mem::take(alive), "seed {seed}, operation {at} frees twice");
                        live -= sizes[&operation.block];
                    }
                    What::Prepare(_) => {
                        assert!(*alive, "seed {seed}, operation {at} uses what is gone");
                        *open += 1;
                    }
                    What::Finish(_) => *open -= 1,
                    What::Reap => {}
                }
                assert!(*open >= 0, "seed {seed}, operation {at} closes what is not open");
            }
            assert!(blocks.iter().all(|(_, _, open)| *open == 0), "seed {seed}");
            let figures = &plan.figures;
            assert_eq!((figures.peak_live_bytes, plan.peak_at), peak, "seed {seed}");
            let left = blocks.iter().filter(|(_, alive, _)| *alive).count();
            assert_eq!(figures.never_freed, left as u64, "seed {seed}");
            assert!(figures.unknown_blocks > 0 && figures.missing_frees > 0, "seed {seed}");
        }
    }

    #[test]
    fn more_streams_and_threads_than_there_are_numbers_share_them() {
        let records: Vec<_> = (0..300)
            .map(|at| {
                let record = Record::new(Action::Allocate, 0, at, at).with_bytes(1);
                record.with_ptr(4096 + at).with_stream(at as u32).with_thread(at)
            })
            .collect();
        let plan = plan_of(&records);
        assert_eq!((plan.figures.streams, plan.figures.threads), (300, 300));
        for (at, operation) in plan.operations.iter().enumerate() {
            assert_eq!(operation.stream as usize, at % MAX_STREAMS);
            assert_eq!(operation.thread as usize, at % MAX_THREADS);
            assert_eq!((plan.thread_of(operation), plan.stream_of(operation)), (None, None));
        }
        let few = plan_of(&records[200..210]);
        let last = &few.operations[9];
        assert_eq!((few.thread_of(last), few.stream_of(last)), (Some(209), Some(209)));
        assert_eq!(size_of::<Operation>(), 56);
    }
}
