//! Reports the blocks of a sub-allocator to memory checkers.
//!
//! A checker such as compute-sanitizer knows the allocations of the driver, not the blocks that a pool splits from them. The NVTX
//! memory extension registers them: a [heap](Domain::register_heap) for each allocation, a [region](Domain::register_region) for
//! each block. The handshake is written from the layout of the interface; there is no header and no library to link with. Without
//! an attached tool [`tool`] returns `None`, and nothing is called.
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
