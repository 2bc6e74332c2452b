//! Loading and launching with a driver that records its arguments.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::{self, NonNull};

use cudarc::driver::sys::{CUfunction, CUmodule, CUstream};

use crate::cuda::api::Symbols;
use crate::cuda::fake::{self, with};
use crate::cuda::module::{CudaModule, KernelArgument, LaunchShape, ModuleCalls};
use crate::{Driver, DriverError, StreamHandle};

#[derive(Default)]
struct Seen {
    image: Vec<u8>,
    asked: Vec<u8>,
    unloads: u32,
    shape: [u32; 7],
    words: Vec<u64>,
    stream: usize,
    answer: u32,
}

thread_local! {
    static SEEN: RefCell<Seen> = RefCell::default();
}

fn seen<T>(body: impl FnOnce(&mut Seen) -> T) -> T {
    SEEN.with_borrow_mut(body)
}

unsafe extern "C" fn load_data(module: *mut CUmodule, image: *const c_void) -> u32 {
    // SAFETY: the code under test passes a string with a NUL at its end and a valid out pointer.
    unsafe {
        seen(|s| s.image = CStr::from_ptr(image.cast()).to_bytes().to_vec());
        module.write(ptr::without_provenance_mut(0x50));
    }
    seen(|s| s.answer)
}

unsafe extern "C" fn unload(module: CUmodule) -> u32 {
    assert_eq!(module.addr(), 0x50);
    seen(|s| s.unloads += 1);
    0
}

unsafe extern "C" fn get_function(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> u32 {
    assert_eq!(module.addr(), 0x50);
    // SAFETY: the code under test passes a string with a NUL at its end and a valid out pointer.
    unsafe {
        seen(|s| s.asked = CStr::from_ptr(name).to_bytes().to_vec());
        function.write(ptr::without_provenance_mut(0x60));
    }
    seen(|s| s.answer)
}

unsafe extern "C" fn launch_kernel(
    function: CUfunction,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    assert_eq!(function.addr(), 0x60);
    assert!(extra.is_null());
    seen(|s| {
        s.shape = [gx, gy, gz, bx, by, bz, shared];
        s.stream = stream.addr();
        // SAFETY: the tests below pass two arguments, each eight bytes long.
        s.words =
            (0..2).map(|at| unsafe { parameters.add(at).read().cast::<u64>().read() }).collect();
        s.answer
    })
}

struct Modules;

// SAFETY: each function above has the prototype of the symbol it is found under.
unsafe impl Symbols for Modules {
    fn address(&self, name: &CStr) -> Option<NonNull<c_void>> {
        NonNull::new(match name.to_bytes() {
            b"cuModuleLoadData" => load_data as *mut c_void,
            b"cuModuleUnload" => unload as *mut c_void,
            b"cuModuleGetFunction" => get_function as *mut c_void,
            b"cuLaunchKernel" => launch_kernel as *mut c_void,
            _ => return None,
        })
    }
}

fn calls() -> ModuleCalls {
    seen(|s| *s = Seen::default());
    ModuleCalls::load(&Modules).unwrap()
}

#[test]
fn a_launch_passes_shape_stream_and_arguments_as_given() {
    let device = fake::device();
    let module = CudaModule::load_with(&device, calls(), c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    let stream = device.stream_create(0).unwrap();
    let shape = LaunchShape { grid: (1, 2, 3), block: (4, 5, 6), shared_bytes: 7 };
    let arguments = [KernelArgument::from(0x1234_5678_9abc_u64), 9_u32.into()];
    // SAFETY: the fake kernel takes two words.
    unsafe { kernel.launch(stream, shape, &arguments).unwrap() };
    seen(|s| {
        assert_eq!(s.image, b"image");
        assert_eq!(s.asked, b"fill");
        assert_eq!(s.shape, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(s.stream, stream.number() as usize);
        assert_eq!(s.words, [0x1234_5678_9abc, 9]);
    });
}

#[test]
fn a_default_stream_is_refused_and_nothing_is_launched() {
    let device = fake::device();
    let module = CudaModule::load_with(&device, calls(), c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    for default in 0..=2 {
        // SAFETY: the launch is refused.
        let refused =
            unsafe { kernel.launch(StreamHandle::numbered(default), LaunchShape::SINGLE, &[]) };
        assert!(matches!(refused, Err(DriverError::Invalid { .. })), "{refused:?}");
    }
    assert_eq!(seen(|s| s.shape), [0; 7]);
}

#[test]
fn a_module_lives_as_long_as_its_last_kernel_and_keeps_the_device() {
    let device = fake::device();
    let module = CudaModule::load_with(&device, calls(), c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    drop(module);
    drop(device);
    assert_eq!(seen(|s| s.unloads), 0);
    assert_eq!(with(|state| state.retains), 1);
    drop(kernel);
    assert_eq!(seen(|s| s.unloads), 1);
    assert_eq!(with(|state| state.retains), 0);
}

#[test]
fn a_module_stays_loaded_while_a_stream_that_is_captured_may_run_it() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let module = CudaModule::load_with(&device, calls(), c"image").unwrap();
    // What was queued before the capture began still runs.
    let gate = device.hold(stream).unwrap();
    with(|state| state.capturing = 1);
    drop(module);
    with(|state| state.capturing = 0);
    assert_eq!(seen(|s| s.unloads), 0, "unloaded under a kernel");
    gate.release();
}

#[test]
fn a_module_stays_loaded_after_a_stream_was_destroyed_that_could_not_be_followed() {
    for is_captured in [true, false] {
        let device = fake::device();
        let stream = device.stream_create(0).unwrap();
        let module = CudaModule::load_with(&device, calls(), c"image").unwrap();
        let gate = device.hold(stream).unwrap();
        with(|state| state.capturing = u32::from(is_captured));
        fake::fail("cuEventCreate", u32::from(!is_captured));
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
        with(|state| state.capturing = 0);
        fake::fail("cuEventCreate", 0);
        drop(module);
        assert_eq!(seen(|s| s.unloads), 0, "unloaded under a kernel");
        gate.release();
    }
}

#[test]
fn failures_name_the_call_and_leave_nothing_behind() {
    let device = fake::device();
    let table = calls();
    seen(|s| s.answer = 218);
    let error = CudaModule::load_with(&device, table, c"not ptx").unwrap_err();
    assert!(matches!(error, DriverError::Code { call: "cuModuleLoadData", code: 218, .. }));
    assert_eq!(seen(|s| s.unloads), 0);
    seen(|s| s.answer = 0);
    let module = CudaModule::load_with(&device, table, c"image").unwrap();
    assert!(matches!(module.function("a\0b"), Err(DriverError::Invalid { .. })));
    seen(|s| s.answer = 500);
    let error = module.function("absent").unwrap_err();
    assert!(matches!(error, DriverError::Code { call: "cuModuleGetFunction", .. }), "{error}");
    seen(|s| s.answer = 0);
    let kernel = module.function("fill").unwrap();
    let stream = device.stream_create(0).unwrap();
    seen(|s| s.answer = 700);
    // SAFETY: the fake kernel takes two words.
    let error =
        unsafe { kernel.launch(stream, LaunchShape::SINGLE, &[0_u64.into(), 0_u64.into()]) };
    assert!(error.unwrap_err().is_device_lost());
    assert!(device.memory_info().unwrap_err().is_device_lost());
}

#[test]
fn a_shape_covers_its_rows_within_what_a_grid_may_have() {
    for (rows, blocks) in [(0, 1), (1, 1), (256, 1), (257, 2), (usize::MAX, 1 << 16)] {
        assert_eq!(LaunchShape::for_rows(rows).grid, (blocks, 1, 1), "{rows} rows");
    }
}
