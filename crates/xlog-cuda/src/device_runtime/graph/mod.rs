//! CUDA graphs: memory and order for work that is recorded once and launched often.
//!
//! | file | content |
//! |---|---|
//! | `scope` | [`XlogDeviceRuntime::capture`](super::XlogDeviceRuntime::capture), and captures that other code began |
//! | `executable` | [`Graph`]: launches, and the blocks that a launch uses |
//! | `registry`, `routing` | open captures and arenas of a runtime; dispatch of the runtime's calls to them |
//! | `arena` | the memory of one capture, or of several whose graphs never run concurrently |
//! | `captured` | uses of blocks inside an open capture |
//! | `order`, `ranges` | vector clocks of captured streams; free ranges and the points that they follow |
//!
//! An arena takes chunks from the runtime's resource, so budget, statistics, log and ledger count them like other blocks. A
//! block that is allocated inside a capture is a range of a chunk. Outside the capture, a use of the block is a use of its
//! chunk, and so is every launch: the resource below orders both.
//!
//! Captures have vector clocks and use tracking of their own beside `ordering`. Captured work does not run, so no event
//! completes and no stamp of a stream can cover it. A wait inside the capture becomes an edge of the graph instead, which
//! orders the work in every launch.
//!
//! Invariants:
//! - No call here makes a stream under capture wait for the device or for work outside: that would break the capture.
//! - A chunk is freed when no graph, open capture or live block needs it. A graph that other code executes counts until the
//!   driver reports its end.
//! - Locks are taken in the order registry, arena. None is held while the resource below is called.

mod arena;
mod captured;
mod error;
mod executable;
mod order;
mod ranges;
mod registry;
mod routing;
mod scope;

pub use error::CaptureError;
pub use executable::Graph;
pub use scope::{CaptureOptions, CaptureScope, JoinedCapture};
pub use xlog_driver::CaptureMode;

pub(crate) use registry::{Detour, GraphRegistry};
pub(crate) use scope::check_not_captured;
