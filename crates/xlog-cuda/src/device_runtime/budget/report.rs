//! Why there was no memory, and what would help.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use super::json::Json;
use crate::device_runtime::resource::{AllocTag, FreeSpace, ResourceStatistics};

/// Holders that a report names.
pub(super) const NAMED: usize = 8;

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
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
    /// It fits the budget; the device is full of this process's memory, or it is not known whose.
    Device,
    /// It fits the budget; the device is full of others' memory.
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
            Self::Device => "the device is full",
            Self::OtherProcesses => "the device is full of other processes' memory",
            Self::Fragmentation => "enough is free, but not in one piece",
        })
    }
}

/// What a tag holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
#[derive(Clone, PartialEq, Eq, Debug)]
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
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OtherUse {
    /// Their bytes.
    pub bytes: usize,
    /// How many they are.
    pub processes: usize,
}

/// The state of a budget when it refused a request.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct OomReport {
    /// Why.
    pub cause: OomCause,
    /// The device.
    pub device_ordinal: u32,
    /// Bytes that would have been charged.
    pub requested: usize,
    /// The most that would have been granted.
    pub remaining: usize,
    /// The tag of the request.
    pub tag: AllocTag,
    /// The scope of the request.
    pub scope: Option<ScopeUsage>,
    /// The limit of the budget.
    pub limit: usize,
    /// Bytes charged: blocks, reservations, operations under way.
    pub reserved: usize,
    /// Bytes of returned blocks that wait for work on streams, or in a quarantine.
    pub waiting: usize,
    /// Who holds most, the largest first.
    pub tags: Vec<TagUsage>,
    /// The scopes that hold most, the largest first.
    pub scopes: Vec<ScopeUsage>,
    /// What other processes hold, where somebody knows.
    pub others: Option<OtherUse>,
    /// The counters of the resource below.
    pub statistics: ResourceStatistics,
    /// What the resource below has free, where it knows.
    pub free_space: Option<FreeSpace>,
    /// What the resource below said, where it was the one that failed.
    pub detail: Option<String>,
}

thread_local! {
    static LAST: RefCell<Option<Arc<OomReport>>> = const { RefCell::new(None) };
}

impl OomReport {
    /// The report of the last refusal that this thread met, of whatever budget.
    #[must_use]
    pub fn last_of_thread() -> Option<Arc<Self>> {
        LAST.try_with(|last| last.borrow().clone()).unwrap_or(None)
    }

    pub(super) fn keep_for_thread(report: &Arc<Self>) {
        let _ = LAST.try_with(|last| last.replace(Some(report.clone())));
    }

    /// What would help, the most useful first.
    #[must_use]
    pub fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let missing = self.requested.saturating_sub(self.remaining);
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
            OomCause::OtherProcesses => {
                hints.push(
                    "end other processes on this device, or share a ledger with them".to_owned(),
                );
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
        let scope = |scope: &ScopeUsage| {
            Json::object()
                .text("name", &scope.name)
                .number("used", scope.used)
                .number("soft", scope.soft)
                .number("hard", scope.hard)
                .end()
        };
        let tag = |usage: &TagUsage| {
            Json::object()
                .text("tag", usage.tag.0)
                .number("bytes", usage.bytes)
                .number("blocks", usage.blocks)
                .end()
        };
        let others = |others: OtherUse| {
            Json::object().number("bytes", others.bytes).number("processes", others.processes).end()
        };
        let space = |space: FreeSpace| {
            Json::object()
                .number("bytes", space.bytes)
                .number("largest", space.largest)
                .raw("fragmentation", &format!("{:.4}", space.fragmentation()))
                .end()
        };
        let statistics = Json::object()
            .number("bytes_outstanding", self.statistics.bytes_outstanding)
            .number("live_blocks", self.statistics.live_blocks)
            .number("retired_blocks", self.statistics.retired_blocks)
            .end();
        Json::object()
            .text("cause", self.cause.name())
            .number("device_ordinal", self.device_ordinal as usize)
            .number("requested", self.requested)
            .number("remaining", self.remaining)
            .text("tag", self.tag.0)
            .option("scope", self.scope.as_ref().map(scope))
            .number("limit", self.limit)
            .number("reserved", self.reserved)
            .number("waiting", self.waiting)
            .list("tags", self.tags.iter().map(tag))
            .list("scopes", self.scopes.iter().map(scope))
            .option("others", self.others.map(others))
            .raw("statistics", &statistics)
            .option("free_space", self.free_space.map(space))
            .option("detail", self.detail.as_deref().map(Json::quote))
            .list("hints", self.hints().iter().map(|hint| Json::quote(hint)))
            .end()
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "out of memory on device {}: {}", self.device_ordinal, self.cause)?;
        writeln!(
            f,
            "  requested {} bytes for '{}', {} remain",
            self.requested, self.tag, self.remaining
        )?;
        writeln!(
            f,
            "  limit {}, reserved {}, of which {} wait on streams",
            self.limit, self.reserved, self.waiting
        )?;
        if let Some(scope) = &self.scope {
            writeln!(
                f,
                "  in scope '{}': used {}, soft {}, hard {}",
                scope.name, scope.used, scope.soft, scope.hard
            )?;
        }
        if let Some(detail) = &self.detail {
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
