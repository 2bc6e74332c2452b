//! Order between streams, by vector clocks instead of one event per use.
//!
//! Every stream has a clock: a *stamp* for work that finishes now, and, for every other stream, the stamp that it is
//! ordered after. A block keeps the stamps of its outstanding reads and writes. Work on the block's own stream costs no
//! driver call. Another stream waits for an event that covers the stamp it needs, unless its clock already covers it.
//!
//! | file | content |
//! |---|---|
//! | `clock`, `events`, `vector_clock`, `clock_headers`, `event_queue` | the clock of a stream: stamps, events, happens-before |
//! | `block_meta`, `slab` | metadata of a block, in a slot that never moves |
//! | `state_word` | the word by which a block is used on its own stream without a lock |
//! | `use_state`, `uses` | outstanding and open uses of a block, behind its lock |
//! | `use_tracking`, `use_slow_path`, `wait_fast_path` | the hooks: opening and closing uses |
//! | `tracker` | the blocks and streams of one resource |
//! | `deferred_frees` | returned blocks that wait for other streams |
//! | `completed_frees` | returned blocks that wait until the host has seen their work complete |
//! | `striped_counters` | counters without contention |
//!
//! `clock` and `state_word` take their atomics and locks from `primitive`, so that a model checker can replace them.

pub(crate) mod block;
pub(crate) mod clock;
pub(crate) mod completed_frees;
pub(crate) mod deferred_frees;
pub(crate) mod primitive;
pub(crate) mod striped_counters;
pub(crate) mod tracker;
pub(crate) mod use_slow_path;
pub(crate) mod use_tracking;
pub(crate) mod wait_fast_path;

/// When an event is recorded for a closed use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum EventPolicy {
    /// At once for a use on another stream than the block's own, so that a waiting stream does not wait for later work
    /// of that stream. Work on the own stream records nothing; the first stream that needs it records the tail.
    #[default]
    ForeignExact,
    /// At once for every use.
    Exact,
    /// Never at once: the first stream that needs the work records the tail, and also waits for what was queued in
    /// between.
    Lazy,
}
