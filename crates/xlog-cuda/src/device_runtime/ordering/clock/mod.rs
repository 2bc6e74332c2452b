//! The clock of a stream: stamps of its work, the events that cover them, and the stamps that it is ordered after.
//!
//! Invariants:
//! - An event covers every stamp before the one at which it was begun: the work of those stamps was queued earlier.
//! - A stream claims to be ordered after another one only once the driver has queued the wait.
//! - A forgotten entry of a vector clock adds a wait and never omits one.
//! - An event is recycled only when it has completed and no thread may still pass it to the driver.
//!
//! | file | content |
//! |---|---|
//! | `stream_clock`, `clock_headers` | stamps and waits; the part that every use reads |
//! | `events` | recorded events by the stamp that they cover |
//! | `vector_clock` | the stamps of other streams that the stream is ordered after |
//!
//! Nothing here calls the driver or knows of blocks. `stream_clock` takes its atomics and its lock from `primitive`, so
//! that a model checker can replace them.

use super::primitive;

pub(crate) mod clock_headers;
pub(crate) mod events;
pub(crate) mod stream_clock;
#[cfg(test)]
mod tests;
pub(crate) mod vector_clock;
