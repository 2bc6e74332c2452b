//! Sampled stacks in the records of allocations.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::support::{Directory, ROWS};
use xlog_cuda::device_runtime::{
    Backtraces, DirectCudaResource, InMemorySink, LogAction, LoggingResource, RuntimeConfig,
    StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager};
use xlog_testing::left_out;
use xlog_trace::{Action, Reader, Source, Summary, stack_frames};

/// Whether each of some allocations has a stack, and the frames of the first.
fn sampled(stacks: Backtraces, allocations: usize) -> (Vec<bool>, Vec<String>) {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let sink = Arc::new(InMemorySink::new());
    let direct = DirectCudaResource::new(Arc::clone(&device), 0);
    let resource = LoggingResource::new(Box::new(direct), sink.clone()).with_stacks(stacks);
    let runtime = XlogDeviceRuntime::with_resource(device, 0, streams, Box::new(resource));
    for _ in 0..allocations {
        a_function_that_allocates(&runtime);
    }
    let log = sink.snapshot();
    assert!(log.iter().all(|r| r.action == LogAction::Allocate || r.stack.is_none()));
    let allocated: Vec<_> = log.iter().filter(|r| r.action == LogAction::Allocate).collect();
    let frames = allocated[0].stack.map(stack_frames).unwrap_or_default();
    (allocated.iter().map(|record| record.stack.is_some()).collect(), frames)
}

#[inline(never)]
fn a_function_that_allocates(runtime: &XlogDeviceRuntime) {
    let block = runtime.allocate(64, StreamId::DEFAULT, ROWS).unwrap();
    runtime.deallocate(block).unwrap();
}

/// Whether this binary has names for its functions; one that was stripped shows places in files, and those of libraries by name.
fn has_names(frames: &[String]) -> bool {
    let is_named = frames.iter().any(|frame| frame.contains("::") || frame.contains(".rs:"));
    if !is_named {
        left_out("names of functions in stacks", "this binary has no symbols");
    }
    is_named
}

#[test]
fn stacks_are_off_unless_asked_for() {
    assert_eq!(sampled(Backtraces::Off, 3), (vec![false; 3], Vec::new()));
    assert_eq!(RuntimeConfig::default().statistics.backtraces, Backtraces::Off);
}

#[test]
fn a_stack_names_the_functions_that_called_from_the_innermost_on() {
    let (has, frames) = sampled(Backtraces::All, 2);
    assert_eq!(has, [true, true]);
    if !has_names(&frames) {
        return;
    }
    let at = |name: &str| frames.iter().position(|frame| frame.contains(name));
    let inner = at("a_function_that_allocates").unwrap_or_else(|| panic!("{frames:#?}"));
    // With line tables alone, functions are named without their path.
    let outer = frames.iter().skip(inner).any(|frame| frame.contains("sampled"));
    assert!(outer, "{frames:#?}");
    assert!(inner < 3, "frames of the runtime come first: {frames:#?}");
}

#[test]
fn one_allocation_in_so_many_has_a_stack() {
    let (has, _) = sampled(Backtraces::Sampled(NonZeroU32::new(4).unwrap()), 12);
    let due: Vec<bool> = (0..12).map(|number| number % 4 == 0).collect();
    assert_eq!(has, due);
}

#[test]
fn files_have_resolved_stacks_and_a_summary_counts_by_them() {
    let folder = Directory::new();
    for name in ["stacks.xtrace", "stacks.csv"] {
        let file = folder.file(name);
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let config = RuntimeConfig::default().with_log(&file).with_stacks(Backtraces::All);
        let runtime = Arc::new(XlogDeviceRuntime::with_config(device, &config).unwrap());
        for _ in 0..3 {
            a_function_that_allocates(&runtime);
        }
        let kept = GpuMemoryManager::with_runtime(Arc::clone(&runtime)).alloc::<u8>(512).unwrap();
        let live = runtime.usage().unwrap().live_blocks();
        assert!(live[0].backtrace.is_some(), "the statistics have them too");
        drop(kept);
        drop(runtime);
        let mut reader = Reader::open(&file).unwrap();
        while let Some(record) = reader.next_record().unwrap() {
            assert_eq!(record.stack().is_some(), record.action() == Action::Allocate);
        }
        let summary = Summary::of(&mut Reader::open(&file).unwrap()).unwrap();
        let frames = summary.by_stack.iter().flat_map(|(frames, _)| frames);
        let all: Vec<String> = frames.map(|frame| frame.to_string()).collect();
        assert!(!all.is_empty(), "{name}");
        if !has_names(&all) {
            continue;
        }
        let of = |(frames, _): &&(Vec<Arc<str>>, _)| {
            frames.iter().any(|frame| frame.contains("a_function_that_allocates"))
        };
        let allocations: u64 =
            summary.by_stack.iter().filter(of).map(|(_, usage)| usage.allocations).sum();
        assert_eq!(allocations, 3, "{name}: {:#?}", summary.by_stack);
    }
}

#[test]
fn the_setting_is_read_from_text_and_refuses_what_it_is_not() {
    let parse = |text: &str| text.parse::<Backtraces>();
    assert_eq!(parse("off").unwrap(), Backtraces::Off);
    assert_eq!(parse("all").unwrap(), Backtraces::All);
    assert_eq!(parse("sampled:7").unwrap(), Backtraces::Sampled(NonZeroU32::new(7).unwrap()));
    for bad in ["", "on", "sampled", "sampled:0", "sampled:x", "all:1"] {
        let said = parse(bad).unwrap_err().to_string();
        assert!(said.contains("sampled:N"), "{said}");
    }
}
