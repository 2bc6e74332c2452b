//! The stack of a runtime that is built by configuration. From the top: the user's layers, log (optional), budget, statistics, guard
//! (optional), resource.
//!
//! The budget's limit is the smallest of all limits ([`Capacity`]). The resource charges its physical bytes to the ledger.

use std::sync::Arc;

use xlog_base::Mutex;

use super::config::RESOURCE_VARIABLE;
use super::ledger_join::{Membership, join};
use super::limit_changes::GivenLimit;
use super::limits::Capacity;
use super::log_file::open_rotated_log;
use super::{Instrumentation, ResourceKind, RuntimeConfig, XlogDeviceRuntime};
use crate::device_runtime::async_resource::AsyncCudaResource;
use crate::device_runtime::budget::{BudgetHandle, GlobalDeviceBudget};
#[cfg(feature = "guard")]
use crate::device_runtime::debug_guard::{DebugGuardResource, GuardHandle};
use crate::device_runtime::direct::DirectCudaResource;
use crate::device_runtime::logging::{LoggingResource, LoggingSink};
use crate::device_runtime::pool::{PoolResource, PoolSanitizer};
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::{Statistics, StatisticsResource};
use crate::device_runtime::stream_pool::StreamPool;
use crate::{CudaDevice, Result, XlogError};

type BoxedResource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// Builds the stack. A failure leaves nothing behind.
pub(super) fn stack(device: Arc<CudaDevice>, config: &RuntimeConfig) -> Result<XlogDeviceRuntime> {
    let ordinal = device.ordinal();
    if let Some(named) = config.device.filter(|named| named.to_string() != device.spec()) {
        return Err(XlogError::bad_setting(
            "the device of a runtime's configuration",
            named.to_string(),
            "the runtime is built on another device",
            "the device that the runtime is built on, or none",
        ));
    }
    if config.resource == ResourceKind::Async && device.driver().async_pools().is_none() {
        return Err(XlogError::Kernel(format!(
            "device {:?} has no stream-ordered pools; set {RESOURCE_VARIABLE}=pool or {RESOURCE_VARIABLE}=direct, \
             or configure ResourceKind::Pool or ResourceKind::Direct",
            device.spec()
        )));
    }
    let capacity = Capacity::of(&device, config)?;
    let ledger = join(&device, config, &capacity)?;
    let limit = capacity.with_ledger(ledger.limit()?).bytes();

    let streams = Arc::new(StreamPool::new(device.clone(), config.max_streams));
    let log = config.log.as_deref();
    let sink = log.map(|log| open_rotated_log(log, ordinal, config)).transpose()?;
    let above = Above { config, sink, limit };
    let mut built = match config.resource {
        ResourceKind::Direct => guarded(DirectCudaResource::new(device.clone(), ordinal), above),
        ResourceKind::Async => {
            guarded(AsyncCudaResource::new(device.clone(), ordinal, streams.clone()), above)
        }
        ResourceKind::Pool => {
            let mut pool = config.pool.clone();
            if config.sanitizer != PoolSanitizer::Automatic || pool.sanitizer == PoolSanitizer::Off
            {
                pool.sanitizer = config.sanitizer;
            }
            guarded(PoolResource::new(device.clone(), ordinal, streams.clone(), pool)?, above)
        }
    };
    for layer in &config.layers {
        built.resource = layer.wrap(built.resource);
    }
    let ledger = Membership::begin(ledger, &*built.resource, &built.budget)?;
    let instrumentation = Instrumentation {
        budget: built.budget,
        capacity,
        given: Mutex::new(GivenLimit::new(limit)),
        ledger,
        statistics: built.statistics,
        #[cfg(feature = "guard")]
        guard: built.guard,
    };
    Ok(XlogDeviceRuntime::compose(device, ordinal, streams, built.resource, Some(instrumentation)))
}

/// The settings of the layers above the guard.
struct Above<'a> {
    config: &'a RuntimeConfig,
    sink: Option<Arc<dyn LoggingSink>>,
    limit: usize,
}

/// A stack and the handles on its layers.
struct Layers {
    resource: BoxedResource,
    budget: BudgetHandle,
    statistics: Statistics,
    #[cfg(feature = "guard")]
    guard: Option<GuardHandle>,
}

/// Adds the guard below budget and statistics, so that they count its redzones.
#[cfg(feature = "guard")]
fn guarded<R: DeviceMemoryResource + Send + Sync + 'static>(
    resource: R,
    above: Above<'_>,
) -> Layers {
    match above.config.guard.config() {
        None => layers(resource, above),
        Some(config) => {
            let guard = DebugGuardResource::on_home(resource, config.clone());
            let handle = guard.handle();
            Layers { guard: Some(handle), ..layers(guard, above) }
        }
    }
}

#[cfg(not(feature = "guard"))]
fn guarded<R: DeviceMemoryResource + Send + Sync + 'static>(
    resource: R,
    above: Above<'_>,
) -> Layers {
    layers(resource, above)
}

fn layers<R: DeviceMemoryResource + Send + Sync + 'static>(
    resource: R,
    above: Above<'_>,
) -> Layers {
    let counted = StatisticsResource::over(resource, above.config.statistics);
    let statistics = counted.handle();
    let limited = GlobalDeviceBudget::over(counted, above.limit);
    let budget = limited.handle();
    // Above the budget: a request is one record, even if the budget refuses it or needs several attempts.
    let resource: BoxedResource = match above.sink {
        None => Box::new(limited),
        Some(sink) => {
            let logged = LoggingResource::over(limited, sink);
            let logged = logged.with_use_logging(above.config.log_uses).with_segment_logging(true);
            Box::new(logged.with_stacks(above.config.statistics.backtraces))
        }
    };
    Layers {
        resource,
        budget,
        statistics,
        #[cfg(feature = "guard")]
        guard: None,
    }
}

#[cfg(test)]
mod tests {
    use xlog_sim::{SimConfig, SimDevice};

    use super::*;

    #[test]
    fn a_device_without_stream_ordered_pools_is_refused_with_the_way_out() {
        let without = || {
            let config = SimConfig::default().with_async_pools(false);
            Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()))
        };
        let ordered = RuntimeConfig::default().with_resource(ResourceKind::Async);
        let said = stack(without(), &ordered).unwrap_err().to_string();
        for kind in [ResourceKind::Pool, ResourceKind::Direct] {
            assert!(said.contains(&format!("XLOG_DEVICE_RESOURCE={kind}")), "{said}");
            let config = RuntimeConfig::default().with_resource(kind);
            assert!(stack(without(), &config).is_ok(), "{kind}");
        }
    }
}
