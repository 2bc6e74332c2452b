//! What happens before a refusal, and what is said with it.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{TAG, allocate, budget, patient, refusal};
use xlog_cuda::device_runtime::{
    AllocTag, AsyncCudaResource, BlockState, DeviceMemoryResource, GlobalDeviceBudget, OomCause,
    OomPolicy, OomReport, OtherUse, ResourceError, StreamId, StreamPool,
};
use xlog_testing::{for_each_device, threads};

#[test]
fn churn_of_a_hundred_limits_without_a_reap_never_fails() {
    const LIMIT: usize = 1 << 20;
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let budget = GlobalDeviceBudget::over(inner, LIMIT).with_policy(patient());
        let streams = [pool.lease().unwrap(), pool.lease().unwrap()];
        let sizes = [LIMIT, LIMIT / 2, LIMIT / 3, LIMIT / 7, 4096];
        let mut moved = 0;
        let mut turn = 0;
        while moved < 100 * LIMIT {
            let bytes = sizes[turn % sizes.len()];
            let stream = streams[turn % 2].id();
            let block = budget.allocate(bytes, stream, TAG).unwrap();
            budget.deallocate(block).unwrap();
            moved += bytes;
            turn += 1;
        }
        budget.reap_pending().unwrap();
        assert_eq!(budget.reserved_bytes(), 0);
    });
}

/// Each has its share, so together they always fit; what they have returned and the streams have not freed yet is waited for.
#[test]
fn threads_that_keep_to_their_share_are_never_refused() {
    const SHARE: usize = 64 << 10;
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let budget = GlobalDeviceBudget::over(inner, 4 * SHARE).with_policy(patient());
        let streams: Vec<_> = (0..4).map(|_| pool.lease().unwrap()).collect();
        let body = |thread: usize| {
            let (budget, stream) = (&budget, &streams[thread]);
            move || {
                for round in 0..40 {
                    let half = SHARE / 2 - round;
                    let a = budget.allocate(half, stream.id(), TAG).unwrap();
                    let b = budget.allocate(SHARE - half, stream.id(), TAG).unwrap();
                    budget.deallocate(a).unwrap();
                    budget.deallocate(b).unwrap();
                }
            }
        };
        let bodies = (0..4).map(|n| Box::new(body(n)) as Box<dyn FnOnce() + Send>).collect();
        threads(device, bodies);
        budget.reap_pending().unwrap();
        assert_eq!((budget.reserved_bytes(), budget.bytes_outstanding()), (0, 0));
    });
}

/// What a function frees is only free when its stream has come that far.
#[test]
fn what_a_pressure_function_frees_on_a_stream_is_waited_for() {
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let budget = Arc::new(GlobalDeviceBudget::over(inner, 10_000));
        let stream = pool.lease().unwrap();
        let cached = Mutex::new(vec![budget.allocate(9000, stream.id(), TAG).unwrap()]);
        let _registered = budget.on_pressure({
            let budget = Arc::downgrade(&budget);
            move |_| {
                let budget = budget.upgrade().unwrap();
                let blocks = std::mem::take(&mut *cached.lock().unwrap());
                blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap());
            }
        });
        let all = allocate(&*budget, 10_000).unwrap();
        budget.deallocate(all).unwrap();
        budget.reap_pending().unwrap();
        assert_eq!(budget.reserved_bytes(), 0);
    });
}

/// The functions of the budget below run while an operation of the one above is under way.
#[test]
fn pressure_below_may_free_and_allocate_above() {
    let (below, _) = budget(1000);
    let below = Arc::new(below);
    let above = Arc::new(GlobalDeviceBudget::over(below.clone(), 2000));
    let cached = Mutex::new(Some(allocate(&*above, 900).unwrap()));
    let _registered = below.on_pressure({
        let above = Arc::downgrade(&above);
        move |_| {
            let above = above.upgrade().unwrap();
            if let Some(block) = cached.lock().unwrap().take() {
                above.deallocate(block).unwrap();
            }
            let spill = allocate(&*above, 10).unwrap();
            above.deallocate(spill).unwrap();
        }
    });
    let rows = allocate(&*above, 800).unwrap();
    above.deallocate(rows).unwrap();
    assert_eq!((above.reserved_bytes(), below.reserved_bytes()), (0, 0));
}

#[test]
fn a_block_behind_a_held_stream_is_charged_until_its_free_completes() {
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let policy = OomPolicy::impatient();
        let budget = GlobalDeviceBudget::over(inner, 8192).with_policy(policy);
        let stream = pool.lease().unwrap();
        let block = budget.allocate(8000, stream.id(), TAG).unwrap();
        let gate = stream.hold().unwrap();
        budget.deallocate(block).unwrap();
        assert_eq!(allocate(&budget, 193).err(), refusal(193, 192));
        let report = budget.last_oom().unwrap();
        assert_eq!((report.cause, report.waiting), (OomCause::WaitingOnStreams, 8000));
        gate.release();
        stream.synchronize().unwrap();
        let all = allocate(&budget, 8192).unwrap();
        budget.deallocate(all).unwrap();
        budget.reap_pending().unwrap();
        assert_eq!(budget.remaining(), 8192);
    });
}

#[test]
fn what_can_never_fit_is_refused_without_a_reap() {
    let (budget, inner) = budget(1000);
    inner.set(|state| state.retire = Some(BlockState::Retired));
    let rows = allocate(&budget, 900).unwrap();
    budget.deallocate(rows).unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    let _registered = budget.on_pressure({
        let called = called.clone();
        move |_| {
            called.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_eq!(allocate(&budget, 1001).err(), refusal(1001, 100));
    assert_eq!((inner.reaps.load(Ordering::Relaxed), called.load(Ordering::Relaxed)), (0, 0));
    assert_eq!(budget.last_oom().unwrap().cause, OomCause::AboveLimit);
    // What could fit is reaped for.
    let all = allocate(&budget, 1000).unwrap();
    assert!(inner.reaps.load(Ordering::Relaxed) > 0);
    budget.deallocate(all).unwrap();
}

#[test]
fn quarantined_blocks_are_let_go_before_a_refusal() {
    let (budget, inner) = budget(1000);
    inner.set(|state| state.retire = Some(BlockState::Quarantined));
    let rows = allocate(&budget, 900).unwrap();
    budget.deallocate(rows).unwrap();
    let all = allocate(&budget, 1000).unwrap();
    assert_eq!(inner.trims.load(Ordering::Relaxed), 1);
    budget.deallocate(all).unwrap();
}

#[test]
fn pressure_functions_are_told_what_is_needed_and_may_free_and_allocate() {
    let (budget, _) = budget(1000);
    let budget = Arc::new(budget);
    let cache = Arc::new(Mutex::new(vec![
        allocate(&*budget, 300).unwrap(),
        allocate(&*budget, 300).unwrap(),
        allocate(&*budget, 300).unwrap(),
    ]));
    let told = Arc::new(Mutex::new(Vec::new()));
    let registered = budget.on_pressure({
        let (budget, cache, told) = (Arc::downgrade(&budget), cache.clone(), told.clone());
        move |pressure| {
            let budget = budget.upgrade().unwrap();
            told.lock().unwrap().push(pressure.needed);
            let mut freed = 0;
            while freed < pressure.needed {
                let Some(block) = cache.lock().unwrap().pop() else { break };
                freed += block.bytes;
                budget.deallocate(block).unwrap();
            }
            // A spill may need memory itself, and may be refused without another round of functions.
            let spill = allocate(&*budget, 50).unwrap();
            assert!(allocate(&*budget, 999).is_err());
            budget.deallocate(spill).unwrap();
        }
    });
    let rows = allocate(&*budget, 500).unwrap();
    assert_eq!((told.lock().unwrap().as_slice(), cache.lock().unwrap().len()), (&[400][..], 1));
    // The last resort is called once, and does not loop.
    assert_eq!(allocate(&*budget, 501).err(), refusal(501, 500));
    assert_eq!(told.lock().unwrap().as_slice(), [400, 301]);
    drop(registered);
    assert_eq!(allocate(&*budget, 501).err(), refusal(501, 500));
    assert_eq!(told.lock().unwrap().len(), 2);
    budget.deallocate(rows).unwrap();
    assert_eq!(budget.reserved_bytes(), 0);
}

#[test]
fn a_full_device_below_climbs_the_same_ladder() {
    let (budget, inner) = budget(10_000);
    let full = ResourceError::OutOfMemory { requested: 100, detail: "full".to_owned() };
    inner.set(|state| (state.fail, state.fail_one_in) = (Some(full.clone()), 1));
    let freed = Arc::new(AtomicUsize::new(0));
    let _registered = budget.on_pressure({
        let (inner, freed) = (inner.clone(), freed.clone());
        move |_| {
            freed.fetch_add(1, Ordering::Relaxed);
            inner.set(|state| state.fail = None);
        }
    });
    let rows = allocate(&budget, 100).unwrap();
    assert_eq!(freed.load(Ordering::Relaxed), 1);
    assert!(inner.trims.load(Ordering::Relaxed) > 0 && inner.reaps.load(Ordering::Relaxed) > 0);
    inner.set(|state| state.fail = Some(full.clone()));
    drop(_registered);
    assert_eq!(allocate(&budget, 2000).err(), Some(full));
    let report = budget.last_oom().unwrap();
    assert_eq!(
        report.cause,
        OomCause::Fragmentation,
        "4096 bytes are free below, 1024 in one piece"
    );
    assert!(report.detail.as_ref().unwrap().contains("full"));
    budget.deallocate(rows).unwrap();
    assert_eq!(budget.reserved_bytes(), 0);
}

#[test]
fn a_report_names_who_holds_what_fits_a_screen_and_is_json() {
    let (budget, _) = budget(10_000);
    let names: Vec<AllocTag> = (0..40).map(|n| AllocTag::intern(&format!("tag \"{n}\""))).collect();
    let blocks: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(n, tag)| budget.allocate(100 + n, StreamId::DEFAULT, *tag).unwrap())
        .collect();
    budget.set_other_use(|| Some(OtherUse { bytes: 77, processes: 2 }));
    let told = Arc::new(Mutex::new(None));
    let _registered = budget.on_oom({
        let told = told.clone();
        move |report: &OomReport| *told.lock().unwrap() = Some(report.clone())
    });
    let requested = budget.remaining() + 1;
    allocate(&budget, requested).unwrap_err();
    let report = budget.last_oom().unwrap();
    assert_eq!(told.lock().unwrap().as_ref(), Some(&*report));
    assert_eq!(OomReport::last_of_thread().as_ref(), Some(&report));
    assert_eq!(
        (report.requested, report.remaining, report.limit),
        (requested, requested - 1, 10_000)
    );
    assert_eq!(
        (report.cause, report.tags[0].tag, report.tags[0].bytes),
        (OomCause::Budget, names[39], 139)
    );
    assert_eq!(report.others, Some(OtherUse { bytes: 77, processes: 2 }));
    let text = report.to_string();
    assert!(text.lines().count() <= 24, "{text}");
    assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    assert!(text.contains("tag \"39\"") && text.contains("hint: "), "{text}");
    let json = report.to_json();
    assert!(json.starts_with("{\"cause\":\"budget\"") && json.ends_with('}'), "{json}");
    assert!(json.contains("\"tag\":\"tag \\\"39\\\"\",\"bytes\":139,\"blocks\":1"), "{json}");
    blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap());
}

#[test]
fn a_returned_block_is_waited_for_with_deadline() {
    let (budget, inner) = budget(1000);
    inner.set(|state| (state.retire, state.reapable) = (Some(BlockState::Retired), false));
    let rows = allocate(&budget, 900).unwrap();
    budget.deallocate(rows).unwrap();
    let impatient = OomPolicy::impatient();
    let refused = budget.allocate_with(200, StreamId::DEFAULT, TAG, &impatient);
    assert_eq!(refused.err(), refusal(200, 100));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            inner.set(|state| state.reapable = true);
        });
        let patient = OomPolicy::default().with_deadline(Duration::from_secs(120));
        let all = budget.allocate_with(1000, StreamId::DEFAULT, TAG, &patient).unwrap();
        budget.deallocate(all).unwrap();
    });
}
