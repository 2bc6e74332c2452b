//! Random sizes: RMM's random allocations, bit for bit, and small blocks.

use std::hint::black_box;
use std::time::Instant;

use crate::generators::{CHECKS, Fnv, Minstd, log_uniform};
use crate::rows::Rows;
use crate::workloads::{LEAST_IDLE_RUNS, MIB, Maker, Nothing, Peer, given_up, limits, runs_again};

#[derive(Default)]
struct RandomRun {
    seconds: f64,
    operations: usize,
    failed: usize,
    peak_live: usize,
    peak: u64,
    fnv: u64,
    is_cut: bool,
}

/// A block that lies on no more cache lines than it has to.
#[repr(align(64))]
struct Live<B>(B);

/// A checked run also hashes what it does and stops after `limit` seconds.
fn random_run<const CHECKED: bool, P: Peer>(
    peer: &P,
    stream: &P::Stream,
    n: usize,
    max: usize,
    limit: f64,
) -> RandomRun {
    const CAP: u64 = 16_000 << 20;
    let mut random = Minstd::new(1);
    let mut live: Vec<Live<P::Block>> = Vec::with_capacity(n);
    let mut sizes: Vec<u64> = Vec::with_capacity(n);
    let mut run = RandomRun::default();
    let mut fnv = Fnv::new();
    let (mut allocated, mut bytes) = (0, 0_u64);
    let start = Instant::now();
    for step in 0..2 * n {
        let size = random.draw(1, (max * MIB) as u64);
        let choice = if live.is_empty() { 0 } else { random.draw(0, 99) };
        let allocates = live.is_empty() || choice < 73 && allocated < n && bytes + size < CAP;
        run.operations += 1;
        if allocates {
            match peer.allocate(black_box(size as usize), stream) {
                Ok(block) => {
                    live.push(Live(block));
                    sizes.push(size);
                    allocated += 1;
                    bytes += size;
                    run.peak = run.peak.max(bytes);
                    if CHECKED {
                        run.peak_live = run.peak_live.max(live.len());
                        fnv.add(1);
                        fnv.add(size);
                    }
                    continue;
                }
                Err(_) => run.failed += 1,
            }
            if live.is_empty() {
                continue;
            }
        }
        let at = random.draw(0, n as u64 - 1) as usize % live.len();
        let Live(block) = live.swap_remove(at);
        bytes -= sizes.swap_remove(at);
        peer.free(black_box(block));
        if CHECKED {
            fnv.add(2);
            fnv.add(at as u64);
            if step % 64 == 0 && start.elapsed().as_secs_f64() > limit {
                run.is_cut = true;
                break;
            }
        }
    }
    run.seconds = start.elapsed().as_secs_f64();
    run.fnv = fnv.0;
    live.into_iter().for_each(|Live(block)| peer.free(block));
    run
}

pub fn random<M: Maker>(rows: &Rows<'_>, n: usize, maker: &M) -> Result<(), String> {
    let (max, limit) = (rows.request.parameter, rows.options.seconds);
    if maker.taken_and_total().is_some_and(|(_, total)| total < 64 << 30) {
        return Err("needs a device of 64 GiB".to_owned());
    }
    let before = maker.taken();
    let peer = maker.make(false)?;
    let stream = peer.stream()?;
    let warmed = random_run::<true, _>(&peer, &stream, n, max, limits::RANDOM);
    peer.synchronize();
    if warmed.is_cut {
        let (done, each) = (warmed.operations, warmed.seconds * 1e9 / warmed.operations as f64);
        let reason = given_up(limits::RANDOM, done, 2 * n);
        return Err(format!("{reason}; {each:.0} ns each so far"));
    }
    let is_wrong = |check: &&(usize, usize, usize, u64, u64)| {
        (check.0, check.1) == (n, max)
            && (check.2, check.3, check.4) != (warmed.peak_live, warmed.peak, warmed.fnv)
    };
    if warmed.failed == 0
        && let Some(wanted) = CHECKS.iter().find(is_wrong)
    {
        // A run that did something else is not the published workload: no figure would mean anything.
        eprintln!(
            "random {n} of {max} MiB: peak live {}, peak bytes {}, hash {:016x}; expected {wanted:?}",
            warmed.peak_live, warmed.peak, warmed.fnv
        );
        std::process::exit(3);
    }
    let held = maker.taken();
    let (mut best, mut turns, mut lost) = (f64::INFINITY, 0, 0);
    let mut start = Instant::now();
    while start.elapsed().as_secs_f64() + warmed.seconds < limit / 4.0 {
        random_run::<false, _>(&peer, &stream, n, max, 0.0);
        peer.synchronize();
    }
    start = Instant::now();
    while runs_again(turns, start.elapsed().as_secs_f64(), limit) {
        let run = random_run::<false, _>(&peer, &stream, n, max, 0.0);
        peer.synchronize();
        (best, turns, lost) = (best.min(run.seconds), turns + 1, lost + run.failed);
    }
    if lost > 0 {
        return Err(format!("{lost} allocations failed"));
    }
    let idle = (0..turns.max(LEAST_IDLE_RUNS))
        .map(|_| random_run::<false, _>(&Nothing, &(), n, max, 0.0).seconds)
        .fold(f64::INFINITY, f64::min);
    rows.value((best - idle) * 1e9 / warmed.operations as f64, "ns");
    rows.also("-idle", max, idle * 1e9 / warmed.operations as f64, "ns");
    if let (Ok(before), Ok(held)) = (before, held) {
        rows.also("-held", max, held.saturating_sub(before) as f64 / warmed.peak as f64, "ratio");
    }
    Ok(())
}

/// Blocks of 4 B to 4 KiB: what the allocator holds of the device for each byte that was live at the peak.
pub fn small<M: Maker>(rows: &Rows<'_>, is_log: bool, maker: &M) -> Result<(), String> {
    let most = rows.request.parameter;
    let before = maker.taken()?;
    let peer = maker.make(true)?;
    let stream = peer.stream()?;
    let mut random = Minstd::new(1);
    let mut live: Vec<(u64, P<M>)> = Vec::with_capacity(most);
    let (mut bytes, mut peak) = (0_u64, 0_u64);
    let start = Instant::now();
    let mut outcome = Ok(());
    for step in 0..11 * most {
        if step % 256 == 255 && start.elapsed().as_secs_f64() > limits::SMALL {
            outcome = Err(given_up(limits::SMALL, step, 11 * most));
            break;
        }
        if step >= most && !live.is_empty() && random.draw(0, 1) == 0 {
            let at = random.draw(0, live.len() as u64 - 1) as usize;
            let (size, block) = live.swap_remove(at);
            bytes -= size;
            peer.free(block);
        } else if live.len() < most {
            let size =
                if is_log { log_uniform(&mut random, 4, 4096) } else { random.draw(4, 4096) };
            match peer.allocate(size as usize, &stream) {
                Ok(block) => live.push((size, block)),
                Err(_) => {
                    outcome = Err("an allocation failed".to_owned());
                    break;
                }
            }
            bytes += size;
            peak = peak.max(bytes);
        }
    }
    peer.synchronize();
    let held = maker.taken()?.saturating_sub(before);
    live.into_iter().for_each(|(_, block)| peer.free(block));
    peer.synchronize();
    outcome?;
    rows.value(held as f64 / peak as f64, "ratio");
    Ok(())
}

type P<M> = <<M as Maker>::Peer as Peer>::Block;
