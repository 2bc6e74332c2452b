//! Blocks that are live, and the report of them.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroU32;
use std::time::Duration;

use crate::support::{KEYS, ROWS, Recycler, STREAM};
use xlog_cuda::device_runtime::{
    Backtraces, DeviceMemoryResource, QueryScope, StatisticsConfig, StatisticsResource, StreamId,
};

fn counted(backtraces: Backtraces) -> StatisticsResource<Recycler> {
    let config = StatisticsConfig::new().with_backtraces(backtraces);
    StatisticsResource::over(Recycler::default(), config)
}

#[test]
fn live_blocks_are_told_oldest_first_with_all_that_is_known() {
    let resource = counted(Backtraces::Off);
    let old = resource.allocate(1000, StreamId(2), ROWS).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let _query = QueryScope::enter(6);
    let young = resource.allocate(64, STREAM, KEYS).unwrap();
    let gone = resource.allocate(64, STREAM, KEYS).unwrap();
    resource.deallocate(gone).unwrap();

    let live = resource.handle().live_blocks();
    assert_eq!(live.len(), 2);
    assert_eq!((live[0].ptr, live[0].bytes, live[0].tag), (old.ptr, old.bytes, ROWS));
    assert_eq!((live[0].stream, live[0].query_id), (Some(StreamId(2)), None));
    assert_eq!((live[1].generation, live[1].query_id), (young.generation, Some(6)));
    // The clock ticks every few milliseconds.
    assert!(live[0].age >= Duration::from_millis(15), "{:?}", live[0].age);
    assert!(live[1].age < live[0].age);
    assert!(live.iter().all(|block| block.backtrace.is_none()));
}

#[inline(never)]
fn allocate_in_a_function_with_a_name(resource: &StatisticsResource<Recycler>) -> u64 {
    resource.allocate(4096, STREAM, ROWS).unwrap().ptr
}

#[test]
fn the_report_names_tags_ages_and_the_place_of_the_allocation() {
    let resource = counted(Backtraces::All);
    let statistics = resource.handle();
    assert_eq!(statistics.live_report().to_string(), "device 3: no live blocks");
    let ptr = allocate_in_a_function_with_a_name(&resource);
    let _key = resource.allocate(64, STREAM, KEYS).unwrap();
    drop(resource);

    // The handle still knows when the resource is gone, as at the end of a runtime.
    let report = statistics.live_report();
    assert_eq!((report.blocks, report.bytes, report.tags.len()), (2, 4160, 2));
    assert_eq!((report.tags[0].tag, report.tags[0].bytes), (ROWS, 4096));
    let text = report.to_string();
    assert!(text.starts_with("device 3: 2 live blocks, 4.1 KiB\n"), "{text}");
    assert!(text.contains(&format!("{ptr:#x} 4 KiB (rows)")), "{text}");
    // A stripped binary has no names to tell.
    let here = std::backtrace::Backtrace::force_capture().to_string();
    let named = here.contains("the_report_names_tags");
    assert!(!named || text.contains("allocate_in_a_function_with_a_name"), "{text}");
    assert!(!text.contains("force_capture"), "{text}");
    assert!(text.lines().count() <= 24, "{text}");
}

#[test]
fn a_report_of_many_blocks_and_tags_fits_one_screen() {
    let resource = counted(Backtraces::Sampled(NonZeroU32::MIN));
    for number in 0..500_usize {
        let tag =
            xlog_cuda::device_runtime::AllocTag::intern(&format!("leak of kind {}", number % 40));
        let _ = resource.allocate(64 * (1 + number % 7), STREAM, tag).unwrap();
    }
    let text = resource.handle().live_report().to_string();
    assert!(text.contains("500 live blocks") && text.contains("and 30 more tags"), "{text}");
    assert!(text.lines().count() <= 40, "{text}");
}

#[test]
fn one_in_so_many_allocations_keeps_its_backtrace() {
    let resource = counted(Backtraces::Sampled(NonZeroU32::new(10).unwrap()));
    let blocks: Vec<_> = (0..100).map(|_| resource.allocate(64, STREAM, ROWS).unwrap()).collect();
    let statistics = resource.handle();
    let traced = || statistics.live_blocks().iter().filter(|b| b.backtrace.is_some()).count();
    assert_eq!(traced(), 10);
    for block in blocks {
        resource.deallocate(block).unwrap();
    }
    assert_eq!(traced(), 0);
}
