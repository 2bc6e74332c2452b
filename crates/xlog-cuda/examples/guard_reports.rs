//! Plants one bug of each kind and shows what the guard says: `cargo run -p xlog-cuda --example guard_reports`.
//!
//! It runs on the simulated device, so that the fault of a guard page ends nothing but that device.

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, GuardSetting, LedgerSetting, QueryScope, ResourceKind, RuntimeConfig,
    XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceStream};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn runtime(guard: &str) -> Result<XlogDeviceRuntime, Box<dyn std::error::Error>> {
    let device = Arc::new(CudaDevice::open("sim:1")?);
    let guard: GuardSetting = guard.parse()?;
    let config = RuntimeConfig::default()
        .with_resource(ResourceKind::Pool)
        .with_ledger(LedgerSetting::Off)
        .with_guard(guard);
    Ok(XlogDeviceRuntime::with_config(device, &config)?)
}

/// A write that somebody got wrong.
fn stray(stream: &DeviceStream, ptr: u64, offset: i64, bytes: usize) -> Outcome {
    // SAFETY: it is a simulated device, and the bytes are the guard's or nobody's.
    unsafe { stream.memset(ptr.wrapping_add_signed(offset), 0x2a, bytes)? };
    Ok(())
}

fn main() -> Outcome {
    let _query = QueryScope::enter(17);
    for (title, offset, bytes) in [("overflow by one byte", 1000, 1), ("underflow", -8, 8)] {
        eprintln!("\n== {title}");
        let runtime = runtime("canary")?;
        let stream = runtime.stream_pool().lease()?;
        let block = runtime.allocate(1000, stream.id(), AllocTag("hash table"))?;
        stray(&stream, block.ptr, offset, bytes)?;
        runtime.deallocate(block)?;
        eprintln!("reap_pending: {:?}", runtime.reap_pending());
    }

    eprintln!("\n== write after free");
    let guarded = runtime("canary")?;
    let stream = guarded.stream_pool().lease()?;
    let block = guarded.allocate(1000, stream.id(), AllocTag("hash table"))?;
    let ptr = block.ptr;
    guarded.deallocate(block)?;
    stray(&stream, ptr, 16, 4)?;
    eprintln!("check_now: {:?}", guarded.guard().map(|guard| guard.check_now()));

    eprintln!("\n== overflow in synchronous mode");
    let guarded = runtime("sync")?;
    let stream = guarded.stream_pool().lease()?;
    let block = guarded.allocate(64, stream.id(), AllocTag("counters"))?;
    stray(&stream, block.ptr, 60, 12)?;
    eprintln!("deallocate: {:?}", guarded.deallocate(block));

    for (title, is_freed) in
        [("guard pages: overflow", false), ("guard pages: write after free", true)]
    {
        eprintln!("\n== {title}");
        let runtime = runtime("pages")?;
        let stream = runtime.stream_pool().lease()?;
        let block = runtime.allocate(4096, stream.id(), AllocTag("hash table"))?;
        let ptr = block.ptr;
        let mut live = Some(block);
        if is_freed {
            live.take().map_or(Ok(()), |block| runtime.deallocate(block))?;
            runtime.reap_pending()?;
            stray(&stream, ptr, 100, 4)?;
        } else {
            stray(&stream, ptr, 4096, 1)?;
        }
        let _ = stream.synchronize();
        // The first call that meets the lost device writes the post-mortem.
        let _ = runtime.allocate(1, stream.id(), AllocTag("rows"));
        let _ = live.map(|block| runtime.deallocate(block));
    }
    Ok(())
}
