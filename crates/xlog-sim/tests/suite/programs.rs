//! Random programs, many schedules: a well-ordered program is silent and computes what its order demands; the same
//! program with a needed order taken away is reported under every schedule.
//!
//! A failure prints the program's seed and the schedule's; `XLOG_SIM_PROGRAM` and `XLOG_SIM_SCHEDULE` run just these.
//! `XLOG_SIM_SEEDS` asks for more programs than the default. `XLOG_SIM_FROM` names the first seed (0), so that a long run
//! can be split; this is the second half of 20000:
//!
//!     XLOG_SIM_FROM=10000 XLOG_SIM_SEEDS=10000 cargo test --release -p xlog-sim --test suite programs
//!
//! A part needs at least as many programs as the default, or it shows too few races.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::support::Random;
use crate::support::program::{Program, Shape};
use xlog_driver::{PoolOptions, ReusePolicy};
use xlog_sim::{RaceKind, SimConfig, SimDevice};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn programs(default: u64) -> std::ops::Range<u64> {
    match number("XLOG_SIM_PROGRAM") {
        Some(one) => one..one + 1,
        None => {
            let from = number("XLOG_SIM_FROM").unwrap_or(0);
            from..from + number("XLOG_SIM_SEEDS").unwrap_or(default)
        }
    }
}

fn schedules(program: u64, count: u64) -> Vec<u64> {
    match number("XLOG_SIM_SCHEDULE") {
        Some(one) => vec![one],
        None => (0..count).map(|i| program * 31 + i * 7919).collect(),
    }
}

/// A device with small mappings, so that many of them cost little.
fn open(seed: Option<u64>) -> Arc<SimDevice> {
    let mut config = SimConfig::default().with_granularity(4096);
    config.seed = seed;
    SimDevice::open(config).unwrap()
}

fn seeded(seed: u64) -> Arc<SimDevice> {
    open(Some(seed))
}

fn shape(random: &mut Random) -> Shape {
    Shape {
        streams: 2 + random.below(7),
        steps: 1000 + random.below(2000),
        blocks: 4 + random.below(20),
        gates: random.chance(50),
        pools: 1 + random.below(4),
        trims: random.chance(50),
        maps: random.chance(50),
    }
}

/// A small program over one pool that keeps what it has.
fn small(streams: usize, steps: usize, blocks: usize) -> Shape {
    Shape { streams, steps, blocks, gates: false, pools: 1, trims: false, maps: false }
}

fn options(random: &mut Random) -> PoolOptions {
    let reuse = ReusePolicy {
        follow_event_dependencies: random.chance(75),
        opportunistic: random.chance(75),
        internal_dependencies: random.chance(75),
    };
    PoolOptions { reuse, release_threshold: release_threshold(random), ..PoolOptions::default() }
}

/// Everything goes back at each synchronisation, one segment stays, all stays.
fn release_threshold(random: &mut Random) -> u64 {
    [0, 32 << 20, u64::MAX][random.below(3)]
}

#[test]
fn well_ordered_programs_are_silent_and_compute_what_their_order_demands() {
    let mut steps = 0;
    for seed in programs(500) {
        let mut random = Random::new(seed);
        let shape = shape(&mut random);
        let program = Program::well_ordered(&mut random, &shape);
        let options = options(&mut random);
        assert!(program.races().is_empty(), "program {seed} is not well ordered by its own model");
        let expected = program.expected();
        for schedule in schedules(seed, 1) {
            let device = seeded(schedule);
            let found = program.run(&device, &options);
            let place = format!("XLOG_SIM_PROGRAM={seed} XLOG_SIM_SCHEDULE={schedule}");
            assert!(device.races().is_empty(), "{place}: {}", device.races()[0]);
            assert!(found == expected, "{place}: wrong bytes");
        }
        steps += program.steps.len();
    }
    println!("{steps} steps");
}

#[test]
fn well_ordered_programs_survive_memory_so_scarce_that_every_free_is_reused() {
    for seed in programs(100) {
        let mut random = Random::new(seed ^ 0xabcd);
        let shape = small(2 + random.below(5), 800, 8);
        let program = Program::well_ordered(&mut random, &shape);
        let expected = program.expected();
        // Ten blocks of at most 512 bytes: new memory is soon out, and a pool must wait for frees.
        let options = PoolOptions { max_bytes: Some(10 * 512), ..PoolOptions::default() };
        for schedule in schedules(seed, 2) {
            let device = seeded(schedule);
            let found = program.run(&device, &options);
            let place = format!("XLOG_SIM_PROGRAM={seed} XLOG_SIM_SCHEDULE={schedule}");
            assert!(device.races().is_empty(), "{place}: {}", device.races()[0]);
            assert!(found == expected, "{place}: wrong bytes");
        }
    }
}

#[test]
fn well_ordered_programs_are_silent_on_concurrent_streams() {
    for seed in programs(40) {
        let mut random = Random::new(seed ^ 0x1234);
        let shape = shape(&mut random);
        let program = Program::well_ordered(&mut random, &shape);
        let device = open(None);
        let found = program.run(&device, &options(&mut random));
        assert!(device.races().is_empty(), "XLOG_SIM_PROGRAM={seed}: {}", device.races()[0]);
        assert!(found == program.expected(), "XLOG_SIM_PROGRAM={seed}: wrong bytes");
    }
}

/// The step of a kernel, from the name it was launched under.
fn step_of(operation: &str) -> Option<usize> {
    operation.strip_prefix('k')?.parse().ok()
}

#[test]
fn a_removed_dependency_is_reported_under_every_schedule() {
    let mut tried = 0_u64;
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    for seed in programs(120) {
        let mut random = Random::new(seed ^ 0x7777);
        let shape = Shape {
            gates: random.chance(30),
            pools: 1 + random.below(3),
            maps: random.chance(50),
            ..small(2 + random.below(5), 300, 3 + random.below(8))
        };
        let program = Program::well_ordered(&mut random, &shape);
        // Completion must not decide which memory is reused, nor which goes back to the device: that would be another
        // program under another schedule.
        let options = PoolOptions { reuse: ReusePolicy::DETERMINISTIC, ..PoolOptions::default() };
        let dependencies = program.dependencies();
        for _ in 0..6 {
            let Some(&dropped) = dependencies.get(random.below(dependencies.len().max(1))) else {
                continue;
            };
            let broken = program.without(dropped);
            let promised = broken.races();
            if promised.is_empty() {
                continue; // another path orders the same steps
            }
            tried += 1;
            let pairs: HashSet<(usize, usize)> = promised.iter().map(|&(a, b, _)| (a, b)).collect();
            let mut first: Option<Vec<String>> = None;
            for schedule in schedules(seed, 8) {
                let device = seeded(schedule);
                let place = format!(
                    "XLOG_SIM_PROGRAM={seed} XLOG_SIM_SCHEDULE={schedule}, step {dropped} removed"
                );
                broken.run(&device, &options);
                assert!(!device.races().is_empty(), "{place}: {promised:?} not reported");
                for race in device.races() {
                    let steps = (step_of(&race.first.operation), step_of(&race.second.operation));
                    if let (Some(a), Some(b)) = steps {
                        let known = pairs.contains(&(a, b)) || pairs.contains(&(b, a));
                        let reuse = race.kind == RaceKind::UseAcrossReuse;
                        assert!(
                            known || reuse || race.first.tag != race.second.tag,
                            "{place}: false {race}"
                        );
                    }
                    *seen.entry(race.kind.to_string()).or_default() += 1;
                }
                let mut reports: Vec<String> = device
                    .races()
                    .iter()
                    .map(|r| format!("{} #{} #{}", r.kind, r.first.sequence, r.second.sequence))
                    .collect();
                reports.sort();
                match &first {
                    None => first = Some(reports),
                    Some(first) => assert_eq!(first, &reports, "{place}: another verdict"),
                }
            }
        }
    }
    println!("{tried} broken programs under 8 schedules each, reports by kind: {seen:?}");
    if number("XLOG_SIM_PROGRAM").is_none() {
        assert!(tried >= 200, "only {tried} were broken");
        let kinds = [
            RaceKind::WriteWrite,
            RaceKind::ReadWrite,
            RaceKind::UseBeforeAllocation,
            RaceKind::UseAfterFree,
            RaceKind::UseAcrossReuse,
            RaceKind::UnmapUnderUse,
        ];
        for kind in kinds {
            assert!(seen.contains_key(&kind.to_string()), "no program showed a {kind}");
        }
    }
}

#[test]
fn the_same_large_programs_with_one_needed_dependency_removed_are_reported() {
    let mut tried = 0_u64;
    for seed in programs(500) {
        let mut random = Random::new(seed);
        let shape = shape(&mut random);
        let program = Program::well_ordered(&mut random, &shape);
        let release_threshold = release_threshold(&mut random);
        let reuse = ReusePolicy::DETERMINISTIC;
        let options = PoolOptions { reuse, release_threshold, ..PoolOptions::default() };
        let dependencies = program.dependencies();
        let broken = (0..8).find_map(|_| {
            let dropped = *dependencies.get(random.below(dependencies.len().max(1)))?;
            let broken = program.without(dropped);
            (!broken.races().is_empty()).then_some((dropped, broken))
        });
        let Some((dropped, broken)) = broken else {
            continue;
        };
        tried += 1;
        for schedule in schedules(seed, 2) {
            let device = seeded(schedule);
            broken.run(&device, &options);
            assert!(
                !device.races().is_empty(),
                "XLOG_SIM_PROGRAM={seed} XLOG_SIM_SCHEDULE={schedule}, step {dropped} removed: silent"
            );
        }
    }
    println!("{tried} broken programs");
    assert!(number("XLOG_SIM_PROGRAM").is_some() || tried >= 450, "only {tried} were broken");
}

#[test]
fn scarce_memory_may_order_what_the_program_does_not_but_never_accuses_it_wrongly() {
    // A pool that must wait for a free orders two streams by itself, and whether it must depends on what has completed.
    // A removed dependency can then be made good under one schedule and not under another: counted, not promised.
    let (mut reported, mut silent) = (0_u64, 0_u64);
    for seed in programs(60) {
        let mut random = Random::new(seed ^ 0x2222);
        let shape = small(3, 300, 8);
        let program = Program::well_ordered(&mut random, &shape);
        let dependencies = program.dependencies();
        let dropped = dependencies[random.below(dependencies.len())];
        let broken = program.without(dropped);
        let unordered: HashSet<(usize, usize)> =
            broken.races().iter().map(|&(a, b, _)| (a, b)).collect();
        let options = PoolOptions { max_bytes: Some(10 * 512), ..PoolOptions::default() };
        for schedule in schedules(seed, 4) {
            let device = seeded(schedule);
            broken.run(&device, &options);
            let place = format!("XLOG_SIM_PROGRAM={seed} XLOG_SIM_SCHEDULE={schedule}");
            let races = device.races();
            if races.is_empty() {
                silent += u64::from(!unordered.is_empty());
                continue;
            }
            reported += 1;
            assert!(!unordered.is_empty(), "{place}: false {}", races[0]);
            for race in races {
                let steps = (step_of(&race.first.operation), step_of(&race.second.operation));
                if let (Some(a), Some(b)) = steps
                    && race.first.tag == race.second.tag
                {
                    let known = unordered.contains(&(a, b)) || unordered.contains(&(b, a));
                    assert!(known, "{place}: false {race}");
                }
            }
        }
    }
    println!("{reported} runs reported, {silent} made good by the pool's own waits");
    assert!(reported > 0);
}

#[test]
fn the_same_seed_executes_the_same_order_and_others_do_not() {
    let mut hashes = HashSet::new();
    let mut random = Random::new(5);
    let shape = Shape { gates: true, maps: true, ..small(6, 800, 12) };
    let program = Program::well_ordered(&mut random, &shape);
    for schedule in 0..50 {
        let run = || {
            let device = seeded(schedule);
            program.run(&device, &PoolOptions::default());
            device.order_hash()
        };
        let (once, again) = (run(), run());
        assert_eq!(once, again, "seed {schedule} gave two orders");
        hashes.insert(once);
    }
    assert_eq!(hashes.len(), 50, "two seeds gave one order");
}
