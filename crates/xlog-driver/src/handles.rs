//! Plain handles. They are names, not owners: dropping one destroys nothing.

use std::fmt;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {:#x}"), self.0)
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
    /// A stream of one device.
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
    /// Physical memory of one device that has no address until it is mapped.
    MemoryHandle,
    "physical memory"
);

/// What a piece of work does to the bytes it touches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// The bytes are read.
    Read,
    /// The bytes are written without looking at them first.
    Write,
    /// The bytes are read and written.
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
