//! Reports of damage.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::redzones::Redzones;
use crate::device_runtime::resource::{AllocTag, Generation, ResourceError, StreamId};
use crate::device_runtime::statistics::write_frames;

/// The kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DamageKind {
    /// Bytes around a block were written.
    OutOfBounds,
    /// Bytes in a block were written after its free.
    UseAfterFree,
}

/// The check that found damage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum FoundBy {
    /// The check at its free.
    Free,
    /// The check when the block left the quarantine.
    Release,
    /// A check by `check_now`.
    CheckNow,
    /// The check at the drop of the guard.
    Drop,
}

/// The moment of an allocation or free.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Moment {
    /// The time since the guard was created.
    pub at: Duration,
    /// The stream it was ordered on.
    pub stream: StreamId,
    /// The query of the thread.
    pub query_id: Option<u64>,
    /// The call site, if backtraces are on.
    pub backtrace: Option<Arc<Backtrace>>,
}

/// Damage, and the block that it belongs to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GuardReport {
    /// The kind of damage.
    pub kind: DamageKind,
    /// The generation of the block.
    pub generation: Generation,
    /// Its address.
    pub ptr: u64,
    /// Its size.
    pub bytes: usize,
    /// Its label.
    pub tag: AllocTag,
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// The offset of the first damaged byte from the block's first byte, negative before it.
    pub offset: i64,
    /// The number of damaged bytes.
    pub damaged: u64,
    /// The expected byte.
    pub expected: u8,
    /// The bytes found from `offset` on, at most 16.
    pub found: Vec<u8>,
    /// Its allocation.
    pub allocated: Moment,
    /// Its free, if it was freed when the damage was found.
    pub freed: Option<Moment>,
    /// The check that found it.
    pub found_by: FoundBy,
    /// The time of the check since the guard was created.
    pub found_at: Duration,
}

impl GuardReport {
    /// Returns the error that a call returns for this report.
    #[must_use]
    pub fn error(&self) -> ResourceError {
        let generation = self.generation;
        match self.kind {
            DamageKind::OutOfBounds => ResourceError::OutOfBounds { generation },
            DamageKind::UseAfterFree => ResourceError::UseAfterFree { generation },
        }
    }
}

impl fmt::Display for GuardReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, generation, ptr, bytes, tag, offset, damaged, expected, found, .. } = self;
        let what = match kind {
            DamageKind::OutOfBounds if *offset < 0 => "bytes before a block were written",
            DamageKind::OutOfBounds => "bytes behind a block were written",
            DamageKind::UseAfterFree => "a freed block was written",
        };
        writeln!(
            f,
            "{what}: {damaged} damaged, the first at offset {offset} of {bytes} bytes ({tag}) at {ptr:#x}"
        )?;
        write!(f, "  found     ")?;
        for byte in found {
            write!(f, "{byte:02x} ")?;
        }
        writeln!(f, "where {expected:02x} was due")?;
        writeln!(f, "  block     {generation}, device {}", self.device_ordinal)?;
        write!(f, "  allocated {}", self.allocated)?;
        if let Some(freed) = &self.freed {
            write!(f, "\n  freed     {freed}")?;
        }
        let by = match self.found_by {
            FoundBy::Free => "when it was freed",
            FoundBy::Release => "when it left the quarantine",
            FoundBy::CheckNow => "by check_now",
            FoundBy::Drop => "when the guard ended",
        };
        write!(f, "\n  found     {by}, at {}", At(self.found_at))
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} on {}", At(self.at), self.stream)?;
        if let Some(query) = self.query_id {
            write!(f, " for query {query}")?;
        }
        let Some(trace) = &self.backtrace else { return Ok(()) };
        write_frames(f, trace, &["backtrace", "device_runtime::", "/rustc/", "core::ops::function"])
    }
}

/// A time since the guard was created.
pub(super) struct At(pub(super) Duration);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6} s", self.0.as_secs_f64())
    }
}

/// The data of a guarded block for reports, even after its free.
#[derive(Debug)]
pub(super) struct BlockInfo {
    pub(super) generation: Generation,
    pub(super) redzones: Redzones,
    pub(super) tag: AllocTag,
    pub(super) ordinal: u32,
    pub(super) allocated: Moment,
    pub(super) freed: OnceLock<Moment>,
    /// Bits of the damage kinds that were reported: each is reported once.
    reported: AtomicU8,
}

impl BlockInfo {
    pub(super) fn new(
        generation: Generation,
        redzones: Redzones,
        tag: AllocTag,
        ordinal: u32,
        allocated: Moment,
    ) -> Self {
        let (freed, reported) = (OnceLock::new(), AtomicU8::new(0));
        Self { generation, redzones, tag, ordinal, allocated, freed, reported }
    }

    /// Marks a kind of damage as reported. Returns true for the first call.
    pub(super) fn set_reported(&self, kind: DamageKind) -> bool {
        let bit = match kind {
            DamageKind::OutOfBounds => 1,
            DamageKind::UseAfterFree => 2,
        };
        self.reported.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }
}
