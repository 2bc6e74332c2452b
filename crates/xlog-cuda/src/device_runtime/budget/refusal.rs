//! Saying no: the error with its numbers, and the report of who holds what.

use std::sync::Arc;

use super::GlobalDeviceBudget;
use super::callbacks;
use super::core::Claim;
use super::credit::Sight;
use super::report::{NAMED, OomCause, OomReport, RefusedBy, ScopeUsage};
use super::tree::DEVICE;
use crate::device_runtime::resource::{DeviceMemoryResource, ResourceError};

impl<R: DeviceMemoryResource> GlobalDeviceBudget<R> {
    /// The budget's refusal, with its report.
    #[cold]
    pub(super) fn refuse(&self, claim: &Claim, sight: Sight) -> ResourceError {
        let scope = self.scope_of(claim);
        let hard = self.core.credits.with_scopes(|tree| tree.hard_room(claim.scope));
        let cause = if self.never_fits(claim) {
            OomCause::AboveLimit
        } else if claim.scope != DEVICE && hard < claim.charge {
            OomCause::Scope
        } else if claim.charge <= sight.free() {
            OomCause::Guaranteed
        } else if claim.charge <= sight.free().saturating_add(sight.pending) {
            OomCause::WaitingOnStreams
        } else {
            OomCause::Budget
        };
        let is_scope = cause == OomCause::Scope
            || (cause == OomCause::AboveLimit && claim.charge <= self.core.limit());
        let refused_by = if is_scope { RefusedBy::Scope } else { RefusedBy::Budget };
        let report = self.describe(claim, sight, cause, None);
        self.report(OomReport { scope, refused_by, ..report });
        ResourceError::OutOfBudget { requested: claim.charge, remaining: sight.room }
    }

    /// The report of a failure below.
    #[cold]
    pub(super) fn report_below(&self, claim: &Claim, error: &ResourceError) {
        let sight = self.core.sight(claim.charge, claim.scope);
        let mut report = self.describe(claim, sight, OomCause::Device, Some(error.to_string()));
        report.refused_by = RefusedBy::Device;
        if let ResourceError::OutOfBudget { requested, remaining } = *error {
            // The word of the meter of physical bytes.
            (report.refused_by, report.needed, report.remaining) =
                (RefusedBy::Ledger, requested, remaining);
        }
        let fits = |space: usize| space >= claim.charge;
        report.cause = match (report.free_space, report.others) {
            (Some(space), _) if fits(space.bytes) && !fits(space.largest) => {
                OomCause::Fragmentation
            }
            _ if sight.pending >= claim.charge => OomCause::WaitingOnStreams,
            (_, Some(others)) if others.bytes > sight.charged => OomCause::OtherProcesses,
            _ if report.refused_by == RefusedBy::Ledger => OomCause::Ledger,
            _ => OomCause::Device,
        };
        report.scope = self.scope_of(claim);
        self.report(report);
    }

    fn scope_of(&self, claim: &Claim) -> Option<ScopeUsage> {
        let name = self.core.scope_names.lock().get(&claim.scope).cloned()?;
        self.core.scopes().into_iter().find(|scope| scope.name == *name)
    }

    fn describe(
        &self,
        claim: &Claim,
        sight: Sight,
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
            requested: claim.charge,
            refused_by: RefusedBy::Budget,
            needed: claim.charge,
            remaining: sight.room,
            tag: claim.tag,
            scope: None,
            limit: sight.limit,
            reserved: sight.charged,
            waiting: sight.pending,
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
        OomReport::keep_for_thread(&report);
        *self.core.last_oom.lock() = Some(report.clone());
        for function in self.core.refusals.outermost() {
            callbacks::inside(|| function(&report));
        }
    }
}
