//! Orders work between streams, by vector clocks instead of one event per use.
//!
//! Every stream has a clock: its current *stamp*, and the stamps of other streams that it is ordered after. A block keeps
//! the stamps of its outstanding reads and writes. Work on the block's own stream costs no driver call. Another stream waits
//! for an event that covers the stamp it needs, unless its clock already covers it.
//! | folder | content |
//! |---|---|
//! | `clock/` | the clock of a stream: stamps, events, happens-before |
//! | `block/` | metadata of a block, its state word, its outstanding and open uses |
//! | `tracking/` | the hooks that open and close uses; deferred frees; counters |
//! | `primitive` | atomics and locks of the concurrent core, which a model checker replaces |

pub(crate) mod block;
pub(crate) mod clock;
pub(crate) mod primitive;
pub(crate) mod tracking;

pub(crate) use block::block_meta::{
    BlockMemory, BlockMeta, BlockOwner, BlockTable, generation_bits,
};
pub(crate) use block::slab::Slab;
pub(crate) use clock::clock_headers::{ClockHeaderRef, ClockHeaders};
pub(crate) use clock::stream_clock::{Begun, ClockHeader, StreamClock};
pub(crate) use primitive::Lock;
pub(crate) use tracking::completed_frees::CompletedFrees;
pub(crate) use tracking::deferred_frees::DeferredFrees;
pub(crate) use tracking::striped_counters::{StripedCounters, WaitCounts};
pub(crate) use tracking::tracker::{Retired, Tracker};
pub(crate) use tracking::use_slow_path::inflate;
pub(crate) use tracking::use_tracking::{UseTracking, tracked_hooks};

/// When an event is recorded for a closed use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum EventPolicy {
    /// At once for a use on another stream than the block's own, so that a waiting stream does not wait for later work
    /// of that stream. Work on the own stream records nothing; the first stream that needs it records an event at the tail.
    #[default]
    ForeignExact,
    /// At once for every use.
    Exact,
}
