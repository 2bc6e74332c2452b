//! Threads that allocate while another one waits for the device, and the deadline of such a wait.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Budget, Counting, TAG, allocate, budget, patient};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    BlockState, DeviceMemoryResource, GlobalDeviceBudget, OomPolicy, PoolConfig, PoolResource,
    ResourceError, StreamId, StreamPool,
};
use xlog_testing::{for_each_device, for_each_sim, threads};

/// Longer than any honest call on a loaded machine.
const LONG: Duration = Duration::from_secs(240);

/// Whenever the budget asks the resource below on behalf of a request that does not fit, another thread allocates to the end.
#[test]
fn a_third_thread_allocates_while_the_resource_below_is_asked() {
    let (budget, inner) = budget(1000);
    inner.set(|state| (state.retire, state.reapable) = (Some(BlockState::Retired), false));
    let rows = allocate(&budget, 900).unwrap();
    budget.deallocate(rows).unwrap();
    let (ask, asked) = mpsc::channel::<()>();
    let (answer, answered) = mpsc::channel();
    let served = Arc::new(Mutex::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Moved, so that its end ends the thread.
            let asked = asked;
            for () in &asked {
                answer.send(allocate(&budget, 1)).unwrap();
            }
        });
        let answered = Mutex::new(answered);
        inner.set_hook({
            let served = served.clone();
            move |bytes| {
                if bytes.is_none() {
                    ask.send(()).unwrap();
                    let third = answered.lock().unwrap().recv_timeout(LONG);
                    assert!(matches!(third, Ok(Ok(_))), "the third thread: {third:?}");
                    *served.lock().unwrap() += 1;
                }
                None
            }
        });
        let policy = OomPolicy::impatient();
        let refused = budget.allocate_with(200, StreamId::DEFAULT, TAG, &policy);
        inner.clear_hook();
        assert!(matches!(refused, Err(ResourceError::OutOfBudget { requested: 200, .. })));
    });
    assert!(*served.lock().unwrap() > 0);
}

/// One thread is held inside the resource below, another one wants what the first may not get after all. What fits beside them is
/// granted meanwhile, and the first is let go only after that.
#[test]
fn a_call_held_below_closes_the_budget_for_nobody() {
    const HELD: usize = 600;
    let (budget, inner) = budget(1000);
    let (inside, is_inside) = mpsc::channel();
    let (let_go, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    inner.set_hook(move |bytes| {
        if bytes != Some(HELD) {
            return None;
        }
        inside.send(()).unwrap();
        gate.lock().unwrap().recv().unwrap();
        Some(ResourceError::Driver("failed in the end".to_owned()))
    });
    std::thread::scope(|scope| {
        let held = scope.spawn(|| allocate(&budget, HELD));
        is_inside.recv().unwrap();
        let second = scope.spawn(|| budget.allocate_with(500, StreamId::DEFAULT, TAG, &patient()));
        for _ in 0..2000 {
            let fits = allocate(&budget, 1000 - HELD).unwrap();
            budget.deallocate(fits).unwrap();
        }
        let_go.send(()).unwrap();
        assert!(matches!(held.join().unwrap(), Err(ResourceError::Driver(_))));
        // At every instant of its call nothing that was used was in its way.
        let second = second.join().unwrap().unwrap();
        budget.deallocate(second).unwrap();
    });
    assert_eq!(budget.reserved_bytes(), 0);
}

/// A pool of 8 MiB that waits for the device rather than make streams wait for each other.
fn small_pool(
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
) -> GlobalDeviceBudget<PoolResource> {
    let mut config = PoolConfig::default().with_maximum(8 << 20).with_growth(2 << 20);
    config.reuse.insert_waits = false;
    let pool = PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config);
    GlobalDeviceBudget::over(pool.unwrap(), 64 << 20)
}

/// The stream is let go only after a third thread's small request was served.
#[test]
fn a_small_request_is_served_while_another_waits_for_a_held_stream_below() {
    for_each_device(|device| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let budget = small_pool(device, &streams);
        let (busy, other) = (streams.lease().unwrap(), streams.lease().unwrap());
        let rows = budget.allocate(6 << 20, busy.id(), TAG).unwrap();
        let gate = Mutex::new(Some(busy.hold().unwrap()));
        budget.deallocate(rows).unwrap();
        let large = || {
            let block = budget.allocate_with(6 << 20, StreamId::DEFAULT, TAG, &patient());
            budget.deallocate(block.unwrap()).unwrap();
        };
        let small = || {
            let block = budget.allocate(4 << 10, other.id(), TAG).unwrap();
            budget.deallocate(block).unwrap();
            gate.lock().unwrap().take().unwrap().release();
        };
        threads(device, vec![Box::new(large), Box::new(small)]);
        budget.reap_pending().unwrap();
        assert_eq!(budget.reserved_bytes(), 0);
    });
}

/// Each of reap, trim and the calls between them may wait below, and none more than what the ones before have left.
#[test]
fn a_stream_held_for_ever_below_ends_the_whole_call_at_its_deadline() {
    for_each_device(|device| {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let budget = small_pool(device, &streams);
        let busy = streams.lease().unwrap();
        let rows = budget.allocate(6 << 20, busy.id(), TAG).unwrap();
        let gate = busy.hold().unwrap();
        budget.deallocate(rows).unwrap();
        let short = OomPolicy::default().with_deadline(Duration::from_millis(20));
        let refused = budget.allocate_with(6 << 20, StreamId::DEFAULT, TAG, &short);
        let Err(ResourceError::OutOfMemory { detail, .. }) = &refused else {
            panic!("{refused:?}")
        };
        assert!(detail.contains("did not complete within the deadline"), "{detail}");
        gate.release();
        busy.synchronize().unwrap();
        let all = budget.allocate(6 << 20, StreamId::DEFAULT, TAG).unwrap();
        budget.deallocate(all).unwrap();
        budget.reap_pending().unwrap();
        assert_eq!(budget.reserved_bytes(), 0);
    });
}

const SHORT: Duration = Duration::from_millis(100);

fn short() -> OomPolicy {
    OomPolicy::default().with_deadline(SHORT)
}

fn out_of_memory() -> ResourceError {
    ResourceError::OutOfMemory { requested: 100, detail: "told to".to_owned() }
}

/// A budget over a resource that keeps a returned block for ever and has no memory left.
fn exhausted() -> (Budget, Arc<Counting>) {
    let (budget, inner) = budget(1000);
    inner.set(|state| (state.retire, state.reapable) = (Some(BlockState::Retired), false));
    let rows = allocate(&budget, 500).unwrap();
    budget.deallocate(rows).unwrap();
    inner.set_hook(|bytes| bytes.map(|_| out_of_memory()));
    (budget.with_policy(short()), inner)
}

/// Under a seed a deadline counts pauses, not the clock.
fn for_each_seed(body: impl Fn() + Send + Sync) {
    for_each_sim(|device, sim| {
        if sim.seed().is_some() {
            threads(device, vec![Box::new(&body)]);
        }
    });
}

/// What a function returned takes some polls to complete.
#[test]
fn half_of_the_deadline_is_left_for_what_a_function_frees_when_the_shortage_is_below() {
    for_each_seed(|| {
        let (budget, inner) = exhausted();
        let _registered = budget.on_pressure({
            let inner = inner.clone();
            move |_| {
                let enough = inner.reaps.load(Ordering::Relaxed) + 30;
                let weak = Arc::downgrade(&inner);
                inner.set_hook(move |bytes| {
                    let inner = weak.upgrade()?;
                    if inner.reaps.load(Ordering::Relaxed) < enough {
                        return bytes.map(|_| out_of_memory());
                    }
                    inner.set(|state| state.reapable = true);
                    None
                });
            }
        });
        let rows = allocate(&budget, 100).unwrap();
        budget.deallocate(rows).unwrap();
    });
}

/// The budget above makes several attempts, and the one below waits in each of them.
#[test]
fn nested_budgets_wait_for_one_deadline_together() {
    for_each_seed(|| {
        let polls = |inner: &Counting| inner.reaps.load(Ordering::Relaxed);
        let (single, inner) = exhausted();
        assert_eq!(allocate(&single, 100), Err(out_of_memory()));
        let once = polls(&inner);
        assert!(once > 100, "{once}");

        let (below, inner) = exhausted();
        let above = GlobalDeviceBudget::over(below, 1000).with_policy(short());
        assert_eq!(allocate(&above, 100), Err(out_of_memory()));
        let nested = polls(&inner);
        assert!(nested < once + once / 2, "{nested} polls, and {once} with one budget");
    });
}
