//! A kernel launched by cudarc on a stream of ours, with buffers of ours; the runtime keeps the order.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use xlog_cuda::interop::CudarcStream;
use xlog_cuda::prelude::*;
use xlog_kernels::exercise::{IMAGE, host};

const ROWS: u32 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = match XlogDeviceRuntime::open("cuda:0") {
        Ok(runtime) => runtime,
        Err(error) => {
            println!("there is no GPU to launch on: {error}");
            return Ok(());
        }
    };

    // Two inputs, filled on the default stream. Nothing waits for the copies yet.
    let manager = GpuMemoryManager::with_runtime(Arc::clone(&runtime));
    let words = |salt| (0..ROWS).map(move |at| host::word(salt, at)).collect::<Vec<u32>>();
    let (left_words, right_words) = (words(1), words(2));
    let (left, right) = (manager.alloc_from(&left_words)?, manager.alloc_from(&right_words)?);

    // Another stream of ours, as cudarc sees it, and a kernel that cudarc loads.
    let lease = runtime.stream_pool().lease()?;
    let stream = CudarcStream::new(Arc::clone(lease.stream()))?;
    let module = stream.context().load_module(Ptx::from_src(IMAGE.ptx().to_str()?))?;
    let mix = module.load_function("mix")?;

    // The recorder makes the stream wait for the copies, cudarc launches, the recorder remembers the uses.
    let mut out = manager.on_stream(lease.id()).alloc::<u32>(ROWS as usize)?;
    let rows = u64::from(ROWS);
    let mut recorder = LaunchRecorder::new_strict(lease.id());
    recorder.write(&out).read(&left).read(&right);
    recorder.run(&runtime, |_| {
        let mut launch = stream.cudarc().launch_builder(&mix);
        launch.arg(&mut out).arg(&left).arg(&right).arg(&rows);
        // SAFETY: these are the arguments of `mix`, each buffer has this many rows, and the recorder orders the launch.
        unsafe { launch.launch(LaunchConfig::for_num_elems(ROWS)) }
            .map(|_events| ())
            .map_err(|error| XlogError::Kernel(format!("launching mix: {error}")))
    })?;
    drop((left, right)); // freed after the kernel, without waiting for it here

    // A view is a `DevicePtr` of cudarc's with an open use; its copies are ordered like any other work.
    let view = stream.read(&out)?;
    let result: Vec<u32> = stream.cudarc().clone_dtoh(&view)?;
    view.close()?;
    stream.cudarc().synchronize()?;

    let expected =
        left_words.iter().zip(&right_words).map(|(left, right)| host::mix(*left, *right));
    let wrong = result.iter().zip(expected).filter(|(found, wanted)| *found != wanted).count();
    if wrong > 0 {
        return Err(format!("{wrong} of {ROWS} rows are wrong").into());
    }
    println!("{ROWS} rows mixed by a kernel that cudarc launched on {}, all verified", lease.id());
    Ok(())
}
