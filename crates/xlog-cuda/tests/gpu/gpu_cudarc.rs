//! cudarc on our streams and buffers. All but the first test need a GPU.

#![allow(clippy::unwrap_used)]

use crate::gpu;

use std::sync::Arc;

use cudarc::driver::{CudaContext, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use xlog_cuda::device_runtime::{ResourceError, StreamPool};
use xlog_cuda::driver::DriverError;
use xlog_cuda::interop::CudarcStream;
use xlog_cuda::{CudaDevice, GpuMemoryManager, LaunchRecorder, XlogError};
use xlog_kernels::exercise::{Exercise, IMAGE, host};

const ROWS: usize = 10_000;
/// Some tens of milliseconds: longer than queueing takes.
const LONG: u64 = 50_000_000;

#[test]
fn a_simulated_device_has_no_stream_for_cudarc() {
    let pool = StreamPool::with_defaults(Arc::new(CudaDevice::open("sim").unwrap()));
    let refused = CudarcStream::new(pool.default_stream().unwrap());
    let error = refused.unwrap_err();
    assert!(matches!(error, XlogError::Driver(DriverError::Unsupported { .. })), "{error}");
}

#[test]
fn a_view_waits_for_what_another_stream_of_ours_wrote() {
    let Some(device) = gpu::gpu("a_view_waits_for_what_another_stream_of_ours_wrote") else {
        return;
    };
    let runtime = gpu::runtime(&device, 2);
    let pool = runtime.stream_pool().clone();
    let manager = GpuMemoryManager::with_runtime(runtime.clone());
    let kernels = Exercise::load(&device).unwrap();
    let (writer, reader) = (pool.lease().unwrap(), pool.lease().unwrap());
    let reader = CudarcStream::new(Arc::clone(reader.stream())).unwrap();
    let data = manager.on_stream(writer.id()).alloc::<u32>(ROWS).unwrap();
    let word = manager.on_stream(writer.id()).alloc::<u32>(1).unwrap();
    // SAFETY: both buffers are live, and this is work on their own stream.
    unsafe {
        kernels.spin(&writer, LONG, word.ptr(), 1).unwrap();
        kernels.fill_pattern(&writer, data.ptr(), ROWS, 3).unwrap();
    }
    let view = reader.read(&data).unwrap();
    let found: Vec<u32> = reader.cudarc().clone_dtoh(&view).unwrap();
    reader.cudarc().synchronize().unwrap();
    view.close().unwrap();
    assert!(found.into_iter().eq((0..ROWS as u32).map(|at| host::word(3, at))));
    drop((data, word));
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0);
}

#[test]
fn a_view_used_on_a_stream_of_cudarcs_is_ordered_before_and_after() {
    let Some(device) = gpu::gpu("a_view_used_on_a_stream_of_cudarcs_is_ordered_before_and_after")
    else {
        return;
    };
    let runtime = gpu::runtime(&device, 1);
    let lease = runtime.stream_pool().lease().unwrap();
    let ours = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
    let theirs = ours.context().new_stream().unwrap();
    let manager = GpuMemoryManager::with_runtime(runtime).on_stream(lease.id());
    let kernels = Exercise::load(&device).unwrap();
    let mut data = manager.alloc::<u32>(ROWS).unwrap();
    let word = manager.alloc::<u32>(1).unwrap();
    // SAFETY: both buffers are live, and this is work on their own stream.
    unsafe {
        kernels.spin(&lease, LONG, word.ptr(), 1).unwrap();
        kernels.fill_pattern(&lease, data.ptr(), ROWS, 3).unwrap();
    }
    let sent: Vec<u32> = (0..ROWS as u32).rev().collect();
    let mut view = ours.write(&mut data).unwrap();
    theirs.memcpy_htod(&sent, &mut view).unwrap();
    view.close().unwrap();
    assert_eq!(data.to_vec().unwrap(), sent);
}

#[test]
fn a_view_reaches_a_buffer_that_hides_its_address() {
    let Some(device) = gpu::gpu("a_view_reaches_a_buffer_that_hides_its_address") else { return };
    let runtime = gpu::runtime(&device, 1);
    let lease = runtime.stream_pool().lease().unwrap();
    let ours = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
    let manager = GpuMemoryManager::with_runtime(runtime).tracked_only();
    let mut data = manager.alloc::<u32>(ROWS).unwrap();
    let sent: Vec<u32> = (0..ROWS as u32).collect();
    let mut view = ours.write(&mut data).unwrap();
    ours.cudarc().memcpy_htod(&sent, &mut view).unwrap();
    view.close().unwrap();
    assert_eq!(data.to_vec().unwrap(), sent);
}

#[test]
fn cudarc_launches_with_views_and_with_buffers() {
    let Some(device) = gpu::gpu("cudarc_launches_with_views_and_with_buffers") else { return };
    let runtime = gpu::runtime(&device, 1);
    let lease = runtime.stream_pool().lease().unwrap();
    let manager = GpuMemoryManager::with_runtime(runtime);
    let ours = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
    let module = ours.context().load_module(Ptx::from_src(IMAGE.ptx().to_str().unwrap())).unwrap();
    let fill = module.load_function("fill_pattern").unwrap();
    let (rows, salt) = (ROWS as u64, 9_u32);
    let config = LaunchConfig::for_num_elems(ROWS as u32);

    // Allocated on the default stream, so that the launch needs the allocation's order.
    let mut data = manager.alloc::<u32>(ROWS).unwrap();
    let mut view = ours.write(&mut data).unwrap();
    let mut launch = ours.cudarc().launch_builder(&fill);
    launch.arg(&mut view).arg(&rows).arg(&salt);
    // SAFETY: these are the kernel's arguments, and the view is open on this stream.
    unsafe { launch.launch(config).unwrap() };
    drop(view);
    assert!(data.to_vec().unwrap().into_iter().eq((0..ROWS as u32).map(|at| host::word(9, at))));

    let mut own = manager.on_stream(lease.id()).alloc::<u32>(ROWS).unwrap();
    let mut launch = ours.cudarc().launch_builder(&fill);
    launch.arg(&mut own).arg(&rows).arg(&salt);
    // SAFETY: as above; the buffer is used on its own stream, which needs no wait.
    unsafe { launch.launch(config).unwrap() };
    assert_eq!(own.to_vec().unwrap(), data.to_vec().unwrap());
}

#[test]
fn adopted_streams_and_slices_of_cudarc_are_ordered_with_ours() {
    let Some(device) = gpu::gpu("adopted_streams_and_slices_of_cudarc_are_ordered_with_ours")
    else {
        return;
    };
    let runtime = gpu::runtime(&device, 3);
    let pool = runtime.stream_pool().clone();
    let manager = GpuMemoryManager::with_runtime(runtime.clone());
    let kernels = Exercise::load(&device).unwrap();
    let context = CudaContext::new(device.ordinal() as usize).unwrap();
    let reader = pool.lease().unwrap();
    let kinds =
        [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()];
    for (kind, theirs) in kinds.into_iter().enumerate() {
        let sent: Vec<u32> = (0..ROWS as u32).map(|at| at + kind as u32).collect();
        let mut slice = theirs.alloc_zeros::<u32>(ROWS).unwrap();
        theirs.memcpy_htod(&sent, &mut slice).unwrap();
        // SAFETY: the stream lives longer than this.
        let adopted = unsafe { pool.adopt(theirs.cu_stream().cast()) }.unwrap();
        let ptr = slice.device_ptr(&theirs).0;
        // SAFETY: the slice lives longer, and is used by cudarc only after it was given back.
        let tracked = unsafe { adopted.adopt::<u32>(&manager, ptr, ROWS) }.unwrap();
        assert_eq!(tracked.to_vec_on(reader.id()).unwrap(), sent, "kind {kind}");

        // Ours, slowly, then theirs, then ours.
        let word = manager.on_stream(reader.id()).alloc::<u32>(1).unwrap();
        let data = manager.on_stream(reader.id()).alloc::<u32>(ROWS).unwrap();
        // SAFETY: both buffers are live, and this is work on their own stream.
        unsafe {
            kernels.spin(&reader, LONG, word.ptr(), 1).unwrap();
            kernels.fill_pattern(&reader, data.ptr(), ROWS, 3).unwrap();
        }
        let mut recorder = LaunchRecorder::new_strict(adopted.id());
        recorder.read(&data).write(&tracked);
        let copied = recorder.run(&runtime, |_| {
            adopted.run(|| {
                // SAFETY: both ranges have this many bytes, and the recorder orders the copy.
                let code = unsafe {
                    cudarc::driver::result::memcpy_dtod_async(
                        tracked.ptr(),
                        data.ptr(),
                        ROWS * 4,
                        theirs.cu_stream(),
                    )
                };
                code.map_err(|error| XlogError::Kernel(error.to_string()))
            })
        });
        copied.unwrap();
        let words: Vec<u32> = (0..ROWS as u32).map(|at| host::word(3, at)).collect();
        assert_eq!(tracked.to_vec_on(reader.id()).unwrap(), words, "kind {kind}");
        adopted.give_back(tracked).unwrap();
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), words, "kind {kind}");
        drop(adopted);
        drop((slice, theirs));
    }
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0);
}

#[test]
fn a_stream_that_cudarc_still_has_outlives_ours() {
    let Some(device) = gpu::gpu("a_stream_that_cudarc_still_has_outlives_ours") else { return };
    let pool = StreamPool::new(device.clone(), 1);
    let kept = {
        let lease = pool.lease().unwrap();
        let ours = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
        Arc::clone(ours.cudarc())
    };
    drop(pool);
    let sent: Vec<u32> = (0..ROWS as u32).collect();
    let buffer = kept.clone_htod(&sent).unwrap();
    assert_eq!(kept.clone_dtoh(&buffer).unwrap(), sent);
    kept.synchronize().unwrap();
}

#[test]
fn a_stream_of_another_pool_is_refused_also_the_default_one() {
    let Some(device) = gpu::gpu("a_stream_of_another_pool_is_refused_also_the_default_one") else {
        return;
    };
    let (runtime, elsewhere) = (gpu::runtime(&device, 1), StreamPool::new(device.clone(), 1));
    let data = GpuMemoryManager::with_runtime(runtime).alloc::<u32>(1).unwrap();
    for stream in [elsewhere.default_stream().unwrap(), elsewhere.lease().unwrap().stream().clone()]
    {
        let refused = CudarcStream::new(stream).unwrap().read(&data).map(drop).unwrap_err();
        assert!(matches!(refused, ResourceError::StreamMisuse(_)), "{refused}");
    }
}

#[test]
fn a_stream_that_cudarc_captures_is_refused_until_the_capture_ends() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

    let Some(device) = gpu::gpu("a_stream_that_cudarc_captures_is_refused_until_the_capture_ends")
    else {
        return;
    };
    let runtime = gpu::runtime(&device, 2);
    let pool = runtime.stream_pool().clone();
    let lease = pool.lease().unwrap();
    let stream = CudarcStream::new(Arc::clone(lease.stream())).unwrap();
    let tag = xlog_cuda::device_runtime::AllocTag("captured");
    stream.cudarc().begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let refused = runtime.allocate(4096, lease.id(), tag);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.cudarc().end_capture(flags).unwrap();
    let error = refused.unwrap_err();
    let ResourceError::Driver(text) = &error else { unreachable!("{error:?}") };
    assert!(text.contains("capture is Active"), "{text}");
    let block = runtime.allocate(4096, lease.id(), tag).unwrap();
    runtime.deallocate(block).unwrap();
    runtime.reap_pending().unwrap();
    assert_eq!(runtime.bytes_outstanding(), 0);
}
