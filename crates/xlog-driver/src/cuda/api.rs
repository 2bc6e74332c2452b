//! The table of driver functions, filled once from a [`Symbols`].
//!
//! Every entry returns the driver's code as `u32`, so that an unknown code is a valid value. Loading fails with the name of the first
//! required symbol that is missing. An optional table is present as a whole or absent.
//!
//! Invariant: each entry was found under the name beside it, and its type is that name's C prototype since CUDA 12.0. The table does not
//! show whether the device supports a call; opening a device reads that attribute.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::NonNull;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUhostFn, CUmemGenericAllocationHandle, CUmemoryPool, CUmodule, CUstream, CUuserObject, CUuuid,
};

use super::abi::{AccessDesc, AllocationProp, PoolProps};
use crate::{DriverError, DriverResult};

/// A source of driver functions: the loaded library, or a test's table.
///
/// # Safety
/// An address returned for a name is a function with the C prototype that the CUDA driver API gives to this name, and
/// stays callable until the process ends.
pub(super) unsafe trait Symbols {
    /// The address of the function `name`.
    fn address(&self, name: &CStr) -> Option<NonNull<c_void>>;
}

macro_rules! table {
    (
        $(#[$doc:meta])*
        $table:ident { $( $field:ident = $symbol:literal ($($argument:ty),* $(,)?); )* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $table {
            $( pub(super) $field: unsafe extern "C" fn($($argument),*) -> u32, )*
        }

        impl $table {
            /// The whole table, or the name of the first missing symbol.
            fn find(symbols: &dyn Symbols) -> Result<Self, &'static CStr> {
                Ok(Self {
                    $( $field: {
                        let address = symbols.address($symbol).ok_or($symbol)?;
                        // SAFETY: `Symbols` promises that the address is the function of this name, whose prototype
                        // is the field's type; both sides are one non-null pointer wide.
                        unsafe {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) -> u32,
                            >(address)
                        }
                    }, )*
                })
            }
        }
    };
}

table! {
    /// The calls that every driver of CUDA 12.0 or later has.
    Calls {
        init = c"cuInit" (c_uint);
        driver_get_version = c"cuDriverGetVersion" (*mut c_int);
        device_get_count = c"cuDeviceGetCount" (*mut c_int);
        device_get = c"cuDeviceGet" (*mut CUdevice, c_int);
        device_get_name = c"cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        device_get_uuid = c"cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
        device_total_mem = c"cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        device_get_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_uint, CUdevice);
        primary_ctx_retain = c"cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        primary_ctx_release = c"cuDevicePrimaryCtxRelease_v2" (CUdevice);
        primary_ctx_get_state = c"cuDevicePrimaryCtxGetState" (CUdevice, *mut c_uint, *mut c_int);
        ctx_get_current = c"cuCtxGetCurrent" (*mut CUcontext);
        ctx_set_current = c"cuCtxSetCurrent" (CUcontext);
        ctx_push_current = c"cuCtxPushCurrent_v2" (CUcontext);
        ctx_pop_current = c"cuCtxPopCurrent_v2" (*mut CUcontext);
        ctx_get_stream_priority_range = c"cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
        ctx_synchronize = c"cuCtxSynchronize" ();
        mem_get_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
        pointer_get_attributes =
            c"cuPointerGetAttributes" (c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr);
        stream_create = c"cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy_v2" (CUstream);
        stream_synchronize = c"cuStreamSynchronize" (CUstream);
        stream_query = c"cuStreamQuery" (CUstream);
        stream_get_id = c"cuStreamGetId" (CUstream, *mut c_ulonglong);
        stream_is_capturing = c"cuStreamIsCapturing" (CUstream, *mut c_uint);
        stream_wait_event = c"cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        event_create = c"cuEventCreate" (*mut CUevent, c_uint);
        event_destroy = c"cuEventDestroy_v2" (CUevent);
        event_record = c"cuEventRecord" (CUevent, CUstream);
        event_query = c"cuEventQuery" (CUevent);
        event_synchronize = c"cuEventSynchronize" (CUevent);
        mem_alloc = c"cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        mem_free = c"cuMemFree_v2" (CUdeviceptr);
        mem_host_alloc = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        mem_free_host = c"cuMemFreeHost" (*mut c_void);
        mem_host_get_device_pointer =
            c"cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
        memset_d8_async = c"cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
        memcpy_htod_async = c"cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
        memcpy_dtoh_async = c"cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
        memcpy_dtod_async = c"cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        launch_host_func = c"cuLaunchHostFunc" (CUstream, CUhostFn, *mut c_void);
    }
}

table! {
    /// Stream-ordered pools.
    PoolCalls {
        create = c"cuMemPoolCreate" (*mut CUmemoryPool, *const PoolProps);
        destroy = c"cuMemPoolDestroy" (CUmemoryPool);
        set_attribute = c"cuMemPoolSetAttribute" (CUmemoryPool, c_uint, *mut c_void);
        get_attribute = c"cuMemPoolGetAttribute" (CUmemoryPool, c_uint, *mut c_void);
        trim_to = c"cuMemPoolTrimTo" (CUmemoryPool, usize);
        alloc_from_pool_async =
            c"cuMemAllocFromPoolAsync" (*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        free_async = c"cuMemFreeAsync" (CUdeviceptr, CUstream);
    }
}

table! {
    /// Virtual memory management.
    VirtualMemoryCalls {
        address_reserve =
            c"cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        address_free = c"cuMemAddressFree" (CUdeviceptr, usize);
        create = c"cuMemCreate"
            (*mut CUmemGenericAllocationHandle, usize, *const AllocationProp, c_ulonglong);
        release = c"cuMemRelease" (CUmemGenericAllocationHandle);
        map = c"cuMemMap" (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        unmap = c"cuMemUnmap" (CUdeviceptr, usize);
        set_access = c"cuMemSetAccess" (CUdeviceptr, usize, *const AccessDesc, usize);
        get_granularity =
            c"cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, c_uint);
    }
}

table! {
    /// Stream waits for a value in memory.
    WaitValueCalls {
        wait_value32 = c"cuStreamWaitValue32_v2" (CUstream, CUdeviceptr, u32, c_uint);
    }
}

table! {
    /// The thread's capture mode.
    CaptureCalls {
        exchange_mode = c"cuThreadExchangeStreamCaptureMode" (*mut c_uint);
    }
}

table! {
    /// Stream capture and graphs.
    GraphCalls {
        begin_capture = c"cuStreamBeginCapture_v2" (CUstream, c_uint);
        end_capture = c"cuStreamEndCapture" (CUstream, *mut CUgraph);
        capture_info = c"cuStreamGetCaptureInfo_v2" (
            CUstream,
            *mut c_uint,
            *mut c_ulonglong,
            *mut CUgraph,
            *mut *const CUgraphNode,
            *mut usize,
        );
        instantiate = c"cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, c_ulonglong);
        launch = c"cuGraphLaunch" (CUgraphExec, CUstream);
        exec_destroy = c"cuGraphExecDestroy" (CUgraphExec);
        destroy = c"cuGraphDestroy" (CUgraph);
        user_object_create =
            c"cuUserObjectCreate" (*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint);
        user_object_release = c"cuUserObjectRelease" (CUuserObject, c_uint);
        retain_user_object =
            c"cuGraphRetainUserObject" (CUgraph, CUuserObject, c_uint, c_uint);
    }
}

table! {
    /// Modules and launches.
    ModuleCalls {
        load_data = c"cuModuleLoadData" (*mut CUmodule, *const c_void);
        unload = c"cuModuleUnload" (CUmodule);
        get_function = c"cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        launch_kernel = c"cuLaunchKernel" (
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void,
        );
    }
}

table! {
    /// The driver's names for its codes.
    ErrorTextCalls {
        name = c"cuGetErrorName" (c_uint, *mut *const c_char);
        description = c"cuGetErrorString" (c_uint, *mut *const c_char);
    }
}

/// All functions this crate calls.
pub(super) struct Api {
    pub(super) calls: Calls,
    pub(super) pools: Option<PoolCalls>,
    pub(super) virtual_memory: Option<VirtualMemoryCalls>,
    pub(super) wait_value: Option<WaitValueCalls>,
    pub(super) capture: Option<CaptureCalls>,
    pub(super) graphs: Option<GraphCalls>,
    pub(super) modules: Option<ModuleCalls>,
    pub(super) error_text: Option<ErrorTextCalls>,
}

impl Api {
    pub(super) fn load(symbols: &dyn Symbols) -> DriverResult<Self> {
        let calls = Calls::find(symbols).map_err(|symbol| DriverError::Unavailable {
            what: format!("libcuda has no symbol {}", symbol.to_string_lossy()),
            remedy: "install an NVIDIA driver of CUDA 12.0 or later, or use the simulated device"
                .to_owned(),
        })?;
        Ok(Self {
            calls,
            pools: PoolCalls::find(symbols).ok(),
            virtual_memory: VirtualMemoryCalls::find(symbols).ok(),
            wait_value: WaitValueCalls::find(symbols).ok(),
            capture: CaptureCalls::find(symbols).ok(),
            graphs: GraphCalls::find(symbols).ok(),
            modules: ModuleCalls::find(symbols).ok(),
            error_text: ErrorTextCalls::find(symbols).ok(),
        })
    }
}
