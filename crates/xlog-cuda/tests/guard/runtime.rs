//! A guard that a runtime's configuration asks for.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, DamageKind, GpuMemoryManager, GuardMode, GuardSetting, LedgerSetting, ResourceError,
    ResourceKind, RuntimeConfig, XlogDeviceRuntime,
};
use xlog_testing::for_each_device;

use crate::support::{poke, quiet};

fn config(resource: ResourceKind) -> RuntimeConfig {
    let budget = "64MiB".parse().unwrap();
    RuntimeConfig::default()
        .with_resource(resource)
        .with_budget(budget)
        .with_ledger(LedgerSetting::Off)
}

#[test]
fn a_guarded_runtime_finds_damage_under_every_resource() {
    for_each_device(|device| {
        for kind in [ResourceKind::Direct, ResourceKind::Async, ResourceKind::Pool] {
            let config = config(kind).with_guard(quiet());
            let runtime = XlogDeviceRuntime::with_config(device.clone(), &config).unwrap();
            let stream = runtime.stream_pool().lease().unwrap();
            let block = runtime.allocate(1000, stream.id(), AllocTag("rows")).unwrap();
            let generation = block.generation;
            poke(&stream, block.ptr, 1000, 1, 3);
            runtime.deallocate(block).unwrap();
            let told = runtime.reap_pending();
            assert_eq!(told, Err(ResourceError::OutOfBounds { generation }), "{kind}");
            let guard = runtime.guard().unwrap();
            let report = &guard.reports()[0];
            assert_eq!((report.kind, report.offset), (DamageKind::OutOfBounds, 1000));
            assert_eq!(guard.quarantine().1, 1);
            guard.flush_quarantine().unwrap();
            runtime.reap_pending().unwrap();
            assert_eq!(runtime.bytes_outstanding(), 0);
        }
    });
}

#[test]
fn typed_buffers_work_under_every_guard() {
    for_each_device(|device| {
        for setting in ["off", "canary", "sync", "pages", "sampled:2"] {
            let guard: GuardSetting = setting.parse().unwrap();
            let config = config(ResourceKind::Pool).with_guard(guard);
            let runtime = XlogDeviceRuntime::with_config(device.clone(), &config).unwrap();
            let runtime = Arc::new(runtime);
            assert_eq!(runtime.guard().is_some(), setting != "off");
            let manager = GpuMemoryManager::with_runtime(runtime.clone());
            for len in [1, 100, 5000] {
                let buffer = manager.alloc::<u32>(len).unwrap();
                assert_eq!(buffer.len(), len);
            }
            if let Some(guard) = runtime.guard() {
                guard.check_now().unwrap();
                guard.flush_quarantine().unwrap();
                assert!(guard.reports().is_empty());
            }
            runtime.reap_pending().unwrap();
            assert_eq!(runtime.bytes_outstanding(), 0, "{setting}");
        }
    });
}

#[test]
fn the_budget_of_a_runtime_charges_what_the_guard_adds() {
    for_each_device(|device| {
        let config = config(ResourceKind::Async).with_guard(quiet().with_quarantine(0, 0));
        let runtime = XlogDeviceRuntime::with_config(device.clone(), &config).unwrap();
        let stream = runtime.stream_pool().lease().unwrap();
        let most = (64 << 20) - 512;
        let over = runtime.allocate(most + 1, stream.id(), AllocTag("rows"));
        assert!(matches!(over, Err(ResourceError::OutOfBudget { .. })), "{over:?}");
        let block = runtime.allocate(most, stream.id(), AllocTag("rows")).unwrap();
        runtime.deallocate(block).unwrap();
        runtime.reap_pending().unwrap();
    });
}

#[test]
fn a_mode_survives_being_written_down() {
    let every = std::num::NonZeroU64::new(7).unwrap();
    let config = quiet().with_mode(GuardMode::Sampled(every));
    assert_eq!(GuardSetting::from(config).to_string(), "sampled:7");
}
