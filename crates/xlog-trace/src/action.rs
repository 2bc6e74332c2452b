//! The closed vocabularies of a record: the action, the path that served it, and the access of a use.
//!
//! Each value is one byte in a file. A number unknown to this version becomes `Other`, so older tools pass newer logs through unchanged.

use std::fmt;

macro_rules! vocabulary {
    ($(#[$meta:meta])* $name:ident, $prefix:literal, { $($(#[$vmeta:meta])* $variant:ident = $code:literal => $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$vmeta])* $variant,)*
            /// A number that this version has no name for.
            Other(u8),
        }

        impl $name {
            /// Returns the value with this number; an unknown number becomes `Other`.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// Returns the number written in files.
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }

            /// Returns the name used in CSV; `None` for a number without one.
            pub const fn name(self) -> Option<&'static str> {
                match Self::from_code(self.code()) {
                    $(Self::$variant => Some($text),)*
                    Self::Other(_) => None,
                }
            }

            /// Parses a CSV field: a known name, or the prefix and a number.
            pub fn from_text(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$variant),)*
                    other => other.strip_prefix($prefix)?.parse().ok().map(Self::from_code),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!($prefix, "{}"), self.code()),
                }
            }
        }
    };
}

vocabulary!(
    /// The operation that a record reports.
    Action, "action-", {
        /// An allocation was requested. A record with an error is a failed request.
        Allocate = 1 => "allocate",
        /// A block was freed.
        Deallocate = 2 => "deallocate",
        /// The host waited for pending frees and counted them.
        ReapPending = 3 => "reap_pending",
        /// A use of a block was opened on a stream.
        UsePrepare = 4 => "use_prepare",
        /// A use of a block was closed.
        UseFinish = 5 => "use_finish",
        /// An allocation failed for an unrecorded reason (RMM's `allocate failure`).
        AllocateFailure = 6 => "allocate_failure",
        /// An allocator reserved a range of device memory. A record without an address gives only the bytes.
        SegmentTake = 7 => "segment_take",
        /// An allocator returned a range to the device, a whole segment or a part of one.
        SegmentReturn = 8 => "segment_return",
    }
);

vocabulary!(
    /// Which path of the allocator served a request.
    ServedBy, "path-", {
        /// Not recorded.
        Unknown = 0 => "unknown",
        /// The driver itself.
        Driver = 1 => "driver",
        /// A per-stream magazine.
        Magazine = 2 => "magazine",
        /// Free memory of the same stream.
        Own = 3 => "own",
        /// Free memory of another stream, which this one is already ordered after.
        Covered = 4 => "covered",
        /// Free memory of another stream, whose work has completed.
        Completed = 5 => "completed",
        /// New memory taken from the device.
        Grown = 6 => "grown",
        /// A block that needed a wait, with the wait inserted.
        Waited = 7 => "waited",
        /// Memory that trimming the caches set free.
        Trimmed = 8 => "trimmed",
        /// A block that was free only after the host waited for pending frees.
        Reaped = 9 => "reaped",
    }
);

/// How a use accesses the bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UseAccess {
    /// Only reads.
    Read,
    /// Only writes.
    Write,
    /// Reads and writes.
    ReadWrite,
}

impl UseAccess {
    pub(crate) const fn from_bits(bits: u8) -> Option<Self> {
        match bits & 3 {
            1 => Some(Self::Read),
            2 => Some(Self::Write),
            3 => Some(Self::ReadWrite),
            _ => None,
        }
    }

    pub(crate) const fn bits(self) -> u8 {
        match self {
            Self::Read => 1,
            Self::Write => 2,
            Self::ReadWrite => 3,
        }
    }

    /// Returns the name used in CSV.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::ReadWrite => "read_write",
        }
    }

    /// Parses the name used in CSV.
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "read" => Some(Self::Read),
            "write" => Some(Self::Write),
            "read_write" => Some(Self::ReadWrite),
            _ => None,
        }
    }
}
