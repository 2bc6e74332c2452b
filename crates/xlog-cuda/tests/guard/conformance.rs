//! A guarded resource is a resource like any other, over every backend and in every stack.
#![allow(clippy::unwrap_used)]

use std::num::NonZeroU64;
use std::sync::Arc;

use xlog_conformance::{BoxedResource, Suite};
use xlog_cuda::device_runtime::{
    AsyncCudaResource, DebugGuardResource, DirectCudaResource, GlobalDeviceBudget, GuardConfig,
    GuardMode, LoggingResource, NullSink, PoolConfig, PoolResource, StatisticsConfig,
    StatisticsResource, StreamPool,
};
use xlog_cuda::{CudaDevice, DeviceSpec};
use xlog_testing::{SEEDS, for_each_device, specs};

use crate::support::{Emptied, quiet};

const LIMIT: usize = 2 << 30;

#[derive(Clone, Copy)]
enum Backend {
    Direct,
    Async,
    Pool,
}

fn backend(kind: Backend, device: &Arc<CudaDevice>, pool: &Arc<StreamPool>) -> BoxedResource {
    let (device, ordinal, pool) = (device.clone(), device.ordinal(), pool.clone());
    match kind {
        Backend::Direct => Box::new(DirectCudaResource::new(device, ordinal)),
        Backend::Async => Box::new(AsyncCudaResource::new(device, ordinal, pool)),
        Backend::Pool => {
            Box::new(PoolResource::new(device, ordinal, pool, PoolConfig::default()).unwrap())
        }
    }
}

/// On the device that was asked for, or else under a seed, another for each stack; one stack on the concurrent device too.
fn conforms(kind: Backend, seed: usize, stack: impl Fn(BoxedResource) -> BoxedResource) {
    let seeded = DeviceSpec::SimSeeded(SEEDS[seed]).to_string();
    let own = [seeded, if seed == 0 { DeviceSpec::Sim.to_string() } else { String::new() }];
    for_each_device(|device| {
        if !own.iter().any(|spec| spec == device.spec()) && specs().len() > 1 {
            return;
        }
        let suite = Suite::new(|device, pool| {
            let guarded = stack(backend(kind, device, pool));
            Box::new(GlobalDeviceBudget::over(guarded, LIMIT)) as BoxedResource
        });
        // A memory checker makes some calls wait that do not wait without it.
        let suite = match std::env::var("XLOG_TEST_WITHOUT") {
            Ok(text) => suite.without(&text),
            Err(_) => suite,
        };
        suite.run(device).assert_passed();
    });
}

fn without_quarantine(config: GuardConfig) -> impl Fn(BoxedResource) -> BoxedResource {
    let config = config.with_quarantine(0, 0);
    move |inner| Box::new(Emptied(DebugGuardResource::new(inner, config.clone())))
}

#[test]
fn a_guarded_async_resource_conforms() {
    conforms(Backend::Async, 0, without_quarantine(quiet()));
}

#[test]
fn a_guarded_pool_conforms() {
    conforms(Backend::Pool, 1, without_quarantine(quiet()));
}

#[test]
fn a_guarded_direct_resource_conforms() {
    conforms(Backend::Direct, 2, without_quarantine(quiet()));
}

#[test]
fn odd_canaries_conform() {
    let config = quiet().with_canary_bytes(77).with_poison(false);
    conforms(Backend::Async, 3, without_quarantine(config));
}

#[test]
fn a_quarantine_that_reaps_empty_conforms() {
    conforms(Backend::Async, 4, |inner| Box::new(Emptied(DebugGuardResource::new(inner, quiet()))));
}

#[test]
fn the_whole_stack_conforms() {
    conforms(Backend::Pool, 1, |inner| {
        let guard = Emptied(DebugGuardResource::new(inner, quiet()));
        let counted = StatisticsResource::over(guard, StatisticsConfig::default());
        Box::new(LoggingResource::over(counted, Arc::new(NullSink::new())))
    });
}

#[test]
fn guard_pages_conform() {
    conforms(Backend::Async, 2, without_quarantine(quiet().with_mode(GuardMode::Pages)));
}

#[test]
fn guard_pages_over_a_direct_resource_conform() {
    conforms(Backend::Direct, 3, without_quarantine(quiet().with_mode(GuardMode::Pages)));
}

#[test]
fn sampled_guard_pages_conform() {
    let every = NonZeroU64::new(3).unwrap();
    conforms(Backend::Pool, 4, without_quarantine(quiet().with_mode(GuardMode::Sampled(every))));
}
