#![doc = include_str!("../CONTRACT.md")]

mod driver;
mod error;
mod gate;
mod graphs;
mod handles;
mod host_memory;
mod pools;
mod properties;
mod virtual_memory;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sync;

pub use driver::{CaptureStatus, Driver, HostFn, Waited};
pub use error::{DriverError, DriverResult};
pub use gate::Gate;
pub use graphs::{CaptureInfo, CaptureMode, Graphs};
pub use handles::{
    Access, EventHandle, GraphExecHandle, GraphHandle, MemoryHandle, PoolHandle, StreamHandle,
};
pub use host_memory::{HostAllocation, HostMemory};
pub use pools::{AsyncPools, PoolOptions, PoolUsage, ReusePolicy};
pub use properties::{DeviceKind, DeviceProperties, DeviceUuid, MemoryInfo, MemoryRange};
pub use virtual_memory::{MapAccess, VirtualMemory};
