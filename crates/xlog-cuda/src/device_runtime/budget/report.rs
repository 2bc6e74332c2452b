//! The report of a refusal: its cause, the largest holders, and where the request came from. `report_text` prints it.
//!
//! The process keeps its last reports; an error has no field for its report, so it is looked up by the text of the error.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, OnceLock};

use serde::{Serialize, Serializer};

use super::limit::LimitSource;
use super::primitive::Mutex;
use crate::device_runtime::resource::{
    AllocTag, FreeSpace, ResourceError, ResourceStatistics, StreamId,
};

/// The number of holders that a report names.
pub(crate) const NAMED: usize = 8;
/// The number of reports that the process keeps for errors that are printed later or on another thread.
const KEPT: usize = 16;

/// The reason why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OomCause {
    /// The request is larger than the limit, or than the hard limit of its scope: it can never be served.
    AboveLimit,
    /// Blocks and reservations of this budget leave too little of the limit.
    Budget,
    /// The hard limit of its scope leaves too little.
    Scope,
    /// The free bytes are guaranteed to other scopes.
    Guaranteed,
    /// The request would fit once work on streams has completed and pending blocks are free.
    WaitingOnStreams,
    /// The limit of its [`GpuMemoryManager`](crate::GpuMemoryManager) leaves too little.
    Manager,
    /// The request fits the budget; the ledger's limit is used up, mostly by this process.
    Ledger,
    /// The request fits the budget; the device is full with memory of this process or of unknown owners.
    Device,
    /// The request fits the budget; other processes use up the device, or the limit of the ledger.
    OtherProcesses,
    /// The request fits the budget and enough memory is free, but not in one range.
    Fragmentation,
}

impl OomCause {
    /// One word, for machines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AboveLimit => "above_limit",
            Self::Budget => "budget",
            Self::Scope => "scope",
            Self::Guaranteed => "guaranteed",
            Self::WaitingOnStreams => "waiting_on_streams",
            Self::Manager => "manager",
            Self::Ledger => "ledger",
            Self::Device => "device",
            Self::OtherProcesses => "other_processes",
            Self::Fragmentation => "fragmentation",
        }
    }
}

impl fmt::Display for OomCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AboveLimit => "the request is larger than its limit",
            Self::Budget => "the budget is used up",
            Self::Scope => "the scope has reached its hard limit",
            Self::Guaranteed => "what is free is guaranteed to other scopes",
            Self::WaitingOnStreams => "returned memory waits for work on streams",
            Self::Manager => "the limit of the manager is used up",
            Self::Ledger => "the limit of the ledger is used up",
            Self::Device => "the device is full",
            Self::OtherProcesses => "other processes hold the memory",
            Self::Fragmentation => "enough is free, but not in one piece",
        })
    }
}

/// The limit that refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefusedBy {
    /// The limit of the budget, or what it guarantees to scopes.
    Budget,
    /// The hard limit of a scope.
    Scope,
    /// The limit of a memory manager.
    Manager,
    /// The limit of the ledger that processes share.
    Ledger,
    /// The device or the resource below; no configured limit refused.
    Device,
}

impl RefusedBy {
    /// One word, for machines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Scope => "scope",
            Self::Manager => "manager",
            Self::Ledger => "ledger",
            Self::Device => "device",
        }
    }
}

/// The usage of one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct TagUsage {
    /// The tag.
    pub tag: AllocTag,
    /// Bytes charged.
    pub bytes: usize,
    /// Blocks charged.
    pub blocks: usize,
    /// The part of the bytes that is freed and waits for work on streams, or is in a quarantine.
    pub pending: usize,
}

/// The usage and the limits of one scope.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct ScopeUsage {
    /// The names of its parents and its own, with slashes between.
    pub name: String,
    /// Bytes charged.
    pub used: usize,
    /// The soft limit, which is guaranteed.
    pub soft: usize,
    /// The hard limit.
    pub hard: usize,
}

/// The memory of the device that other processes hold.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct OtherUse {
    /// Their bytes.
    pub bytes: usize,
    /// The number of processes.
    pub processes: usize,
}

/// Another process on the ledger.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct OtherProcess {
    /// The process id.
    pub pid: u32,
    /// The name of its command.
    pub name: String,
    /// Its bytes of the device, used or granted.
    pub bytes: usize,
    /// The part of the bytes that it has cached, if it publishes that.
    pub cached: Option<usize>,
    /// The part of the bytes that was freed and waits for work on streams, if it publishes that.
    pub pending: Option<usize>,
    /// Whether it has answered the last request for cached memory. A stopped process has not.
    pub has_answered: bool,
}

/// The call that was refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct RefusedCall {
    /// The stream of the request.
    pub stream: StreamId,
    /// The source file of the caller.
    pub file: &'static str,
    /// The line of the caller.
    pub line: u32,
    /// The source of the limit of the runtime's budget.
    pub limit_source: Option<LimitSource>,
}

/// The state of a budget when it refused a request.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct OomReport {
    /// The reason.
    pub cause: OomCause,
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// Bytes that would have been charged.
    pub requested: usize,
    /// The limit that refused.
    pub refused_by: RefusedBy,
    /// Bytes that this limit would have had to grant. For a ledger it is the size of the segment for which the resource below asked.
    pub needed: usize,
    /// The maximum that this limit would have granted. For a device it is what the budget would have granted; 0 without a budget.
    pub remaining: usize,
    /// The tag of the request.
    pub tag: AllocTag,
    /// The scope of the request.
    pub scope: Option<ScopeUsage>,
    /// The limit of the budget.
    pub limit: usize,
    /// Bytes charged: blocks, reservations, operations in flight.
    pub reserved: usize,
    /// Bytes of freed blocks that wait for work on streams, or are in a quarantine.
    pub waiting: usize,
    /// The largest tags, in descending order.
    pub tags: Vec<TagUsage>,
    /// The largest scopes, in descending order.
    pub scopes: Vec<ScopeUsage>,
    /// Usage of other processes, if a ledger is joined.
    pub others: Option<OtherUse>,
    /// The counters of the resource below.
    pub statistics: ResourceStatistics,
    /// The free memory of the resource below, if known.
    #[serde(serialize_with = "with_fragmentation")]
    pub free_space: Option<FreeSpace>,
    /// The error of the resource below, if that failed.
    pub detail: Option<String>,
    /// The largest other processes, if a ledger is joined.
    pub processes: Vec<OtherProcess>,
    /// The physical memory of the resource below, cached or not, if known.
    pub physical: Option<usize>,
    /// The memory of the device, if known.
    pub device_total: Option<usize>,
    /// The free memory that the driver reports, if the device or the resource below refused.
    pub device_free: Option<usize>,
    /// The text of the error without its report.
    pub error: String,
    /// The call of a runtime or a manager, which sets it after the callbacks of [`on_oom`](super::BudgetHandle::on_oom) have run.
    #[serde(serialize_with = "of_once")]
    pub call: OnceLock<RefusedCall>,
}

fn of_once<S: Serializer>(call: &OnceLock<RefusedCall>, serializer: S) -> Result<S::Ok, S::Error> {
    call.get().serialize(serializer)
}

fn with_fragmentation<S: Serializer>(
    space: &Option<FreeSpace>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Shown {
        bytes: usize,
        largest: usize,
        fragmentation: f64,
    }
    let shown = |space: &FreeSpace| Shown {
        bytes: space.bytes,
        largest: space.largest,
        fragmentation: (space.fragmentation() * 1e4).round() / 1e4,
    };
    space.as_ref().map(shown).serialize(serializer)
}

thread_local! {
    static LAST: RefCell<Option<Arc<OomReport>>> = const { RefCell::new(None) };
}

static RECENT: Mutex<VecDeque<Arc<OomReport>>> = Mutex::new(VecDeque::new());

impl OomReport {
    /// Returns the report of this thread's last refusal, by any budget.
    #[must_use]
    pub fn last_of_thread() -> Option<Arc<Self>> {
        LAST.try_with(|last| last.borrow().clone()).unwrap_or(None)
    }

    /// Makes a report that has only the numbers of `error`.
    pub(crate) fn of_error(
        error: &ResourceError,
        tag: AllocTag,
        cause: OomCause,
        refused_by: RefusedBy,
    ) -> Self {
        let (needed, remaining) = match *error {
            ResourceError::OutOfBudget { requested, remaining } => (requested, remaining),
            ResourceError::OutOfMemory { requested, .. } => (requested, 0),
            _ => (0, 0),
        };
        Self {
            cause,
            device_ordinal: 0,
            requested: needed,
            refused_by,
            needed,
            remaining,
            tag,
            scope: None,
            limit: 0,
            reserved: 0,
            waiting: 0,
            tags: Vec::new(),
            scopes: Vec::new(),
            others: None,
            statistics: ResourceStatistics::default(),
            free_space: None,
            detail: None,
            processes: Vec::new(),
            physical: None,
            device_total: None,
            device_free: None,
            error: error.brief(),
            call: OnceLock::new(),
        }
    }

    /// Publishes the report: as this thread's last one, and for the code that prints its error.
    pub(crate) fn publish(self) -> Arc<Self> {
        let report = Arc::new(self);
        let _ = LAST.try_with(|last| last.replace(Some(report.clone())));
        let mut recent = RECENT.lock();
        recent.truncate(KEPT - 1);
        recent.push_front(report.clone());
        report
    }

    /// Returns the report of the error with this text: this thread's last one, else the only recent one of the process.
    pub(crate) fn of_text(error: &str) -> Option<Arc<Self>> {
        let own = Self::last_of_thread().filter(|report| report.error == error);
        own.or_else(|| {
            let recent = RECENT.lock();
            let mut found = recent.iter().filter(|report| report.error == error);
            found.next().filter(|_| found.next().is_none()).cloned()
        })
    }

    /// Adds the call, if it is not known yet.
    pub(crate) fn set_call(
        &self,
        stream: StreamId,
        site: &'static Location<'static>,
        limit_source: Option<LimitSource>,
    ) {
        let (file, line) = (site.file(), site.line());
        let _ = self.call.set(RefusedCall { stream, file, line, limit_source });
    }

    /// Returns the report as one JSON object.
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Object<'a> {
            #[serde(flatten)]
            report: &'a OomReport,
            hints: Vec<String>,
        }
        // Serialization fails only for keys that are not strings.
        serde_json::to_string(&Object { report: self, hints: self.hints() }).unwrap_or_default()
    }
}
