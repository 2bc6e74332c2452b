//! The reports of the race detector.

use std::fmt;
use std::sync::Arc;

use xlog_base::escape::line;
use xlog_driver::StreamHandle;

/// The kind of a race.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RaceKind {
    /// Two writes, neither ordered before the other.
    WriteWrite,
    /// A read and a write, neither ordered before the other.
    ReadWrite,
    /// Work that is not ordered after the allocation of its block.
    UseBeforeAllocation,
    /// Work that is not ordered before the free of its block.
    UseAfterFree,
    /// Work on a block that is not ordered against the next block at its address.
    UseAcrossReuse,
    /// A mapping or its access rights were revoked before the host had seen all work on it complete.
    UnmapUnderUse,
}

impl fmt::Display for RaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteWrite => "write/write race",
            Self::ReadWrite => "read/write race",
            Self::UseBeforeAllocation => "use before allocation",
            Self::UseAfterFree => "use after free",
            Self::UseAcrossReuse => "use across reuse",
            Self::UnmapUnderUse => "unmap under use",
        })
    }
}

/// Races that no call has returned and that the program has not read.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct UnreadRaces {
    /// The messages of the first 1000, in the order of analysis.
    pub first: Vec<Arc<str>>,
    /// The number of all unread races.
    pub total: u64,
}

/// One of the two operations of a race.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RaceSide {
    /// Its name: `memset`, `copy_htod`, `alloc_async`, or the name of a kernel.
    pub operation: String,
    /// The stream it was queued on; `None` for a host call such as `unmap` or `set_access`.
    pub stream: Option<StreamHandle>,
    /// The name given to that stream, if any.
    pub stream_name: Option<String>,
    /// Its position in the order of all queued operations of the machine, from 0.
    pub sequence: u64,
    /// The verb of its access, such as `reads`.
    pub action: &'static str,
    /// The tag given to the memory when the operation was queued, if any.
    pub tag: Option<String>,
}

impl fmt::Display for RaceSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (#{}, {}", line(&self.operation), self.sequence, self.action)?;
        match (&self.stream, &self.stream_name) {
            (Some(stream), Some(name)) => write!(f, ", {stream} '{}'", line(name))?,
            (Some(stream), None) => write!(f, ", {stream}")?,
            (None, _) => write!(f, ", host call")?,
        }
        if let Some(tag) = &self.tag {
            write!(f, ", tag '{}'", line(tag))?;
        }
        f.write_str(")")
    }
}

/// Two operations that the program does not order, and the bytes they share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RaceReport {
    /// The kind of race.
    pub kind: RaceKind,
    /// The operation analysed first.
    pub first: RaceSide,
    /// The operation analysed second.
    pub second: RaceSide,
    /// The first shared byte, as the second operation addresses it.
    pub ptr: u64,
    /// The number of bytes from the first shared byte to the last.
    pub bytes: u64,
}

impl fmt::Display for RaceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} on {} bytes at {:#x}: {} is not ordered against {}",
            self.kind, self.bytes, self.ptr, self.first, self.second
        )
    }
}
