//! Sorted by their order counters, the records of all threads are a history that could have happened.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc;

use crate::support::{Random, Recycler, Replay, STREAM, seeds};
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, DeviceMemoryResource, InMemorySink, LogAction, LogRecord,
    LoggingResource,
};

/// Replays a log. Panics where it could not have happened.
fn replay(log: &[LogRecord]) -> usize {
    let mut live: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut last_order = 0;
    let mut peak = 0;
    for record in log {
        assert!(record.order_counter > last_order, "{record:?} after order {last_order}");
        last_order = record.order_counter;
        let (ptr, generation) = (record.ptr.unwrap(), record.generation.unwrap().0);
        match record.action {
            LogAction::Allocate => {
                let end = ptr + record.granted.unwrap() as u64;
                let before = live.range(..end).next_back();
                let overlap = before.filter(|(_, (before_end, _))| *before_end > ptr);
                assert!(overlap.is_none(), "{record:?} overlaps {overlap:?}");
                live.insert(ptr, (end, generation));
                peak = peak.max(live.len());
            }
            LogAction::Deallocate => {
                let freed = live.remove(&ptr);
                assert_eq!(freed.map(|block| block.1), Some(generation), "{record:?}");
            }
            other => unreachable!("{other}"),
        }
    }
    assert!(live.is_empty(), "{live:?}");
    peak
}

#[test]
fn the_history_of_eight_threads_is_legal() {
    for seed in seeds(4) {
        let _replay = Replay(seed);
        let sink = Arc::new(InMemorySink::new());
        let resource = LoggingResource::over(Recycler::default(), sink.clone());
        // Each thread frees what its neighbour allocated, so that addresses go round.
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..8).map(|_| mpsc::channel::<DeviceBlock>()).unzip();
        let mut senders: Vec<_> = senders.into_iter().map(Some).collect();
        senders.rotate_left(1);
        std::thread::scope(|scope| {
            for (number, (receiver, sender)) in receivers.into_iter().zip(&mut senders).enumerate()
            {
                let sender = sender.take().unwrap();
                let resource = &resource;
                scope.spawn(move || {
                    let mut random = Random::new(seed * 8 + number as u64);
                    for _ in 0..2_000 {
                        let bytes = 1 + random.below(256);
                        let block = resource.allocate(bytes, STREAM, AllocTag("ring")).unwrap();
                        match random.below(2) {
                            0 => resource.deallocate(block).unwrap(),
                            _ => sender.send(block).unwrap(),
                        }
                        while let Ok(block) = receiver.try_recv() {
                            resource.deallocate(block).unwrap();
                        }
                    }
                    drop(sender);
                    for block in receiver {
                        resource.deallocate(block).unwrap();
                    }
                });
            }
        });
        let log = sink.snapshot();
        assert_eq!(log.len(), 8 * 2_000 * 2);
        assert!(replay(&log) > 1);
        // Each thread's own records are in its order of time too.
        let mut last: HashMap<u64, u128> = HashMap::new();
        for record in &log {
            let last = last.entry(record.thread_id).or_default();
            assert!(record.timestamp_nanos >= *last, "{record:?}");
            *last = record.timestamp_nanos;
        }
        assert_eq!(last.len(), 8);
    }
}

#[test]
#[should_panic(expected = "overlaps")]
fn a_free_numbered_after_its_call_would_be_found_out() {
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    let first = resource.allocate(64, STREAM, AllocTag("a")).unwrap();
    resource.deallocate(first).unwrap();
    let second = resource.allocate(64, STREAM, AllocTag("b")).unwrap();
    resource.deallocate(second).unwrap();
    let mut log = sink.snapshot();
    // As if another thread had the address before the free took its number.
    let (freed, again) = (log[1].order_counter, log[2].order_counter);
    (log[1].order_counter, log[2].order_counter) = (again, freed);
    log.sort_by_key(|record| record.order_counter);
    replay(&log);
}

#[test]
fn two_resources_in_one_sink_have_one_history() {
    let sink = Arc::new(InMemorySink::new());
    let two = [(); 2].map(|()| LoggingResource::over(Recycler::default(), sink.clone()));
    for turn in 0..10 {
        let resource = &two[turn % 2];
        let block = resource.allocate(64, STREAM, AllocTag("a")).unwrap();
        resource.deallocate(block).unwrap();
    }
    let log = sink.snapshot();
    assert!(log.windows(2).all(|two| two[0].order_counter < two[1].order_counter));
    assert!(log.windows(2).all(|two| two[0].timestamp_nanos <= two[1].timestamp_nanos + 1_000_000));
}
