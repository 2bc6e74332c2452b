//! Tells memory checkers which bytes of a large driver allocation are handed out.
//!
//! A checker such as compute-sanitizer knows the allocations of the driver, not the blocks that a pool cuts from them. Through the
//! NVTX memory extension it can be told: a [heap](Domain::register_heap) for each allocation, a
//! [region](Domain::register_region) for each block. The handshake is written from the layout of the interface; there is no header
//! and no library to link with. Where no tool is attached, [`tool`] says so and nothing is called.
//!
//! ```
//! // Without a tool there is nothing to tell.
//! assert!(xlog_nvtx::tool()?.is_none());
//! # Ok::<(), xlog_nvtx::AttachError>(())
//! ```

mod core_tables;
mod domain;
mod layout;
mod tool;

pub use domain::{Domain, Heap};
pub use layout::{InitializeExtension, ModuleInfo, ModuleSegment};
pub use tool::{AttachError, INJECTION_VARIABLE, Tool, inject, tool};
