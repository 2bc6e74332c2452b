//! Refusals as the runtime reports them: the call is added to the report of the budget. A stack without a budget gets a report here.

use std::panic::Location;

use super::XlogDeviceRuntime;
use crate::device_runtime::budget::{
    BudgetHandle, LimitSource, NAMED, OomCause, OomReport, RefusedBy, free_of,
};
use crate::device_runtime::resource::{AllocTag, ResourceError, StreamId};

/// What was asked of a runtime, and where.
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
            // The limit of a meter or of a resource's own: the error has its numbers, and the device is not to blame.
            None if matches!(error, ResourceError::OutOfBudget { .. }) => return,
            None => {
                let device_free = free_of(self.device());
                OomReport { device_free, ..self.describe(error, asked) }.file()
            }
        };
        report.set_call(asked.stream, asked.site, self.limit_source());
    }

    /// Reports a request that the limit of a memory manager refused. It holds `reserved` bytes of `limit`.
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
        report.file().set_call(asked.stream, asked.site, None);
    }

    /// The state of the stack without a budget of its own.
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

    /// Where the limit of this runtime's budget comes from, unless it was changed since.
    fn limit_source(&self) -> Option<LimitSource> {
        let limit = self.effective_limit()?;
        (limit.bytes() == self.budget()?.limit()).then(|| limit.ruled_by())
    }
}
