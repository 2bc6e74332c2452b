//! Order between streams, by clocks instead of events.
//!
//! Every stream has a clock: a *stamp* that work finishing now gets, and, for every other stream, how far it is ordered after
//! it. A block remembers the stamps of its outstanding reads and writes. Work on the block's own stream costs no driver call;
//! another stream waits for an event that covers the stamp it needs, unless its clock already does.
//!
//! | file | what it is |
//! |---|---|
//! | `clock`, `events`, `vector_clock`, `clock_headers`, `event_queue` | the clock of a stream and what it has seen |
//! | `state_word` | the word by which a block is used on its own stream without a lock |
//! | `uses`, `small_list`, `use_slow_path` | the outstanding and open uses of a block, for everything else |
//! | `block_meta`, `slab` | what a resource knows of a block, at a place that never moves |
//! | `wait_fast_path`, `use_state` | the short way of a block from one stream to another |
//! | `tracker`, `use_tracking` | what every resource that tracks uses has, and its hooks |
//! | `deferred_frees` | returned blocks that wait for other streams |
//! | `striped_counters` | counters that threads do not meet on |
//!
//! `clock` and `state_word` take their atomics and locks from `primitive`, so that a model checker can replace them.

pub(crate) mod block_meta;
pub(crate) mod clock;
pub(crate) mod clock_headers;
#[cfg(test)]
mod clock_tests;
pub(crate) mod deferred_frees;
pub(crate) mod event_queue;
pub(crate) mod events;
pub(crate) mod primitive;
pub(crate) mod slab;
pub(crate) mod small_list;
pub(crate) mod state_word;
pub(crate) mod striped_counters;
pub(crate) mod tracker;
pub(crate) mod use_slow_path;
pub(crate) mod use_state;
pub(crate) mod use_tracking;
pub(crate) mod uses;
pub(crate) mod vector_clock;
pub(crate) mod wait_fast_path;

/// When an event is recorded for a use that is closed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum EventPolicy {
    /// At once for a use on another stream than the block's own, so that later work of that stream is not waited for. Work
    /// on the own stream records nothing; the first stream that needs it records the tail then.
    #[default]
    ForeignExact,
    /// At once for every use.
    Exact,
    /// Never at once: whoever needs it records the tail, and waits also for what was queued in between.
    Lazy,
}
