//! The reports of a guard, and the damage that no call has returned yet.

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use xlog_base::escape;
use xlog_driver::sync::Mutex;

use super::checker::{Finding, Findings};
use super::config::{GuardConfig, GuardOutput};
use super::redzones::{CANARY, FREED};
use super::report::{BlockInfo, DamageKind, FoundBy, GuardReport, Moment};
use crate::device_runtime::logging::QueryScope;
use crate::device_runtime::resource::{ResourceError, StreamId};
use crate::device_runtime::runtime::print_report;

/// The maximum number of stored reports; further ones are only counted.
const MAX_KEPT: usize = 1000;

/// The reports of one guard.
#[derive(Debug)]
pub(super) struct Journal {
    started: Instant,
    backtraces: bool,
    output: GuardOutput,
    reports: Mutex<Reports>,
}

#[derive(Debug, Default)]
struct Reports {
    kept: Vec<GuardReport>,
    /// Not yet returned by a call.
    unreported: VecDeque<ResourceError>,
    total: u64,
}

impl Journal {
    pub(super) fn new(config: &GuardConfig) -> Self {
        Self {
            started: Instant::now(),
            backtraces: config.backtraces,
            output: config.output.clone(),
            reports: Mutex::new(Reports::default()),
        }
    }

    /// Returns the current moment, for an allocation or free.
    pub(super) fn moment(&self, stream: StreamId) -> Moment {
        Moment {
            at: self.started.elapsed(),
            stream,
            query_id: QueryScope::current(),
            backtrace: self.backtraces.then(|| Arc::new(Backtrace::force_capture())),
        }
    }

    /// Stores the findings of a check. Returns true if they include damage that was not reported before.
    pub(super) fn enter(&self, block: &BlockInfo, findings: &Findings, found_by: FoundBy) -> bool {
        let mut is_new = false;
        let kinds = [
            (DamageKind::OutOfBounds, &findings.around, CANARY),
            (DamageKind::UseAfterFree, &findings.inside, FREED),
        ];
        for (kind, finding, expected) in kinds {
            if let Some(finding) = finding
                && block.set_reported(kind)
            {
                is_new = true;
                self.add(self.report(block, finding, kind, expected, found_by));
            }
        }
        is_new
    }

    fn report(
        &self,
        block: &BlockInfo,
        finding: &Finding,
        kind: DamageKind,
        expected: u8,
        found_by: FoundBy,
    ) -> GuardReport {
        let mut found = finding.found.clone();
        found.truncate(block.redzones.left_of_part(finding.first));
        GuardReport {
            kind,
            generation: block.generation,
            ptr: block.redzones.user(),
            bytes: block.redzones.bytes,
            tag: block.tag,
            device_ordinal: block.ordinal,
            offset: block.redzones.offset_of(finding.first),
            damaged: finding.count,
            expected,
            found,
            allocated: block.allocated.clone(),
            freed: block.freed.get().cloned(),
            found_by,
            found_at: self.started.elapsed(),
        }
    }

    fn add(&self, report: GuardReport) {
        self.write(format_args!("{report}"));
        let mut reports = self.reports.lock();
        reports.total += 1;
        reports.unreported.push_back(report.error());
        if reports.kept.len() < MAX_KEPT {
            reports.kept.push(report);
        }
    }

    /// Writes a text to the configured output.
    pub(super) fn write(&self, text: fmt::Arguments<'_>) {
        let path = match &self.output {
            GuardOutput::Silent => return,
            GuardOutput::StandardError => return print_report(text),
            GuardOutput::File(path) => path,
        };
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Err(error) = file.and_then(|mut file| writeln!(file, "{text}")) {
            let path = path.display().to_string();
            let path = escape::line(&path);
            print_report(format_args!("{text}\n(not written to {path}: {error})"));
        }
    }

    /// Removes and returns the oldest damage that no call has returned.
    pub(super) fn pop_unreported(&self) -> Option<ResourceError> {
        self.reports.lock().unreported.pop_front()
    }

    /// Removes and returns unreturned damage: of this block first, then of any other.
    pub(super) fn pop_unreported_of(&self, block: &BlockInfo) -> Option<ResourceError> {
        let is_own = |error: &ResourceError| match error {
            ResourceError::OutOfBounds { generation }
            | ResourceError::UseAfterFree { generation } => *generation == block.generation,
            _ => false,
        };
        let mut reports = self.reports.lock();
        let at = reports.unreported.iter().position(is_own).unwrap_or(0);
        reports.unreported.remove(at)
    }

    pub(super) fn reports(&self) -> Vec<GuardReport> {
        self.reports.lock().kept.clone()
    }

    pub(super) fn total(&self) -> u64 {
        self.reports.lock().total
    }
}
