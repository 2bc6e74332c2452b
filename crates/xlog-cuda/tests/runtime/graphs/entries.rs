//! The memory of a graph in statistics, budget and log: one entry by tag, however often its arena grew. The ledger publishes the entries of the
//! statistics.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::support::{assert_empty, manager};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, CaptureOptions, Graph, LedgerSetting, RuntimeConfig, XlogDeviceRuntime,
};
use xlog_testing::for_each_device;
use xlog_trace::{Action, Reader, Source};

const MIB: usize = 1 << 20;

/// A graph whose arena grows for each of its blocks.
fn grown(runtime: &Arc<XlogDeviceRuntime>, options: &CaptureOptions, sizes: &[usize]) -> Graph {
    let memory = manager(runtime);
    let stream = runtime.stream_pool().lease().unwrap();
    let captured = runtime.capture_with(stream.id(), options, |scope| {
        let inside = memory.on_stream(scope.id());
        let blocks: Vec<_> =
            sizes.iter().map(|size| inside.alloc::<u8>(*size)).collect::<Result<_, _>>()?;
        drop(blocks);
        Ok(())
    });
    captured.unwrap()
}

/// The tags of a log, and the bytes that it shows as live at its end, of any tag.
fn in_log(path: &std::path::Path) -> (Vec<String>, i64) {
    let mut reader = Reader::open(path).unwrap();
    let mut live: BTreeMap<String, i64> = BTreeMap::new();
    while let Some(record) = reader.next_record().unwrap() {
        let tag = reader.names().text_or_empty(record.tag()).to_owned();
        let bytes = record.bytes().unwrap_or(0) as i64;
        match record.action() {
            Action::Allocate => *live.entry(tag).or_default() += bytes,
            Action::Deallocate => *live.entry(tag).or_default() -= bytes,
            _ => {}
        }
    }
    let left = live.values().map(|bytes| bytes.abs()).sum();
    (live.into_keys().collect(), left)
}

#[test]
fn the_memory_of_a_graph_that_grew_is_one_entry_everywhere() {
    for_each_device(|device| {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("xlog-graph-entries-{}-{number}.xtrace", std::process::id());
        let log = std::env::temp_dir().join(name);
        let config = RuntimeConfig::default().with_log(&log).with_ledger(LedgerSetting::Off);
        let device = Arc::new(CudaDevice::open(device.spec()).unwrap());
        let runtime = Arc::new(XlogDeviceRuntime::with_config(device, &config).unwrap());
        let first = grown(&runtime, &CaptureOptions::default(), &[3 * MIB, 5 * MIB, 9 * MIB]);
        let second = grown(&runtime, &CaptureOptions::default(), &[2 * MIB, 7 * MIB]);
        let named = CaptureOptions::default().with_tag(AllocTag("decode"));
        let third = grown(&runtime, &named, &[MIB, 4 * MIB]);
        let expected: Vec<(AllocTag, usize)> =
            [&first, &second, &third].map(|graph| (graph.tag(), graph.arena_bytes())).to_vec();
        let sorted = |mut entries: Vec<(AllocTag, usize)>| {
            entries.sort_unstable_by_key(|(tag, _)| tag.0);
            entries
        };
        assert_eq!(
            expected.iter().map(|(tag, _)| tag.0).collect::<Vec<_>>(),
            ["graph 1", "graph 2", "decode"]
        );
        let expected = sorted(expected);

        let statistics = runtime.usage().unwrap().snapshot().by_tag;
        let held = statistics.iter().filter(|(_, usage)| usage.current_bytes > 0);
        let held = held.map(|(tag, usage)| (*tag, usage.current_bytes)).collect();
        assert_eq!(sorted(held), expected, "statistics");
        assert!(statistics.iter().any(|(_, usage)| usage.current_blocks > 1), "an arena grew");
        let charged = runtime.budget().unwrap().usage_by_tag();
        let charged = charged.into_iter().map(|usage| (usage.tag, usage.bytes)).collect();
        assert_eq!(sorted(charged), expected, "budget");

        // A number is used again when its graph is gone.
        let bytes = first.arena_bytes();
        drop(first);
        let fourth = grown(&runtime, &CaptureOptions::default(), &[3 * MIB, 5 * MIB, 9 * MIB]);
        assert_eq!((fourth.tag().0, fourth.arena_bytes()), ("graph 1", bytes));
        drop((second, third, fourth));
        assert_empty(&runtime);
        drop(runtime);
        let (taken, left) = in_log(&log);
        assert_eq!(taken, ["decode", "graph 1", "graph 2"], "log");
        assert_eq!(left, 0, "what is taken and given back has one tag");
        std::fs::remove_file(&log).unwrap();
    });
}
