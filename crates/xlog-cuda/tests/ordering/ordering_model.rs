//! Random programs through the hooks, many schedules: silent, with the right bytes, and nothing left; and with one needed
//! prepare taken away, reported under every schedule.
//!
//! A failure prints the program's seed and the schedule's; `XLOG_ORDERING_PROGRAM` and `XLOG_ORDERING_SCHEDULE` run just
//! these. `XLOG_ORDERING_SEEDS=1000000` with `--release` is the soak. `XLOG_ORDERING_FROM` names the first seed (0), so that
//! it can be split; this is its second half:
//!
//!     XLOG_ORDERING_FROM=500000 XLOG_ORDERING_SEEDS=500000 cargo test --release -p xlog-cuda --test ordering ordering_model
//!
//! A part needs at least as many programs as the default, or it removes too few prepares.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::support::program::{Program, Step, needed};
use crate::support::rig::Rig;
use crate::support::runner::{Outcome, Runner};
use crate::support::stranger::{Flaw, Stranger};
use crate::support::{Random, number};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{PoolConfig, PoolReuse, StreamPool};
use xlog_testing::{for_each_device, specs};

/// Without a choice of device, all of them; with one, only the tests that run on it.
fn simulated() -> bool {
    specs().iter().all(|spec| spec.starts_with("sim"))
}

fn programs(default: u64) -> std::ops::Range<u64> {
    match number("XLOG_ORDERING_PROGRAM") {
        Some(one) => one..one + 1,
        None => {
            let from = number("XLOG_ORDERING_FROM").unwrap_or(0);
            from..from + number("XLOG_ORDERING_SEEDS").unwrap_or(default)
        }
    }
}

fn schedules(program: u64, count: u64) -> Vec<u64> {
    match number("XLOG_ORDERING_SCHEDULE") {
        Some(one) => vec![one],
        None => (0..count).map(|i| program * 31 + i * 7919).collect(),
    }
}

fn seeded(seed: u64) -> Arc<CudaDevice> {
    Arc::new(CudaDevice::open(&format!("sim:{seed}")).unwrap())
}

/// Says how to run a program again that panicked.
struct Replay(String);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed; run it again with {}", self.0);
        }
    }
}

fn run(program: &Program, device: &Arc<CudaDevice>, place: &str) {
    run_over(program, Rig::new(device), place);
}

fn run_over(program: &Program, rig: Rig, place: &str) {
    if number("XLOG_ORDERING_SCHEDULE").is_some() {
        println!("{place}: {program:#?}");
    }
    let _replay = Replay(place.to_owned());
    let Outcome { problems, races } = Runner::new(program, rig, None).run();
    assert!(races.is_empty(), "{place}: {}", races[0].text);
    assert!(problems.is_empty(), "{place}: {problems:?}");
}

#[test]
fn random_programs_are_silent_keep_their_bytes_and_leave_nothing() {
    if !simulated() {
        return;
    }
    let mut steps = 0;
    for seed in programs(1200) {
        let program = Program::random(seed);
        steps += 2 * program.threads.iter().map(Vec::len).sum::<usize>();
        for schedule in schedules(seed, 2) {
            let place = format!("XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}");
            run(&program, &seeded(schedule), &place);
        }
    }
    println!("{steps} steps");
}

#[test]
fn blocks_that_are_handed_on_for_long_are_silent_whatever_comes_in_between() {
    if !simulated() {
        return;
    }
    for seed in programs(400) {
        let program = Program::handed_on(seed);
        for schedule in schedules(seed, 1) {
            let place = format!("XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}");
            run(&program, &seeded(schedule), &place);
        }
    }
}

#[test]
fn random_programs_on_more_streams_than_a_clock_remembers_are_silent() {
    if !simulated() {
        return;
    }
    for seed in programs(300) {
        let program = Program::crowded(seed);
        let (streams, config) = (program.streams, &pools()[seed as usize % 6]);
        for schedule in schedules(seed, 1) {
            let place = format!("XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}");
            run_over(&program, Rig::with_streams(&seeded(schedule), streams), &place);
            let place = format!("{place} {config:?}");
            let device = seeded(schedule);
            let rig = Rig::pooled_with_streams(&device, config.clone(), streams);
            run_over(&program, rig, &place);
        }
    }
}

/// Pools that have room, that have hardly any, and that do not look at what has completed; the same where ranges are stolen in
/// parts; and one that gives back what is complete whenever it is asked.
fn pools() -> [PoolConfig; 6] {
    let scarce = PoolConfig::default().with_growth(4096).with_maximum(SCARCE);
    let steady = scarce.clone().with_reuse(PoolReuse::deterministic());
    // A stream gets 4 KiB at a time, so that a few streams share out all there is.
    let full = PoolConfig::default().with_growth(64 << 10).with_initial(SCARCE);
    // A unit of a segment is never handed out.
    let full = full.with_maximum(SCARCE + 256).with_magazines(0);
    let strict = full.clone().with_reuse(PoolReuse::deterministic());
    let passing = PoolConfig::default().with_growth(4096).with_decay(Duration::ZERO, 0);
    [PoolConfig::default(), scarce, steady, full, strict, passing]
}

/// Every block of these programs takes 256 bytes; this is little more than they have live.
const SCARCE: usize = 8192;

#[test]
fn random_programs_hold_over_pools() {
    if !simulated() {
        return;
    }
    for seed in programs(400) {
        let program = Program::random(seed);
        for (schedule, config) in schedules(seed, 6).into_iter().zip(pools()) {
            let place = format!(
                "XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule} {config:?}"
            );
            run_over(&program, Rig::pooled(&seeded(schedule), config), &place);
        }
    }
}

#[test]
fn random_programs_that_mix_announced_and_unannounced_work_within_the_rule_are_silent() {
    if !simulated() {
        return;
    }
    for seed in programs(1000) {
        let program = Program::mixed(seed);
        for (n, schedule) in schedules(seed, 2).into_iter().enumerate() {
            let place = format!("XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}");
            run(&program, &seeded(schedule), &place);
            let [roomy, scarce, ..] = pools();
            let config = if n == 0 { roomy } else { scarce };
            run_over(&program, Rig::pooled(&seeded(schedule), config), &place);
        }
    }
}

#[test]
fn random_programs_over_pools_hold_on_concurrent_streams_and_threads() {
    for_each_device(|device| {
        if device.sim().is_some_and(|sim| sim.seed().is_some()) {
            return;
        }
        for seed in programs(60).take(2000) {
            let program = Program::random(seed ^ 0x7654_3210);
            for config in pools() {
                let fresh =
                    device.sim().map(|_| Arc::new(CudaDevice::open(device.spec()).unwrap()));
                let place = format!("XLOG_ORDERING_PROGRAM={seed} {config:?}");
                run_over(&program, Rig::pooled(fresh.as_ref().unwrap_or(device), config), &place);
            }
        }
    });
}

#[test]
fn random_programs_hold_on_concurrent_streams_and_threads() {
    for_each_device(|device| {
        if device.sim().is_some_and(|sim| sim.seed().is_some()) {
            return; // the test above has these
        }
        for seed in programs(150).take(2000) {
            let program = Program::random(seed ^ 0x1234_5678);
            let fresh = device.sim().map(|_| Arc::new(CudaDevice::open(device.spec()).unwrap()));
            let place = format!("XLOG_ORDERING_PROGRAM={seed}");
            run(&program, fresh.as_ref().unwrap_or(device), &place);
        }
    });
}

#[test]
fn a_removed_prepare_is_reported_under_every_schedule() {
    if !simulated() {
        return;
    }
    let (mut removed, mut kinds) = (0_u64, BTreeMap::<String, u64>::new());
    for seed in programs(200).take(20_000) {
        let program = Program::for_control(seed);
        let steps = &program.threads[0];
        let mut candidates = needed(steps, program.streams, program.slots);
        let mut random = Random::new(seed);
        while candidates.len() > 4 {
            candidates.swap_remove(random.below(candidates.len()));
        }
        for without in candidates {
            removed += 1;
            let name = format!("{:?}", steps[without]);
            *kinds.entry(name.split(' ').next().unwrap().to_owned()).or_default() += 1;
            let mut first: Option<Vec<String>> = None;
            for schedule in schedules(seed, 3) {
                let place = format!(
                    "XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}, \
                     step {without} without hooks ({name})"
                );
                let device = seeded(schedule);
                let races = Runner::new(&program, Rig::new(&device), Some(without)).run().races;
                let mut races: Vec<_> = races.into_iter().map(|race| race.verdict).collect();
                assert!(!races.is_empty(), "{place}: silent");
                races.sort();
                match &first {
                    None => first = Some(races),
                    Some(first) => assert_eq!(first, &races, "{place}: another verdict"),
                }
            }
        }
    }
    println!("{removed} prepares removed, by step: {kinds:?}");
    if number("XLOG_ORDERING_PROGRAM").is_none() {
        assert!(removed >= 300, "only {removed} prepares were removed");
        for step in ["Fill", "Mix", "Copy", "Look"] {
            assert!(kinds.contains_key(step), "no {step} was removed");
        }
    }
}

#[test]
fn the_control_is_silent_with_all_its_prepares() {
    if !simulated() {
        return;
    }
    for seed in programs(100).take(20_000) {
        let mut program = Program::for_control(seed);
        let held = (0..program.streams).map(|stream| Step::Hold { stream });
        let steps = held.chain(program.threads[0].clone()).collect();
        program.threads[0] = steps;
        for schedule in schedules(seed, 1) {
            let place = format!("XLOG_ORDERING_PROGRAM={seed} XLOG_ORDERING_SCHEDULE={schedule}");
            run(&program, &seeded(schedule), &place);
        }
    }
}

#[test]
fn a_resource_that_breaks_a_rule_is_found_out() {
    if !simulated() {
        return;
    }
    let flaws = [
        Flaw::NotBornDependent,
        Flaw::ReadIgnoresWrites,
        Flaw::WriteIgnoresReads,
        Flaw::FreeIgnoresReads,
        Flaw::FinishForgetsAll,
        Flaw::FinishForgetsReads,
        Flaw::RecordDoesNothing,
        Flaw::ReapPendingForgets,
    ];
    for flaw in [Flaw::None].into_iter().chain(flaws) {
        let found = (0..100).find(|&seed| {
            let program = Program::random(seed);
            let pool = Arc::new(StreamPool::with_defaults(seeded(seed)));
            let stranger = Arc::new(Stranger::new(pool.device(), &pool, flaw));
            let outcome = Runner::new(&program, Rig::over(pool, stranger), None).run();
            !outcome.races.is_empty() || !outcome.problems.is_empty()
        });
        assert_eq!(found.is_none(), flaw == Flaw::None, "{flaw:?}: found by program {found:?}");
    }
}

#[test]
fn a_schedule_can_be_replayed() {
    if !simulated() {
        return;
    }
    for seed in programs(40).take(1000) {
        let program = Program::random(seed);
        for schedule in schedules(seed, 1) {
            let hashes = [0, 1, 2].map(|_| {
                let device = seeded(schedule);
                let _ = Runner::new(&program, Rig::new(&device), None).run();
                device.sim().unwrap().order_hash()
            });
            assert_eq!(hashes, [hashes[0]; 3], "program {seed} schedule {schedule}");
        }
    }
}
