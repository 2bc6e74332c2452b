//! Loading and launching with a driver that records its arguments.

use crate::cuda::fake::{self, fail, logged, with};
use crate::cuda::module::{CudaModule, KernelArgument, LaunchShape};
use crate::{Driver, DriverError, StreamHandle};

#[test]
fn a_launch_passes_shape_stream_and_arguments_as_given() {
    let device = fake::device();
    let module = CudaModule::load(&device, c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    let stream = device.stream_create(0).unwrap();
    let shape = LaunchShape { grid: (1, 2, 3), block: (4, 5, 6), shared_bytes: 7 };
    let arguments = [KernelArgument::from(0x1234_5678_9abc_u64), 9_u32.into()];
    // SAFETY: the fake kernel takes two words.
    unsafe { kernel.launch(stream, shape, &arguments).unwrap() };
    with(|s| {
        assert_eq!(s.image.as_c_str(), c"image");
        assert_eq!(s.kernel.as_c_str(), c"fill");
        assert_eq!(s.launches.len(), 1);
        assert_eq!(s.launches[0].shape, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(s.launches[0].stream, stream.number() as usize);
        assert_eq!(s.launches[0].words, [0x1234_5678_9abc, 9]);
    });
}

#[test]
fn a_default_stream_is_refused_and_nothing_is_launched() {
    let device = fake::device();
    let module = CudaModule::load(&device, c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    for default in 0..=2 {
        // SAFETY: the launch is refused.
        let refused =
            unsafe { kernel.launch(StreamHandle::numbered(default), LaunchShape::SINGLE, &[]) };
        assert!(matches!(refused, Err(DriverError::Invalid { .. })), "{refused:?}");
    }
    assert_eq!(logged("cuLaunchKernel"), 0);
}

#[test]
fn a_module_lives_as_long_as_its_last_kernel_and_keeps_the_device() {
    let device = fake::device();
    let module = CudaModule::load(&device, c"image").unwrap();
    let kernel = module.function("fill").unwrap();
    drop(module);
    drop(device);
    assert_eq!(logged("cuModuleUnload"), 0);
    assert_eq!(with(|state| state.retains), 1);
    drop(kernel);
    assert_eq!(logged("cuModuleUnload"), 1);
    assert_eq!(with(|state| state.retains), 0);
}

#[test]
fn a_module_stays_loaded_while_a_stream_that_is_captured_may_run_it() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let module = CudaModule::load(&device, c"image").unwrap();
    // What was queued before the capture began still runs.
    let gate = device.hold(stream).unwrap();
    with(|state| state.capturing = 1);
    drop(module);
    with(|state| state.capturing = 0);
    assert_eq!(logged("cuModuleUnload"), 0, "unloaded under a kernel");
    gate.release();
}

#[test]
fn a_module_stays_loaded_after_a_stream_was_destroyed_that_could_not_be_followed() {
    for is_captured in [true, false] {
        let device = fake::device();
        let stream = device.stream_create(0).unwrap();
        let module = CudaModule::load(&device, c"image").unwrap();
        let gate = device.hold(stream).unwrap();
        with(|state| state.capturing = u32::from(is_captured));
        fake::fail("cuEventCreate", u32::from(!is_captured));
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
        with(|state| state.capturing = 0);
        fake::fail("cuEventCreate", 0);
        drop(module);
        assert_eq!(logged("cuModuleUnload"), 0, "unloaded under a kernel");
        gate.release();
    }
}

#[test]
fn failures_name_the_call_and_leave_nothing_behind() {
    let device = fake::device();
    fail("cuModuleLoadData", 218);
    let error = CudaModule::load(&device, c"not ptx").unwrap_err();
    assert!(matches!(error, DriverError::Code { call: "cuModuleLoadData", code: 218, .. }));
    assert_eq!(logged("cuModuleUnload"), 0);
    fail("cuModuleLoadData", 0);
    let module = CudaModule::load(&device, c"image").unwrap();
    assert!(matches!(module.function("a\0b"), Err(DriverError::Invalid { .. })));
    fail("cuModuleGetFunction", 500);
    let error = module.function("absent").unwrap_err();
    assert!(matches!(error, DriverError::Code { call: "cuModuleGetFunction", .. }), "{error}");
    fail("cuModuleGetFunction", 0);
    let kernel = module.function("fill").unwrap();
    let stream = device.stream_create(0).unwrap();
    fail("cuLaunchKernel", 700);
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
