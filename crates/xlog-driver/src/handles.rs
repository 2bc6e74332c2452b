//! Handles, which identify objects but do not own them. Dropping one destroys nothing, and safe code cannot forge a CUDA handle.
//!
//! A handle of the CUDA driver is an address, with the tag of the open device above it. Safe code gets one only from the device, and every
//! call compares the tag, so a foreign address never reaches the CUDA driver. A device with a handle table, such as the simulated one, uses
//! plain numbers without a tag.

use std::fmt;

/// The bits of an address; the tag is above them.
const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        handle!($(#[$doc])* $name, $word, ADDRESS);

        impl $name {
            /// Makes a handle of an open CUDA device; `None` for an address that leaves no room for the tag.
            #[cfg(feature = "cuda")]
            pub(crate) const fn tagged(tag: u16, address: u64) -> Option<Self> {
                if address & !ADDRESS != 0 {
                    return None;
                }
                Some(Self((tag as u64) << ADDRESS_BITS | address))
            }

            /// Returns the address, if the device with this tag made the handle.
            #[cfg(feature = "cuda")]
            #[inline]
            pub(crate) const fn address(self, tag: u16) -> Option<u64> {
                if self.0 >> ADDRESS_BITS == tag as u64 { Some(self.number()) } else { None }
            }
        }
    };
    ($(#[$doc:meta])* $name:ident, $word:literal, $number:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Makes a handle of a device with a handle table. A handle with a tag keeps the low 48 bits of `number`, and the CUDA driver
            /// refuses it.
            #[must_use]
            pub const fn numbered(number: u64) -> Self {
                Self(number & $number)
            }

            /// Returns the number, or the CUDA driver's address.
            #[must_use]
            pub const fn number(self) -> u64 {
                self.0 & $number
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {:#x}"), self.number())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

handle!(
    /// A stream of one device. It cannot be forged:
    ///
    /// ```compile_fail
    /// let forged = xlog_driver::StreamHandle(0x7f00_0000);
    /// ```
    StreamHandle,
    "stream"
);
handle!(
    /// An event of one device.
    EventHandle,
    "event"
);
handle!(
    /// A stream-ordered memory pool of one device.
    PoolHandle,
    "pool"
);
handle!(
    /// A graph of recorded work.
    GraphHandle,
    "graph"
);
handle!(
    /// An executable graph.
    GraphExecHandle,
    "executable graph"
);
handle!(
    /// Physical memory of one device, without an address until it is mapped. It has no tag: every call that takes one is `unsafe`.
    MemoryHandle,
    "physical memory",
    u64::MAX
);

/// How work accesses the bytes it touches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads the bytes.
    Read,
    /// Writes the bytes without reading them first.
    Write,
    /// Reads and writes the bytes.
    ReadWrite,
}

impl Access {
    /// True when the bytes are read.
    #[must_use]
    pub fn reads(self) -> bool {
        self != Self::Write
    }

    /// True when the bytes are written.
    #[must_use]
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}
