//! Random allocations and frees by many threads on many streams.
//!
//! Each thread allocates and frees its share. A fifth of its frees goes through a shared list of a few blocks, so that
//! other threads free blocks they did not allocate.

use std::sync::atomic::{AtomicBool, Ordering};

use xlog_cuda::Result;
use xlog_cuda::XlogError;
use xlog_cuda::driver::sync::Mutex;
use xlog_workloads::stack::{Stack, run_threads};
use xlog_workloads::{Minstd, draw_size};

use super::Plan;
use super::blocks::{Checks, Counts, LiveBlock};
use super::report::Report;

/// The maximum number of live blocks of one thread.
const MAX_LIVE: u64 = 500;

struct ChurnShared {
    left: Mutex<Vec<LiveBlock>>,
    counts: Mutex<Counts>,
    error: Mutex<Option<XlogError>>,
    stop: AtomicBool,
}

pub(super) fn run(
    plan: &Plan,
    checks: &Checks<'_>,
    stack: &Stack,
    report: &mut Report,
) -> Result<()> {
    let shared = ChurnShared {
        left: Mutex::new(Vec::new()),
        counts: Mutex::new(Counts::default()),
        error: Mutex::new(None),
        stop: AtomicBool::new(false),
    };
    let threads = u64::from(plan.threads);
    run_threads(stack.device(), plan.threads, |thread| {
        let thread = u64::from(thread);
        // Block numbers are divided among the threads like the allocations.
        let (from, to) =
            (plan.allocations * thread / threads, plan.allocations * (thread + 1) / threads);
        let (live, counts) = (Vec::new(), Counts::default());
        let mut worker = Worker { checks, shared: &shared, live, counts };
        if let Err(error) = worker.run(plan, thread, from..to) {
            shared.stop.store(true, Ordering::Relaxed);
            shared.error.lock().get_or_insert(error);
        }
        shared.counts.lock().add(&worker.counts);
    });
    let ChurnShared { left, counts, error, .. } = shared;
    let mut counts = counts.into_inner();
    report.note_pool(None, stack.snapshot().as_ref());
    let mut outcome = error.into_inner().map_or(Ok(()), Err);
    for held in left.into_inner() {
        let freed = checks.free(held, &mut counts);
        outcome = outcome.and(freed);
    }
    report.note_blocks(&counts);
    outcome
}

struct Worker<'a> {
    checks: &'a Checks<'a>,
    shared: &'a ChurnShared,
    live: Vec<LiveBlock>,
    counts: Counts,
}

impl Worker<'_> {
    fn run(&mut self, plan: &Plan, thread: u64, numbers: std::ops::Range<u64>) -> Result<()> {
        let mut outcome = self.steps(plan, thread, numbers);
        while let Some(held) = self.live.pop() {
            let freed = self.checks.free(held, &mut self.counts);
            outcome = outcome.and(freed);
        }
        outcome
    }

    fn steps(&mut self, plan: &Plan, thread: u64, numbers: std::ops::Range<u64>) -> Result<()> {
        let mut random = Minstd::new(plan.seed.wrapping_add(thread.wrapping_mul(7919)));
        for number in numbers {
            if self.shared.stop.load(Ordering::Relaxed) {
                break;
            }
            let bytes = draw_size(&mut random, plan.sizes, 4.min(plan.max), plan.max);
            let held = self.checks.allocate(number, bytes, &mut self.counts)?;
            let full = held.is_none() || self.live.len() as u64 >= MAX_LIVE;
            self.live.extend(held);
            // The live set grows slowly to its maximum, and shrinks when memory is exhausted.
            let frees = if full { 2 } else { u64::from(random.draw(0, 99) < 90) };
            for _ in 0..frees {
                self.free_one(&mut random)?;
            }
        }
        Ok(())
    }

    fn free_one(&mut self, random: &mut Minstd) -> Result<()> {
        let Some(at) = random.draw(0, MAX_LIVE).checked_rem(self.live.len() as u64) else {
            return Ok(());
        };
        let mut held = self.live.swap_remove(at as usize);
        if random.draw(0, 4) == 0 {
            let mut left = self.shared.left.lock();
            left.push(held);
            if left.len() < 8 {
                return Ok(());
            }
            // Free a block that has waited, most likely one of another thread.
            held = left.swap_remove(0);
        }
        self.checks.free(held, &mut self.counts)
    }
}
