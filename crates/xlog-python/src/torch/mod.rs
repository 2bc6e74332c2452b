//! PyTorch: the C functions of an allocator, and the support of `xlogmem.torch`.
//!
//! There are two allocators. `enable()` makes the shared runtime PyTorch's global allocator ([`allocator`]). `pool()` gives
//! segments to a `torch.cuda.MemPool` ([`segments`]). PyTorch passes no context to the functions of a pool, so each of [`POOLS`]
//! pools has its own pair. A pool lives as long as the process, since PyTorch frees segments until the end.
//!
//! A pool refuses by a null pointer, which PyTorch turns into `torch.OutOfMemoryError`. The global allocator throws ([`throw`]).

mod allocator;
mod counters;
mod graph_memory;
mod segments;
mod throw;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use xlog_base::{Mutex, size_text};
use xlog_cuda::device_runtime::{ResourceKind, RuntimeConfig};
use xlog_cuda::{Result, XlogError};

use self::allocator::{DEVICES, Device, Devices, GraphPoolId};
use self::counters::Counters;
use self::segments::Segments;
use self::throw::{Kind, Ready, Thrower};
use crate::config::apply;
use crate::errors::{exception, without_gil};
use crate::idle;
use crate::runtime::Runtime;
use crate::value::object;

/// The maximum number of segment pools.
const POOLS: usize = 16;
/// The number of the global allocator in Python.
const GLOBAL: usize = POOLS;

struct Global {
    devices: Devices,
    /// Held while a device is opened.
    opening: Mutex<()>,
    thrower: OnceLock<Thrower>,
}

struct Pool {
    config: OnceLock<RuntimeConfig>,
    devices: [OnceLock<Segments>; DEVICES],
    opening: Mutex<()>,
    refusal: Mutex<Option<String>>,
}

static TORCH: Global = Global {
    devices: [const { OnceLock::new() }; DEVICES],
    opening: Mutex::new(()),
    thrower: OnceLock::new(),
};

static SEGMENTS: [Pool; POOLS] = [const {
    Pool {
        config: OnceLock::new(),
        devices: [const { OnceLock::new() }; DEVICES],
        opening: Mutex::new(()),
        refusal: Mutex::new(None),
    }
}; POOLS];

fn bad_device(device: c_int) -> XlogError {
    XlogError::Kernel(format!("device {device} is not accepted; expected 0 to {}", DEVICES - 1))
}

/// Returns the value of a cell and creates it at the first call. A failed creation is tried again.
fn made<'a, T>(
    cells: &'a [OnceLock<T>; DEVICES],
    opening: &Mutex<()>,
    device: c_int,
    make: impl FnOnce(usize) -> Result<T>,
) -> Result<&'a T> {
    let index = usize::try_from(device).map_err(|_| bad_device(device))?;
    let cell = cells.get(index).ok_or_else(|| bad_device(device))?;
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let _opening = opening.lock();
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = make(index)?;
    Ok(cell.get_or_init(|| value))
}

impl Global {
    fn device(&self, device: c_int) -> Result<&Device> {
        made(&self.devices, &self.opening, device, Device::open)
    }

    fn opened(&self, device: c_int) -> Option<&Device> {
        self.devices.get(usize::try_from(device).ok()?)?.get()
    }

    fn allocate(&self, bytes: usize, device: c_int, stream: usize) -> Result<u64> {
        self.device(device)?.allocate(bytes, stream)
    }
}

impl Pool {
    fn device(&self, device: c_int) -> Result<&Segments> {
        let Some(config) = self.config.get() else {
            return Err(XlogError::Kernel(
                "this pool was not made by xlogmem.torch.pool()".to_owned(),
            ));
        };
        made(&self.devices, &self.opening, device, |index| Segments::open(config, index))
    }

    fn allocate(&self, bytes: usize, device: c_int) -> Option<u64> {
        match self.device(device).and_then(|segments| segments.allocate(bytes)) {
            Ok(ptr) => Some(ptr),
            Err(error) => {
                *self.refusal.lock() = Some(error.to_string());
                None
            }
        }
    }

    fn free(&self, ptr: u64) {
        let _ = self.devices.iter().filter_map(OnceLock::get).any(|segments| segments.free(ptr));
    }
}

/// Runs `work` for a C function and catches its panic.
fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

fn address(ptr: Option<u64>) -> *mut c_void {
    ptr::without_provenance_mut(ptr.unwrap_or(0) as usize)
}

/// Prepares the exception of a refused request; `None` before `torch_prepare`.
fn refusal(error: &XlogError, bytes: usize) -> Option<(Thrower, Ready)> {
    let thrower = *TORCH.thrower.get()?;
    let (kind, text) = match idle::is_short(error) {
        true => (
            Kind::OutOfMemory,
            format!("CUDA out of memory. Tried to allocate {}. {error}", size_text(bytes as u64)),
        ),
        false => (Kind::Other, format!("xlogmem: {error}")),
    };
    Some((thrower, thrower.prepare(kind, &text)))
}

/// Allocates for PyTorch: ordered on `stream`, aligned to 512 bytes. Returns null for zero bytes.
///
/// Throws `c10::OutOfMemoryError` if memory is short, and `c10::Error` for any other failure. Before `torch_prepare` it returns
/// null.
///
/// # Safety
/// `stream` is a live stream of the device, and is never destroyed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn xlogmem_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let Ok(bytes @ 1..) = usize::try_from(size) else { return ptr::null_mut() };
    let allocate = || TORCH.allocate(bytes, device, stream.addr()).map_err(Box::new);
    let (thrower, ready) = match guarded(allocate) {
        Some(Ok(ptr)) => return address(Some(ptr)),
        failed => {
            let panicked = || XlogError::Kernel("the allocator panicked".to_owned());
            let error = failed.and_then(Result::err).map_or_else(panicked, |error| *error);
            match guarded(|| refusal(&error, bytes)).flatten() {
                Some(thrown) => thrown,
                None => return ptr::null_mut(),
            }
        }
    };
    // SAFETY: all values of this frame are dropped or need no drop.
    unsafe { thrower.throw(ready) }
}

/// Frees memory of [`xlogmem_torch_alloc`], in the order of its stream and after the recorded streams.
///
/// # Safety
/// All work on the memory is queued on its stream or on recorded streams, and no more follows.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xlogmem_torch_free(
    ptr: *mut c_void,
    _size: isize,
    device: c_int,
    _stream: *mut c_void,
) {
    // A negative number becomes an index that no device has.
    guarded(|| allocator::free(&TORCH.devices, device as usize, ptr.addr() as u64));
}

/// Records that work on a stream uses memory of [`xlogmem_torch_alloc`].
///
/// # Safety
/// `stream` is a live stream of the device, and is never destroyed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xlogmem_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    guarded(|| allocator::record_stream(&TORCH.devices, ptr.addr() as u64, stream.addr()));
}

/// Returns cached memory to the devices.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xlogmem_torch_reset() {
    guarded(|| TORCH.devices.iter().filter_map(OnceLock::get).for_each(Device::empty_cache));
}

/// Sets the limit of a device to a fraction of its memory.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xlogmem_torch_memory_fraction(fraction: f64, device: c_int) {
    guarded(|| {
        let Ok(device) = TORCH.device(device) else { return };
        let total = device.runtime.device().properties().total_bytes as f64;
        if let Some(budget) = device.runtime.budget() {
            budget.set_limit((total * fraction.clamp(0.0, 1.0)) as usize);
        }
    });
}

/// Returns the address of a block and, unless `size` is null, stores its size.
///
/// # Safety
/// `size` is null or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xlogmem_torch_base_alloc(
    ptr: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let found = guarded(|| allocator::size_at(&TORCH.devices, ptr.addr() as u64)).flatten();
    if let Some(bytes) = found.filter(|_| !size.is_null()) {
        // SAFETY: the caller guarantees it.
        unsafe { size.write(bytes) };
    }
    ptr
}

/// Begins a capture. `_filter` is a C++ closure that is not called: the driver reports which streams are captured.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xlogmem_torch_begin_pool(
    device: c_int,
    first: u64,
    second: u64,
    _filter: *mut c_void,
) {
    guarded(|| {
        TORCH.device(device).map(|device| device.begin_capture(GraphPoolId([first, second])))
    });
}

/// Ends a capture.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xlogmem_torch_end_pool(device: c_int, first: u64, second: u64) {
    guarded(|| TORCH.opened(device).map(|device| device.end_capture(GraphPoolId([first, second]))));
}

/// Records that a graph of a pool was destroyed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xlogmem_torch_release_pool(device: c_int, first: u64, second: u64) {
    guarded(|| {
        TORCH.opened(device).map(|device| device.release_pool(GraphPoolId([first, second])))
    });
}

macro_rules! pool_functions {
    ($($number:literal $allocate:ident $free:ident,)*) => {
        $(
            /// Allocates a segment of a pool. Null is a refusal.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $allocate(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
                let Ok(bytes @ 1..) = usize::try_from(size) else { return ptr::null_mut() };
                address(guarded(|| SEGMENTS[$number].allocate(bytes, device)).flatten())
            }

            /// Frees a segment of a pool after all work on the device has completed.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $free(ptr: *mut c_void, _size: isize, _device: c_int, _stream: *mut c_void) {
                guarded(|| SEGMENTS[$number].free(ptr.addr() as u64));
            }
        )*
    };
}

pool_functions! {
    0 xlogmem_pool_alloc_0 xlogmem_pool_free_0,
    1 xlogmem_pool_alloc_1 xlogmem_pool_free_1,
    2 xlogmem_pool_alloc_2 xlogmem_pool_free_2,
    3 xlogmem_pool_alloc_3 xlogmem_pool_free_3,
    4 xlogmem_pool_alloc_4 xlogmem_pool_free_4,
    5 xlogmem_pool_alloc_5 xlogmem_pool_free_5,
    6 xlogmem_pool_alloc_6 xlogmem_pool_free_6,
    7 xlogmem_pool_alloc_7 xlogmem_pool_free_7,
    8 xlogmem_pool_alloc_8 xlogmem_pool_free_8,
    9 xlogmem_pool_alloc_9 xlogmem_pool_free_9,
    10 xlogmem_pool_alloc_10 xlogmem_pool_free_10,
    11 xlogmem_pool_alloc_11 xlogmem_pool_free_11,
    12 xlogmem_pool_alloc_12 xlogmem_pool_free_12,
    13 xlogmem_pool_alloc_13 xlogmem_pool_free_13,
    14 xlogmem_pool_alloc_14 xlogmem_pool_free_14,
    15 xlogmem_pool_alloc_15 xlogmem_pool_free_15,
}

/// Finds the exceptions of the loaded PyTorch by the path of its `libc10_cuda.so`. The global allocator needs them to refuse.
#[pyfunction]
fn torch_prepare(library: &str) -> PyResult<()> {
    let thrower = Thrower::find(library).map_err(|reason| {
        PyRuntimeError::new_err(format!(
            "the out-of-memory exception of this PyTorch cannot be thrown: {reason}; use xlogmem.torch.pool() instead"
        ))
    })?;
    TORCH.thrower.get_or_init(|| thrower);
    Ok(())
}

/// Takes the next unused segment pool, sets its configuration, and returns its number.
#[pyfunction]
#[pyo3(signature = (**options))]
fn torch_new_pool(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<usize> {
    let config = RuntimeConfig::from_environment().map_err(|error| exception(py, &error))?;
    let config = apply(config.with_resource(ResourceKind::Direct), options)?;
    let free = SEGMENTS.iter().position(|pool| pool.config.set(config.clone()).is_ok());
    free.ok_or_else(|| {
        PyRuntimeError::new_err(format!("a process has at most {POOLS} pools; reuse one"))
    })
}

/// Returns the statistics of the global allocator or of a pool on a device; `None` before its first use.
#[pyfunction]
fn torch_statistics<'py>(
    py: Python<'py>,
    pool: usize,
    device: c_int,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let counters = with_counters(pool, device, |counters| *counters)?;
    counters.map(|counters| object(py, &counters.value())).transpose()
}

/// Resets the peaks.
#[pyfunction]
fn torch_reset_peaks(pool: usize, device: c_int) -> PyResult<()> {
    with_counters(pool, device, Counters::reset_peaks).map(drop)
}

/// Resets the totals.
#[pyfunction]
fn torch_reset_totals(pool: usize, device: c_int) -> PyResult<()> {
    with_counters(pool, device, Counters::reset_totals).map(drop)
}

/// Returns the number of the last open capture that this thread has begun; 0 if there is none.
#[pyfunction]
fn torch_last_capture() -> u64 {
    let devices = TORCH.devices.iter().filter_map(OnceLock::get);
    devices.filter_map(Device::last_capture).max().unwrap_or(0)
}

/// Ends the capture with this number, which PyTorch has abandoned, unless it has ended.
#[pyfunction]
fn torch_abandon_capture(py: Python<'_>, number: u64) {
    let devices = || TORCH.devices.iter().filter_map(OnceLock::get);
    py.detach(|| devices().for_each(|device| device.abandon_capture(number)));
}

fn with_counters<T>(
    pool: usize,
    device: c_int,
    work: impl FnOnce(&mut Counters) -> T,
) -> PyResult<Option<T>> {
    let index = usize::try_from(device).ok().filter(|index| *index < DEVICES);
    let index = index.ok_or_else(|| PyValueError::new_err(bad_device(device).to_string()))?;
    if pool == GLOBAL {
        return Ok(TORCH.devices[index].get().map(|device| device.with_counters(work)));
    }
    let pool = numbered(pool)?;
    Ok(pool.devices[index].get().map(|segments| segments.with_counters(work)))
}

fn numbered(pool: usize) -> PyResult<&'static Pool> {
    SEGMENTS.get(pool).ok_or_else(|| PyValueError::new_err(format!("there is no pool {pool}")))
}

/// Returns why a pool last refused a segment.
#[pyfunction]
fn torch_last_refusal(pool: usize) -> PyResult<Option<String>> {
    Ok(numbered(pool)?.refusal.lock().clone())
}

/// Returns the runtime of a pool on a device and opens it if necessary.
#[pyfunction]
fn torch_pool_runtime(py: Python<'_>, pool: usize, device: c_int) -> PyResult<Runtime> {
    let pool = numbered(pool)?;
    let runtime = without_gil(py, || Ok(pool.device(device)?.runtime.clone()))?;
    Ok(Runtime::over(runtime))
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("TORCH_GLOBAL", GLOBAL)?;
    module.add_function(wrap_pyfunction!(torch_prepare, module)?)?;
    module.add_function(wrap_pyfunction!(torch_new_pool, module)?)?;
    module.add_function(wrap_pyfunction!(torch_statistics, module)?)?;
    module.add_function(wrap_pyfunction!(torch_reset_peaks, module)?)?;
    module.add_function(wrap_pyfunction!(torch_reset_totals, module)?)?;
    module.add_function(wrap_pyfunction!(torch_last_capture, module)?)?;
    module.add_function(wrap_pyfunction!(torch_abandon_capture, module)?)?;
    module.add_function(wrap_pyfunction!(torch_last_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(torch_pool_runtime, module)?)
}
