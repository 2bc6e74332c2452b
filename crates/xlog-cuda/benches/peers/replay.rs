//! What comes from a log, and what goes on for long: how fast it is, and how much memory it takes.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use crate::generators::{Minstd, log_uniform};
use crate::rows::Rows;
use crate::workloads::{LEAST_IDLE_RUNS, Maker, Nothing, Peer, given_up, limits, runs_again};

/// One operation: a block is allocated in a slot, or, with 0 bytes, freed.
struct Step {
    stream: usize,
    slot: usize,
    bytes: usize,
}

#[derive(Default)]
struct Plan {
    steps: Vec<Step>,
    streams: usize,
    slots: usize,
    peak: u64,
}

/// A plan is lines of `stream slot bytes`. It ends with nothing live.
fn read_plan(path: &Path) -> Result<Plan, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("no plan {}: {error}", path.display()))?;
    let wrong = |line: &str| format!("not a plan: {} has the line '{line}'", path.display());
    let mut plan = Plan::default();
    let mut live: Vec<usize> = Vec::new();
    let mut now = 0_u64;
    for line in text.lines() {
        let numbers: Vec<usize> = line
            .split(' ')
            .map(|word| word.parse().map_err(|_| wrong(line)))
            .collect::<Result<_, _>>()?;
        let [stream, slot, bytes] = numbers[..] else { return Err(wrong(line)) };
        if slot >= live.len() {
            live.resize(slot + 1, 0);
        }
        if (bytes == 0) == (live[slot] == 0) {
            return Err(wrong(line));
        }
        now = if bytes == 0 { now - live[slot] as u64 } else { now + bytes as u64 };
        live[slot] = bytes;
        plan.peak = plan.peak.max(now);
        plan.streams = plan.streams.max(stream + 1);
        plan.steps.push(Step { stream, slot, bytes });
    }
    plan.slots = live.len();
    if plan.steps.is_empty() || now != 0 {
        return Err(format!("not a plan: {} ends with {now} bytes live", path.display()));
    }
    Ok(plan)
}

/// The seconds of one run, which stops after `limit` of them.
fn run<P: Peer>(peer: &P, streams: &[P::Stream], plan: &Plan, limit: f64) -> Result<f64, String> {
    let mut live: Vec<Option<P::Block>> = (0..plan.slots).map(|_| None).collect();
    let mut outcome = Ok(());
    let start = Instant::now();
    for (done, step) in plan.steps.iter().enumerate() {
        if done % 1024 == 1023 && start.elapsed().as_secs_f64() > limit {
            outcome = Err(given_up(limit, done, plan.steps.len()));
            break;
        }
        match live[step.slot].take() {
            Some(block) => peer.free(block),
            None => match peer.allocate(black_box(step.bytes), &streams[step.stream]) {
                Ok(block) => live[step.slot] = Some(block),
                Err(_) => {
                    outcome = Err("an allocation failed".to_owned());
                    break;
                }
            },
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    live.into_iter().flatten().for_each(|block| peer.free(block));
    outcome.map(|()| seconds)
}

/// A log by one thread, in its order, on as many streams as it has.
pub fn replay<M: Maker>(rows: &Rows<'_>, kind: &str, maker: &M) -> Result<(), String> {
    let plans = rows.options.plans.as_ref().ok_or("no plans were given")?;
    let plan = read_plan(&plans.join(format!("{kind}.plan")))?;
    let limit = rows.options.seconds;
    let before = maker.taken();
    let peer = maker.make(true)?;
    let streams: Vec<_> = (0..plan.streams).map(|_| peer.stream()).collect::<Result<_, _>>()?;
    let warmed = run(&peer, &streams, &plan, limits::REPLAY)?;
    peer.synchronize();
    let held = maker.taken();
    let (mut best, mut turns) = (f64::INFINITY, 0);
    let mut start = Instant::now();
    while start.elapsed().as_secs_f64() + warmed < limit / 4.0 {
        run(&peer, &streams, &plan, f64::INFINITY)?;
        peer.synchronize();
    }
    start = Instant::now();
    while runs_again(turns, start.elapsed().as_secs_f64(), limit) {
        best = best.min(run(&peer, &streams, &plan, f64::INFINITY)?);
        peer.synchronize();
        turns += 1;
    }
    let mut idle = f64::INFINITY;
    for _ in 0..turns.max(LEAST_IDLE_RUNS) {
        idle = idle.min(run(&Nothing, &vec![(); plan.streams], &plan, f64::INFINITY)?);
    }
    rows.value((best - idle) * 1e9 / plan.steps.len() as f64, "ns");
    if let (Ok(before), Ok(held)) = (before, held) {
        let ratio = held.saturating_sub(before) as f64 / plan.peak as f64;
        rows.also("-held", rows.request.parameter, ratio, "ratio");
    }
    Ok(())
}

/// The largest size of each tenth of a churn, in KiB.
const PHASES: [u64; 10] = [4, 1024, 64, 16384, 256, 4096, 65536, 16, 1024, 65536];

/// A program that changes its mind: ten phases with sizes of their own, at most 4 GiB live.
pub fn churn<M: Maker>(rows: &Rows<'_>, maker: &M) -> Result<(), String> {
    const MOST: u64 = 4 << 30;
    let per_phase = rows.request.parameter / 10;
    let before = maker.taken()?;
    let peer = maker.make(true)?;
    let stream = peer.stream()?;
    let mut random = Minstd::new(1);
    let mut live = Vec::new();
    let (mut bytes, mut peak, mut spent, mut worst) = (0_u64, 0_u64, 0.0, 0.0_f64);
    let mut seen = Vec::new();
    let mut outcome = Ok(());
    'all: for (phase, largest) in PHASES.into_iter().enumerate() {
        let held = |peak: u64| {
            Ok::<f64, String>(maker.taken()?.saturating_sub(before) as f64 / peak.max(1) as f64)
        };
        for part in 1..=10 {
            let start = Instant::now();
            for _ in 0..per_phase / 10 {
                let size = log_uniform(&mut random, 256, largest << 10);
                if live.is_empty() || random.draw(0, 99) < 60 && bytes + size <= MOST {
                    match peer.allocate(size as usize, &stream) {
                        Ok(block) => live.push((size, block)),
                        Err(_) => {
                            outcome = Err("an allocation failed".to_owned());
                            break 'all;
                        }
                    }
                    bytes += size;
                    peak = peak.max(bytes);
                } else {
                    let at = random.draw(0, live.len() as u64 - 1) as usize;
                    let (size, block) = live.swap_remove(at);
                    bytes -= size;
                    peer.free(block);
                }
            }
            spent += start.elapsed().as_secs_f64();
            if spent > limits::CHURN {
                let done = phase * per_phase + part * (per_phase / 10);
                outcome = Err(given_up(limits::CHURN, done, 10 * per_phase));
                break 'all;
            }
            // The first tenth has too little live to say anything.
            if phase > 0 {
                worst = worst.max(held(peak)?);
            }
        }
        seen.push(held(peak)?);
    }
    live.into_iter().for_each(|(_, block)| peer.free(block));
    peer.synchronize();
    outcome?;
    rows.value(worst, "ratio");
    rows.also("-time", rows.request.parameter, spent * 1e9 / (per_phase * 10) as f64, "ns");
    for (at, ratio) in seen.into_iter().enumerate() {
        rows.also("-at", 10 * (at + 1), ratio, "ratio");
    }
    Ok(())
}
