//! Numbers and memory layouts of the CUDA driver's C interface.
//!
//! Some of cudarc's structs change their fields with the CUDA version it was built for. The driver accepts one layout from every caller,
//! because new fields take reserved space that older callers leave zero. This file defines that layout, and the assertions below compare it
//! with cudarc's.
//!
//! Invariant: every struct here is plain data for which all zeroes is a valid, default value. This file makes no calls.

use std::ffi::{c_int, c_void};
use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys;

/// Result codes that this crate tells apart. Every other code is passed on as a number.
pub(super) mod code {
    pub(crate) const SUCCESS: u32 = 0;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_INITIALIZED: u32 = 3;
    pub(crate) const DEINITIALIZED: u32 = 4;
    pub(crate) const STUB_LIBRARY: u32 = 34;
    pub(crate) const DEVICE_UNAVAILABLE: u32 = 46;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const ECC_UNCORRECTABLE: u32 = 214;
    pub(crate) const NVLINK_UNCORRECTABLE: u32 = 220;
    pub(crate) const CONTAINED: u32 = 226;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
    pub(crate) const LAUNCH_TIMEOUT: u32 = 702;
    pub(crate) const CONTEXT_IS_DESTROYED: u32 = 709;
    pub(crate) const ASSERT: u32 = 710;
    pub(crate) const HARDWARE_STACK_ERROR: u32 = 714;
    pub(crate) const LAUNCH_FAILED: u32 = 719;
    pub(crate) const TENSOR_MEMORY_LEAK: u32 = 721;
    pub(crate) const NOT_SUPPORTED: u32 = 801;
    pub(crate) const SYSTEM_NOT_READY: u32 = 802;
    pub(crate) const SYSTEM_DRIVER_MISMATCH: u32 = 803;
    pub(crate) const COMPAT_NOT_SUPPORTED: u32 = 804;
    pub(crate) const MPS_CLIENT_TERMINATED: u32 = 810;
    pub(crate) const EXTERNAL_DEVICE: u32 = 911;
    pub(crate) const UNKNOWN: u32 = 999;
}

/// `CUdevice_attribute` values.
pub(super) mod attribute {
    pub(crate) const MULTIPROCESSOR_COUNT: u32 = 16;
    pub(crate) const MEMORY_CLOCK_RATE: u32 = 36;
    pub(crate) const GLOBAL_MEMORY_BUS_WIDTH: u32 = 37;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub(crate) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: u32 = 102;
    pub(crate) const MEMORY_POOLS_SUPPORTED: u32 = 115;
}

/// `CUmemPool_attribute` values.
pub(super) mod pool_attribute {
    pub(crate) const REUSE_FOLLOW_EVENT_DEPENDENCIES: u32 = 1;
    pub(crate) const REUSE_ALLOW_OPPORTUNISTIC: u32 = 2;
    pub(crate) const REUSE_ALLOW_INTERNAL_DEPENDENCIES: u32 = 3;
    pub(crate) const RELEASE_THRESHOLD: u32 = 4;
    pub(crate) const RESERVED_MEM_CURRENT: u32 = 5;
    pub(crate) const RESERVED_MEM_HIGH: u32 = 6;
    pub(crate) const USED_MEM_CURRENT: u32 = 7;
    pub(crate) const USED_MEM_HIGH: u32 = 8;
}

pub(super) const STREAM_NON_BLOCKING: u32 = 1;
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
/// Waits until `(i32)(*address - value) >= 0`, a comparison that survives the wrap of the counter.
pub(super) const WAIT_VALUE_GEQ: u32 = 0;
pub(super) const HOST_ALLOC_PORTABLE: u32 = 1;
pub(super) const HOST_ALLOC_DEVICE_MAP: u32 = 2;
pub(super) const CAPTURE_NONE: u32 = 0;
pub(super) const CAPTURE_ACTIVE: u32 = 1;
/// The `CUstreamCaptureMode` in which an open capture forbids no call of the thread.
pub(super) const CAPTURE_MODE_RELAXED: u32 = 2;
pub(super) const CAPTURE_MODE_GLOBAL: u32 = 0;
pub(super) const CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
/// The driver may run the destructor of a user object on any thread at any time.
pub(super) const USER_OBJECT_NO_DESTRUCTOR_SYNC: u32 = 1;
/// The graph takes over the reference of the caller.
pub(super) const GRAPH_USER_OBJECT_MOVE: u32 = 1;
pub(super) const GRANULARITY_MINIMUM: u32 = 0;
pub(super) const GRANULARITY_RECOMMENDED: u32 = 1;
pub(super) const ALLOCATION_TYPE_PINNED: u32 = 1;
pub(super) const LOCATION_TYPE_DEVICE: u32 = 1;
pub(super) const ACCESS_NONE: u32 = 0;
pub(super) const ACCESS_READ: u32 = 1;
pub(super) const ACCESS_READ_WRITE: u32 = 3;

/// `CUmemLocation`: where memory lives or who accesses it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Location {
    pub(super) kind: u32,
    pub(super) id: c_int,
}

impl Location {
    /// The memory of one device.
    pub(super) fn device(device: sys::CUdevice) -> Self {
        Self { kind: LOCATION_TYPE_DEVICE, id: device }
    }
}

/// `CUmemPoolProps`. The driver reads `max_size` since CUDA 12.2; before, those bytes are reserved and must be zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolProps {
    pub(super) allocation_type: u32,
    pub(super) handle_types: u32,
    pub(super) location: Location,
    pub(super) win32_security_attributes: *mut c_void,
    pub(super) max_size: usize,
    pub(super) reserved: [u8; 56],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProp {
    pub(super) allocation_type: u32,
    pub(super) requested_handle_types: u32,
    pub(super) location: Location,
    pub(super) win32_handle_meta_data: *mut c_void,
    pub(super) flags: [u8; 8],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDesc {
    pub(super) location: Location,
    pub(super) flags: u32,
}

// What the driver's headers fix on every 64-bit platform.
const _: () = {
    assert!(size_of::<usize>() == 8, "only 64-bit hosts have a CUDA driver");
    assert!(size_of::<Location>() == 8 && offset_of!(Location, id) == 4);
    assert!(size_of::<PoolProps>() == 88 && offset_of!(PoolProps, location) == 8);
    assert!(offset_of!(PoolProps, win32_security_attributes) == 16);
    assert!(offset_of!(PoolProps, max_size) == 24);
    assert!(size_of::<AllocationProp>() == 32 && offset_of!(AllocationProp, location) == 8);
    assert!(offset_of!(AllocationProp, win32_handle_meta_data) == 16);
    assert!(offset_of!(AllocationProp, flags) == 24);
    assert!(size_of::<AccessDesc>() == 12 && offset_of!(AccessDesc, flags) == 8);
};

// cudarc's bindings, for the CUDA version they were built for.
const _: () = {
    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<PoolProps>() == size_of::<sys::CUmemPoolProps>());
    assert!(align_of::<PoolProps>() == align_of::<sys::CUmemPoolProps>());
    assert!(offset_of!(PoolProps, location) == offset_of!(sys::CUmemPoolProps, location));
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(align_of::<AllocationProp>() == align_of::<sys::CUmemAllocationProp>());
    assert!(offset_of!(AllocationProp, flags) == offset_of!(sys::CUmemAllocationProp, allocFlags));
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(size_of::<sys::CUresult>() == size_of::<u32>());
    assert!(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 == code::OUT_OF_MEMORY);
    assert!(sys::CUresult::CUDA_ERROR_NOT_READY as u32 == code::NOT_READY);
    assert!(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as u32 == code::NOT_SUPPORTED);
    assert!(sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32 == STREAM_NON_BLOCKING);
    assert!(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32 == EVENT_DISABLE_TIMING);
    assert!(sys::CU_MEMHOSTALLOC_PORTABLE == HOST_ALLOC_PORTABLE);
    assert!(sys::CU_MEMHOSTALLOC_DEVICEMAP == HOST_ALLOC_DEVICE_MAP);
};
