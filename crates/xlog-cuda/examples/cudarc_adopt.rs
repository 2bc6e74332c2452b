//! A cudarc program that is brought over one module at a time. The module `old` keeps its context, its stream and its slices; the module
//! `new` has buffers and streams of the runtime. Each uses the other's buffers, and the runtime keeps the order.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use xlog_cuda::interop::CudarcStream;
use xlog_cuda::prelude::*;
use xlog_kernels::exercise::{IMAGE, host};

const ROWS: u32 = 1 << 20;

fn words(salt: u32) -> Vec<u32> {
    (0..ROWS).map(|at| host::word(salt, at)).collect()
}

/// A module that was written for cudarc alone. It is not changed.
mod old {
    use super::*;

    pub(super) fn load(stream: &Arc<CudaStream>) -> Result<CudaSlice<u32>, Box<dyn Error>> {
        Ok(stream.clone_htod(&words(1))?)
    }
}

/// A module on the runtime: mixes a buffer, wherever it comes from, with its own.
mod new {
    use super::*;

    pub(super) fn mix(
        memory: &GpuMemoryManager,
        kernel: &CudaFunction,
        left: &TrackedCudaSlice<u32>,
    ) -> xlog_cuda::Result<TrackedCudaSlice<u32>> {
        let runtime = memory.runtime();
        let lease = runtime.stream_pool().lease()?;
        let stream = CudarcStream::new(Arc::clone(lease.stream()))?;
        let memory = memory.on_stream(lease.id());
        let right = memory.alloc_from(&words(2))?;
        let mut out = memory.alloc::<u32>(ROWS as usize)?;
        let rows = u64::from(ROWS);
        let mut recorder = LaunchRecorder::new_strict(lease.id());
        recorder.write(&out).read(left).read(&right);
        recorder.run(runtime, |_| {
            let mut launch = stream.cudarc().launch_builder(kernel);
            launch.arg(&mut out).arg(left).arg(&right).arg(&rows);
            // SAFETY: these are the arguments of `mix`, each buffer has this many rows, and the recorder orders the launch.
            unsafe { launch.launch(LaunchConfig::for_num_elems(ROWS)) }
                .map(|_events| ())
                .map_err(|error| XlogError::Kernel(format!("launching mix: {error}")))
        })?;
        Ok(out)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = match XlogDeviceRuntime::open("cuda:0") {
        Ok(runtime) => runtime,
        Err(error) => {
            println!("there is no GPU to launch on: {error}");
            return Ok(());
        }
    };
    let memory = GpuMemoryManager::with_runtime(runtime.clone());

    // What the program has already.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let kernel = context.load_module(Ptx::from_src(IMAGE.ptx().to_str()?))?.load_function("mix")?;
    let loaded = old::load(&stream)?;

    // The old module's slice as a buffer of the runtime: ordered after what its stream has queued.
    // SAFETY: the stream outlives the adoption. The slice outlives its use by the new module, which ends when it is given back.
    let (adopted, left) = unsafe {
        let adopted = runtime.stream_pool().adopt(stream.cu_stream().cast())?;
        let left = adopted.adopt::<u32>(&memory, loaded.device_ptr(&stream).0, loaded.len())?;
        (adopted, left)
    };
    let out = new::mix(&memory, &kernel, &left)?;

    // The old module's stream writes the new module's buffer.
    let mut recorder = LaunchRecorder::new_strict(adopted.id());
    recorder.read_write(&out).read(&left);
    let rows = u64::from(ROWS);
    recorder.run(&runtime, |_| {
        adopted.run(|| {
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&out).arg(&out).arg(&left).arg(&rows);
            // SAFETY: as above; each row is read before it is written.
            unsafe { launch.launch(LaunchConfig::for_num_elems(ROWS)) }
                .map(|_events| ())
                .map_err(|error| XlogError::Kernel(format!("launching mix: {error}")))
        })
    })?;

    adopted.give_back(left)?; // the old stream waits for the new module
    drop(loaded); // so cudarc frees the slice in that order

    let (left, right) = (words(1), words(2));
    let mixed =
        left.iter().zip(&right).map(|(left, right)| host::mix(host::mix(*left, *right), *left));
    // The stream of `out` went back with its lease, so the copy is on the default one.
    let found = out.to_vec_on(StreamId::DEFAULT)?;
    let wrong = found.iter().zip(mixed).filter(|(found, wanted)| *found != wanted).count();
    if wrong > 0 {
        return Err(format!("{wrong} of {ROWS} rows are wrong").into());
    }
    println!("{ROWS} rows mixed on a stream of the runtime and on one of cudarc, all verified");
    Ok(())
}
