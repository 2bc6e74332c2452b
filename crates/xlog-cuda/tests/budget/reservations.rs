//! Bytes set aside.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::{TAG, allocate, budget, refusal};
use xlog_cuda::device_runtime::{
    AsyncCudaResource, DeviceMemoryResource, GlobalDeviceBudget, ResourceError, StreamId,
    StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{GpuMemoryManager, XlogError};
use xlog_testing::for_each_device;

#[test]
fn all_or_nothing_and_the_rest_goes_back() {
    let (budget, _) = budget(1000);
    let rows = allocate(&budget, 300).unwrap();
    assert_eq!(budget.reserve(701).err(), refusal(701, 700));
    let mut three = budget.reserve(700).unwrap();
    assert_eq!((budget.remaining(), three.bytes()), (0, 700));
    let a = three.allocate(&budget, 200, StreamId::DEFAULT, TAG).unwrap();
    let refused = three.allocate(&budget, 501, StreamId::DEFAULT, TAG);
    assert_eq!(refused.err(), refusal(501, 500));
    let mut part = three.split(100).unwrap();
    assert_eq!(three.split(401).err(), refusal(401, 400));
    drop(three);
    assert_eq!((budget.reserved_bytes(), part.bytes()), (600, 100));
    part.merge(budget.reserve(50).unwrap()).unwrap();
    let b = part.allocate(&budget, 150, StreamId::DEFAULT, TAG).unwrap();
    assert_eq!(budget.reserved_bytes(), 650);
    [rows, a, b].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    drop(part);
    assert_eq!((budget.reserved_bytes(), budget.usage_by_tag().len()), (0, 0));
}

#[test]
fn an_inner_failure_leaves_the_reservation_whole() {
    let (budget, inner) = budget(1000);
    let mut set_aside = budget.reserve(500).unwrap();
    let error = ResourceError::Driver("no".to_owned());
    inner.set(|state| (state.fail, state.fail_one_in) = (Some(error.clone()), 1));
    let failed = set_aside.allocate(&budget, 500, StreamId::DEFAULT, TAG);
    assert_eq!((failed.err(), set_aside.bytes()), (Some(error), 500));
    inner.set(|state| (state.fail, state.larger) = (None, 1));
    let larger = set_aside.allocate(&budget, 500, StreamId::DEFAULT, TAG);
    assert_eq!((larger.err(), set_aside.bytes()), (refusal(501, 500), 500));
    assert_eq!((budget.reserved_bytes(), inner.used()), (500, 0));
}

#[test]
fn another_budgets_reservation_is_refused() {
    let ((budget, _), (other, _)) = (budget(1000), budget(1000));
    let mut foreign = other.reserve(100).unwrap();
    let refused = foreign.allocate(&budget, 100, StreamId::DEFAULT, TAG);
    assert!(matches!(refused, Err(ResourceError::InvalidRequest { .. })));
    assert!(foreign.merge(budget.reserve(10).unwrap()).is_err());
    drop(foreign);
    assert_eq!((budget.reserved_bytes(), other.reserved_bytes()), (0, 0));
}

#[test]
fn a_reservation_reaches_through_a_stack_of_budgets() {
    let (below, _) = budget(1000);
    let below = Arc::new(below);
    let above = GlobalDeviceBudget::new(Box::new(below.clone()), 2000);
    let mut set_aside = above.reserve(900).unwrap();
    assert_eq!((above.remaining(), below.remaining()), (1100, 100));
    assert_eq!(above.reserve(101).err(), refusal(101, 100));
    assert_eq!(above.remaining(), 1100);
    let rows = set_aside.allocate(&above, 900, StreamId::DEFAULT, TAG).unwrap();
    drop(set_aside);
    above.deallocate(rows).unwrap();
    assert_eq!((above.remaining(), below.remaining()), (2000, 1000));
}

#[test]
fn a_managers_reservation_holds_in_the_budget_of_its_runtime() {
    for_each_device(|device| {
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone());
        let budget = GlobalDeviceBudget::new(Box::new(inner), 10_000);
        let handle = budget.handle();
        let ordinal = device.ordinal();
        let runtime =
            XlogDeviceRuntime::with_resource(device.clone(), ordinal, pool, Box::new(budget));
        let runtime = Arc::new(runtime);
        let one = GpuMemoryManager::with_runtime(runtime.clone());
        let other = GpuMemoryManager::with_runtime(runtime.clone());
        let mut set_aside = one.reserve_bytes(8000).unwrap();
        assert_eq!(handle.reserved_bytes(), 8000);
        let refused = other.alloc::<u8>(2001).unwrap_err();
        let due = ResourceError::OutOfBudget { requested: 2001, remaining: 2000 };
        assert!(matches!(refused, XlogError::Resource(ref error) if *error == due), "{refused}");
        let keys = set_aside.alloc::<u32>(1000).unwrap();
        let part = set_aside.split(1000).unwrap();
        assert_eq!(handle.reserved_bytes(), 8000);
        drop(set_aside);
        assert_eq!(handle.reserved_bytes(), 5000);
        drop((keys, part));
        runtime.reap_pending().unwrap();
        assert_eq!(handle.reserved_bytes(), 0);
    });
}
