//! CUDA graphs: memory and order for work that is recorded once and launched often.
//!
//! | file | what it has |
//! |---|---|
//! | `scope` | [`XlogDeviceRuntime::capture`](super::XlogDeviceRuntime::capture), and captures that other code began |
//! | `executable` | [`Graph`]: launches, and the blocks that a launch uses |
//! | `registry`, `routing` | open captures and arenas of a runtime; which calls concern them |
//! | `arena` | the memory of one capture, or of several that never run at once |
//! | `captured` | uses of blocks inside an open capture |
//! | `order`, `ranges` | vector clocks of captured streams; free ranges and the points that they follow |
//!
//! An arena takes chunks from the runtime's resource, so budget, statistics, log and ledger count them like any other block. A block that is
//! allocated inside a capture is a range of a chunk. Inside the capture it is ordered by the clocks of the captured streams. Outside, a use of it is a
//! use of its chunk, and so is every launch: both are ordered by the resource below.
//!
//! Invariants:
//! - No call here waits for the device, or for work outside of a capture, on a stream under capture: that would break the capture.
//! - A chunk is freed when no graph, no open capture and no live block needs it. A graph that other code executes counts until the driver reports
//!   its end.
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
