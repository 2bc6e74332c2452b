//! Reports the blocks of a sub-allocator to memory checkers.
//!
//! A checker such as compute-sanitizer knows the driver's allocations, not the blocks that a pool splits from them. The NVTX memory
//! extension registers both: a [heap](Domain::register_heap) for each allocation and a [region](Domain::register_region) for each block.
//! This crate implements the binary interface and needs no header or library. Without an attached tool, [`tool`] returns `None` and nothing
//! is called.
//!
//! ```
//! // Without a tool there is nothing to report to.
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
