//! The report of a refusal: its cause, the largest holders, and what would help.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::device_runtime::resource::{AllocTag, FreeSpace, ResourceStatistics};

/// Holders that a report names.
pub(super) const NAMED: usize = 8;

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OomCause {
    /// It is larger than the limit, or than the hard limit of its scope: it can never be served.
    AboveLimit,
    /// Blocks and reservations of this budget leave too little of the limit.
    Budget,
    /// The hard limit of its scope leaves too little.
    Scope,
    /// What is free is guaranteed to other scopes.
    Guaranteed,
    /// It would fit once work on streams has completed and returned blocks are free.
    WaitingOnStreams,
    /// It fits the budget; the ledger's limit is used up, mostly by this process.
    Ledger,
    /// It fits the budget; the device is full, of this process's memory or of memory whose owner is unknown.
    Device,
    /// It fits the budget; the device, or the limit of the ledger, is used up by other processes.
    OtherProcesses,
    /// It fits the budget and enough is free, but not in one piece.
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
            Self::Ledger => "ledger",
            Self::Device => "device",
        }
    }
}

/// What a tag holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct TagUsage {
    /// The tag.
    pub tag: AllocTag,
    /// Bytes charged.
    pub bytes: usize,
    /// Blocks charged.
    pub blocks: usize,
}

/// What a scope holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct ScopeUsage {
    /// Its path.
    pub name: String,
    /// Bytes charged.
    pub used: usize,
    /// Its guarantee.
    pub soft: usize,
    /// Its bound.
    pub hard: usize,
}

/// What other processes hold of the device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct OtherUse {
    /// Their bytes.
    pub bytes: usize,
    /// How many they are.
    pub processes: usize,
}

/// The state of a budget when it refused a request.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct OomReport {
    /// Why.
    pub cause: OomCause,
    /// The device.
    pub device_ordinal: u32,
    /// Bytes that would have been charged.
    pub requested: usize,
    /// Which limit refused.
    pub refused_by: RefusedBy,
    /// Bytes that this limit would have had to grant. For a ledger: the size of the segment that the resource below wanted from the
    /// card.
    pub needed: usize,
    /// The maximum that this limit would have granted. For a device, whose free memory is not known, it is what the budget would
    /// grant.
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
    /// What other processes hold, if a ledger is joined.
    pub others: Option<OtherUse>,
    /// The counters of the resource below.
    pub statistics: ResourceStatistics,
    /// What the resource below has free, where it knows.
    #[serde(serialize_with = "with_fragmentation")]
    pub free_space: Option<FreeSpace>,
    /// The error of the resource below, if that failed.
    pub detail: Option<String>,
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

impl OomReport {
    /// Returns the report of this thread's last refusal, by any budget.
    #[must_use]
    pub fn last_of_thread() -> Option<Arc<Self>> {
        LAST.try_with(|last| last.borrow().clone()).unwrap_or(None)
    }

    pub(super) fn store_for_thread(report: &Arc<Self>) {
        let _ = LAST.try_with(|last| last.replace(Some(report.clone())));
    }

    /// What would help, the most useful first.
    #[must_use]
    pub fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let missing = self.needed.saturating_sub(self.remaining);
        match self.cause {
            OomCause::AboveLimit => hints.push(format!(
                "ask for at most {} bytes at a time, or raise the limit",
                self.scope.as_ref().map_or(self.limit, |scope| scope.hard.min(self.limit))
            )),
            OomCause::Budget | OomCause::Device => {
                if let Some(top) = self.tags.first() {
                    hints.push(format!(
                        "'{}' holds {} bytes in {} blocks; {missing} bytes less would do",
                        top.tag, top.bytes, top.blocks
                    ));
                }
                if self.cause == OomCause::Device {
                    hints
                        .push("lower the limit of the budget below what the device has".to_owned());
                }
            }
            OomCause::Ledger => hints.push(format!(
                "free or trim {missing} bytes in this process, or raise the limit of the ledger"
            )),
            OomCause::Scope => hints.push(format!(
                "raise the hard limit of scope '{}' by {missing} bytes, or free inside it",
                self.scope.as_ref().map_or("", |scope| &scope.name)
            )),
            OomCause::Guaranteed => {
                hints.push("lower the soft limits of scopes that do not use them".to_owned());
            }
            OomCause::WaitingOnStreams => hints.push(
                "synchronize the streams that use returned blocks, close open uses, or wait longer"
                    .to_owned(),
            ),
            OomCause::OtherProcesses if self.refused_by == RefusedBy::Ledger => {
                hints.push(
                    "trim or end other processes of the ledger, or raise its limit".to_owned(),
                );
            }
            OomCause::OtherProcesses => {
                hints.push("trim or end other processes on this device".to_owned());
            }
            OomCause::Fragmentation => hints.push(format!(
                "ask for pieces of at most {} bytes, or trim",
                self.free_space.map_or(0, |space| space.largest)
            )),
        }
        if self.waiting >= missing && self.cause != OomCause::WaitingOnStreams && missing > 0 {
            hints.push(format!("{} returned bytes wait for work on streams", self.waiting));
        }
        hints
    }

    /// The report as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Object<'a> {
            #[serde(flatten)]
            report: &'a OomReport,
            hints: Vec<String>,
        }
        // Only keys that are no texts fail.
        serde_json::to_string(&Object { report: self, hints: self.hints() }).unwrap_or_default()
    }
}

impl OomReport {
    /// One line: what was asked for, which limit refused, what is left under it.
    fn write_refusal(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  requested {} bytes for '{}'", self.requested, self.tag)?;
        if self.needed != self.requested {
            write!(f, ", which takes {} of the card", self.needed)?;
        }
        match self.refused_by {
            RefusedBy::Budget => writeln!(f, "; {} remain in the budget", self.remaining),
            RefusedBy::Scope => writeln!(f, "; {} remain in its scope", self.remaining),
            RefusedBy::Ledger => writeln!(f, "; {} remain in the ledger", self.remaining),
            RefusedBy::Device => writeln!(f, "; the budget allows them, the device has too few"),
        }
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "out of memory on device {}: {}", self.device_ordinal, self.cause)?;
        self.write_refusal(f)?;
        writeln!(
            f,
            "  limit of the budget {}, reserved {}, of which {} wait on streams",
            self.limit, self.reserved, self.waiting
        )?;
        if let Some(scope) = &self.scope {
            writeln!(
                f,
                "  in scope '{}': used {}, soft {}, hard {}",
                scope.name, scope.used, scope.soft, scope.hard
            )?;
        }
        // The line above has all that the ledger reported.
        if let Some(detail) = self.detail.as_ref().filter(|_| self.refused_by == RefusedBy::Device)
        {
            writeln!(f, "  the resource below: {detail}")?;
        }
        if let Some(space) = &self.free_space {
            writeln!(
                f,
                "  free below {}, largest piece {} ({:.0} % fragmented)",
                space.bytes,
                space.largest,
                100.0 * space.fragmentation()
            )?;
        }
        if let Some(others) = &self.others {
            writeln!(f, "  {} other processes hold {} bytes", others.processes, others.bytes)?;
        }
        for usage in &self.tags {
            writeln!(
                f,
                "  tag   {:>16} bytes {:>8} blocks  {}",
                usage.bytes, usage.blocks, usage.tag
            )?;
        }
        for scope in &self.scopes {
            writeln!(
                f,
                "  scope {:>16} bytes of {} guaranteed, {} at most  {}",
                scope.used, scope.soft, scope.hard, scope.name
            )?;
        }
        for hint in self.hints() {
            writeln!(f, "  hint: {hint}")?;
        }
        Ok(())
    }
}
