//! Refusals: the error, and the report of the largest holders.

use super::GlobalDeviceBudget;
use super::callbacks;
use super::quota::{AuditSnapshot, Charge};
use super::report::{NAMED, OomCause, OomReport, RefusedBy, ScopeUsage};
use super::tags;
use super::tree::DEVICE;
use crate::CudaDevice;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceError};

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// Refuses a request and files the report.
    #[cold]
    pub(super) fn refuse(&self, charge: &Charge, snapshot: AuditSnapshot) -> ResourceError {
        let scope = self.scope_of(charge);
        let hard = self.core.quotas.with_scopes(|tree| tree.hard_room(charge.scope));
        let cause = if self.never_fits(charge) {
            OomCause::AboveLimit
        } else if charge.scope != DEVICE && hard < charge.bytes {
            OomCause::Scope
        } else if charge.bytes <= snapshot.free() {
            OomCause::Guaranteed
        } else if charge.bytes <= snapshot.free().saturating_add(snapshot.pending) {
            OomCause::WaitingOnStreams
        } else {
            OomCause::Budget
        };
        let is_scope = cause == OomCause::Scope
            || (cause == OomCause::AboveLimit && charge.bytes <= self.core.limit());
        let refused_by = if is_scope { RefusedBy::Scope } else { RefusedBy::Budget };
        let error =
            ResourceError::OutOfBudget { requested: charge.bytes, remaining: snapshot.room };
        let report = OomReport::of_error(&error, tags::name(charge.tag), cause, refused_by);
        self.report(OomReport { scope, ..self.describe(report, snapshot) });
        error
    }

    /// Files the report of a failure below.
    #[cold]
    pub(super) fn report_below(&self, charge: &Charge, error: &ResourceError) {
        let snapshot = self.core.quotas.snapshot(charge.bytes, charge.scope);
        let (tag, below) = (tags::name(charge.tag), RefusedBy::Device);
        let report = OomReport::of_error(error, tag, OomCause::Device, below);
        let mut report = self.describe(report, snapshot);
        (report.requested, report.detail) = (charge.bytes, Some(error.brief()));
        if let ResourceError::OutOfBudget { .. } = error {
            // The meter of physical bytes refused.
            report.refused_by = RefusedBy::Ledger;
        } else {
            (report.needed, report.remaining) = (charge.bytes, snapshot.room);
            report.device_free = self.inner.home().and_then(|home| free_of(&home.device));
        }
        let fits = |space: usize| space >= charge.bytes;
        report.cause = match (report.free_space, report.others) {
            (Some(space), _) if fits(space.bytes) && !fits(space.largest) => {
                OomCause::Fragmentation
            }
            _ if snapshot.pending >= charge.bytes => OomCause::WaitingOnStreams,
            (_, Some(others)) if others.bytes > snapshot.charged => OomCause::OtherProcesses,
            _ if report.refused_by == RefusedBy::Ledger => OomCause::Ledger,
            _ => OomCause::Device,
        };
        report.scope = self.scope_of(charge);
        self.report(report);
    }

    fn scope_of(&self, charge: &Charge) -> Option<ScopeUsage> {
        let name = self.core.scope_names.lock().get(&charge.scope).cloned()?;
        self.core.scopes().into_iter().find(|scope| scope.name == *name)
    }

    /// Adds the state of the budget and of the resource below. No lock is held over a call of either.
    fn describe(&self, report: OomReport, snapshot: AuditSnapshot) -> OomReport {
        let (mut tags, mut scopes) = (self.core.tags(), self.core.scopes());
        tags.truncate(NAMED);
        scopes.truncate(NAMED);
        let others = self.core.other_use.lock().clone();
        let device_total = self.inner.home().map(|home| home.device.properties().total_bytes);
        let (others, processes) = others.and_then(|others| others()).unzip();
        OomReport {
            device_ordinal: self.inner.device_ordinal(),
            limit: snapshot.limit,
            reserved: snapshot.charged,
            waiting: snapshot.pending,
            tags,
            scopes,
            others,
            processes: processes.unwrap_or_default(),
            physical: self.inner.physical_bytes(),
            device_total: device_total.and_then(|bytes| usize::try_from(bytes).ok()),
            statistics: self.inner.statistics(),
            free_space: self.inner.free_space(),
            ..report
        }
    }

    fn report(&self, report: OomReport) {
        let report = report.publish();
        *self.core.last_oom.lock() = Some(report.clone());
        for callback in self.core.refusals.outermost() {
            callbacks::inside(|| callback(&report));
        }
    }
}

/// Returns the free memory that the driver reports; `None` if it fails.
pub(crate) fn free_of(device: &CudaDevice) -> Option<usize> {
    usize::try_from(device.memory_info().ok()?.free).ok()
}
