//! The driver calls that this library makes itself, which bypass its own hooks.

use std::ffi::{CStr, c_void};

use crate::resolve::driver_symbol;

/// The status of a driver call.
pub(crate) type CuResult = i32;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const NO_DEVICE: CuResult = 100;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: i32 = 1;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: i32 = 2;

const RESERVED_BYTES: i32 = 5;

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const GRAPH_RESERVED_BYTES: i32 = 2;
/// `CU_GRAPH_NODE_TYPE_GRAPH` and `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const CHILD_GRAPH: i32 = 4;
const MEMORY_ALLOCATION: i32 = 10;

/// `CUDA_ALLOC_NODE_PARAMS` with space for fields of later versions.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllocationNode {
    /// `CUmemPoolProps`: type, handle types, type of location, id of location, and more.
    pool: [i32; 22],
    access: u64,
    accesses: usize,
    bytes: usize,
    address: u64,
    later: [u64; 16],
}

const _: () = assert!(std::mem::offset_of!(AllocationNode, bytes) == 104);

macro_rules! driver {
    ($($field:ident $name:literal ($($kind:ty),*);)*) => {
        /// The driver's functions; `None` for those that it lacks.
        pub(crate) struct Driver { $($field: Option<unsafe extern "C" fn($($kind),*) -> CuResult>),* }

        impl Driver {
            pub(crate) fn load() -> Self {
                Self { $($field: {
                    let address = driver_symbol($name);
                    // SAFETY: an option of a function pointer may be null; the driver's function of this name has these arguments.
                    unsafe {
                        std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($kind),*) -> CuResult>>(address)
                    }
                }),* }
            }
        }
    };
}

driver! {
    ctx_get_device c"cuCtxGetDevice" (*mut i32);
    ctx_get_current c"cuCtxGetCurrent" (*mut u64);
    device_get_uuid_v2 c"cuDeviceGetUuid_v2" (*mut [u8; 16], i32);
    device_get_uuid c"cuDeviceGetUuid" (*mut [u8; 16], i32);
    device_get_name c"cuDeviceGetName" (*mut u8, i32, i32);
    device_total_mem c"cuDeviceTotalMem_v2" (*mut usize, i32);
    device_get_mem_pool c"cuDeviceGetMemPool" (*mut u64, i32);
    mem_pool_get_attribute c"cuMemPoolGetAttribute" (u64, i32, *mut u64);
    mem_pool_trim_to c"cuMemPoolTrimTo" (u64, usize);
    mem_free_async c"cuMemFreeAsync" (u64, u64);
    device_get_graph_mem_attribute c"cuDeviceGetGraphMemAttribute" (i32, i32, *mut u64);
    device_graph_mem_trim c"cuDeviceGraphMemTrim" (i32);
    graph_get_nodes c"cuGraphGetNodes" (u64, *mut u64, *mut usize);
    graph_node_get_type c"cuGraphNodeGetType" (u64, *mut i32);
    graph_mem_alloc_node_get_params c"cuGraphMemAllocNodeGetParams" (u64, *mut AllocationNode);
    graph_child_graph_node_get_graph c"cuGraphChildGraphNodeGetGraph" (u64, *mut u64);
    stream_is_capturing c"cuStreamIsCapturing" (u64, *mut i32);
    exchange_capture_mode c"cuThreadExchangeStreamCaptureMode" (*mut i32);
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut u64, i32);
    primary_release c"cuDevicePrimaryCtxRelease_v2" (i32);
    primary_state c"cuDevicePrimaryCtxGetState" (i32, *mut u32, *mut i32);
}

/// Calls a driver function and returns the value it wrote, or `None` if it fails.
macro_rules! read {
    ($function:expr, $value:ident, $initial:expr, ($($argument:expr),*)) => {{
        let mut $value = $initial;
        // SAFETY: the pointers are those of live local values of the types that the driver expects.
        let is_read = $function.is_some_and(|function| unsafe { function($($argument),*) } == SUCCESS);
        is_read.then_some($value)
    }};
}

/// Allows this thread calls that would break a capture of the program. Dropping it restores the mode.
struct Relaxed {
    exchange: Option<unsafe extern "C" fn(*mut i32) -> CuResult>,
    mode: i32,
}

impl Relaxed {
    fn exchange(&mut self) {
        if let Some(exchange) = self.exchange {
            // SAFETY: the pointer is that of a live value of the type that the driver expects.
            let _ = unsafe { exchange(&raw mut self.mode) };
        }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        self.exchange();
    }
}

impl Driver {
    /// For calls that an open capture forbids: pools and graph memory do not affect the captured stream.
    fn relaxed(&self) -> Relaxed {
        let mut relaxed = Relaxed { exchange: self.exchange_capture_mode, mode: RELAXED };
        relaxed.exchange();
        relaxed
    }

    /// The device of the current context; `None` before `cuInit` and without a context.
    pub(crate) fn current_device(&self) -> Option<u32> {
        let device = read!(self.ctx_get_device, device, -1_i32, (&raw mut device))?;
        u32::try_from(device).ok()
    }

    pub(crate) fn current_context(&self) -> Option<u64> {
        read!(self.ctx_get_current, context, 0_u64, (&raw mut context))
    }

    /// The UUID of a device. `cuDeviceGetUuid_v2` distinguishes the instances of a partitioned GPU.
    pub(crate) fn uuid(&self, device: u32) -> Option<[u8; 16]> {
        let device = i32::try_from(device).ok()?;
        let newer = read!(self.device_get_uuid_v2, uuid, [0; 16], (&raw mut uuid, device));
        newer.or_else(|| read!(self.device_get_uuid, uuid, [0; 16], (&raw mut uuid, device)))
    }

    pub(crate) fn name(&self, device: u32) -> Option<String> {
        const LENGTH: i32 = 128;
        let device = i32::try_from(device).ok()?;
        let name = read!(
            self.device_get_name,
            name,
            [0_u8; LENGTH as usize],
            ((&raw mut name).cast(), LENGTH, device)
        )?;
        Some(CStr::from_bytes_until_nul(&name).ok()?.to_string_lossy().into_owned())
    }

    /// The total memory of a device in bytes.
    pub(crate) fn total(&self, device: u32) -> Option<u64> {
        let device = i32::try_from(device).ok()?;
        read!(self.device_total_mem, total, 0_usize, (&raw mut total, device))
            .map(|total| total as u64)
    }

    /// The pool that `cuMemAllocAsync` uses on a device.
    pub(crate) fn current_pool(&self, device: u32) -> Option<u64> {
        let device = i32::try_from(device).ok()?;
        read!(self.device_get_mem_pool, pool, 0_u64, (&raw mut pool, device))
    }

    /// The bytes that a pool has reserved on its device.
    pub(crate) fn pool_reserved(&self, pool: u64) -> Option<u64> {
        let (get, _relaxed) = (self.mem_pool_get_attribute, self.relaxed());
        read!(get, bytes, 0_u64, (pool, RESERVED_BYTES, &raw mut bytes))
    }

    /// The bytes that the driver has reserved on a device for graphs.
    pub(crate) fn graph_reserved(&self, device: u32) -> Option<u64> {
        let device = i32::try_from(device).ok()?;
        let (get, _relaxed) = (self.device_get_graph_mem_attribute, self.relaxed());
        read!(get, bytes, 0_u64, (device, GRAPH_RESERVED_BYTES, &raw mut bytes))
    }

    /// Makes the driver return unused graph memory.
    pub(crate) fn trim_graphs(&self, device: u32) {
        let _relaxed = self.relaxed();
        if let (Some(trim), Ok(device)) = (self.device_graph_mem_trim, i32::try_from(device)) {
            // SAFETY: the call takes no pointers.
            let _ = unsafe { trim(device) };
        }
    }

    /// The nodes of a graph; none if it cannot be read.
    pub(crate) fn graph_nodes(&self, graph: u64) -> Vec<u64> {
        let get = self.graph_get_nodes;
        let none = std::ptr::null_mut();
        let Some(count) = read!(get, count, 0_usize, (graph, none, &raw mut count)) else {
            return Vec::new();
        };
        let mut nodes = vec![0; count];
        let first = nodes.as_mut_ptr();
        let Some(written) = read!(get, room, count, (graph, first, &raw mut room)) else {
            return Vec::new();
        };
        nodes.truncate(written);
        nodes
    }

    /// The device and the bytes of an allocation node; `None` for other nodes.
    pub(crate) fn allocation_of_node(&self, node: u64) -> Option<(u32, u64)> {
        if self.node_type(node)? != MEMORY_ALLOCATION {
            return None;
        }
        let empty = AllocationNode {
            pool: [0; 22],
            access: 0,
            accesses: 0,
            bytes: 0,
            address: 0,
            later: [0; 16],
        };
        let get = self.graph_mem_alloc_node_get_params;
        let node = read!(get, parameters, empty, (node, &raw mut parameters))?;
        Some((device_of(node.pool.as_ptr())?, node.bytes as u64))
    }

    /// The graph inside a node; `None` for other nodes.
    pub(crate) fn child_graph(&self, node: u64) -> Option<u64> {
        if self.node_type(node)? != CHILD_GRAPH {
            return None;
        }
        let get = self.graph_child_graph_node_get_graph;
        read!(get, graph, 0_u64, (node, &raw mut graph))
    }

    fn node_type(&self, node: u64) -> Option<i32> {
        read!(self.graph_node_get_type, kind, -1_i32, (node, &raw mut kind))
    }

    /// True if work on `stream` is captured instead of run. The legacy default stream cannot be captured.
    pub(crate) fn is_capturing(&self, stream: u64) -> bool {
        const LEGACY: u64 = 1;
        let ask = self.stream_is_capturing.filter(|_| stream > LEGACY);
        read!(ask, status, 0_i32, (stream, &raw mut status)).is_some_and(|status| status != 0)
    }

    /// Makes a pool return unused memory, down to `keep` bytes.
    pub(crate) fn trim_pool(&self, pool: u64, keep: u64) {
        let _relaxed = self.relaxed();
        if let Some(trim) = self.mem_pool_trim_to {
            // SAFETY: the program just used the pool; the call takes no pointers.
            let _ = unsafe { trim(pool, usize::try_from(keep).unwrap_or(usize::MAX)) };
        }
    }

    /// Frees, in the order of its stream, a block that the driver just allocated and the limit does not allow.
    pub(crate) fn free_in_order(&self, address: u64, stream: u64) {
        let _relaxed = self.relaxed();
        if let Some(free) = self.mem_free_async {
            // SAFETY: the driver returned the address for this stream just now, and the program does not have it yet.
            let _ = unsafe { free(address, stream) };
        }
    }

    /// True if the primary context of a device is active.
    pub(crate) fn is_primary_active(&self, device: u32) -> Option<bool> {
        let device = i32::try_from(device).ok()?;
        let mut flags = 0_u32;
        let state = self.primary_state;
        read!(state, active, 0_i32, (device, &raw mut flags, &raw mut active))
            .map(|active| active != 0)
    }

    /// The primary context of a device, if it is active. Leaves its reference count unchanged.
    pub(crate) fn primary_context(&self, device: u32) -> Option<u64> {
        if !self.is_primary_active(device)? {
            return None;
        }
        let device = i32::try_from(device).ok()?;
        let release = self.primary_release?;
        let context = read!(self.primary_retain, context, 0_u64, (&raw mut context, device))?;
        // SAFETY: releases the reference that was retained just now.
        let _ = unsafe { release(device) };
        Some(context)
    }
}

/// True if the program has called `cuInit`. Does not allocate or lock.
pub(crate) fn is_initialized() -> bool {
    let address = driver_symbol(c"cuDeviceGetCount");
    // SAFETY: an option of a function pointer may be null; the driver's function of this name has this argument.
    let count = unsafe {
        std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut i32) -> CuResult>>(
            address,
        )
    };
    read!(count, devices, 0_i32, (&raw mut devices)).is_some()
}

/// The device in `CUmemAllocationProp` or `CUmemPoolProps`; `None` for host memory.
pub(crate) fn device_of(properties: *const i32) -> Option<u32> {
    if properties.is_null() {
        return None;
    }
    // SAFETY: the caller gave a structure that begins with type, handle types, type of location and id of location.
    let (location, id) = unsafe { (*properties.add(2), *properties.add(3)) };
    if location == ON_DEVICE { u32::try_from(id).ok() } else { None }
}
