//! Common imports, for one `use xlog_cuda::prelude::*;`.
//!
//! ```
//! use xlog_cuda::prelude::*;
//!
//! let memory = GpuMemoryManager::with_runtime(XlogDeviceRuntime::open("sim")?);
//! assert_eq!(memory.alloc_from(&[3_u32, 1, 4])?.to_vec()?, [3, 1, 4]);
//! # Ok::<(), xlog_cuda::XlogError>(())
//! ```

#[cfg(feature = "guard")]
pub use crate::device_runtime::DebugGuardResource;
pub use crate::device_runtime::{
    Access, AllocTag, AsyncCudaResource, CaptureOptions, DeviceMemoryResource, DirectCudaResource,
    GlobalDeviceBudget, Graph, LoggingResource, PinnedBuffer, PinnedHostResource, PoolConfig,
    PoolResource, ResourceKind, RuntimeConfig, StatisticsResource, StreamId, XlogDeviceRuntime,
};
pub use crate::{
    ByteSize, CudaDevice, DeviceRepr, DeviceView, DeviceViewMut, GpuMemoryManager, LaunchRecorder,
    TrackedCudaSlice, XlogError,
};
