//! The stack of a runtime that is built by configuration. From the top: log (optional), budget, statistics, guard (optional),
//! resource. The ledger meters the resource.
//!
//! The budget's limit is the smallest of all limits ([`Capacity`]). The lowest resource charges its physical bytes to the ledger.

use std::sync::Arc;

use super::config::RESOURCE_VARIABLE;
use super::ledger_join::{LedgerStatus, join};
use super::limits::Capacity;
use super::log_file::open_log;
use super::tag_publisher::PublishedTags;
use super::{Instrumentation, ResourceKind, RuntimeConfig, XlogDeviceRuntime};
use crate::device_runtime::async_resource::AsyncCudaResource;
use crate::device_runtime::budget::{BudgetHandle, GlobalDeviceBudget};
use crate::device_runtime::debug_guard::{DebugGuardResource, GuardConfig, GuardHandle};
use crate::device_runtime::direct::DirectCudaResource;
use crate::device_runtime::ledger::{LedgerMeter, other_use};
use crate::device_runtime::logging::{LoggingResource, LoggingSink};
use crate::device_runtime::pool::{PoolConfig, PoolResource};
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::{Statistics, StatisticsConfig, StatisticsResource};
use crate::device_runtime::stream_pool::StreamPool;
use crate::{CudaDevice, Result, XlogError};

type BoxedResource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// Builds the stack. A failure leaves nothing behind.
pub(super) fn stack(device: Arc<CudaDevice>, config: &RuntimeConfig) -> Result<XlogDeviceRuntime> {
    let ordinal = device.ordinal();
    if config.resource == ResourceKind::Async && device.driver().async_pools().is_none() {
        return Err(XlogError::Kernel(format!(
            "device {:?} has no stream-ordered pools; set {RESOURCE_VARIABLE}=pool or {RESOURCE_VARIABLE}=direct, \
             or configure ResourceKind::Pool or ResourceKind::Direct",
            device.spec()
        )));
    }
    let capacity = Capacity::of(&device, config)?;
    let ledger = join(&device, config, &capacity)?;
    let agreed = match ledger.ledger() {
        Some(ledger) => Some(ledger.limit().map_err(|error| XlogError::Kernel(error.to_string()))?),
        None => None,
    };
    let limit = capacity.with_ledger(agreed).bytes();

    let streams = Arc::new(StreamPool::new(device.clone(), config.max_streams));
    let sink = config.log.as_deref().map(|log| open_log(log, ordinal)).transpose()?;
    let guard = config.guard.config();
    let Layers { resource, budget, statistics, guard } = match config.resource {
        ResourceKind::Direct => {
            guarded(DirectCudaResource::new(device.clone(), ordinal), guard, sink, limit)
        }
        ResourceKind::Async => {
            let resource = AsyncCudaResource::new(device.clone(), ordinal, streams.clone());
            guarded(resource, guard, sink, limit)
        }
        ResourceKind::Pool => {
            let config = PoolConfig::default().with_sanitizer(config.sanitizer);
            let resource = PoolResource::new(device.clone(), ordinal, streams.clone(), config)?;
            guarded(resource, guard, sink, limit)
        }
    };
    let meter = match &ledger {
        LedgerStatus::Joined(ledger) => {
            let meter = Arc::new(LedgerMeter::new(ledger.clone()));
            resource.meter_physical(meter.clone())?;
            let asked = ledger.clone();
            budget.set_other_use(move || other_use(&asked));
            Some(meter)
        }
        _ => None,
    };
    let _published_tags =
        ledger.ledger().and_then(|ledger| PublishedTags::start(ledger, &statistics));
    let instrumentation =
        Instrumentation { budget, capacity, ledger, meter, statistics, guard, _published_tags };
    Ok(XlogDeviceRuntime::compose(device, ordinal, streams, resource, Some(instrumentation)))
}

/// A stack and the handles on its layers.
struct Layers {
    resource: BoxedResource,
    budget: BudgetHandle,
    statistics: Statistics,
    guard: Option<GuardHandle>,
}

/// Puts the guard below budget and statistics, so that they count its redzones.
fn guarded<R: DeviceMemoryResource + Send + Sync + 'static>(
    resource: R,
    guard: Option<&GuardConfig>,
    sink: Option<Arc<dyn LoggingSink>>,
    limit: usize,
) -> Layers {
    match guard {
        None => layers(resource, sink, limit),
        Some(config) => {
            let guard = DebugGuardResource::on_home(resource, config.clone());
            let handle = guard.handle();
            Layers { guard: Some(handle), ..layers(guard, sink, limit) }
        }
    }
}

fn layers<R: DeviceMemoryResource + Send + Sync + 'static>(
    resource: R,
    sink: Option<Arc<dyn LoggingSink>>,
    limit: usize,
) -> Layers {
    let counted = StatisticsResource::over(resource, StatisticsConfig::default());
    let statistics = counted.handle();
    let limited = GlobalDeviceBudget::over(counted, limit);
    let budget = limited.handle();
    // Above the budget: a request is one record, also if the budget refuses it or needs several attempts.
    let resource: BoxedResource = match sink {
        None => Box::new(limited),
        Some(sink) => Box::new(LoggingResource::over(limited, sink)),
    };
    Layers { resource, budget, statistics, guard: None }
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
