//! A CUDA driver made of Rust functions, so that the code above it can be tested without a GPU.
//!
//! Its state belongs to the calling thread, so tests run in parallel without interfering. Queued work runs when a test or a synchronisation
//! runs it, in queueing order across all streams. A test can make any call fail with any code. Every call is logged by its C name.
//!
//! It does not model concurrent streams; it checks codes, arguments and the order of calls.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{
    CUcontext, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUhostFn, CUmemoryPool,
    CUmodule, CUstream, CUuserObject, CUuuid,
};

use super::abi::{AccessDesc, AllocationProp, PoolProps};
use super::api::{Api, Symbols};
use super::device::CudaDriver;
use crate::{DriverError, DriverResult};

/// Where the fake device's memory begins.
pub(super) const BASE: u64 = 0x7f00_0000_0000;
const MEMORY: usize = 16 << 20;
pub(super) const OURS: usize = 0x1000;
const MODULE: usize = 0x50;
const FUNCTION: usize = 0x60;

pub(super) enum Op {
    CopyIn { dst: u64, src: usize, bytes: usize },
    CopyOut { dst: usize, src: u64, bytes: usize },
    Record(usize),
    Wait { counter: usize, value: u32 },
    Call { function: CUhostFn, data: usize },
}

/// A kernel launch with two arguments of eight bytes.
pub(super) struct Launch {
    pub(super) shape: [u32; 7],
    pub(super) stream: usize,
    pub(super) words: [u64; 2],
}

pub(super) struct State {
    pub(super) version: i32,
    pub(super) count: i32,
    pub(super) attributes: HashMap<u32, i32>,
    pub(super) failures: HashMap<&'static str, u32>,
    pub(super) log: Vec<&'static str>,
    pub(super) contexts: Vec<usize>,
    pub(super) retains: i32,
    pub(super) capturing: u32,
    /// The thread's capture mode; initially global, as in the driver.
    pub(super) capture_mode: u32,
    /// The mode that each call was made in.
    pub(super) modes: Vec<(&'static str, u32)>,
    /// The mode of the latest capture, and whether that capture is open.
    pub(super) begun_mode: u32,
    pub(super) is_begun: bool,
    /// The destructors of user objects.
    pub(super) user_objects: Vec<(CUhostFn, usize)>,
    pub(super) priority: i32,
    pub(super) host_blocks: HashMap<usize, usize>,
    pub(super) events: HashMap<usize, bool>,
    pub(super) queue: VecDeque<Op>,
    pub(super) memory: Vec<u8>,
    pub(super) pool_props: Option<PoolProps>,
    pub(super) pool_values: HashMap<u32, u64>,
    pub(super) access: Option<AccessDesc>,
    pub(super) prop: Option<AllocationProp>,
    /// The latest module image, and the latest kernel that was looked up.
    pub(super) image: CString,
    pub(super) kernel: CString,
    pub(super) launches: Vec<Launch>,
    next: usize,
}

impl Default for State {
    fn default() -> Self {
        Self {
            version: 13_000,
            count: 1,
            attributes: HashMap::from([(16, 132), (75, 9), (76, 0), (102, 1), (115, 1)]),
            failures: HashMap::new(),
            log: Vec::new(),
            contexts: Vec::new(),
            retains: 0,
            capturing: 0,
            capture_mode: 0,
            modes: Vec::new(),
            begun_mode: u32::MAX,
            is_begun: false,
            user_objects: Vec::new(),
            priority: i32::MAX,
            host_blocks: HashMap::new(),
            events: HashMap::new(),
            queue: VecDeque::new(),
            memory: vec![0; MEMORY],
            pool_props: None,
            pool_values: HashMap::new(),
            access: None,
            prop: None,
            image: CString::default(),
            kernel: CString::default(),
            launches: Vec::new(),
            next: 0x2000,
        }
    }
}

impl State {
    fn handle(&mut self) -> usize {
        self.next += 0x10;
        self.next
    }

    pub(super) fn logged(&self, call: &str) -> usize {
        self.log.iter().filter(|entry| **entry == call).count()
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Runs `body` with this thread's fake driver.
pub(super) fn with<T>(body: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(body)
}

pub(super) fn logged(call: &str) -> usize {
    with(|state| state.logged(call))
}

/// Makes `call` return `code` from now on; 0 ends the failure.
pub(super) fn fail(call: &'static str, code: u32) {
    with(|state| state.failures.insert(call, code));
}

/// Runs queued work until none is left or a wait blocks. Returns true when none is left.
pub(super) fn run_queue() -> bool {
    while let Some(op) = with(|state| {
        let blocked = state.queue.front().is_some_and(|op| match op {
            Op::Wait { counter, value } => {
                // SAFETY: a wait names a counter in a page that is freed only after a synchronisation.
                let counter = unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(*counter) };
                (counter.load(Ordering::Acquire).wrapping_sub(*value) as i32) < 0
            }
            _ => false,
        });
        if blocked { None } else { state.queue.pop_front() }
    }) {
        perform(op);
    }
    with(|state| state.queue.is_empty())
}

fn perform(op: Op) {
    match op {
        Op::CopyIn { dst, src, bytes } => with(|state| {
            let to = (dst - BASE) as usize;
            // SAFETY: the source of a queued copy is pinned memory that stays until its event completed.
            let from = unsafe {
                std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(src), bytes)
            };
            state.memory[to..to + bytes].copy_from_slice(from);
        }),
        Op::CopyOut { dst, src, bytes } => with(|state| {
            let from = (src - BASE) as usize;
            // SAFETY: the destination of a queued copy is pinned memory that stays until its event completed.
            let to = unsafe {
                std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(dst), bytes)
            };
            to.copy_from_slice(&state.memory[from..from + bytes]);
        }),
        Op::Record(event) => with(|state| {
            state.events.insert(event, true);
        }),
        Op::Wait { .. } => {}
        Op::Call { function, data } => {
            if let Some(function) = function {
                // SAFETY: the pair was queued together and is called once.
                unsafe { function(ptr::with_exposed_provenance_mut(data)) };
            }
        }
    }
}

/// Destroys all user objects, as the end of their graphs does.
pub(super) fn release_user_objects() {
    for (function, data) in with(|state| std::mem::take(&mut state.user_objects)) {
        perform(Op::Call { function, data });
    }
}

/// The fake's symbols without those that a test removes.
pub(super) struct Without(pub(super) &'static [&'static CStr]);

/// A fresh driver on this thread, and its table.
pub(super) fn load(symbols: Without) -> DriverResult<Arc<Api>> {
    with(|state| *state = State::default());
    Api::load(&symbols).map(Arc::new)
}

/// A fresh driver on this thread with every symbol.
pub(super) fn api() -> Arc<Api> {
    load(Without(&[])).expect("the fake has every symbol")
}

/// An open fake device.
pub(super) fn device() -> Arc<CudaDriver> {
    CudaDriver::open_with(api(), 0).expect("the fake device opens")
}

/// The error of an open after `prepare` changed the fake.
pub(super) fn open_error(prepare: impl FnOnce(&mut State), ordinal: usize) -> DriverError {
    let api = api();
    with(prepare);
    CudaDriver::open_with(api, ordinal).expect_err("the open must fail")
}

/// Logs the call and returns the code that a test chose for it.
fn enter(symbol: &'static str) -> u32 {
    with(|state| {
        state.log.push(symbol);
        state.modes.push((symbol, state.capture_mode));
        state.failures.get(symbol).copied().unwrap_or(0)
    })
}

fn set<T>(to: *mut T, value: T) {
    // SAFETY: the code under test passes valid out pointers, as the driver demands.
    unsafe { to.write(value) };
}

fn get<T: Copy>(from: *const T) -> T {
    // SAFETY: the code under test passes valid pointers, as the driver demands.
    unsafe { from.read() }
}

fn text(from: *const c_char) -> CString {
    // SAFETY: the code under test passes strings with a NUL at their end, as the driver demands.
    unsafe { CStr::from_ptr(from) }.to_owned()
}

fn block_layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 4096).expect("a sane size")
}

macro_rules! fakes {
    ($( $symbol:literal ($($argument:ident : $type:ty),* $(,)?) $body:expr; )*) => {
        // SAFETY: each function below has the prototype of the symbol it is found under.
        unsafe impl Symbols for Without {
            fn address(&self, name: &CStr) -> Option<NonNull<c_void>> {
                if self.0.contains(&name) {
                    return None;
                }
                match name.to_str().ok()? {
                    $( $symbol => {
                        #[allow(clippy::no_effect)]
                        unsafe extern "C" fn fake($($argument: $type),*) -> u32 {
                            $( let _ = &$argument; )*
                            match enter($symbol) {
                                0 => { $body; 0 }
                                code => code,
                            }
                        }
                        NonNull::new(fake as *mut c_void)
                    } )*
                    _ => None,
                }
            }
        }
    };
}

/// Returns the code of a query from the fake function.
macro_rules! answer {
    ($code:expr) => {{
        let code: u32 = $code;
        if code != 0 {
            return code;
        }
    }};
}

fakes! {
    "cuInit"(flags: c_uint) ();
    "cuDriverGetVersion"(version: *mut c_int) set(version, with(|s| s.version));
    "cuDeviceGetCount"(count: *mut c_int) set(count, with(|s| s.count));
    "cuDeviceGet"(device: *mut c_int, ordinal: c_int) set(device, ordinal);
    "cuDeviceGetName"(name: *mut c_char, len: c_int, device: c_int)
        for (index, byte) in c"Fake".to_bytes_with_nul().iter().enumerate() {
            set(name.wrapping_add(index), *byte as c_char);
        };
    "cuDeviceGetUuid_v2"(uuid: *mut CUuuid, device: c_int) set(uuid, CUuuid { bytes: [-1; 16] });
    "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int) set(bytes, MEMORY);
    "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_uint, device: c_int)
        match with(|s| s.attributes.get(&attribute).copied()) {
            Some(found) => set(value, found),
            None => answer!(1),
        };
    "cuDevicePrimaryCtxRetain"(context: *mut CUcontext, device: c_int) {
        with(|s| s.retains += 1);
        set(context, ptr::without_provenance_mut(OURS));
    };
    "cuDevicePrimaryCtxRelease_v2"(device: c_int) with(|s| s.retains -= 1);
    "cuDevicePrimaryCtxGetState"(device: c_int, flags: *mut c_uint, active: *mut c_int)
        set(active, c_int::from(with(|s| s.retains) > 0));
    "cuCtxGetCurrent"(context: *mut CUcontext)
        set(context, ptr::without_provenance_mut(with(|s| s.contexts.last().copied().unwrap_or(0))));
    "cuCtxSetCurrent"(context: CUcontext) with(|s| {
        s.contexts.pop();
        if !context.is_null() {
            s.contexts.push(context.addr());
        }
    });
    "cuCtxPushCurrent_v2"(context: CUcontext) with(|s| s.contexts.push(context.addr()));
    "cuCtxPopCurrent_v2"(context: *mut CUcontext)
        set(context, ptr::without_provenance_mut(with(|s| s.contexts.pop().unwrap_or(0))));
    "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int) {
        set(least, 0);
        set(greatest, -5);
    };
    "cuCtxSynchronize"() assert!(run_queue(), "a synchronisation that would never end");
    "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize) {
        set(free, MEMORY / 2);
        set(total, MEMORY);
    };
    "cuPointerGetAttributes"(
        count: c_uint,
        attributes: *mut c_uint,
        data: *mut *mut c_void,
        ptr: u64
    ) {
        // Device 0 has one mapped allocation: 4096 bytes at 0x1000.
        assert_eq!(count, 5, "type, ordinal, start, size, mapped");
        let _ = attributes;
        if (0x1000..0x2000).contains(&ptr) {
            // SAFETY: the caller passes as many pointers as attributes, of these types.
            let at = |n: usize| unsafe { *data.add(n) };
            set(at(0).cast::<c_uint>(), 2);
            set(at(1).cast::<c_int>(), 0);
            set(at(2).cast::<u64>(), 0x1000);
            set(at(3).cast::<usize>(), 0x1000);
            set(at(4).cast::<c_uint>(), 1);
        }
    };
    "cuStreamCreateWithPriority"(stream: *mut CUstream, flags: c_uint, priority: c_int) {
        assert_eq!(flags, 1, "streams are non-blocking");
        with(|s| s.priority = priority);
        set(stream, ptr::without_provenance_mut(with(State::handle)));
    };
    "cuStreamDestroy_v2"(stream: CUstream) ();
    "cuStreamSynchronize"(stream: CUstream) assert!(run_queue(), "a wait that would never end");
    "cuStreamQuery"(stream: CUstream) answer!(if run_queue() { 0 } else { 600 });
    "cuStreamGetId"(stream: CUstream, id: *mut c_ulonglong) set(id, stream.addr() as u64);
    "cuStreamIsCapturing"(stream: CUstream, status: *mut c_uint)
        set(status, with(|s| s.capturing));
    "cuThreadExchangeStreamCaptureMode"(mode: *mut c_uint)
        set(mode, with(|s| std::mem::replace(&mut s.capture_mode, get(mode))));
    "cuStreamBeginCapture_v2"(stream: CUstream, mode: c_uint) with(|s| {
        s.begun_mode = mode;
        s.is_begun = true;
    });
    "cuStreamEndCapture"(stream: CUstream, graph: *mut CUgraph) {
        with(|s| s.is_begun = false);
        set(graph, ptr::without_provenance_mut(with(State::handle)));
    };
    "cuStreamGetCaptureInfo_v2"(
        stream: CUstream,
        status: *mut c_uint,
        id: *mut c_ulonglong,
        graph: *mut CUgraph,
        nodes: *mut *const CUgraphNode,
        count: *mut usize
    ) {
        set(status, c_uint::from(with(|s| s.is_begun)));
        set(id, 1);
        set(graph, ptr::without_provenance_mut(0x1500));
    };
    "cuGraphInstantiateWithFlags"(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong)
        set(exec, ptr::without_provenance_mut(with(State::handle)));
    "cuGraphLaunch"(exec: CUgraphExec, stream: CUstream) ();
    "cuGraphExecDestroy"(exec: CUgraphExec) ();
    "cuGraphDestroy"(graph: CUgraph) ();
    "cuUserObjectCreate"(
        object: *mut CUuserObject,
        data: *mut c_void,
        function: CUhostFn,
        references: c_uint,
        flags: c_uint
    ) {
        assert_eq!((references, flags), (1, 1), "one reference, no synchronisation");
        with(|s| s.user_objects.push((function, data.expose_provenance())));
        set(object, ptr::without_provenance_mut(0x1600));
    };
    "cuUserObjectRelease"(object: CUuserObject, count: c_uint) release_user_objects();
    "cuGraphRetainUserObject"(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint)
        assert_eq!((count, flags), (1, 1), "the reference moves to the graph");
    "cuStreamWaitEvent"(stream: CUstream, event: CUevent, flags: c_uint) ();
    "cuEventCreate"(event: *mut CUevent, flags: c_uint) {
        assert_eq!(flags, 2, "events do not time");
        let handle = with(|s| {
            let handle = s.handle();
            s.events.insert(handle, true);
            handle
        });
        set(event, ptr::without_provenance_mut(handle));
    };
    "cuEventDestroy_v2"(event: CUevent)
        assert!(with(|s| s.events.remove(&event.addr())).is_some(), "an event that is not there");
    "cuEventRecord"(event: CUevent, stream: CUstream) with(|s| {
        s.events.insert(event.addr(), false);
        s.queue.push_back(Op::Record(event.addr()));
    });
    "cuEventQuery"(event: CUevent)
        answer!(if with(|s| s.events[&event.addr()]) { 0 } else { 600 });
    "cuEventSynchronize"(event: CUevent) {
        run_queue();
        assert!(with(|s| s.events[&event.addr()]), "a wait that would never end");
    };
    "cuMemAlloc_v2"(block: *mut u64, bytes: usize) set(block, BASE);
    "cuMemFree_v2"(block: u64) ();
    "cuMemHostAlloc"(memory: *mut *mut c_void, bytes: usize, flags: c_uint) {
        // SAFETY: the layout has a size. The bytes are filled, as the driver does not promise zeroes.
        let block = unsafe { std::alloc::alloc(block_layout(bytes)) };
        // SAFETY: the block was just allocated with this many bytes.
        unsafe { block.write_bytes(0xaa, bytes) };
        with(|s| s.host_blocks.insert(block.expose_provenance(), bytes));
        set(memory, block.cast());
    };
    "cuMemFreeHost"(memory: *mut c_void) {
        let bytes = with(|s| s.host_blocks.remove(&memory.addr())).expect("a live pinned block");
        // SAFETY: the block was allocated with this layout and was just taken off the books.
        unsafe { std::alloc::dealloc(memory.cast(), block_layout(bytes)) };
    };
    "cuMemHostGetDevicePointer_v2"(device: *mut u64, host: *mut c_void, flags: c_uint)
        set(device, host.addr() as u64);
    "cuMemsetD8Async"(dst: u64, value: u8, bytes: usize, stream: CUstream) ();
    "cuMemcpyHtoDAsync_v2"(dst: u64, src: *const c_void, bytes: usize, stream: CUstream)
        with(|s| s.queue.push_back(Op::CopyIn { dst, src: src.expose_provenance(), bytes }));
    "cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: u64, bytes: usize, stream: CUstream)
        with(|s| s.queue.push_back(Op::CopyOut { dst: dst.expose_provenance(), src, bytes }));
    "cuMemcpyDtoDAsync_v2"(dst: u64, src: u64, bytes: usize, stream: CUstream) ();
    "cuLaunchHostFunc"(stream: CUstream, function: CUhostFn, data: *mut c_void)
        with(|s| s.queue.push_back(Op::Call { function, data: data.expose_provenance() }));
    "cuStreamWaitValue32_v2"(stream: CUstream, address: u64, value: u32, flags: c_uint) {
        assert_eq!(flags, 0, "compared with GEQ");
        with(|s| s.queue.push_back(Op::Wait { counter: address as usize, value }));
    };
    "cuModuleLoadData"(module: *mut CUmodule, image: *const c_void) {
        with(|s| s.image = text(image.cast()));
        set(module, ptr::without_provenance_mut(MODULE));
    };
    "cuModuleUnload"(module: CUmodule) assert_eq!(module.addr(), MODULE);
    "cuModuleGetFunction"(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        assert_eq!(module.addr(), MODULE);
        with(|s| s.kernel = text(name));
        set(function, ptr::without_provenance_mut(FUNCTION));
    };
    "cuLaunchKernel"(
        function: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        assert_eq!((function.addr(), extra.addr()), (FUNCTION, 0));
        let words = [0, 1].map(|at| get(get(parameters.wrapping_add(at)).cast::<u64>()));
        let shape = [gx, gy, gz, bx, by, bz, shared];
        with(|s| s.launches.push(Launch { shape, stream: stream.addr(), words }));
    };
    "cuGetErrorName"(code: c_uint, text: *mut *const c_char) match code {
        700 => set(text, c"CUDA_ERROR_ILLEGAL_ADDRESS".as_ptr()),
        1 => set(text, c"CUDA_ERROR_INVALID_VALUE".as_ptr()),
        _ => answer!(1),
    };
    "cuGetErrorString"(code: c_uint, text: *mut *const c_char) match code {
        700 => set(text, c"an illegal memory access was encountered".as_ptr()),
        _ => answer!(1),
    };
    "cuMemPoolCreate"(pool: *mut CUmemoryPool, props: *const PoolProps) {
        with(|s| s.pool_props = Some(get(props)));
        set(pool, ptr::without_provenance_mut(with(State::handle)));
    };
    "cuMemPoolDestroy"(pool: CUmemoryPool) ();
    "cuMemPoolSetAttribute"(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) {
        let value = match attribute {
            4 => get(value.cast::<u64>()),
            _ => get(value.cast::<c_int>()) as u64,
        };
        with(|s| s.pool_values.insert(attribute, value));
    };
    "cuMemPoolGetAttribute"(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void)
        set(value.cast::<u64>(), u64::from(attribute) * 100);
    "cuMemPoolTrimTo"(pool: CUmemoryPool, keep: usize) ();
    "cuMemAllocFromPoolAsync"(block: *mut u64, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        set(block, BASE);
    "cuMemFreeAsync"(block: u64, stream: CUstream) ();
    "cuMemAddressReserve"
        (address: *mut u64, bytes: usize, align: usize, at: u64, flags: c_ulonglong)
        set(address, BASE);
    "cuMemAddressFree"(address: u64, bytes: usize) ();
    "cuMemCreate"(memory: *mut u64, bytes: usize, prop: *const AllocationProp, flags: c_ulonglong) {
        with(|s| s.prop = Some(get(prop)));
        set(memory, with(State::handle) as u64);
    };
    "cuMemRelease"(memory: u64) ();
    "cuMemMap"(address: u64, bytes: usize, offset: usize, memory: u64, flags: c_ulonglong) ();
    "cuMemUnmap"(address: u64, bytes: usize) ();
    "cuMemSetAccess"(address: u64, bytes: usize, desc: *const AccessDesc, count: usize)
        with(|s| s.access = Some(get(desc)));
    "cuMemGetAllocationGranularity"(bytes: *mut usize, prop: *const AllocationProp, which: c_uint)
        set(bytes, 2 << 20);
}
