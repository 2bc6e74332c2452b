//! The exported driver calls and the table of hooks.
//!
//! An exported function puts its return address into the register after its last argument and jumps to its Rust body, so that the log can
//! name the caller. The body passes on calls that the driver makes to itself, and all calls once the library is off.
//! In the table, `call` makes the driver's call with the caller's own arguments, and `caller` is the return address.
//!
//! A hook has the driver's symbol, the base name for `cuGetProcAddress`, the first version in which that base name means this symbol, and a
//! flag for per-thread default streams.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::blocks::{Space, give, pitched_bytes, take, written};
use crate::driver::{CuResult, NO_DEVICE};
use crate::log::per_thread;
use crate::messages::{Inside, is_on};
use crate::{
    arrays, contexts, graphs, handles, information, pools, proc_address, resolve, synchronization,
};

/// One intercepted driver call.
pub(crate) struct Hook {
    pub(crate) symbol: &'static CStr,
    pub(crate) base: &'static CStr,
    /// The CUDA version since which the base name means this symbol.
    pub(crate) since: i32,
    pub(crate) per_thread: bool,
    entry: unsafe extern "C" fn(),
    real: AtomicPtr<c_void>,
}

impl Hook {
    /// The address that programs get.
    pub(crate) fn entry(&self) -> *mut c_void {
        self.entry as *mut c_void
    }

    /// Stores the address behind the hook, unless one is known. A driver with preemptible symbols may return the hook itself.
    pub(crate) fn set_real(&self, address: *mut c_void) {
        if address == self.entry() {
            return;
        }
        let _ =
            self.real.compare_exchange(null_mut(), address, Ordering::Release, Ordering::Relaxed);
    }

    /// The address behind the hook; null without a driver.
    pub(crate) fn real(&self) -> *mut c_void {
        let known = self.real.load(Ordering::Acquire);
        if known.is_null() { resolve::find_real(self) } else { known }
    }
}

macro_rules! hooks {
    (|$call:ident, $caller:ident| $($symbol:ident $name:literal of $base:literal since $since:literal $(, $per_thread:ident)?;
        $register:literal ($($argument:ident: $kind:ty),*) => $work:expr;)*) => {
        $(
            #[doc = concat!("The exported `", stringify!($symbol), "`.")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub(crate) unsafe extern "C" fn $symbol() {
                naked_asm!(
                    "endbr64",
                    concat!("mov ", $register, ", [rsp]"),
                    "jmp {body}",
                    body = sym bodies::$symbol,
                )
            }
        )*

        /// The indices of the hooks in [`HOOKS`].
        #[allow(non_camel_case_types)]
        enum Place { $($symbol,)* Count }

        pub(crate) static HOOKS: [Hook; Place::Count as usize] = [$(Hook {
            symbol: $name,
            base: $base,
            since: $since,
            per_thread: false $(|| stringify!($per_thread).len() > 0)?,
            entry: $symbol,
            real: AtomicPtr::new(null_mut()),
        }),*];

        mod bodies {
            use super::*;
            $(
                #[allow(non_snake_case, unused_variables)]
                pub(super) unsafe extern "C" fn $symbol($($argument: $kind,)* $caller: usize) -> CuResult {
                    let Some(hook) = HOOKS.get(Place::$symbol as usize) else { return NO_DEVICE };
                    let real = hook.real();
                    if real.is_null() {
                        return NO_DEVICE;
                    }
                    // SAFETY: the address is that of the driver's function of this name, which has these arguments.
                    let real = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> CuResult>(real)
                    };
                    // SAFETY: the arguments are the caller's own.
                    let $call = || unsafe { real($($argument),*) };
                    match Inside::enter() {
                        Some(_inside) if is_on() => $work,
                        _ => $call(),
                    }
                }
            )*
        }
    };
}

type Address = u64;
type Handle = u64;

hooks! {
    |call, caller|
    cuGetProcAddress c"cuGetProcAddress" of c"cuGetProcAddress" since 11030;
        "r8" (name: *const c_char, out: *mut *mut c_void, version: i32, flags: u64) => proc_address::find(name, out, version, flags, call);
    cuGetProcAddress_v2 c"cuGetProcAddress_v2" of c"cuGetProcAddress" since 12000;
        "r9" (name: *const c_char, out: *mut *mut c_void, version: i32, flags: u64, status: *mut i32) => proc_address::find(name, out, version, flags, call);

    cuMemAlloc_v2 c"cuMemAlloc_v2" of c"cuMemAlloc" since 3020;
        "rdx" (out: *mut Address, bytes: usize) => take(Space::Address, bytes as u64, caller, call, || written(out));
    cuMemAllocManaged c"cuMemAllocManaged" of c"cuMemAllocManaged" since 6000;
        "rcx" (out: *mut Address, bytes: usize, flags: u32) => take(Space::Address, bytes as u64, caller, call, || written(out));
    cuMemAllocPitch_v2 c"cuMemAllocPitch_v2" of c"cuMemAllocPitch" since 3020;
        "r9" (out: *mut Address, pitch: *mut usize, width: usize, height: usize, element: u32) => take(Space::Address, pitched_bytes(width, height), caller, call, || written(out));
    cuMemFree_v2 c"cuMemFree_v2" of c"cuMemFree" since 3020;
        "rsi" (address: Address) => give(Space::Address, address, None, call);

    cuMemAllocAsync c"cuMemAllocAsync" of c"cuMemAllocAsync" since 11020;
        "rcx" (out: *mut Address, bytes: usize, stream: Handle) => pools::take(None, out, bytes as u64, stream, caller, call);
    cuMemAllocAsync_ptsz c"cuMemAllocAsync_ptsz" of c"cuMemAllocAsync" since 11020, per_thread;
        "rcx" (out: *mut Address, bytes: usize, stream: Handle) => pools::take(None, out, bytes as u64, per_thread(stream), caller, call);
    cuMemAllocFromPoolAsync c"cuMemAllocFromPoolAsync" of c"cuMemAllocFromPoolAsync" since 11020;
        "r8" (out: *mut Address, bytes: usize, pool: Handle, stream: Handle) => pools::take(Some(pool), out, bytes as u64, stream, caller, call);
    cuMemAllocFromPoolAsync_ptsz c"cuMemAllocFromPoolAsync_ptsz" of c"cuMemAllocFromPoolAsync" since 11020, per_thread;
        "r8" (out: *mut Address, bytes: usize, pool: Handle, stream: Handle) => pools::take(Some(pool), out, bytes as u64, per_thread(stream), caller, call);
    cuMemFreeAsync c"cuMemFreeAsync" of c"cuMemFreeAsync" since 11020;
        "rdx" (address: Address, stream: Handle) => pools::free(address, stream, call);
    cuMemFreeAsync_ptsz c"cuMemFreeAsync_ptsz" of c"cuMemFreeAsync" since 11020, per_thread;
        "rdx" (address: Address, stream: Handle) => pools::free(address, per_thread(stream), call);
    cuMemPoolCreate c"cuMemPoolCreate" of c"cuMemPoolCreate" since 11020;
        "rdx" (out: *mut Handle, properties: *const i32) => pools::create(out, properties, call);
    cuMemPoolDestroy c"cuMemPoolDestroy" of c"cuMemPoolDestroy" since 11020;
        "rsi" (pool: Handle) => pools::destroy(pool, call);
    cuDeviceSetMemPool c"cuDeviceSetMemPool" of c"cuDeviceSetMemPool" since 11020;
        "rdx" (device: i32, pool: Handle) => pools::change_current(call);
    cuMemSetMemPool c"cuMemSetMemPool" of c"cuMemSetMemPool" since 13000;
        "rcx" (location: *const i32, kind: i32, pool: Handle) => pools::change_current(call);
    cuMemPoolTrimTo c"cuMemPoolTrimTo" of c"cuMemPoolTrimTo" since 11020;
        "rdx" (pool: Handle, keep: usize) => pools::correct_after(pool, call);
    cuMemPoolSetAttribute c"cuMemPoolSetAttribute" of c"cuMemPoolSetAttribute" since 11020;
        "rcx" (pool: Handle, attribute: i32, value: *mut c_void) => pools::correct_after(pool, call);
    cuStreamSynchronize c"cuStreamSynchronize" of c"cuStreamSynchronize" since 2000;
        "rsi" (stream: Handle) => synchronization::stream(stream, call);
    cuStreamSynchronize_ptsz c"cuStreamSynchronize_ptsz" of c"cuStreamSynchronize" since 7000, per_thread;
        "rsi" (stream: Handle) => synchronization::stream(per_thread(stream), call);
    cuEventSynchronize c"cuEventSynchronize" of c"cuEventSynchronize" since 2000;
        "rsi" (event: Handle) => synchronization::event(call);
    cuCtxSynchronize c"cuCtxSynchronize" of c"cuCtxSynchronize" since 2000;
        "rdi" () => synchronization::context(call);

    cuGraphInstantiate c"cuGraphInstantiate" of c"cuGraphInstantiate" since 10000;
        "r9" (out: *mut Handle, graph: Handle, error_node: Address, log: Address, size: usize) => graphs::instantiate(out, graph, caller, call);
    cuGraphInstantiate_v2 c"cuGraphInstantiate_v2" of c"cuGraphInstantiate" since 11000;
        "r9" (out: *mut Handle, graph: Handle, error_node: Address, log: Address, size: usize) => graphs::instantiate(out, graph, caller, call);
    cuGraphInstantiateWithFlags c"cuGraphInstantiateWithFlags" of c"cuGraphInstantiateWithFlags" since 11040;
        "rcx" (out: *mut Handle, graph: Handle, flags: u64) => graphs::instantiate(out, graph, caller, call);
    // CUDA 12 returns the function with flags under the short name.
    xlogGraphInstantiateWithFlags c"cuGraphInstantiateWithFlags" of c"cuGraphInstantiate" since 12000;
        "rcx" (out: *mut Handle, graph: Handle, flags: u64) => graphs::instantiate(out, graph, caller, call);
    cuGraphInstantiateWithParams c"cuGraphInstantiateWithParams" of c"cuGraphInstantiateWithParams" since 12000;
        "rcx" (out: *mut Handle, graph: Handle, parameters: Address) => graphs::instantiate(out, graph, caller, call);
    cuGraphInstantiateWithParams_ptsz c"cuGraphInstantiateWithParams_ptsz" of c"cuGraphInstantiateWithParams" since 12000, per_thread;
        "rcx" (out: *mut Handle, graph: Handle, parameters: Address) => graphs::instantiate(out, graph, caller, call);
    cuGraphLaunch c"cuGraphLaunch" of c"cuGraphLaunch" since 10000;
        "rdx" (graph: Handle, stream: Handle) => graphs::launch(graph, stream, caller, call);
    cuGraphLaunch_ptsz c"cuGraphLaunch_ptsz" of c"cuGraphLaunch" since 10000, per_thread;
        "rdx" (graph: Handle, stream: Handle) => graphs::launch(graph, per_thread(stream), caller, call);
    cuGraphUpload c"cuGraphUpload" of c"cuGraphUpload" since 11010;
        "rdx" (graph: Handle, stream: Handle) => graphs::launch(graph, stream, caller, call);
    cuGraphUpload_ptsz c"cuGraphUpload_ptsz" of c"cuGraphUpload" since 11010, per_thread;
        "rdx" (graph: Handle, stream: Handle) => graphs::launch(graph, per_thread(stream), caller, call);
    cuGraphExecDestroy c"cuGraphExecDestroy" of c"cuGraphExecDestroy" since 10000;
        "rsi" (graph: Handle) => graphs::destroy(graph, call);
    cuDeviceGraphMemTrim c"cuDeviceGraphMemTrim" of c"cuDeviceGraphMemTrim" since 11040;
        "rsi" (device: i32) => graphs::trim(device, call);

    cuMemCreate c"cuMemCreate" of c"cuMemCreate" since 10020;
        "r8" (out: *mut Handle, bytes: usize, properties: *const i32, flags: u64) => handles::create(out, bytes as u64, properties, caller, call);
    cuMemRelease c"cuMemRelease" of c"cuMemRelease" since 10020;
        "rsi" (handle: Handle) => handles::release(handle, call);
    cuMemMap c"cuMemMap" of c"cuMemMap" since 10020;
        "r9" (address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) => handles::map(address, bytes as u64, handle, call);
    cuMemUnmap c"cuMemUnmap" of c"cuMemUnmap" since 10020;
        "rdx" (address: Address, bytes: usize) => handles::unmap(address, bytes as u64, call);
    cuMemRetainAllocationHandle c"cuMemRetainAllocationHandle" of c"cuMemRetainAllocationHandle" since 11000;
        "rdx" (out: *mut Handle, address: Address) => handles::retain(out, address, call);

    cuArrayCreate_v2 c"cuArrayCreate_v2" of c"cuArrayCreate" since 3020;
        "rdx" (out: *mut Handle, descriptor: *const arrays::Flat) => take(Space::Array, arrays::flat_bytes(descriptor), caller, call, || written(out));
    cuArray3DCreate_v2 c"cuArray3DCreate_v2" of c"cuArray3DCreate" since 3020;
        "rdx" (out: *mut Handle, descriptor: *const arrays::Cubic) => take(Space::Array, arrays::cubic_bytes(descriptor, 1), caller, call, || written(out));
    cuMipmappedArrayCreate c"cuMipmappedArrayCreate" of c"cuMipmappedArrayCreate" since 5000;
        "rcx" (out: *mut Handle, descriptor: *const arrays::Cubic, levels: u32) => take(Space::MipmappedArray, arrays::cubic_bytes(descriptor, levels), caller, call, || written(out));
    cuArrayDestroy c"cuArrayDestroy" of c"cuArrayDestroy" since 2000;
        "rsi" (array: Handle) => give(Space::Array, array, None, call);
    cuMipmappedArrayDestroy c"cuMipmappedArrayDestroy" of c"cuMipmappedArrayDestroy" since 5000;
        "rsi" (array: Handle) => give(Space::MipmappedArray, array, None, call);

    cuMemGetInfo_v2 c"cuMemGetInfo_v2" of c"cuMemGetInfo" since 3020;
        "rdx" (free: *mut usize, total: *mut usize) => information::memory(free, total, call);
    cuDeviceTotalMem_v2 c"cuDeviceTotalMem_v2" of c"cuDeviceTotalMem" since 3020;
        "rdx" (bytes: *mut usize, device: i32) => information::total(bytes, device, call);

    cuCtxDestroy_v2 c"cuCtxDestroy_v2" of c"cuCtxDestroy" since 4000;
        "rsi" (context: Handle) => contexts::destroy(context, call);
    cuDevicePrimaryCtxRelease_v2 c"cuDevicePrimaryCtxRelease_v2" of c"cuDevicePrimaryCtxRelease" since 11000;
        "rsi" (device: i32) => contexts::release_primary(device, call);
    cuDevicePrimaryCtxReset_v2 c"cuDevicePrimaryCtxReset_v2" of c"cuDevicePrimaryCtxReset" since 11000;
        "rsi" (device: i32) => contexts::release_primary(device, call);
}
