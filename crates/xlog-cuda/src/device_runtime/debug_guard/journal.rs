//! What was found so far, and what of it nobody has been told.

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use xlog_driver::sync::Mutex;

use super::check::{Finding, Findings};
use super::config::{GuardConfig, GuardOutput};
use super::report::{BlockInfo, DamageKind, FoundBy, GuardReport, Moment};
use super::zone::{CANARY, FREED};
use crate::device_runtime::logging::QueryScope;
use crate::device_runtime::resource::{ResourceError, StreamId};
use crate::device_runtime::runtime::say;

/// Reports that are kept; more are counted.
const KEPT: usize = 1000;

/// The reports of one guard.
#[derive(Debug)]
pub(super) struct Journal {
    started: Instant,
    backtraces: bool,
    output: GuardOutput,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    reports: Vec<GuardReport>,
    /// Not yet returned by a call.
    untold: VecDeque<ResourceError>,
    total: u64,
}

impl Journal {
    pub(super) fn new(config: &GuardConfig) -> Self {
        Self {
            started: Instant::now(),
            backtraces: config.backtraces,
            output: config.output.clone(),
            pages: Mutex::new(Pages::default()),
        }
    }

    /// What a block's allocation or free is remembered as.
    pub(super) fn moment(&self, stream: StreamId) -> Moment {
        Moment {
            at: self.started.elapsed(),
            stream,
            query_id: QueryScope::current(),
            backtrace: self.backtraces.then(|| Arc::new(Backtrace::force_capture())),
        }
    }

    /// Takes down what a look at a block found; true if it was damage nobody has told of.
    pub(super) fn enter(&self, block: &BlockInfo, findings: &Findings, found_by: FoundBy) -> bool {
        let mut is_new = false;
        let kinds = [
            (DamageKind::OutOfBounds, &findings.around, CANARY),
            (DamageKind::UseAfterFree, &findings.inside, FREED),
        ];
        for (kind, finding, expected) in kinds {
            if let Some(finding) = finding
                && block.tell(kind)
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
        GuardReport {
            kind,
            generation: block.generation,
            ptr: block.zone.user(),
            bytes: block.zone.bytes,
            tag: block.tag,
            device_ordinal: block.ordinal,
            offset: block.zone.offset_of(finding.first),
            damaged: finding.count,
            expected,
            found: finding.found.clone(),
            allocated: block.allocated.clone(),
            freed: block.freed.get().cloned(),
            found_by,
            found_at: self.started.elapsed(),
        }
    }

    fn add(&self, report: GuardReport) {
        self.write(format_args!("{report}"));
        let mut pages = self.pages.lock();
        pages.total += 1;
        pages.untold.push_back(report.error());
        if pages.reports.len() < KEPT {
            pages.reports.push(report);
        }
    }

    /// Writes to where the configuration says.
    pub(super) fn write(&self, text: fmt::Arguments<'_>) {
        let path = match &self.output {
            GuardOutput::Silent => return,
            GuardOutput::StandardError => return say(text),
            GuardOutput::File(path) => path,
        };
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Err(error) = file.and_then(|mut file| writeln!(file, "{text}")) {
            say(format_args!("{text}\n(not written to {}: {error})", path.display()));
        }
    }

    /// The oldest damage that no call has returned.
    pub(super) fn take_untold(&self) -> Option<ResourceError> {
        self.pages.lock().untold.pop_front()
    }

    /// The damage of one block first, then any other.
    pub(super) fn take_untold_of(&self, block: &BlockInfo) -> Option<ResourceError> {
        let is_own = |error: &ResourceError| match error {
            ResourceError::OutOfBounds { generation }
            | ResourceError::UseAfterFree { generation } => *generation == block.generation,
            _ => false,
        };
        let mut pages = self.pages.lock();
        let at = pages.untold.iter().position(is_own).unwrap_or(0);
        pages.untold.remove(at)
    }

    pub(super) fn reports(&self) -> Vec<GuardReport> {
        self.pages.lock().reports.clone()
    }

    pub(super) fn total(&self) -> u64 {
        self.pages.lock().total
    }
}
