//! Order between streams, by clocks instead of events.
//!
//! Every stream has a clock: a *stamp* that work finishing now gets, and, for every other stream, how far it is ordered after
//! it. A block remembers the stamps of its outstanding reads and writes. Work on the block's own stream costs no driver call;
//! another stream waits for an event that covers the stamp it needs, unless its clock already does.
//!
//! | file | what it is |
//! |---|---|
//! | `clock`, `events`, `seen`, `cells`, `row` | the clock of a stream and what it has seen |
//! | `gate` | the word by which a block is used on its own stream without a lock |
//! | `uses`, `few`, `locked` | the outstanding and open uses of a block, for everything else |
//! | `record`, `slab` | what a resource knows of a block, at a place that never moves |
//! | `handover`, `baton` | the short way of a block from one stream to another |
//! | `tracker`, `tracks` | what every resource that tracks uses has, and its hooks |
//! | `put_by` | returned blocks that wait for other streams |
//! | `tally` | counters that threads do not meet on |
//!
//! `clock` and `gate` take their atomics and locks from `primitive`, so that a model checker can replace them.

pub(crate) mod baton;
pub(crate) mod cells;
pub(crate) mod clock;
pub(crate) mod events;
pub(crate) mod few;
pub(crate) mod gate;
pub(crate) mod handover;
pub(crate) mod locked;
pub(crate) mod primitive;
pub(crate) mod put_by;
pub(crate) mod record;
pub(crate) mod row;
pub(crate) mod seen;
pub(crate) mod slab;
pub(crate) mod tally;
pub(crate) mod tracker;
pub(crate) mod tracks;
pub(crate) mod uses;

/// When an event is recorded for a use that is closed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum EdgePolicy {
    /// At once for a use on another stream than the block's own, so that later work of that stream is not waited for. Work
    /// on the own stream records nothing; the first stream that needs it records the tail then.
    #[default]
    ForeignExact,
    /// At once for every use.
    Exact,
    /// Never at once: whoever needs it records the tail, and waits also for what was queued in between.
    Lazy,
}
