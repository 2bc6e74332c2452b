//! Runtimes that are opened by text or by configuration, outside of the process-wide table.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Backtraces, InMemorySink, LogAction, LoggingResource, StatisticsConfig,
};
use xlog_cuda::prelude::*;

#[test]
fn a_text_opens_a_runtime_and_a_bad_one_is_named_with_what_is_accepted() {
    for spec in ["sim", "sim:7"] {
        let runtime = XlogDeviceRuntime::open(spec).unwrap();
        assert_eq!(runtime.device().spec(), spec);
        assert!(runtime.budget().is_some() && runtime.supports_block_use_tracking());
    }
    for bad in ["", "gpu", "sim:x", "cuda", "cuda:-1"] {
        let error = XlogDeviceRuntime::open(bad).unwrap_err();
        assert!(
            matches!(&error, XlogError::BadDeviceSpec { spec, .. } if spec == bad),
            "{error:?}"
        );
        assert!(error.to_string().contains("sim:SEED"), "{error}");
    }
}

#[test]
fn a_configuration_opens_its_own_device_and_refuses_another_one() {
    let config = RuntimeConfig::default().with_device("sim:3".parse().unwrap());
    assert_eq!(config.open().unwrap().device().spec(), "sim:3");
    let other = Arc::new(CudaDevice::open("sim:4").unwrap());
    let error = XlogDeviceRuntime::with_config(other, &config).unwrap_err();
    let XlogError::BadSetting { value, .. } = &error else { panic!("{error:?}") };
    assert_eq!(value, "sim:3");
    let same = Arc::new(CudaDevice::open("sim:3").unwrap());
    assert!(XlogDeviceRuntime::with_config(same, &config).is_ok());
}

#[test]
fn settings_of_the_pool_and_of_the_statistics_reach_the_stack() {
    let pool = PoolConfig::default().with_maximum(4 << 20);
    let statistics = StatisticsConfig::new().with_backtraces(Backtraces::All);
    let config = RuntimeConfig::default().with_device("sim".parse().unwrap());
    let runtime = config.with_pool(pool).with_statistics(statistics).open().unwrap();
    let memory = GpuMemoryManager::with_runtime(runtime.clone());
    assert!(memory.alloc::<u8>(8 << 20).is_err(), "the pool grew beyond its maximum");
    let block = memory.alloc::<u8>(1 << 20).unwrap();
    let live = runtime.usage().unwrap().live_blocks();
    assert!(live.len() == 1 && live[0].backtrace.is_some(), "{live:?}");
    drop(block);
    let bad = RuntimeConfig::default()
        .with_device("sim".parse().unwrap())
        .with_pool(PoolConfig::default().with_growth(0));
    assert!(bad.open().is_err());
}

#[test]
fn layers_wrap_each_other_in_order_and_see_uses_and_refusals() {
    let sinks = [(); 2].map(|()| Arc::new(InMemorySink::new()));
    let [inner, outer] = sinks.clone();
    let config = RuntimeConfig::default()
        .with_device("sim".parse().unwrap())
        .with_budget(ByteSize::mib(1))
        .with_layer(move |below| Box::new(LoggingResource::new(below, inner.clone())))
        .with_layer(move |below| {
            Box::new(LoggingResource::new(below, outer.clone()).with_use_logging(true))
        });
    assert_eq!(config, config.clone());
    assert_ne!(config, RuntimeConfig::default());
    let memory = GpuMemoryManager::with_runtime(config.open().unwrap());
    drop(memory.alloc_zeroed::<u8>(100).unwrap());
    assert!(memory.alloc::<u8>(2 << 20).is_err());
    let actions = |sink: &InMemorySink| -> Vec<LogAction> {
        sink.snapshot().iter().map(|record| record.action).collect()
    };
    use LogAction::{Allocate, Deallocate, UseFinish, UsePrepare};
    assert_eq!(actions(&sinks[0]), [Allocate, Deallocate, Allocate]);
    assert_eq!(actions(&sinks[1]), [Allocate, UsePrepare, UseFinish, Deallocate, Allocate]);
    assert!(!sinks[1].snapshot()[4].result.is_ok());
}

#[test]
fn a_log_rotates_has_uses_and_refuses_a_rotation_out_of_range() {
    let folder = std::env::temp_dir().join(format!("xlog-open-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("run.csv");
    let config =
        RuntimeConfig::default().with_device("sim".parse().unwrap()).with_log(file.clone());
    for (bytes, keep) in [(4095, 1), (4096, 10_001)] {
        let error = config.clone().with_log_rotation(bytes, keep).open().unwrap_err();
        let XlogError::BadSetting { value, .. } = &error else { panic!("{error:?}") };
        assert!(value.contains(&bytes.to_string()) && value.contains(&keep.to_string()), "{value}");
    }
    let runtime = config.with_log_rotation(4096, 2).with_use_logging(true).open().unwrap();
    let memory = GpuMemoryManager::with_runtime(runtime);
    for _ in 0..500 {
        drop(memory.alloc_zeroed::<u8>(100).unwrap());
    }
    drop(memory);
    let kept: String = ["run.csv.2", "run.csv.1", "run.csv"]
        .iter()
        .map(|name| std::fs::read_to_string(folder.join(name)).unwrap())
        .collect();
    assert!(kept.contains("use_prepare") && kept.contains("use_finish"), "{kept}");
    assert!(!folder.join("run.csv.3").exists());
    std::fs::remove_dir_all(&folder).unwrap();
}
