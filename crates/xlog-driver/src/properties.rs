//! The properties of a device.

use std::fmt;

/// The implementation of the [`Driver`](crate::Driver) trait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A GPU behind the CUDA driver.
    Cuda,
    /// The simulated device.
    Simulated,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Simulated => "simulated",
        })
    }
}

/// The identity of a physical device, printed as `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Facts about a device that do not change while it is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceProperties {
    /// The implementation.
    pub kind: DeviceKind,
    /// The device's index among those its driver shows to this process.
    pub ordinal: u32,
    /// The marketing name.
    pub name: String,
    /// The identity of the physical device.
    pub uuid: DeviceUuid,
    /// All memory of the device in bytes.
    pub total_bytes: u64,
    /// The driver's CUDA version, as 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The numerically greatest (least urgent) stream priority.
    pub least_priority: i32,
    /// The numerically least (most urgent) stream priority.
    pub greatest_priority: i32,
    /// Whether stream-ordered memory pools are offered.
    pub async_pools: bool,
    /// Whether virtual memory management is offered.
    pub virtual_memory: bool,
    /// The mapping granularity in bytes; 0 without virtual memory.
    pub granularity: usize,
    /// The peak memory bandwidth in bytes per second; `None` if the driver does not report it.
    pub peak_bandwidth: Option<u64>,
    /// The minimum alignment of every allocation.
    pub allocation_alignment: usize,
}

/// One allocation or mapping of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// The first address.
    pub start: u64,
    /// The size.
    pub bytes: u64,
}

/// Free and total memory of the physical device at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that no process holds.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}
