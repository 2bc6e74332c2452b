//! The books under threads, judged inside the resource below: never above the limit at any instant, no refusal that was not true at
//! some instant of its call, nothing left at the end.
//!
//! `XLOG_BUDGET_SOAK=1` runs 16 threads of a million operations each.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Counting, TAG, patient};
use xlog_base::Random;
use xlog_cuda::device_runtime::{
    DeviceMemoryResource, GlobalDeviceBudget, ResourceError, StreamId,
};

const LIMIT: usize = 8_000;
const LARGEST: u64 = 2000;

struct Counts {
    requests: AtomicUsize,
    refused: AtomicUsize,
    failed: AtomicUsize,
}

/// Run by `threads` that begin together.
fn run(threads: usize, operations: usize, placed: bool, retire: bool, seed: u64) {
    println!(
        "seed {seed}: {threads} threads, {operations} operations, placed {placed}, retire {retire}"
    );
    let inner = Counting::new(placed);
    inner.set(|state| {
        (state.fail, state.fail_one_in) = (Some(ResourceError::Driver("injected".to_owned())), 16);
        state.retire = retire.then_some(xlog_cuda::device_runtime::BlockState::Retired);
    });
    // After a deadline, operations in flight count as used: it must not pass because a machine is busy.
    let budget = GlobalDeviceBudget::over(inner.clone(), LIMIT).with_policy(patient());
    let counts = Counts {
        requests: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        failed: AtomicUsize::new(0),
    };
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (budget, inner, counts, start) = (&budget, &inner, &counts, &start);
            scope.spawn(move || {
                start.wait();
                let mut random = Random::new(seed.wrapping_mul(1000) + thread as u64);
                let mut blocks = Vec::new();
                for _ in 0..operations {
                    let turn = random.next_u64();
                    if turn % 4 < 3 || blocks.is_empty() {
                        let bytes = 1 + random.below_u64(LARGEST) as usize;
                        inner.begin_call(thread);
                        counts.requests.fetch_add(1, Ordering::Relaxed);
                        match budget.allocate(bytes, StreamId::DEFAULT, TAG) {
                            Ok(block) => blocks.push(block),
                            Err(ResourceError::OutOfBudget { requested, remaining }) => {
                                counts.refused.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(requested, bytes);
                                assert!(remaining < requested, "{remaining} bytes remained for {bytes}");
                                let most = inner.most_in_call(thread);
                                assert!(most + bytes > LIMIT, "{bytes} bytes fitted at every instant: at most {most} were used");
                            }
                            Err(ResourceError::Driver(_)) => {
                                counts.failed.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(other) => panic!("{other}"),
                        }
                    } else {
                        let at = (turn >> 8) as usize % blocks.len();
                        budget.deallocate(blocks.swap_remove(at)).unwrap();
                    }
                }
                blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap());
            });
        }
    });
    budget.reap_pending().unwrap();
    let most = inner.state.lock().unwrap().most;
    assert!(most <= LIMIT, "{most} bytes were used at an instant");
    assert_eq!((inner.used(), budget.reserved_bytes(), budget.pending_bytes()), (0, 0, 0));
    assert!(budget.usage_by_tag().is_empty());
    let [requests, refused, failed] = [&counts.requests, &counts.refused, &counts.failed]
        .map(|count| count.load(Ordering::Relaxed));
    println!("{requests} requests, {refused} refused, {failed} failed below, at most {most} used");
    assert!(3 * refused >= requests, "the limit is not tight: {refused} of {requests} refused");
    assert!(failed > 0);
    // Nothing was lost: all of it can be had.
    inner.set(|state| state.fail = None);
    let all = budget.allocate(LIMIT, StreamId::DEFAULT, TAG).unwrap();
    budget.deallocate(all).unwrap();
}

#[test]
fn never_above_the_limit_and_no_false_refusal() {
    let soak = std::env::var_os("XLOG_BUDGET_SOAK").is_some();
    let (threads, operations) = if soak { (16, 1_000_000) } else { (6, 20_000) };
    let begin = std::time::Instant::now();
    run(threads, operations, true, false, 1);
    println!("{:?}", begin.elapsed());
    run(6, 2_000, false, false, 2);
}

#[test]
fn blocks_that_wait_to_be_reaped_refuse_nothing() {
    run(4, 1_500, true, true, 3);
    run(4, 1_500, false, true, 4);
}

/// More threads than there are shards.
#[test]
fn threads_that_share_a_shard_lose_nothing() {
    run(80, 300, true, false, 5);
}
