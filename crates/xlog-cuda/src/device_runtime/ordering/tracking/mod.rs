//! Use tracking of a resource: opens and closes uses, makes streams wait, and defers frees.
//!
//! Invariants:
//! - No lock of a block or a clock is held over a driver call.
//! - A use is open before its stream waits, and outstanding before it is closed, so a free never misses it.
//! - Memory is freed only when no use is open and the freeing stream is ordered after all outstanding uses.
//!
//! | file | content |
//! |---|---|
//! | `use_tracking`, `use_slow_path` | the hooks: opening and closing uses |
//! | `tracker` | the blocks and streams of one resource |
//! | `deferred_frees` | returned blocks that wait for other streams |
//! | `completed_frees` | returned blocks that wait until the host has seen their work complete |
//! | `striped_counters` | counters without contention |

pub(crate) mod completed_frees;
pub(crate) mod deferred_frees;
pub(crate) mod striped_counters;
pub(crate) mod tracker;
pub(crate) mod use_slow_path;
pub(crate) mod use_tracking;
