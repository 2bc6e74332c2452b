//! The small closed vocabularies of a record: what was done, what served it, how bytes were touched.
//!
//! Each is one byte in a file. A number this version does not know is kept as `Other`, so that a
//! newer log passes through an older tool unchanged.

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
            /// The value with this number; unknown numbers become `Other`.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// The number written in files.
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }

            /// The name used in CSV; none for numbers without one.
            pub const fn name(self) -> Option<&'static str> {
                match Self::from_code(self.code()) {
                    $(Self::$variant => Some($text),)*
                    Self::Other(_) => None,
                }
            }

            /// The value a CSV field names: a known name, or the prefix and a number.
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
        /// An allocation was asked for; failed if the record carries an error.
        Allocate = 1 => "allocate",
        /// A block was freed.
        Deallocate = 2 => "deallocate",
        /// Pending frees were waited for and counted.
        ReapPending = 3 => "reap_pending",
        /// A use of a block was opened on a stream.
        UsePrepare = 4 => "use_prepare",
        /// A use of a block was closed.
        UseFinish = 5 => "use_finish",
        /// An allocation failed, and the log does not have the reason (RMM's `allocate failure`).
        AllocateFailure = 6 => "allocate_failure",
        /// An allocator took a range of device memory: its address and bytes. Without an address, only the bytes are known.
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
        /// The central index, a block of the same stream.
        Own = 3 => "own",
        /// The central index, a block that the stream is already ordered after.
        Covered = 4 => "covered",
        /// The central index, a block whose work has completed.
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

/// The access of a use to the bytes of a block.
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

    /// The name used in CSV.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::ReadWrite => "read_write",
        }
    }

    /// The access a CSV field names.
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "read" => Some(Self::Read),
            "write" => Some(Self::Write),
            "read_write" => Some(Self::ReadWrite),
            _ => None,
        }
    }
}
