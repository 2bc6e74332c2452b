//! The runtime on one device: streams, and the words that everything ordered on them shares.
//!
//! Every public name of a submodule is reachable here too, with the device and stream types it works on.

pub mod resource;
pub(crate) mod stream_ids;
pub mod stream_pool;
mod stream_table;

pub use resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    PhysicalMeter, ResourceError, ResourceResult, ResourceStatistics, StreamId,
};
pub use stream_pool::{
    DEFAULT_MAX_STREAMS, StreamLease, StreamPool, StreamPoolError, StreamPriority,
};

pub use crate::device::CudaDevice;
pub use crate::error::{Result, XlogError};
pub use crate::stream::DeviceStream;
pub use xlog_driver::Gate;
pub use xlog_sim::RaceReport;
