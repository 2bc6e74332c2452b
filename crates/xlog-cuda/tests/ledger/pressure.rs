//! Pressure of one process on another: a second process peaks, keeps little, and is idle, busy, killed or stopped while this one asks.
//!
//! Pipes and the ledger order the two; the deadlines only end a hang, but for the one that a refusal needs.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use xlog_cuda::device_runtime::{
    AllocTag, CaptureMode, CaptureOptions, DeviceBlock, LedgerSetting, OomCause, OomPolicy,
    PoolConfig, ResourceError, ResourceKind, RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::ledger::{LedgerView, SlotSnapshot};
use xlog_cuda::{ByteSize, CudaDevice};
use xlog_testing::turn;

use crate::support::{MIB, Process, TestDirectory, wait_until};

const LIMIT: u64 = 200 * MIB;
/// What the other process holds at its peak, in blocks of this size, and what it keeps.
const BLOCK: u64 = 10 * MIB;
const PEAK: u64 = 12;
const KEPT: u64 = 1;
/// What this process asks for: it fits beside what the other one keeps.
const ASKED: usize = 140 << 20;
const TAG: AllocTag = AllocTag("rows");
/// Only ends a hang.
const LONG: Duration = Duration::from_secs(240);

fn device() -> String {
    std::env::var("XLOG_TEST_DEVICE").unwrap_or_else(|_| "sim".to_owned())
}

fn config(ledger: std::path::PathBuf, kind: ResourceKind) -> RuntimeConfig {
    RuntimeConfig::default()
        .with_resource(kind)
        // What is cached stays until it is asked for.
        .with_pool(PoolConfig::default().without_decay())
        .with_ledger(LedgerSetting::File(ledger))
        .with_ledger_limit(ByteSize::Bytes(LIMIT))
}

fn open(config: &RuntimeConfig) -> XlogDeviceRuntime {
    XlogDeviceRuntime::with_config(Arc::new(CudaDevice::open(&device()).unwrap()), config).unwrap()
}

/// The other process. It says what it has done in lines, and goes on with each line that it reads.
#[test]
#[ignore = "a role of other tests, which start it as a process of its own"]
fn role() {
    let ledger = std::env::var_os("XLOG_TEST_LEDGER").expect("started by a test");
    let kind = std::env::var("XLOG_TEST_RESOURCE").unwrap().parse().unwrap();
    let is_busy = std::env::var("XLOG_TEST_BUSY").is_ok();
    let runtime = open(&config(ledger.into(), kind));
    let stream = runtime.stream_pool().lease().unwrap();
    let allocate = |_| runtime.allocate(BLOCK as usize, stream.id(), TAG).unwrap();
    let mut blocks: Vec<DeviceBlock> = (0..PEAK).map(allocate).collect();
    let kept = blocks.split_off((PEAK - KEPT) as usize);
    // SAFETY: the blocks are live, and everything is on their own stream.
    let mark = |block: &DeviceBlock| unsafe { stream.memset(block.ptr, 7, 16).unwrap() };
    kept.iter().for_each(mark);
    let gate = is_busy.then(|| stream.hold().unwrap());
    // Behind the gate, so that the memory of these blocks has pending work.
    blocks.iter().for_each(mark);
    blocks.into_iter().for_each(|block| runtime.deallocate(block).unwrap());
    if !is_busy {
        runtime.reap_pending().unwrap();
    }
    // The listener publishes it by itself.
    wait_until("the freed memory is published", || {
        let own = runtime.ledger().ledger().unwrap().slot();
        let slots = runtime.ledger_snapshot().unwrap().unwrap().slots;
        let memory = slots.iter().find(|slot| slot.index == own).and_then(|slot| slot.memory);
        memory.is_some_and(|memory| memory.cached + memory.pending >= (PEAK - KEPT) * BLOCK)
    });
    println!("\nready");
    let next = || std::io::stdin().read_line(&mut String::new()).unwrap();
    next();
    // More work is queued before the gate opens, so the stream is never idle.
    let more = is_busy.then(|| stream.hold().unwrap());
    drop(gate);
    println!("\nopened");
    next();
    drop(more);
    // What it keeps is as it was, and it gets memory again as far as the limit allows.
    for block in kept {
        let mut bytes = [0; 16];
        // SAFETY: as above.
        unsafe { stream.copy_dtoh(&mut bytes, block.ptr).unwrap() };
        assert_eq!(bytes, [7; 16]);
        runtime.deallocate(block).unwrap();
    }
    runtime.deallocate(runtime.allocate(BLOCK as usize, stream.id(), TAG).unwrap()).unwrap();
    println!("\ndone");
}

/// The other process, as this one sees it.
struct Other {
    process: Process,
    input: Option<ChildStdin>,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Other {
    fn start(directory: &TestDirectory, kind: ResourceKind, is_busy: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "pressure::role", "--ignored", "--nocapture"])
            .env("XLOG_TEST_LEDGER", directory.ledger_path())
            .env("XLOG_TEST_RESOURCE", kind.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if is_busy {
            command.env("XLOG_TEST_BUSY", "1");
        }
        let mut process = Process::spawn(command);
        let (input, output) = (process.0.stdin.take(), process.0.stdout.take().unwrap());
        let lines = Box::new(BufReader::new(output).lines().map_while(Result::ok));
        let mut other = Self { process, input, lines };
        other.expect("ready");
        other
    }

    fn expect(&mut self, word: &str) {
        assert!(self.lines.any(|line| line == word), "it ended before {word}");
    }

    fn go_on(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Goes on to its end, which must be a good one.
    fn finish(mut self) {
        self.expect("done");
        drop(self.input.take());
        assert!(self.process.wait().success());
    }

    fn slot(&self, view: &LedgerView) -> SlotSnapshot {
        let slots = view.snapshot().unwrap().slots;
        slots.into_iter().find(|slot| slot.pid == self.process.0.id()).expect("it is there")
    }
}

struct Case {
    directory: TestDirectory,
    runtime: XlogDeviceRuntime,
    view: LedgerView,
}

impl Case {
    fn new() -> Self {
        let directory = TestDirectory::new();
        let runtime = open(&config(directory.ledger_path(), ResourceKind::Pool));
        let view = LedgerView::open(directory.ledger_path()).unwrap();
        let case = Self { directory, runtime, view };
        case.wait_up_to(LONG);
        case
    }

    fn wait_up_to(&self, deadline: Duration) {
        let policy = OomPolicy::default().with_deadline(deadline);
        self.runtime.budget().unwrap().set_policy(policy);
    }

    fn ask(&self) -> Result<DeviceBlock, ResourceError> {
        self.runtime.allocate(ASKED, StreamId::DEFAULT, TAG)
    }
}

#[test]
fn an_idle_process_gives_up_what_it_has_cached() {
    let _turn = turn(&device());
    for kind in [ResourceKind::Pool, ResourceKind::Async] {
        let case = Case::new();
        let mut other = Other::start(&case.directory, kind, false);
        let before = other.slot(&case.view);
        assert!(before.used >= PEAK * BLOCK, "{kind}: {before:?}");
        let block = case.ask().unwrap_or_else(|error| panic!("{kind}: {error}"));
        let after = other.slot(&case.view);
        assert!(after.used <= LIMIT - ASKED as u64, "{kind}: {after:?}");
        assert!(after.used >= KEPT * BLOCK, "{kind}: {after:?}");
        case.runtime.deallocate(block).unwrap();
        other.go_on();
        other.go_on();
        // This process is idle now, and has cached what the other one asks for.
        other.finish();
    }
}

#[test]
fn a_busy_process_gives_up_memory_when_its_work_has_completed() {
    let _turn = turn(&device());
    let case = Case::new();
    let mut other = Other::start(&case.directory, ResourceKind::Pool, true);
    let block = std::thread::scope(|scope| {
        let asking = scope.spawn(|| case.ask());
        // It has answered an ask, and kept what its work uses.
        wait_until("it was asked", || {
            let memory = other.slot(&case.view).memory;
            memory.is_some_and(|memory| memory.pending >= (PEAK - KEPT) * BLOCK)
        });
        assert!(!asking.is_finished());
        other.go_on();
        asking.join().unwrap().unwrap()
    });
    case.runtime.deallocate(block).unwrap();
    other.expect("opened");
    other.go_on();
    other.finish();
}

#[test]
fn the_memory_of_a_process_that_is_killed_while_it_is_asked_is_had() {
    let _turn = turn(&device());
    let case = Case::new();
    let mut other = Other::start(&case.directory, ResourceKind::Pool, false);
    other.process.stop();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| case.ask());
        wait_until("it is asked", || {
            other.slot(&case.view).memory.is_some_and(|memory| !memory.has_answered)
        });
        other.process.kill();
        case.runtime.deallocate(asking.join().unwrap().unwrap()).unwrap();
    });
}

#[test]
fn a_stopped_process_is_named_with_what_it_has_cached() {
    let _turn = turn(&device());
    let case = Case::new();
    let mut other = Other::start(&case.directory, ResourceKind::Pool, false);
    other.process.stop();
    case.wait_up_to(Duration::from_millis(100));
    let refused = case.ask().unwrap_err();
    let report = refused.report().unwrap();
    assert_eq!(report.cause, OomCause::OtherProcesses, "{report}");
    let held = report.processes.iter().find(|one| one.pid == other.process.0.id()).unwrap();
    let freed = ((PEAK - KEPT) * BLOCK) as usize;
    assert!(!held.has_answered && held.cached.unwrap() >= freed, "{held:?}");
    let said = refused.to_string();
    for part in
        [&*held.name, &format!("{} '", held.pid), " cached (does not answer)", "end process"]
    {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    // It answers when it goes on.
    other.process.signal(libc::SIGCONT);
    case.wait_up_to(LONG);
    case.runtime.deallocate(case.ask().unwrap()).unwrap();
    other.go_on();
    other.go_on();
    other.finish();
}

/// A process whose memory is all live answers at once: the other one is refused without waiting for its deadline.
#[test]
fn processes_that_have_nothing_cached_are_not_waited_for() {
    let _turn = turn(&device());
    let case = Case::new();
    let holding = open(&config(case.directory.ledger_path(), ResourceKind::Pool));
    let blocks: Vec<DeviceBlock> = (0..PEAK)
        .map(|_| holding.allocate(BLOCK as usize, StreamId::DEFAULT, TAG).unwrap())
        .collect();
    assert!(matches!(case.ask(), Err(ResourceError::OutOfBudget { .. })));
    // Nor is a process asked that does not wait.
    for block in blocks {
        holding.deallocate(block).unwrap();
    }
    holding.reap_pending().unwrap();
    case.runtime.budget().unwrap().set_policy(OomPolicy::impatient());
    assert!(case.ask().is_err());
    assert!(holding.memory_use().unwrap().cached >= (PEAK * BLOCK) as usize);
    case.wait_up_to(LONG);
    case.runtime.deallocate(case.ask().unwrap()).unwrap();
}

/// Other code captures, and the runtime gives it memory; once its executable graph is gone, the runtime makes no call of its own.
#[test]
fn memory_of_a_foreign_graph_that_has_ended_is_given_up_without_a_call_of_its_runtime() {
    let _turn = turn(&device());
    for kind in [ResourceKind::Pool, ResourceKind::Async] {
        let case = Case::new();
        let holding = open(&config(case.directory.ledger_path(), kind));
        let driver = holding.device().driver().clone();
        let graphs = driver.graphs().unwrap();
        let stream = driver.stream_create(0).unwrap();
        graphs.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        let number = std::ptr::without_provenance_mut(stream.number() as usize);
        let raw = driver.raw_stream(stream).unwrap_or(number);
        // SAFETY: the stream lives until the end of this test.
        let adopted = unsafe { holding.stream_pool().adopt(raw) }.unwrap();
        let joined = holding.join_capture(adopted.id(), &CaptureOptions::default()).unwrap();
        let bytes = (PEAK * BLOCK) as usize;
        holding.deallocate(holding.allocate(bytes, adopted.id(), TAG).unwrap()).unwrap();
        drop(adopted);
        drop(joined.finish().unwrap());
        let graph = graphs.end_capture(stream).unwrap();
        let exec = graphs.graph_instantiate(graph).unwrap();
        // SAFETY: made above, and not used any more.
        unsafe { graphs.graph_destroy(graph) }.unwrap();
        // The other library can still launch.
        assert!(matches!(case.ask(), Err(ResourceError::OutOfBudget { .. })), "{kind}");
        // SAFETY: made above, and not used any more.
        unsafe { graphs.graph_exec_destroy(exec) }.unwrap();
        let block = case.ask().unwrap_or_else(|error| panic!("{kind}: {error}"));
        case.runtime.deallocate(block).unwrap();
        // SAFETY: made above, and not used any more.
        unsafe { driver.stream_destroy(stream) }.unwrap();
    }
}

/// From then on other processes wait for an answer, however late the listener's thread runs.
#[test]
fn a_runtime_publishes_before_its_first_allocation_returns() {
    let _turn = turn(&device());
    let case = Case::new();
    let published = |runtime: &XlogDeviceRuntime| {
        let own = runtime.ledger().ledger().unwrap().slot();
        let slots = runtime.ledger_snapshot().unwrap().unwrap().slots;
        slots.iter().find(|slot| slot.index == own).is_some_and(|slot| slot.memory.is_some())
    };
    let runtime = open(&config(case.directory.ledger_path(), ResourceKind::Direct));
    // Without memory the listener ends, and the next allocation starts another one.
    for round in 0..100 {
        let block = runtime.allocate(BLOCK as usize, StreamId::DEFAULT, TAG).unwrap();
        assert!(published(&runtime), "round {round}");
        runtime.deallocate(block).unwrap();
        if round % 10 == 0 {
            wait_until("the listener has ended", || !published(&runtime));
        }
    }
}

#[test]
fn live_cached_and_pending_are_told_apart() {
    let _turn = turn(&device());
    for kind in [ResourceKind::Pool, ResourceKind::Async] {
        let case = Case::new();
        let runtime = open(&config(case.directory.ledger_path(), kind));
        let (one, other) = {
            let streams = runtime.stream_pool();
            (streams.lease().unwrap(), streams.lease().unwrap())
        };
        let blocks = [4, 8, 16].map(|mib: usize| {
            let block = runtime.allocate(mib << 20, one.id(), TAG).unwrap();
            (block, mib << 20)
        });
        let [(live, _), (pending, pending_bytes), (cached, cached_bytes)] = blocks;
        let gate = other.hold().unwrap();
        runtime.record_block_use(&pending, other.id()).unwrap();
        runtime.deallocate(pending).unwrap();
        runtime.deallocate(cached).unwrap();
        one.synchronize().unwrap();
        runtime.reap_completed().unwrap();
        let held = runtime.memory_use().unwrap();
        assert_eq!(Some(held.physical()), runtime.physical_bytes(), "{kind}");
        assert!(held.pending >= pending_bytes, "{kind}: {held:?}");
        assert!(held.live >= 4 << 20, "{kind}: {held:?}");
        if kind == ResourceKind::Pool {
            assert!(held.cached >= cached_bytes, "{held:?}");
        }
        drop(gate);
        runtime.reap_pending().unwrap();
        runtime.trim().unwrap();
        let held = runtime.memory_use().unwrap();
        assert_eq!(held.pending, 0, "{kind}: {held:?}");
        runtime.deallocate(live).unwrap();
    }
}
