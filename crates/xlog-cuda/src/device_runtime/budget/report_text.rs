//! The texts of a report: one line for the error, one screen for the report itself, and hints.

use std::fmt;

use xlog_base::{size_text, size_text_up};

use super::limit::LimitSource;
use super::report::{OomCause, OomReport, OtherProcess, RefusedBy, TagUsage};

/// The number of holders, and of other processes, that the line of an error names.
const IN_LINE: usize = 3;

fn size(bytes: usize) -> String {
    size_text(bytes as u64)
}

fn at_least(bytes: usize) -> String {
    size_text_up(bytes as u64)
}

/// Counts the other processes, as the beginning of a sentence about their bytes.
fn hold(processes: usize) -> String {
    match processes {
        1 => "1 other process holds".to_owned(),
        _ => format!("{processes} other processes hold"),
    }
}

/// The name of a tag in a line, at most 40 characters of it.
fn quoted(tag: &TagUsage) -> String {
    format!("\"{:.40}\"", tag.tag.0)
}

impl OomReport {
    /// Returns the remedies, the most useful first.
    pub fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let missing = self.needed.saturating_sub(self.remaining);
        hints.push(match self.cause {
            OomCause::AboveLimit => {
                let hard = self.scope.as_ref().map_or(self.limit, |scope| scope.hard);
                let limit = size(hard.min(self.limit));
                format!("ask for at most {limit} at a time, or raise the limit")
            }
            OomCause::Budget => self.free_or_raise(missing),
            OomCause::Manager => format!(
                "free {} of this manager's buffers, or raise its limit to {}",
                at_least(missing),
                at_least(self.reserved.saturating_add(self.needed))
            ),
            OomCause::Device if self.tags.is_empty() => {
                "free memory on the device, or ask for less".to_owned()
            }
            OomCause::Device => {
                format!("{}, or ask for less", self.free_something(missing))
            }
            OomCause::Ledger => format!(
                "free or trim {} in this process, or raise the limit of the ledger",
                at_least(missing)
            ),
            OomCause::Scope => self.widen_scope(missing),
            OomCause::Guaranteed => {
                "lower the soft limits of scopes that do not use them".to_owned()
            }
            OomCause::WaitingOnStreams => {
                "synchronize the streams that use returned blocks, close open uses, or wait longer"
                    .to_owned()
            }
            OomCause::OtherProcesses => {
                self.silent_holder(missing).unwrap_or_else(|| self.end_others())
            }
            OomCause::Fragmentation => format!(
                "ask for pieces of at most {} bytes, or trim",
                self.free_space.map_or(0, |space| space.largest)
            ),
        });
        if self.cause == OomCause::Device && self.limit > 0 {
            hints.push("lower the limit of the budget below what the device has".to_owned());
        }
        if self.waiting >= missing && self.cause != OomCause::WaitingOnStreams && missing > 0 {
            hints.push(format!(
                "{} of returned blocks wait for work on streams",
                size(self.waiting)
            ));
        }
        hints
    }

    /// The hint if other processes hold the memory.
    fn end_others(&self) -> String {
        match self.refused_by == RefusedBy::Ledger {
            true => "trim or end other processes of the ledger, or raise its limit".to_owned(),
            false => "trim or end other processes on this device".to_owned(),
        }
    }

    /// The hint if another process has enough cached memory and does not answer.
    fn silent_holder(&self, missing: usize) -> Option<String> {
        let has_it = |cached: usize| cached >= missing;
        let silent =
            |other: &&OtherProcess| !other.has_answered && other.cached.is_some_and(has_it);
        let other = self.processes.iter().find(silent)?;
        Some(format!("continue or end process {}, which may be stopped", other.pid))
    }

    /// Names the smallest tag whose live blocks are enough, or else the missing bytes.
    fn free_something(&self, missing: usize) -> String {
        let live = |tag: &TagUsage| tag.bytes.saturating_sub(tag.pending);
        let enough = self.tags.iter().rev().find(|tag| live(tag) >= missing && tag.blocks > 0);
        let largest = self.tags.iter().filter(|tag| tag.blocks > 0).max_by_key(|tag| live(tag));
        match (enough, largest) {
            (Some(tag), _) => format!("free {} by dropping {}", size(live(tag)), quoted(tag)),
            (None, Some(top)) if live(top) > 0 => {
                format!("free {} ({} holds the most)", at_least(missing), quoted(top))
            }
            _ => format!("free {}", at_least(missing)),
        }
    }

    /// The hint if the budget is used up. It proposes no limit above the card's memory.
    fn free_or_raise(&self, missing: usize) -> String {
        let free = self.free_something(missing);
        match self.limit_source() {
            Some(LimitSource::Ledger) => format!("{free}, or raise the limit of the ledger"),
            Some(LimitSource::Driver | LimitSource::DeviceReserve) => free,
            Some(LimitSource::Configuration) | None => {
                // The budget also caps physical memory, in whole granules. Cached memory is trimmed.
                let cached = self.free_space.map_or(0, |space| space.bytes);
                let held = self.physical.map_or(0, |bytes| bytes.saturating_sub(cached));
                let limit = self.reserved.max(held).saturating_add(self.needed);
                match self.device_total {
                    Some(total) if limit > total => free,
                    _ => format!("{free}, or raise the budget to {}", at_least(limit)),
                }
            }
        }
    }

    /// The hint if the hard limit of a scope is reached.
    fn widen_scope(&self, missing: usize) -> String {
        let free = at_least(missing);
        let Some(scope) = &self.scope else { return format!("free {free} inside the scope") };
        let (name, sum) = (&scope.name, scope.used.saturating_add(self.needed));
        if sum <= scope.hard {
            return format!("free {free} in the scopes around '{name:.40}', or widen them");
        }
        let fits = self.limit.saturating_sub(self.reserved) >= self.needed;
        let widen = format!(", or raise its hard limit to {}", at_least(sum));
        format!("free {free} inside scope '{name:.40}'{}", if fits { &*widen } else { "" })
    }

    /// The error below the budget. A refusal by the ledger has no more than the numbers of the report.
    fn detail_below(&self) -> Option<&String> {
        self.detail.as_ref().filter(|_| self.refused_by == RefusedBy::Device)
    }

    fn limit_source(&self) -> Option<LimitSource> {
        self.call.get().and_then(|call| call.limit_source)
    }

    /// Writes the line of the error: the request, the limit, the usage, the largest holders, other processes, a hint.
    fn write_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for \"{:.40}\"", size(self.requested), self.tag.0)?;
        if let Some(call) = self.call.get() {
            write!(f, " on stream {} ({}:{})", call.stream.0, call.file, call.line)?;
        }
        if self.needed != self.requested {
            write!(f, ", which takes {} of the card", size(self.needed))?;
        }
        match (self.refused_by, &self.scope) {
            (RefusedBy::Scope, Some(scope)) => {
                let (hard, used) = (size(scope.hard), size(scope.used));
                let (limit, name) = (size(self.limit), &scope.name);
                write!(f, "; limit {hard} (scope '{name:.40}', {used} used), {limit} (budget)")?;
            }
            (RefusedBy::Manager, _) => write!(f, "; limit {} (manager)", size(self.limit))?,
            (RefusedBy::Ledger, _) => {
                write!(
                    f,
                    "; {} left in the ledger, budget {}",
                    size(self.remaining),
                    size(self.limit)
                )?;
            }
            (RefusedBy::Device, _) if self.limit == 0 => f.write_str("; refused by the device")?,
            (RefusedBy::Device, _) => {
                write!(f, "; refused below the budget of {}", size(self.limit))?;
            }
            (RefusedBy::Budget | RefusedBy::Scope, _) => {
                let source = match self.limit_source() {
                    None | Some(LimitSource::Configuration) => "budget",
                    Some(LimitSource::Ledger) => "ledger",
                    Some(LimitSource::Driver) => "driver",
                    Some(LimitSource::DeviceReserve) => "card less its reserve",
                };
                write!(f, "; limit {} ({source})", size(self.limit))?;
            }
        }
        write!(f, ", {} live", size(self.reserved.saturating_sub(self.waiting)))?;
        if self.waiting > 0 {
            write!(f, ", {} pending", size(self.waiting))?;
        }
        if let Some(space) = self.free_space.filter(|space| space.bytes > 0) {
            write!(f, ", {} cached", size(space.bytes))?;
            if space.largest < self.requested {
                write!(f, " in pieces up to {}", size(space.largest))?;
            }
        }
        if self.refused_by != RefusedBy::Device {
            write!(f, ", {} free", size(self.remaining))?;
        } else if let Some(free) = self.device_free {
            write!(f, ", {} free on the card", size(free))?;
            if let Some(total) = self.device_total {
                write!(f, " of {}", size(total))?;
            }
        }
        let largest: Vec<String> = self
            .tags
            .iter()
            .take(IN_LINE)
            .map(|tag| {
                let blocks = if tag.blocks == 1 { "block" } else { "blocks" };
                format!("{} {} in {} {blocks}", quoted(tag), size(tag.bytes), tag.blocks)
            })
            .collect();
        if !largest.is_empty() {
            let whose = if self.refused_by == RefusedBy::Manager { "; in the runtime" } else { "" };
            write!(f, "{whose}: {}", largest.join(", "))?;
        }
        if let Some(detail) = self.detail_below() {
            write!(f, "; {detail}")?;
        }
        if let Some(others) = self.others.filter(|others| others.bytes > 0) {
            write!(f, "; {} {}", hold(others.processes), size(others.bytes))?;
            let named: Vec<String> = self
                .processes
                .iter()
                .take(IN_LINE)
                .map(|other| {
                    let cached = other.cached.filter(|cached| *cached > 0);
                    let cached = cached.map(|cached| format!(" with {} cached", size(cached)));
                    let silent = if other.has_answered { "" } else { " (does not answer)" };
                    let (pid, name, bytes) = (other.pid, &other.name, size(other.bytes));
                    format!("{pid} '{name:.40}' {bytes}{}{silent}", cached.unwrap_or_default())
                })
                .collect();
            if !named.is_empty() {
                write!(f, " (process {})", named.join(", "))?;
            }
        }
        self.hints().first().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

/// A report in one line, for the error that it belongs to.
pub(crate) struct Line<'a>(pub(crate) &'a OomReport);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write_line(f)
    }
}

impl OomReport {
    /// Writes the request, the limit that refused, and what it leaves.
    fn write_refusal(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  requested {} bytes for '{}'", self.requested, self.tag)?;
        if self.needed != self.requested {
            write!(f, ", which takes {} of the card", self.needed)?;
        }
        match self.refused_by {
            RefusedBy::Budget => writeln!(f, "; {} remain in the budget", self.remaining),
            RefusedBy::Scope => writeln!(f, "; {} remain in its scope", self.remaining),
            RefusedBy::Manager => writeln!(f, "; {} remain in the manager", self.remaining),
            RefusedBy::Ledger => writeln!(f, "; {} remain in the ledger", self.remaining),
            RefusedBy::Device => writeln!(f, "; the budget allows them, the device has too few"),
        }
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "out of memory on device {}: {}", self.device_ordinal, self.cause)?;
        self.write_refusal(f)?;
        if let Some(call) = self.call.get() {
            writeln!(f, "  called at {}:{} for {}", call.file, call.line, call.stream)?;
        }
        let whose = if self.refused_by == RefusedBy::Manager { "manager" } else { "budget" };
        writeln!(
            f,
            "  limit of the {whose} {}, reserved {}, of which {} wait on streams",
            self.limit, self.reserved, self.waiting
        )?;
        if let Some(scope) = &self.scope {
            writeln!(
                f,
                "  in scope '{}': used {}, soft {}, hard {}",
                scope.name, scope.used, scope.soft, scope.hard
            )?;
        }
        if let Some(detail) = self.detail_below() {
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
            writeln!(f, "  {} {} bytes", hold(others.processes), others.bytes)?;
        }
        for other in &self.processes {
            write!(f, "  process {} '{:.40}': {} bytes", other.pid, other.name, other.bytes)?;
            if let (Some(cached), Some(pending)) = (other.cached, other.pending)
                && cached.saturating_add(pending) > 0
            {
                write!(f, ", {cached} cached, {pending} pending")?;
            }
            writeln!(f, "{}", if other.has_answered { "" } else { ", does not answer" })?;
        }
        if let (Some(free), Some(total)) = (self.device_free, self.device_total) {
            writeln!(f, "  the card has {free} bytes free of {total}")?;
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
