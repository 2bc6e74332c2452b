//! Common imports, for one `use xlog_cuda::prelude::*;`.

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
