//! The shared parts of a runtime: the check that they fit together, their start, and the report of leaks at their end.

use std::sync::{Arc, OnceLock};

use xlog_base::Mutex;

use super::idle_returns::IdleReturns;
use super::ledger_join::Membership;
use super::limit_changes::GivenLimit;
use super::limits::Capacity;
use super::report::{self, LeakReport, catch_panic};
use crate::CudaDevice;
use crate::device_runtime::budget::{BudgetHandle, EffectiveLimit};
#[cfg(feature = "guard")]
use crate::device_runtime::debug_guard::GuardHandle;
use crate::device_runtime::graph::GraphRegistry;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceError};
use crate::device_runtime::statistics::Statistics;
use crate::device_runtime::stream_pool::StreamPool;

/// The shared parts of a runtime. Buffers and recorders hold it, so it may outlive the runtime object.
pub(super) struct RuntimeCore {
    pub(super) device: Arc<CudaDevice>,
    pub(super) ordinal: u32,
    pub(super) stream_pool: Arc<StreamPool>,
    pub(super) resource: Arc<dyn DeviceMemoryResource + Send + Sync>,
    /// The reason why the parts do not fit together.
    pub(super) mismatch: Option<ResourceError>,
    /// Captures, graphs, and the reasons for calls to bypass the direct path to the resource.
    pub(super) graphs: Arc<GraphRegistry>,
    /// Whether the resource's addresses are trusted without a check.
    pub(super) is_trusted: bool,
    pub(super) instrumentation: Option<Instrumentation>,
    /// Set if the resource returns idle memory by itself.
    pub(super) idle_returns: OnceLock<Arc<IdleReturns>>,
}

/// The limits, meters and statistics of a runtime that was built by configuration.
#[derive(Debug)]
pub(super) struct Instrumentation {
    pub(super) budget: BudgetHandle,
    pub(super) capacity: Capacity,
    pub(super) given: Mutex<GivenLimit>,
    pub(super) ledger: Membership,
    pub(super) statistics: Statistics,
    #[cfg(feature = "guard")]
    pub(super) guard: Option<GuardHandle>,
}

impl RuntimeCore {
    pub(super) fn effective_limit(&self) -> Option<EffectiveLimit> {
        let instrumentation = self.instrumentation.as_ref()?;
        Some(instrumentation.capacity.with_ledger(instrumentation.ledger.limit()))
    }

    /// Starts the listener of the ledger, and the return of idle memory.
    pub(super) fn listen(&self) {
        // Both call the graph router, which also returns memory that graphs of other code have left.
        let resource: Arc<dyn DeviceMemoryResource + Send + Sync> = self.graphs.clone();
        if let Some(returns) = IdleReturns::begin(&resource) {
            let _ = self.idle_returns.set(returns);
        }
        if let Some(instrumentation) = &self.instrumentation {
            instrumentation.ledger.listen(
                &resource,
                &instrumentation.budget,
                &instrumentation.statistics,
            );
        }
    }
}

impl Drop for RuntimeCore {
    fn drop(&mut self) {
        catch_panic(|| {
            if let Some(returns) = self.idle_returns.get() {
                returns.end();
            }
            if let Some(instrumentation) = &self.instrumentation {
                instrumentation.ledger.end_listening();
            }
            self.graphs.sweep();
            // Counts completed frees. A wait could be for a stream that this thread holds.
            let _ = self.resource.reap_completed();
            let statistics = self.resource.statistics();
            let bytes = self.resource.bytes_outstanding();
            // Bytes without a live block are queued frees, unless the resource counts no blocks.
            let counts_blocks = statistics.allocations > 0;
            if statistics.live_blocks == 0 && (counts_blocks || bytes == 0) {
                // The device may stay open. Without the ledger's slot, memory cached on it would not be counted.
                if self
                    .instrumentation
                    .as_ref()
                    .is_some_and(|instrumentation| instrumentation.ledger.is_metered())
                {
                    let _ = self.resource.trim();
                }
                return;
            }
            // Work on the live blocks may still run: the resource must stay.
            std::mem::forget(self.resource.clone());
            report::report_leak(&LeakReport {
                device: self.device.spec().to_owned(),
                device_ordinal: self.ordinal,
                at_exit: false,
                is_page_locked: false,
                live_blocks: statistics.live_blocks,
                bytes,
                holders: self
                    .instrumentation
                    .as_ref()
                    .map(|instrumentation| instrumentation.statistics.live_report().to_string()),
            });
        });
    }
}

/// Returns why these parts are not of one device and one stream pool.
pub(super) fn mismatch(
    device: &CudaDevice,
    ordinal: u32,
    pool: &StreamPool,
    resource: &dyn DeviceMemoryResource,
) -> Option<ResourceError> {
    let differ = |what: String, other: String| {
        Some(ResourceError::Driver(format!(
            "the parts of this runtime belong to different devices: {what} and {other}; compose it of parts of one open device"
        )))
    };
    if device.ordinal() != ordinal {
        return differ(
            format!("device {:?} of ordinal {}", device.spec(), device.ordinal()),
            format!("the ordinal {ordinal} asked for"),
        );
    }
    if resource.device_ordinal() != ordinal {
        return differ(
            format!("device {:?} of ordinal {ordinal}", device.spec()),
            format!("a resource of ordinal {}", resource.device_ordinal()),
        );
    }
    if !device.is_same(pool.device()) {
        return differ(
            format!("device {:?} of ordinal {ordinal}", device.spec()),
            format!(
                "a stream pool on another open device, {:?} of ordinal {}",
                pool.device().spec(),
                pool.device().ordinal()
            ),
        );
    }
    let mismatch = resource.home()?.mismatch(device, pool)?;
    Some(ResourceError::Driver(format!(
        "the parts of this runtime do not belong together: {mismatch}; compose it of parts of one open device and one stream pool"
    )))
}
