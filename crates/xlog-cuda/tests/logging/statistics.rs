//! What is counted, and what happens at the edges: refused frees, failing drivers, many names, scopes.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};

use crate::support::{KEYS, ROWS, Recycler, STREAM, direct, twin};
use xlog_cuda::device_runtime::statistics::{
    PEAK_STEP_ALONE_BYTES, PEAK_STEP_BLOCKS, PEAK_STEP_BYTES, PEAK_STEP_PART, ScopeStatistics,
};
use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, QueryScope, StatisticsConfig, StatisticsResource,
    StatisticsScope, StreamId,
};

fn counted() -> StatisticsResource<Recycler> {
    StatisticsResource::over(Recycler::default(), StatisticsConfig::new())
}

#[test]
fn every_account_is_kept() {
    let resource = StatisticsResource::new(Box::new(direct()));
    let rows = resource.allocate(1000, STREAM, ROWS).unwrap();
    let query = QueryScope::enter(4);
    let keys = resource.allocate(3000, StreamId(5), KEYS).unwrap();
    drop(query);
    resource.deallocate(rows).unwrap();
    assert!(resource.allocate(0, STREAM, ROWS).is_err());

    let now = resource.handle().snapshot();
    assert_eq!((now.total.current_bytes, now.total.peak_bytes), (3000, 4000));
    assert_eq!((now.total.current_blocks, now.total.peak_blocks), (1, 2));
    assert_eq!((now.total.total_bytes, now.total.freed_bytes), (4000, 1000));
    assert_eq!((now.total.allocations, now.total.deallocations), (2, 1));
    assert_eq!(now.total.failures, 1);
    assert_eq!(now.failures, [("invalid_request", 1)]);
    let rows = now.tag(ROWS);
    assert_eq!((rows.current_bytes, rows.peak_bytes, rows.failures), (0, 1000, 1));
    assert_eq!(now.by_tag[0].0, KEYS, "who holds most comes first");
    assert_eq!(now.stream(StreamId(5)).current_bytes, 3000);
    assert_eq!(now.stream(STREAM).total_bytes, 1000);
    assert_eq!(now.query(Some(4)).current_bytes, 3000);
    assert_eq!(now.query(None).total_bytes, 1000);
    assert_eq!(now.sizes.classes().collect::<Vec<_>>(), [(10, 1), (12, 1)]);
    assert_eq!(now.requested_bytes, 4000);
    let text = now.to_string();
    assert!(text.contains("rows") && text.contains("2.9 KiB"), "{text}");
    resource.deallocate(keys).unwrap();
}

#[test]
fn a_forged_size_is_not_believed() {
    let resource = counted();
    let mut block = resource.allocate(1000, STREAM, ROWS).unwrap();
    let honest = block.bytes;
    (block.bytes, block.tag, block.alloc_stream) = (7, KEYS, StreamId(9));
    resource.deallocate(block).unwrap();
    let now = resource.handle().snapshot();
    assert_eq!(now.total.current_bytes, 0);
    assert_eq!(now.tag(ROWS).freed_bytes, honest as u64);
    assert_eq!(now.tag(KEYS).freed_bytes, 0);
}

#[test]
fn a_refused_free_counts_nothing_and_a_half_failed_one_counts() {
    let resource = counted();
    let statistics = resource.handle();
    let block = resource.allocate(100, STREAM, ROWS).unwrap();
    let stale = twin(&block);
    resource.deallocate(block).unwrap();
    assert!(resource.deallocate(stale).is_err());
    assert_eq!(statistics.snapshot().total.deallocations, 1);

    resource.inner().half_fails.store(true, Ordering::Relaxed);
    let block = resource.allocate(100, STREAM, ROWS).unwrap();
    assert!(resource.deallocate(block).is_err());
    let now = statistics.snapshot();
    assert_eq!((now.total.current_blocks, now.total.deallocations), (0, 2));
    assert_eq!(now.unknown_frees, 0);
}

#[test]
fn a_refused_free_is_not_counted() {
    let resource = counted();
    let blocks = [10, 20, 30].map(|bytes| resource.allocate(bytes, STREAM, ROWS).unwrap());
    let stale = twin(&blocks[0]);
    blocks.into_iter().for_each(|block| resource.deallocate(block).unwrap());
    assert!(resource.deallocate(stale).is_err());
    let now = resource.handle().snapshot();
    assert_eq!((now.total.current_blocks, now.total.deallocations), (0, 3));
}

#[test]
fn blocks_from_before_are_told_apart() {
    let inner = Arc::new(Recycler::default());
    let before = inner.allocate(100, STREAM, ROWS).unwrap();
    let resource = StatisticsResource::over(inner, StatisticsConfig::new());
    resource.deallocate(before).unwrap();
    let now = resource.handle().snapshot();
    assert_eq!((now.unknown_frees, now.total.deallocations, now.total.current_bytes), (1, 0, 0));
}

#[test]
fn more_queries_and_streams_than_there_is_room_for_lose_no_byte() {
    let resource = counted();
    let kept: Vec<_> = (0..300)
        .map(|number| {
            let _query = QueryScope::enter(number);
            resource.allocate(64, StreamId(number as u32), ROWS).unwrap()
        })
        .collect();
    for number in 1000..6000 {
        let _query = QueryScope::enter(number);
        let block = resource.allocate(64, StreamId(number as u32), ROWS).unwrap();
        resource.deallocate(block).unwrap();
    }
    let now = resource.handle().snapshot();
    for (name, sum, parts) in [
        ("streams", now.other_streams, now.by_stream.iter().map(|part| part.1).collect::<Vec<_>>()),
        ("queries", now.other_queries, now.by_query.iter().map(|part| part.1).collect()),
    ] {
        let all = |of: fn(&xlog_cuda::device_runtime::statistics::Usage) -> u64| {
            of(&sum) + parts.iter().map(of).sum::<u64>()
        };
        assert_eq!(all(|usage| usage.current_bytes as u64), 300 * 64, "{name}");
        assert_eq!(all(|usage| usage.allocations), 5300, "{name}");
        assert_eq!(all(|usage| usage.deallocations), 5000, "{name}");
        assert!(parts.len() <= 1024, "{name}");
    }
    // A query with live blocks keeps its account as long as there is room.
    assert_eq!(now.query(Some(7)).current_bytes, 64);
    kept.into_iter().for_each(|block| resource.deallocate(block).unwrap());
    assert_eq!(resource.handle().snapshot().total.current_blocks, 0);
}

#[test]
fn peaks_of_threads_that_alternate_are_within_the_step() {
    let resource = counted();
    let statistics = resource.handle();
    // Each holds 1 MiB while the other holds 1 MiB: the peak is 2 MiB, whoever looks.
    let held = 1 << 20;
    let first = resource.allocate(held, STREAM, ROWS).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let second = resource.allocate(held, STREAM, ROWS).unwrap();
            resource.deallocate(second).unwrap();
        });
    });
    resource.deallocate(first).unwrap();
    let now = statistics.snapshot();
    for peak in [now.total.peak_bytes, now.tag(ROWS).peak_bytes] {
        assert!(peak.abs_diff(2 * held) <= 15 * PEAK_STEP_BYTES, "{peak}");
    }
}

#[test]
fn a_thread_that_was_alone_is_off_by_no_more_than_its_step_once_another_comes() {
    let resource = counted();
    let statistics = resource.handle();
    // Alone it goes up and down below its peak, and that stays exact.
    let held = 3 << 20;
    let kept = resource.allocate(held, STREAM, ROWS).unwrap();
    for _ in 0..100 {
        let block = resource.allocate(held, STREAM, ROWS).unwrap();
        resource.deallocate(block).unwrap();
    }
    assert_eq!(statistics.snapshot().total.peak_bytes, 2 * held);
    assert_eq!(statistics.snapshot().tag(ROWS).current_bytes, held);
    // It goes further than its step, up and down, and at each end another one comes and goes.
    let mut most = 2 * held;
    for high in [4, 8, 16, 1, 32] {
        let blocks: Vec<_> =
            (0..high).map(|_| resource.allocate(held, STREAM, ROWS).unwrap()).collect();
        let other = 40 * held;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let second = resource.allocate(other, STREAM, ROWS).unwrap();
                resource.deallocate(second).unwrap();
            });
        });
        most = most.max((1 + high) * held + other);
        let peak = statistics.snapshot().total.peak_bytes;
        let off = PEAK_STEP_ALONE_BYTES.max(most / PEAK_STEP_PART);
        assert!(peak.abs_diff(most) <= off, "{peak} of {most}");
        blocks.into_iter().for_each(|block| resource.deallocate(block).unwrap());
    }
    resource.deallocate(kept).unwrap();
    assert_eq!(statistics.snapshot().total.current_bytes, 0);
}

#[test]
fn threads_that_only_free_after_a_refusal_tell_as_the_others_do() {
    const THREADS: usize = 8;
    let resource = StatisticsResource::new(Box::new(direct()));
    let statistics = resource.handle();
    let (held, each) = (512 << 10, 12);
    let allocate = || resource.allocate(held, STREAM, ROWS).unwrap();
    let mut shares: Vec<Vec<_>> =
        (0..THREADS).map(|_| (0..each).map(|_| allocate()).collect()).collect();
    std::thread::scope(|scope| {
        for share in shares.drain(..) {
            let resource = &resource;
            scope.spawn(move || {
                assert!(resource.allocate(0, STREAM, ROWS).is_err());
                share.into_iter().for_each(|block| resource.deallocate(block).unwrap());
            });
        }
    });
    // All are gone, and who comes now knows it, within what each of them may keep to itself.
    let most = THREADS * each * held;
    let again: Vec<_> = (0..THREADS * each).map(|_| allocate()).collect();
    let peak = statistics.snapshot().total.peak_bytes;
    let off = (THREADS * PEAK_STEP_BYTES).max(most / PEAK_STEP_PART);
    assert!(peak.abs_diff(most) <= off, "{peak} of {most}");
    again.into_iter().for_each(|block| resource.deallocate(block).unwrap());
}

#[test]
fn the_peak_of_many_threads_is_within_the_parts_that_each_may_keep_to_itself() {
    const THREADS: usize = 8;
    const BLOCKS: usize = 200;
    let resource = counted();
    let statistics = resource.handle();
    // Sizes differ, so that the shards tell of themselves at different times; all stand at their most at once.
    let size = |thread: usize, n: usize| 4096 * (1 + (thread * 31 + n * 17) % 40);
    let most: usize =
        (0..THREADS).flat_map(|thread| (0..BLOCKS).map(move |n| size(thread, n))).sum();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (resource, barrier) = (&resource, &barrier);
            scope.spawn(move || {
                let allocate = |n| resource.allocate(size(thread, n), STREAM, ROWS).unwrap();
                let blocks: Vec<_> = (0..BLOCKS).map(allocate).collect();
                barrier.wait();
                blocks.into_iter().for_each(|block| resource.deallocate(block).unwrap());
            });
        }
    });
    let now = statistics.snapshot();
    assert_eq!((now.total.current_bytes, now.total.current_blocks), (0, 0));
    let off = |most: usize, least: usize| (most / PEAK_STEP_PART).max((THREADS - 1) * least);
    let (bytes, blocks) = (off(most, PEAK_STEP_BYTES), off(THREADS * BLOCKS, PEAK_STEP_BLOCKS));
    for usage in [now.total, now.tag(ROWS)] {
        assert!(usage.peak_bytes.abs_diff(most) <= bytes, "{} of {most}", usage.peak_bytes);
        assert!(usage.peak_blocks.abs_diff(THREADS * BLOCKS) <= blocks, "{}", usage.peak_blocks);
    }
}

#[test]
fn scopes_nest_and_tell_the_thread_from_the_rest() {
    let resource = counted();
    let statistics = resource.handle();
    let before = resource.allocate(64 * 100, STREAM, ROWS).unwrap();
    let outer = StatisticsScope::enter(&statistics);
    let block = resource.allocate(64 * 50, STREAM, ROWS).unwrap();
    resource.deallocate(block).unwrap();
    {
        let inner = StatisticsScope::enter(&statistics);
        let block = resource.allocate(64 * 10, STREAM, ROWS).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let block = resource.allocate(64 * 4000, STREAM, KEYS).unwrap();
                resource.deallocate(block).unwrap();
            });
        });
        resource.deallocate(block).unwrap();
        let report = inner.finish();
        assert_eq!((report.thread.peak_bytes, report.thread.allocations), (640, 1));
        assert_eq!((report.global.start_bytes, report.global.allocations), (6400, 2));
        assert!(report.global.peak_bytes.abs_diff(64 * 4110) <= 15 * PEAK_STEP_BYTES);
    }
    let report = outer.report();
    assert_eq!((report.thread.peak_bytes, report.thread.allocations), (3200, 2));
    assert!(report.global.peak_bytes >= 64 * 4000);
    resource.deallocate(before).unwrap();
    let report = outer.finish();
    assert_eq!(report.thread.freed_bytes, 64 * 160);

    // A later scope does not see the peak of an earlier one; the resource keeps it.
    let later = StatisticsScope::enter(&statistics);
    let block = resource.allocate(64, STREAM, ROWS).unwrap();
    resource.deallocate(block).unwrap();
    assert_eq!(later.finish().global.peak_bytes, 64);
    assert!(statistics.snapshot().total.peak_bytes >= 64 * 4000);
}

#[test]
fn a_scope_of_one_resource_does_not_see_another() {
    let (one, other) = (counted(), counted());
    let scope = StatisticsScope::enter(&one.handle());
    let block = other.allocate(64, STREAM, ROWS).unwrap();
    other.deallocate(block).unwrap();
    let report = scope.finish();
    assert_eq!(
        (report.thread, report.global),
        (ScopeStatistics::default(), ScopeStatistics::default())
    );
}

#[test]
fn equal_tags_at_different_addresses_are_one_account() {
    let resource = counted();
    let text: &'static str = String::from("rows").leak();
    let blocks = [ROWS, AllocTag(text)].map(|tag| resource.allocate(64, STREAM, tag).unwrap());
    assert_eq!(resource.handle().snapshot().tag(ROWS).current_blocks, 2);
    blocks.into_iter().for_each(|block| resource.deallocate(block).unwrap());
}
