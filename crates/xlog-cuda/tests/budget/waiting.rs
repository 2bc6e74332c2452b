//! Requests that wait for memory.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::support::{TAG, allocate, budget, refusal};
use xlog_cuda::device_runtime::{
    DeviceMemoryResource, DirectCudaResource, GlobalDeviceBudget, OomPolicy, StreamId, WaitPolicy,
};
use xlog_testing::{for_each_sim, threads};

/// Returns once so many requests wait.
fn until_waiting(budget: &GlobalDeviceBudget<impl DeviceMemoryResource>, requests: usize) {
    let begin = Instant::now();
    while budget.waiting_requests() < requests {
        assert!(begin.elapsed() < Duration::from_secs(120), "a request does not wait");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn waiting(seconds: u64, priority: u8) -> OomPolicy {
    let wait = WaitPolicy::up_to(Duration::from_secs(seconds)).with_priority(priority);
    OomPolicy::default().with_wait(wait)
}

#[test]
fn waiters_are_served_by_priority_then_in_order() {
    let (budget, _) = budget(1000);
    let all = allocate(&budget, 1000).unwrap();
    let served = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (came, (name, priority)) in
            [("a", 1), ("b", 1), ("c", 9), ("d", 0)].into_iter().enumerate()
        {
            let (budget, served) = (&budget, &served);
            scope.spawn(move || {
                let policy = waiting(600, priority);
                let block = budget.allocate_with(1000, StreamId::DEFAULT, TAG, &policy).unwrap();
                served.lock().unwrap().push(name);
                budget.deallocate(block).unwrap();
            });
            // They come one after the other.
            until_waiting(budget, came + 1);
        }
        budget.deallocate(all).unwrap();
    });
    assert_eq!(*served.lock().unwrap(), ["c", "a", "b", "d"]);
    assert_eq!(budget.reserved_bytes(), 0);
}

#[test]
fn a_waiter_that_can_never_be_served_is_refused_at_once() {
    let (budget, _) = budget(1000);
    let begin = Instant::now();
    let refused = budget.allocate_with(1001, StreamId::DEFAULT, TAG, &waiting(600, 0));
    assert_eq!(refused.err(), refusal(1001, 1000));
    let all = allocate(&budget, 1000).unwrap();
    std::thread::scope(|scope| {
        let waiter =
            scope.spawn(|| budget.allocate_with(800, StreamId::DEFAULT, TAG, &waiting(600, 0)));
        until_waiting(&budget, 1);
        // Now it cannot be served any more.
        budget.set_limit(700);
        assert_eq!(waiter.join().unwrap().err(), refusal(800, 0));
    });
    assert!(begin.elapsed() < Duration::from_secs(300));
    budget.deallocate(all).unwrap();
}

#[test]
fn a_waiter_gives_up_at_its_deadline_and_its_place_with_it() {
    let (budget, _) = budget(1000);
    let rows = allocate(&budget, 600).unwrap();
    let wait = OomPolicy::default().with_wait(WaitPolicy::up_to(Duration::from_millis(30)));
    let begin = Instant::now();
    let refused = budget.allocate_with(500, StreamId::DEFAULT, TAG, &wait);
    assert_eq!(refused.err(), refusal(500, 400));
    assert!(begin.elapsed() >= Duration::from_millis(30));
    // Nobody is in the way of others.
    let keys = allocate(&budget, 400).unwrap();
    [rows, keys].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!(budget.remaining(), 1000);
}

#[test]
fn one_that_does_not_wait_is_not_refused_for_one_that_does() {
    let (budget, _) = budget(1000);
    let rows = allocate(&budget, 600).unwrap();
    std::thread::scope(|scope| {
        let waiter =
            scope.spawn(|| budget.allocate_with(900, StreamId::DEFAULT, TAG, &waiting(600, 0)));
        until_waiting(&budget, 1);
        for _ in 0..20 {
            let keys = allocate(&budget, 400).unwrap();
            budget.deallocate(keys).unwrap();
        }
        budget.deallocate(rows).unwrap();
        budget.deallocate(waiter.join().unwrap().unwrap()).unwrap();
    });
    assert_eq!(budget.reserved_bytes(), 0);
}

#[test]
fn a_deterministic_scheduler_is_not_held_up_by_a_waiter() {
    for_each_sim(|device, _| {
        let inner = DirectCudaResource::new(device.clone(), device.ordinal());
        let budget = GlobalDeviceBudget::over(inner, 4096);
        let body = |_: usize| {
            let budget = &budget;
            move || {
                for _ in 0..5 {
                    let policy = waiting(600, 0);
                    let block = budget.allocate_with(3000, StreamId::DEFAULT, TAG, &policy);
                    budget.deallocate(block.unwrap()).unwrap();
                }
            }
        };
        let bodies = (0..3).map(|n| Box::new(body(n)) as Box<dyn FnOnce() + Send>).collect();
        threads(device, bodies);
        assert_eq!(budget.reserved_bytes(), 0);
    });
}
