//! The ordering state of a block: its metadata in a slot that never moves, its state word, and its uses.
//!
//! Invariants:
//! - A slot is reused with a new generation, so a stale identity fails by its generation.
//! - Every change of state changes the state word: validation and change are one step.
//! - While another stream than the block's own is involved, the block is inflated and every thread takes its lock.
//!
//! | file | content |
//! |---|---|
//! | `block_meta`, `slab` | metadata of a block, and slots that never move |
//! | `state_word` | the word by which a block is used on its own stream without a lock |
//! | `uses` | outstanding and open uses, behind the lock |
//!
//! Nothing here calls the driver. `state_word` takes its atomics from `primitive`, so that a model checker can replace
//! them.

use super::primitive;

pub(crate) mod block_meta;
pub(crate) mod slab;
pub(crate) mod state_word;
pub(crate) mod uses;
