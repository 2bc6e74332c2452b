//! Refusals at the level of the runtime: adds the call to the report of the budget, and makes the report of a stack without a budget.

use std::panic::Location;

use super::XlogDeviceRuntime;
use crate::device_runtime::budget::{
    BudgetHandle, LimitSource, NAMED, OomCause, OomReport, RefusedBy, free_of,
};
use crate::device_runtime::resource::{AllocTag, ResourceError, StreamId};

/// A request to a runtime, and the source location of the caller.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) bytes: usize,
    pub(crate) stream: StreamId,
    pub(crate) tag: AllocTag,
    pub(crate) site: &'static Location<'static>,
}

impl XlogDeviceRuntime {
    /// Adds the call to the report of a refusal. Does nothing for other errors.
    #[cold]
    #[inline(never)]
    pub(crate) fn complete_report(&self, error: &ResourceError, asked: Asked) {
        if !error.is_refusal() {
            return;
        }
        let report = match error.report() {
            Some(report) => report,
            // A meter or the resource itself refused by a limit; the device did not.
            None if matches!(error, ResourceError::OutOfBudget { .. }) => return,
            None => {
                let device_free = free_of(self.device());
                OomReport { device_free, ..self.describe(error, asked) }.publish()
            }
        };
        report.set_call(asked.stream, asked.site, self.limit_source());
    }

    /// Reports a request that the limit of a memory manager refused. The manager has charged `reserved` bytes of `limit`.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_manager(
        &self,
        error: &ResourceError,
        asked: Asked,
        limit: usize,
        reserved: usize,
    ) {
        let mut tags = self.budget().map(BudgetHandle::usage_by_tag).unwrap_or_default();
        tags.truncate(NAMED);
        let report = OomReport {
            tags,
            cause: OomCause::Manager,
            refused_by: RefusedBy::Manager,
            limit,
            reserved,
            ..self.describe(error, asked)
        };
        report.publish().set_call(asked.stream, asked.site, None);
    }

    /// Describes the state of a stack without a budget.
    fn describe(&self, error: &ResourceError, asked: Asked) -> OomReport {
        let resource = self.resource();
        OomReport {
            device_ordinal: self.device_ordinal(),
            requested: asked.bytes,
            reserved: resource.bytes_outstanding(),
            statistics: resource.statistics(),
            free_space: resource.free_space(),
            detail: Some(error.brief()),
            physical: resource.physical_bytes(),
            device_total: usize::try_from(self.device().properties().total_bytes).ok(),
            ..OomReport::of_error(error, asked.tag, OomCause::Device, RefusedBy::Device)
        }
    }

    /// Returns the source of the budget's limit, unless the budget has another limit by now.
    fn limit_source(&self) -> Option<LimitSource> {
        let limit = self.effective_limit()?;
        (limit.bytes() == self.budget()?.limit()).then(|| limit.ruled_by())
    }
}
