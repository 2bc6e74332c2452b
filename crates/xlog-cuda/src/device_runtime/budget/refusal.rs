//! Refusals: the error with its numbers, and the report of what holds the memory.

use std::sync::Arc;

use super::GlobalDeviceBudget;
use super::callbacks;
use super::quota::{AuditSnapshot, Charge};
use super::report::{NAMED, OomCause, OomReport, RefusedBy, ScopeUsage};
use super::tags;
use super::tree::DEVICE;
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
        let report = self.describe(charge, snapshot, cause, None);
        self.report(OomReport { scope, refused_by, ..report });
        ResourceError::OutOfBudget { requested: charge.bytes, remaining: snapshot.room }
    }

    /// Files the report of a failure below.
    #[cold]
    pub(super) fn report_below(&self, charge: &Charge, error: &ResourceError) {
        let snapshot = self.core.quotas.snapshot(charge.bytes, charge.scope);
        let mut report = self.describe(charge, snapshot, OomCause::Device, Some(error.to_string()));
        report.refused_by = RefusedBy::Device;
        if let ResourceError::OutOfBudget { requested, remaining } = *error {
            // The meter of physical bytes refused.
            (report.refused_by, report.needed, report.remaining) =
                (RefusedBy::Ledger, requested, remaining);
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

    fn describe(
        &self,
        charge: &Charge,
        snapshot: AuditSnapshot,
        cause: OomCause,
        detail: Option<String>,
    ) -> OomReport {
        let (mut tags, mut scopes) = (self.core.tags(), self.core.scopes());
        tags.truncate(NAMED);
        scopes.truncate(NAMED);
        let others = self.core.other_use.lock().clone();
        OomReport {
            cause,
            device_ordinal: self.inner.device_ordinal(),
            requested: charge.bytes,
            refused_by: RefusedBy::Budget,
            needed: charge.bytes,
            remaining: snapshot.room,
            tag: tags::name(charge.tag),
            scope: None,
            limit: snapshot.limit,
            reserved: snapshot.charged,
            waiting: snapshot.pending,
            tags,
            scopes,
            others: others.and_then(|others| others()),
            statistics: self.inner.statistics(),
            free_space: self.inner.free_space(),
            detail,
        }
    }

    fn report(&self, report: OomReport) {
        let report = Arc::new(report);
        OomReport::store_for_thread(&report);
        *self.core.last_oom.lock() = Some(report.clone());
        for function in self.core.refusals.outermost() {
            callbacks::inside(|| function(&report));
        }
    }
}
