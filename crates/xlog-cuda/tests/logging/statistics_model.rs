//! Random programs against a model that adds everything up in one place.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Mutex;

use crate::support::{Random, Recycler, Replay, seeds};
use xlog_cuda::device_runtime::statistics::Usage;
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, DeviceMemoryResource, QueryScope, StatisticsConfig, StatisticsResource,
    StreamId,
};

const TAGS: [AllocTag; 4] = [AllocTag("a"), AllocTag("b"), AllocTag("c"), AllocTag("d")];

#[derive(Default)]
struct Model {
    total: Usage,
    tags: HashMap<AllocTag, Usage>,
    streams: HashMap<StreamId, Usage>,
    queries: HashMap<Option<u64>, Usage>,
}

type Key = (AllocTag, StreamId, Option<u64>);

impl Model {
    fn each(&mut self, key: Key, change: impl Fn(&mut Usage)) {
        change(&mut self.total);
        change(self.tags.entry(key.0).or_default());
        change(self.streams.entry(key.1).or_default());
        change(self.queries.entry(key.2).or_default());
    }

    fn allocate(&mut self, key: Key, bytes: usize) {
        self.each(key, |usage| {
            usage.current_bytes += bytes;
            usage.current_blocks += 1;
            usage.total_bytes += bytes as u64;
            usage.allocations += 1;
            usage.peak_bytes = usage.peak_bytes.max(usage.current_bytes);
            usage.peak_blocks = usage.peak_blocks.max(usage.current_blocks);
        });
    }

    fn free(&mut self, key: Key, bytes: usize) {
        self.each(key, |usage| {
            usage.current_bytes -= bytes;
            usage.current_blocks -= 1;
            usage.freed_bytes += bytes as u64;
            usage.deallocations += 1;
        });
    }
}

fn without_peaks(mut usage: Usage) -> Usage {
    (usage.peak_bytes, usage.peak_blocks) = (0, 0);
    usage
}

fn compare(resource: &StatisticsResource<Recycler>, model: &Model, due: fn(Usage) -> Usage) {
    let now = resource.handle().snapshot();
    assert_eq!(due(now.total), due(model.total));
    for (tag, usage) in &model.tags {
        assert_eq!(due(now.tag(*tag)), due(*usage), "{tag}");
    }
    for (stream, usage) in &model.streams {
        assert_eq!(due(now.stream(*stream)), due(*usage), "{stream}");
    }
    for (query, usage) in &model.queries {
        assert_eq!(due(now.query(*query)), due(*usage), "{query:?}");
    }
    assert_eq!(resource.bytes_outstanding(), model.total.current_bytes);
}

fn step(
    random: &mut Random,
    has_large: bool,
    resource: &StatisticsResource<Recycler>,
    live: &mut Vec<(DeviceBlock, Key)>,
    mut told: impl FnMut(Key, usize, bool),
) {
    if live.is_empty() || random.below(100) < 52 {
        let query = match random.below(4) {
            0 => None,
            query => Some(query as u64),
        };
        let _scope = query.map(QueryScope::enter);
        let key = (TAGS[random.below(4)], StreamId(random.below(3) as u32), query);
        // A few are above the step at which shards tell each other; half of the programs have none of those.
        let most = if has_large && random.below(10) == 0 { 1 << 20 } else { 1 << 10 };
        let bytes = 1 + random.below(most);
        let block = resource.allocate(bytes, key.1, key.0).unwrap();
        told(key, block.bytes, true);
        live.push((block, key));
    } else {
        let (block, key) = live.swap_remove(random.below(live.len()));
        let bytes = block.bytes;
        resource.deallocate(block).unwrap();
        told(key, bytes, false);
    }
}

#[test]
fn one_thread_agrees_with_the_model_peaks_and_all() {
    for seed in seeds(20) {
        let _replay = Replay(seed);
        let mut random = Random::new(seed);
        let resource = StatisticsResource::over(Recycler::default(), StatisticsConfig::new());
        let (mut model, mut live) = (Model::default(), Vec::new());
        for turn in 0..1500 {
            step(&mut random, seed % 2 == 0, &resource, &mut live, |key, bytes, is_allocation| {
                if is_allocation { model.allocate(key, bytes) } else { model.free(key, bytes) }
            });
            if turn % 100 == 0 {
                compare(&resource, &model, |usage| usage);
            }
        }
        compare(&resource, &model, |usage| usage);
        assert_eq!(resource.handle().live_blocks().len(), live.len());
    }
}

#[test]
fn eight_threads_that_free_each_others_blocks_agree_with_the_model() {
    for seed in seeds(4) {
        let _replay = Replay(seed);
        let resource = StatisticsResource::over(Recycler::default(), StatisticsConfig::new());
        let model = Mutex::new(Model::default());
        let shared: Mutex<Vec<(DeviceBlock, Key)>> = Mutex::default();
        let frees: Mutex<Vec<(Key, usize, bool)>> = Mutex::default();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (resource, model, shared, frees) = (&resource, &model, &shared, &frees);
                scope.spawn(move || {
                    let mut random = Random::new(seed * 100 + thread);
                    let (mut live, mut changes) = (Vec::new(), Vec::new());
                    for turn in 0..1500 {
                        step(
                            &mut random,
                            seed % 2 == 0,
                            resource,
                            &mut live,
                            |key, bytes, is_allocation| {
                                changes.push((key, bytes, is_allocation));
                            },
                        );
                        if turn % 50 == 0 {
                            // What this thread holds goes to another, which frees it.
                            std::mem::swap(&mut live, &mut *shared.lock().unwrap());
                            let now = resource.handle().snapshot().total;
                            assert_eq!(
                                now.allocations - now.deallocations,
                                now.current_blocks as u64
                            );
                            assert_eq!(now.total_bytes - now.freed_bytes, now.current_bytes as u64);
                            assert!(now.peak_bytes >= now.current_bytes);
                        }
                    }
                    // The order of threads does not matter to sums: all allocations, then all frees.
                    let mut model = model.lock().unwrap();
                    for &(key, bytes, _) in changes.iter().filter(|change| change.2) {
                        model.allocate(key, bytes);
                    }
                    shared.lock().unwrap().append(&mut live);
                    drop(model);
                    changes.retain(|change| !change.2);
                    frees.lock().unwrap().append(&mut changes);
                });
            }
        });
        let mut model = model.into_inner().unwrap();
        for (key, bytes, _) in frees.into_inner().unwrap() {
            model.free(key, bytes);
        }
        compare(&resource, &model, without_peaks);
        for (block, key) in shared.into_inner().unwrap() {
            model.free(key, block.bytes);
            resource.deallocate(block).unwrap();
        }
        compare(&resource, &model, without_peaks);
        assert!(resource.handle().live_blocks().is_empty());
    }
}
