//! Runtimes that are built by configuration: what they hold of the device is what the ledger counts, at every step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_cuda::device_runtime::{
    AllocTag, LimitSource, OomCause, ResourceError, ResourceKind, RuntimeConfig, StreamId,
    XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager};

use xlog_ledger::LedgerView;

use crate::support::{KINDS, MIB, Random, TestDirectory, seed};

const TAG: AllocTag = AllocTag("rows");

fn held(runtime: &XlogDeviceRuntime) -> u64 {
    let memory = runtime.device().memory_info().unwrap();
    memory.total - memory.free
}

fn empty(runtime: &XlogDeviceRuntime) {
    runtime.reap_pending().unwrap();
    runtime.trim().unwrap();
    let ledger = runtime.ledger().ledger().unwrap();
    assert_eq!((held(runtime), ledger.used()), (0, 0));
}

#[test]
fn the_memory_of_a_graph_is_one_tag_of_the_ledger_however_often_its_arena_grew() {
    let directory = TestDirectory::new();
    let runtime = Arc::new(directory.runtime(ResourceKind::Pool, 256 * MIB));
    let memory = GpuMemoryManager::with_runtime(runtime.clone());
    let stream = runtime.stream_pool().lease().unwrap();
    let captured = runtime.capture(stream.id(), |scope| {
        let inside = memory.on_stream(scope.id());
        let sizes = [3, 5, 9].map(|count| count * MIB as usize);
        let blocks: Result<Vec<_>, _> =
            sizes.into_iter().map(|size| inside.alloc::<u8>(size)).collect();
        blocks.map(drop)
    });
    let graph = captured.unwrap();
    let view = LedgerView::open(directory.ledger_path()).unwrap();
    view.watch().unwrap();
    let begin = Instant::now();
    let tags = loop {
        let slots = view.snapshot().unwrap().slots;
        let tags: Vec<_> =
            slots.into_iter().filter_map(|slot| slot.tags).flat_map(|tags| tags.tags).collect();
        if !tags.is_empty() {
            break tags;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "no tags are published");
        std::thread::sleep(Duration::from_millis(5));
    };
    let [tag] = &tags[..] else { panic!("{tags:?}") };
    assert_eq!((tag.tag.as_str(), tag.bytes), ("graph 1", graph.arena_bytes() as u64));
    drop((graph, stream, memory));
    empty(&runtime);
}

#[test]
fn without_a_ledger_a_runtime_has_a_budget_all_the_same() {
    for kind in KINDS {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let config =
            RuntimeConfig::default().with_resource(kind).with_budget("1MiB".parse().unwrap());
        let runtime = XlogDeviceRuntime::with_config(device, &config).unwrap();
        let limit = runtime.effective_limit().unwrap();
        assert_eq!((limit.bytes(), limit.ruled_by()), (1 << 20, LimitSource::Configuration));
        assert!(runtime.ledger().ledger().is_none() && runtime.ledger_meter().is_none());
        assert!(runtime.ledger_snapshot().unwrap().is_none());
        assert_eq!(runtime.budget().unwrap().limit(), 1 << 20);
        let all = runtime.allocate(1 << 20, StreamId::DEFAULT, TAG).unwrap();
        let refused = runtime.allocate(1, StreamId::DEFAULT, TAG).unwrap_err();
        assert!(
            matches!(refused, ResourceError::OutOfBudget { remaining: 0, .. }),
            "{kind}: {refused}"
        );
        runtime.deallocate(all).unwrap();
    }
}

/// A limit that was met: its bytes, or what whole granules of the card leave of it.
fn is_refusal(error: &ResourceError) -> bool {
    matches!(error, ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. })
}

/// Single-threaded and random, with another process's use coming and going: never above, and exact after every call.
#[test]
fn what_a_runtime_holds_of_the_device_is_what_the_ledger_counts() {
    let seed = seed("what_a_runtime_holds_of_the_device_is_what_the_ledger_counts");
    for kind in KINDS {
        let mut random = Random::new(seed);
        let directory = TestDirectory::new();
        let limit = 200 * MIB;
        let runtime = directory.runtime(kind, limit);
        let other = directory.ledger(limit);
        let ledger = runtime.ledger().ledger().unwrap();
        let (mut blocks, mut refused) = (Vec::new(), 0);
        for step in 0..400 {
            match random.below_u64(10) {
                0..5 => {
                    let bytes = 1 + random.below_u64(16 * MIB) as usize;
                    match runtime.allocate(bytes, StreamId::DEFAULT, TAG) {
                        Ok(block) => blocks.push(block),
                        Err(error) if is_refusal(&error) => refused += 1,
                        Err(error) => panic!("{kind}, step {step}: {error}"),
                    }
                }
                5..8 if !blocks.is_empty() => {
                    let index = random.below_u64(blocks.len() as u64) as usize;
                    runtime.deallocate(blocks.swap_remove(index)).unwrap();
                }
                8 => {
                    let free = limit.saturating_sub(ledger.used() + other.used());
                    let _ = other.charge(random.below_u64(free + MIB));
                }
                _ => other.release(other.used()).unwrap(),
            }
            let meter = runtime.ledger_meter().unwrap();
            let excess = held(&runtime).saturating_sub(meter.bytes());
            // Only a driver pool grows unforeseen, by one step.
            let allowed = if kind == ResourceKind::Async { 32 * MIB } else { 0 };
            assert!(excess <= allowed, "{kind}, step {step}: {excess} bytes are not counted");
            assert!(ledger.used() + other.used() <= limit);
        }
        assert!(refused > 0, "{kind}: the limit was not met");
        other.release(other.used()).unwrap();
        blocks.into_iter().for_each(|block| runtime.deallocate(block).unwrap());
        empty(&runtime);
        assert_eq!(runtime.ledger_meter().unwrap().failed_releases(), 0, "{kind}");
    }
}

#[test]
fn two_runtimes_share_the_limit_and_a_refusal_names_the_other() {
    for kind in KINDS {
        let directory = TestDirectory::new();
        let limit = 128 * MIB;
        let (one, two) = (directory.runtime(kind, limit), directory.runtime(kind, limit));
        let large = one.allocate(90 << 20, StreamId::DEFAULT, TAG).unwrap();
        match two.allocate(60 << 20, StreamId::DEFAULT, TAG) {
            Err(ResourceError::OutOfBudget { requested, remaining }) => {
                assert_eq!(remaining as u64, limit - held(&one), "{kind}");
                assert!(requested >= 60 << 20);
            }
            other => panic!("{kind}: {other:?}"),
        }
        let report = two.budget().unwrap().last_oom().unwrap();
        let others = report.others.unwrap();
        assert_eq!((others.bytes as u64, others.processes), (held(&one), 1), "{kind}");
        assert_eq!(report.cause, OomCause::OtherProcesses, "{report}");
        one.deallocate(large).unwrap();
        one.reap_pending().unwrap();
        one.trim().unwrap();
        let now = two.allocate(60 << 20, StreamId::DEFAULT, TAG).unwrap();
        two.deallocate(now).unwrap();
        empty(&one);
        empty(&two);
    }
}

fn report_of(runtime: &XlogDeviceRuntime) -> (OomCause, String) {
    let report = runtime.budget().unwrap().last_oom().unwrap();
    (report.cause, report.to_string())
}

/// The budget would grant all of it: the report speaks of the ledger alone, which is the limit that refused.
#[test]
fn the_report_of_a_full_ledger_names_one_limit_and_what_remains_under_it() {
    let directory = TestDirectory::new();
    let limit = 64 * MIB;
    let kind = ResourceKind::Direct;
    let (one, two) = (directory.runtime(kind, limit), directory.runtime(kind, limit));
    let large = one.allocate(62 << 20, StreamId::DEFAULT, TAG).unwrap();
    let refused = two.allocate(4 << 20, StreamId::DEFAULT, TAG).unwrap_err();
    let called = |line| format!("{}:{line}", file!());
    let first = called(line!() - 2);
    let slots = two.ledger().ledger().unwrap().snapshot().unwrap().slots;
    let process = format!("process {} '{}'", std::process::id(), slots[0].name);
    let (requested, remaining) = (4 << 20, 2 << 20);
    assert_eq!(refused, ResourceError::OutOfBudget { requested, remaining });
    let ordinal = two.device().ordinal();
    let expected = format!(
        "out of memory on device {ordinal}: other processes hold the memory
  requested 4194304 bytes for 'rows'; 2097152 remain in the ledger
  called at {first} for stream id 0
  limit of the budget 67108864, reserved 0, of which 0 wait on streams
  1 other process holds 65011712 bytes
  {process}: 65011712 bytes
  hint: trim or end other processes of the ledger, or raise its limit
"
    );
    assert_eq!(report_of(&two), (OomCause::OtherProcesses, expected));
    let json = two.budget().unwrap().last_oom().unwrap().to_json();
    let refusal = r#""refused_by":"ledger","needed":4194304,"remaining":2097152"#;
    assert!(json.contains(refusal), "{json}");
    // One's own bytes are in the way: the same limit, another cause.
    one.deallocate(large).unwrap();
    let own = two.allocate(60 << 20, StreamId::DEFAULT, TAG).unwrap();
    let small = one.allocate(2 << 20, StreamId::DEFAULT, TAG).unwrap();
    two.allocate(4 << 20, StreamId::DEFAULT, TAG).unwrap_err();
    let second = called(line!() - 1);
    let expected = format!(
        "out of memory on device {ordinal}: the limit of the ledger is used up
  requested 4194304 bytes for 'rows'; 2097152 remain in the ledger
  called at {second} for stream id 0
  limit of the budget 67108864, reserved 62914560, of which 0 wait on streams
  1 other process holds 2097152 bytes
  {process}: 2097152 bytes
  tag           62914560 bytes        1 blocks  rows
  hint: free or trim 2 MiB in this process, or raise the limit of the ledger
"
    );
    assert_eq!(report_of(&two), (OomCause::Ledger, expected));
    two.deallocate(own).unwrap();
    one.deallocate(small).unwrap();
    empty(&one);
    empty(&two);
}

/// The runtime's own cache is in its way: it is trimmed before anything is refused.
#[test]
fn a_cache_is_given_up_before_a_request_is_refused() {
    for kind in [ResourceKind::Async, ResourceKind::Pool] {
        let directory = TestDirectory::new();
        let runtime = directory.runtime(kind, 96 * MIB);
        let many: Vec<_> =
            (0..3).map(|_| runtime.allocate(30 << 20, StreamId::DEFAULT, TAG).unwrap()).collect();
        many.into_iter().for_each(|block| runtime.deallocate(block).unwrap());
        runtime.reap_pending().unwrap();
        assert!(runtime.ledger().ledger().unwrap().used() >= 90 * MIB, "{kind}: nothing is cached");
        let all = runtime.allocate(96 << 20, StreamId::DEFAULT, TAG).unwrap();
        runtime.deallocate(all).unwrap();
        empty(&runtime);
    }
}

/// Threads of one runtime at a limit that refuses many of them: the books agree at every look, and at the end.
#[test]
fn threads_at_the_limit_lose_no_byte_of_the_ledger() {
    const THREADS: u64 = 4;
    let seed = seed("threads_at_the_limit_lose_no_byte_of_the_ledger");
    for kind in KINDS {
        let directory = TestDirectory::new();
        let limit = 160 * MIB;
        let runtime = directory.runtime(kind, limit);
        let (refused, excess) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (runtime, refused, excess) = (&runtime, &refused, &excess);
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ (thread << 40));
                    let stream = runtime.stream_pool().lease().unwrap();
                    let mut blocks = Vec::new();
                    for _ in 0..150 {
                        if blocks.is_empty() || random.below_u64(5) < 3 {
                            let bytes = 1 + random.below_u64(14 * MIB) as usize;
                            match runtime.allocate(bytes, stream.id(), TAG) {
                                Ok(block) => blocks.push(block),
                                Err(error) if is_refusal(&error) => {
                                    refused.fetch_add(1, Ordering::Relaxed);
                                    blocks.pop().into_iter().for_each(|block| {
                                        runtime.deallocate(block).unwrap();
                                    });
                                }
                                Err(error) => panic!("{kind}: {error}"),
                            }
                        } else {
                            let index = random.below_u64(blocks.len() as u64) as usize;
                            runtime.deallocate(blocks.swap_remove(index)).unwrap();
                        }
                        let over = held(runtime).saturating_sub(limit);
                        excess.fetch_max(over, Ordering::Relaxed);
                    }
                    blocks.into_iter().for_each(|block| runtime.deallocate(block).unwrap());
                });
            }
        });
        let (refused, excess) = (refused.into_inner(), excess.into_inner());
        println!("{kind}: {refused} refused, at most {excess} bytes above the limit");
        // Only a driver pool grows unforeseen, by one step for each thread at once.
        let allowed = if kind == ResourceKind::Async { THREADS * 32 * MIB } else { 0 };
        assert!(excess <= allowed, "{kind}: {excess} bytes above the limit");
        assert!(refused > 0, "{kind}: the limit was not met");
        empty(&runtime);
        let meter = runtime.ledger_meter().unwrap();
        assert_eq!((meter.bytes(), meter.failed_releases()), (0, 0), "{kind}");
    }
}

/// The device stays open after its runtime: nothing may be left on it that no ledger counts.
#[test]
fn a_runtime_that_ends_takes_its_cache_off_the_device_and_its_bytes_off_the_ledger() {
    for kind in KINDS {
        let directory = TestDirectory::new();
        let watcher = directory.ledger(96 * MIB);
        let runtime = directory.runtime(kind, 96 * MIB);
        let device = runtime.device().clone();
        let block = runtime.allocate(1 << 20, StreamId::DEFAULT, TAG).unwrap();
        runtime.deallocate(block).unwrap();
        device.synchronize().unwrap();
        drop(runtime);
        let memory = device.memory_info().unwrap();
        assert_eq!(memory.total - memory.free, 0, "{kind}");
        let left = watcher.snapshot().unwrap();
        assert_eq!((left.used(), left.granted(), left.slots.len()), (0, 0, 1), "{kind}: {left:?}");
    }
}

#[test]
fn churn_of_many_times_the_limit_never_fails_while_memory_is_free() {
    for kind in KINDS {
        let directory = TestDirectory::new();
        let runtime = directory.runtime(kind, 128 * MIB);
        for round in 0..200 {
            let bytes = (8 << 20) + round * 4096;
            let blocks: Vec<_> =
                (0..8).map(|_| runtime.allocate(bytes, StreamId::DEFAULT, TAG).unwrap()).collect();
            blocks.into_iter().for_each(|block| runtime.deallocate(block).unwrap());
        }
        empty(&runtime);
    }
}

#[test]
fn a_limit_that_is_changed_in_the_ledger_rules_at_once() {
    let directory = TestDirectory::new();
    let runtime = directory.runtime(ResourceKind::Direct, 64 * MIB);
    let first = runtime.allocate(40 << 20, StreamId::DEFAULT, TAG).unwrap();
    directory.ledger(MIB).set_limit(32 * MIB).unwrap();
    assert!(runtime.allocate(1 << 20, StreamId::DEFAULT, TAG).is_err());
    let limit = runtime.refresh_limit().unwrap();
    assert_eq!((limit.bytes(), limit.ruled_by()), (32 << 20, LimitSource::Ledger));
    assert_eq!(runtime.budget().unwrap().limit(), 32 << 20);
    directory.ledger(MIB).set_limit(256 * MIB).unwrap();
    assert_eq!(runtime.refresh_limit().unwrap().bytes(), 256 << 20);
    let second = runtime.allocate(200 << 20, StreamId::DEFAULT, TAG).unwrap();
    runtime.deallocate(first).unwrap();
    runtime.deallocate(second).unwrap();
    empty(&runtime);
}
