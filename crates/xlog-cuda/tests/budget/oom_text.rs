//! What the error of a refusal says: who asked for what, which limit refused, who holds the memory, and what would help.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, BlockState, DeviceMemoryResource, DirectCudaResource, OomCause, OomPolicy, RefusedBy,
    ResourceError, ResourceKind, RuntimeConfig, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager, TrackedCudaSlice, XlogError};
use xlog_sim::{SimConfig, SimDevice};

use crate::support::{TAG, allocate, budget};

const MIB: usize = 1 << 20;

/// A runtime with a budget of 64 MiB on a simulated device.
fn runtime() -> Arc<XlogDeviceRuntime> {
    let device = Arc::new(CudaDevice::open("sim:7").unwrap());
    let config = RuntimeConfig::default()
        .with_resource(ResourceKind::Direct)
        .with_budget("64MiB".parse().unwrap());
    Arc::new(XlogDeviceRuntime::with_config(device, &config).unwrap())
}

fn tagged(manager: &GpuMemoryManager, mib: usize, tag: &'static str) -> TrackedCudaSlice<u8> {
    manager.alloc_tagged(mib * MIB, AllocTag(tag)).unwrap()
}

#[test]
fn an_error_says_who_asked_for_what_which_limit_refused_who_holds_it_and_what_helps() {
    let runtime = runtime();
    let stream = runtime.stream_pool().lease().unwrap();
    let manager = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(stream.id());
    let rows = [tagged(&manager, 20, "rows"), tagged(&manager, 20, "rows")];
    let others =
        (tagged(&manager, 9, "scratch"), tagged(&manager, 6, "keys"), tagged(&manager, 1, "b"));
    let refused = manager.alloc_tagged::<u8>(16 * MIB, AllocTag("hash table")).unwrap_err();
    let line = line!() - 1;
    let expected = format!(
        "out of budget: 16 MiB for \"hash table\" on stream {} ({}:{line}); limit 64 MiB (budget), 56 MiB live, 8 MiB free: \
         \"rows\" 40 MiB in 2 blocks, \"scratch\" 9 MiB in 1 block, \"keys\" 6 MiB in 1 block; \
         free 9 MiB by dropping \"scratch\", or raise the budget to 73 MiB",
        stream.id().0,
        file!()
    );
    assert_eq!(refused.to_string(), expected);
    let XlogError::Resource(error) = refused else { panic!("{refused}") };
    assert_eq!(error, ResourceError::OutOfBudget { requested: 16 * MIB, remaining: 8 * MIB });
    // Another thread prints the same.
    assert_eq!(std::thread::spawn(move || error.to_string()).join().unwrap(), expected);
    // Either proposal is enough.
    let budget = runtime.budget().unwrap();
    budget.set_limit(73 * MIB);
    drop(manager.alloc_tagged::<u8>(16 * MIB, AllocTag("hash table")).unwrap());
    budget.set_limit(64 * MIB);
    drop(others.0);
    drop(manager.alloc_tagged::<u8>(16 * MIB, AllocTag("hash table")).unwrap());
    drop((rows, others.1, others.2));
}

#[test]
fn a_report_in_json_has_the_call_and_the_text() {
    let runtime = runtime();
    let refused = runtime.allocate(65 * MIB, StreamId::DEFAULT, TAG).unwrap_err();
    let line = u64::from(line!() - 1);
    let report = refused.report().unwrap();
    assert_eq!(report.cause, OomCause::AboveLimit);
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["call"]["file"], file!());
    assert_eq!((&json["call"]["line"], &json["call"]["stream"]), (&line.into(), &0.into()));
    assert_eq!(json["call"]["limit_source"], "configuration");
    assert_eq!(json["error"], "out of budget: 68157440 bytes requested, 67108864 remain");
    assert_eq!(json["hints"][0], "ask for at most 64 MiB at a time, or raise the limit");
    assert!(refused.to_string().ends_with("or raise the limit"), "{refused}");
}

#[test]
fn a_main_that_returns_the_error_prints_all_of_it() {
    let manager = GpuMemoryManager::with_runtime(runtime());
    let refused = manager.alloc_tagged::<u8>(65 * MIB, TAG).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("65 MiB for") && text.ends_with("or raise the limit"), "{text}");
    let variant = "Resource(OutOfBudget { requested: 68157440, remaining: 67108864 }): ";
    assert_eq!(format!("{refused:?}"), format!("{variant}{text}"));
    let open = CudaDevice::open("gpu").unwrap_err();
    assert_eq!(format!("{open:?}"), format!("BadDeviceSpec {{ spec: \"gpu\", .. }}: {open}"));
}

#[test]
fn the_limit_of_a_manager_is_named_as_one() {
    let manager = GpuMemoryManager::with_runtime(runtime()).with_limit(10 * MIB);
    let rows = tagged(&manager, 8, "rows");
    let refused = manager.alloc_raw(3 * MIB).unwrap_err();
    let expected = format!(
        "out of budget: 3 MiB for \"untagged\" on stream 0 ({}:{}); limit 10 MiB (manager), 8 MiB live, 2 MiB free; \
         in the runtime: \"rows\" 8 MiB in 1 block; free 1 MiB of this manager's buffers, or raise its limit to 11 MiB",
        file!(),
        line!() - 5
    );
    assert_eq!(refused.to_string(), expected);
    let refused = manager.reserve_bytes(3 * MIB).unwrap_err().to_string();
    assert!(refused.contains(&format!("\"(reserved)\" on stream 0 ({}:", file!())), "{refused}");
    drop(rows);
}

#[test]
fn the_limit_of_a_scope_is_named_as_one_and_raising_it_helps_only_if_the_budget_has_room() {
    let runtime = runtime();
    let budget = runtime.budget().unwrap();
    let scope = budget.scope("join", 0, 10 * MIB).unwrap();
    let outside = runtime.allocate(40 * MIB, StreamId::DEFAULT, TAG).unwrap();
    let entered = scope.enter();
    let inside = runtime.allocate(8 * MIB, StreamId::DEFAULT, TAG).unwrap();
    let refused = runtime.allocate(9 * MIB, StreamId::DEFAULT, TAG).unwrap_err();
    assert_eq!(refused.report().unwrap().refused_by, RefusedBy::Scope);
    let text = refused.to_string();
    assert!(text.contains("; limit 10 MiB (scope 'join', 8 MiB used), 64 MiB (budget)"), "{text}");
    assert!(
        text.ends_with("free 7 MiB inside scope 'join', or raise its hard limit to 17 MiB"),
        "{text}"
    );
    budget.set_limit(56 * MIB);
    let text = runtime.allocate(9 * MIB, StreamId::DEFAULT, TAG).unwrap_err().to_string();
    assert!(text.ends_with("free 7 MiB inside scope 'join'"), "{text}");
    drop(entered);
    runtime.deallocate(inside).unwrap();
    runtime.deallocate(outside).unwrap();
}

#[test]
fn a_full_card_is_named_with_what_it_has_free_with_and_without_a_budget() {
    let device = || {
        let config = SimConfig::default().with_capacity(64 << 20);
        Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()))
    };
    let bare = {
        let device = device();
        let pool = Arc::new(StreamPool::with_defaults(device.clone()));
        let resource = Box::new(DirectCudaResource::new(device.clone(), 0));
        XlogDeviceRuntime::with_resource(device, 0, pool, resource)
    };
    let rows = bare.allocate(40 * MIB, StreamId::DEFAULT, TAG).unwrap();
    let text = bare.allocate(32 * MIB, StreamId::DEFAULT, TAG).unwrap_err().to_string();
    assert!(text.starts_with("out of device memory: 32 MiB for \"rows\" on stream 0 ("), "{text}");
    assert!(
        text.contains("; refused by the device, 40 MiB live, 24 MiB free on the card of 64 MiB; "),
        "{text}"
    );
    assert!(text.ends_with("; free memory on the device, or ask for less"), "{text}");
    bare.deallocate(rows).unwrap();

    let device = device();
    let config = RuntimeConfig::default().with_resource(ResourceKind::Direct);
    let runtime = XlogDeviceRuntime::with_config(device.clone(), &config).unwrap();
    let stranger = DirectCudaResource::new(device, 0);
    let taken = stranger.allocate(40 * MIB, StreamId::DEFAULT, TAG).unwrap();
    let refused = runtime.allocate(32 * MIB, StreamId::DEFAULT, TAG).unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains(
            "; refused below the budget of 60 MiB, 0 bytes live, 24 MiB free on the card of 64 MiB"
        ),
        "{text}"
    );
    stranger.deallocate(taken).unwrap();
}

/// Two refusals with the same numbers: an older error may not speak of the younger one's request on another thread.
#[test]
fn an_error_whose_report_is_not_certain_prints_its_numbers_alone() {
    let (budget, _) = budget(1000);
    let (first, second) =
        (allocate(&budget, 1003).unwrap_err(), allocate(&budget, 1003).unwrap_err());
    let text = std::thread::spawn(move || first.to_string()).join().unwrap();
    assert_eq!(text, "out of budget: 1003 bytes requested, 1000 remain");
    assert!(second.to_string().contains("ask for at most 1000 bytes"), "{second}");
}

#[test]
fn pending_blocks_are_shown_and_dropping_them_is_not_proposed() {
    let (budget, inner) = budget(1000);
    let budget = budget.with_policy(OomPolicy::impatient());
    let gone = budget.allocate(600, StreamId::DEFAULT, AllocTag("gone")).unwrap();
    let rows = allocate(&budget, 300).unwrap();
    inner.set(|state| (state.retire, state.reapable) = (Some(BlockState::Retired), false));
    budget.deallocate(gone).unwrap();
    let text = allocate(&budget, 900).unwrap_err().to_string();
    assert_eq!(
        text,
        "out of budget: 900 bytes for \"rows\"; limit 1000 bytes (budget), 300 bytes live, 600 bytes pending, \
         4 KiB cached, 100 bytes free: \"gone\" 600 bytes in 1 block, \"rows\" 300 bytes in 1 block; \
         free 800 bytes (\"rows\" holds the most), or raise the budget to 1.76 KiB"
    );
    inner.set(|state| state.reapable = true);
    budget.deallocate(rows).unwrap();
}
