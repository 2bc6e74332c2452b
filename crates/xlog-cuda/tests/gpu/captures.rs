//! Every resource works beside a stream capture of somebody else, and the capture stays valid.
//!
//! A capture in global mode concerns every thread of the process, so the test has a process of its own.

#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use xlog_cuda::device_runtime::{
    Access, AllocTag, AsyncCudaResource, BlockId, DebugGuardResource, DeviceMemoryResource,
    DirectCudaResource, GuardConfig, GuardMode, PinnedHostResource, PoolConfig, PoolResource,
    PoolSegments, StreamLease, StreamPool,
};
use xlog_cuda::{CudaDevice, DeviceStream};

use crate::gpu;

const TAG: AllocTag = AllocTag("beside a capture");
const SIZES: [usize; 3] = [256, 64 << 10, 5 << 20];

type Resource = Box<dyn DeviceMemoryResource + Send + Sync>;

#[test]
fn every_resource_works_beside_a_capture_that_stays_valid() {
    let name = "every_resource_works_beside_a_capture_that_stays_valid";
    if gpu::gpu(name).is_none() {
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "captures::beside_a_capture", "--nocapture"])
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr)
    );
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// Every resource, bare and under each kind of guard.
fn resources(
    device: &Arc<CudaDevice>,
    streams: &Arc<StreamPool>,
    guard: Option<GuardMode>,
) -> Vec<(String, Resource)> {
    let ordinal = device.ordinal();
    let pool = |segments| {
        let config = PoolConfig::default().with_segments(segments);
        PoolResource::new(device.clone(), ordinal, streams.clone(), config).unwrap()
    };
    let direct = DirectCudaResource::new(device.clone(), ordinal);
    let asynchronous = AsyncCudaResource::new(device.clone(), ordinal, streams.clone());
    let pinned = PinnedHostResource::new(device.clone(), ordinal, streams.clone());
    let bare: Vec<(&str, Resource)> = vec![
        ("direct", Box::new(direct)),
        ("async", Box::new(asynchronous)),
        ("pool of mapped memory", Box::new(pool(PoolSegments::Automatic))),
        ("pool of plain memory", Box::new(pool(PoolSegments::Plain))),
        ("page-locked memory", Box::new(pinned)),
    ];
    let guarded = |resource| -> Resource {
        match guard {
            None => resource,
            Some(mode) => {
                let config = GuardConfig::default().with_mode(mode);
                Box::new(DebugGuardResource::new(resource, config))
            }
        }
    };
    bare.into_iter()
        .map(|(name, resource)| (format!("{name}, guard {guard:?}"), guarded(resource)))
        .collect()
}

fn fill(stream: &DeviceStream, ptr: u64, bytes: usize) {
    // SAFETY: the caller keeps the block alive, and orders this work by the hooks or by waiting.
    unsafe { stream.memset(ptr, 7, bytes) }.unwrap();
}

/// Allocates, uses, hands over, frees, reaps and trims.
fn work(resource: &Resource, own: &StreamLease, other: &StreamLease) {
    for bytes in SIZES {
        let block = resource.allocate(bytes, own.id(), TAG).unwrap();
        let id = BlockId::from_block(&block);
        fill(own, block.ptr, bytes);
        if resource.supports_block_use_tracking() {
            resource.prepare_block_use(id, other.id(), Access::ReadWrite).unwrap();
            fill(other, block.ptr, bytes);
            resource.finish_block_use(id, other.id(), Access::ReadWrite).unwrap();
        }
        let mut back = vec![0; 16];
        resource_read(resource, id, own, &mut back);
        assert_eq!(back, [7; 16]);
        resource.deallocate(block).unwrap();
        resource.reap_completed().unwrap();
    }
    resource.reap_pending().unwrap();
    resource.trim().unwrap();
    own.synchronize().unwrap();
    other.query().unwrap();
}

fn resource_read(resource: &Resource, id: BlockId, own: &StreamLease, back: &mut [u8]) {
    let tracked = resource.supports_block_use_tracking();
    if tracked {
        resource.prepare_block_use(id, own.id(), Access::Read).unwrap();
    }
    // SAFETY: the block is live and has at least this many bytes; the hooks order the read, or it is on the same stream.
    unsafe { own.copy_dtoh(back, id.ptr) }.unwrap();
    if tracked {
        resource.finish_block_use(id, own.id(), Access::Read).unwrap();
    }
}

fn done(code: sys::CUresult, call: &str) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "{call}");
}

/// A stream that is not ours, on which a capture is open.
struct Capture(sys::CUstream);

impl Capture {
    fn begin() -> Self {
        let mut stream = ptr::null_mut();
        // SAFETY: the out pointer is valid, and the device's context is current on this thread; 1 is non-blocking.
        done(unsafe { sys::cuStreamCreate(&raw mut stream, 1) }, "cuStreamCreate");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream was just created.
        done(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }, "cuStreamBeginCapture");
        Self(stream)
    }

    /// Ends the capture, which must be valid.
    fn end(self, name: &str) {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is the one of `begin`, on the same thread.
        let code = unsafe { sys::cuStreamEndCapture(self.0, &raw mut graph) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "{name} broke the capture");
        // SAFETY: the graph was just made and is used nowhere; the stream is given up.
        unsafe {
            done(sys::cuGraphDestroy(graph), "cuGraphDestroy");
            done(sys::cuStreamDestroy_v2(self.0), "cuStreamDestroy");
        }
    }
}

#[test]
#[ignore = "run by every_resource_works_beside_a_capture_that_stays_valid, in a process of its own"]
fn beside_a_capture() {
    let Some(device) = gpu::gpu("beside_a_capture") else { return };
    // Makes the context current on this thread.
    device.synchronize().unwrap();
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let (own, other) = (streams.lease().unwrap(), streams.lease().unwrap());
    for guard in [None, Some(GuardMode::Canaries), Some(GuardMode::Pages)] {
        for (name, resource) in resources(&device, &streams, guard) {
            let capture = Capture::begin();
            std::thread::scope(|scope| {
                scope.spawn(|| work(&resource, &own, &other));
            });
            capture.end(&name);
        }
    }
    // Resources, streams and the pool of streams are made and dropped beside a capture, too.
    let capture = Capture::begin();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let streams = Arc::new(StreamPool::with_defaults(device.clone()));
            let (own, other) = (streams.lease().unwrap(), streams.lease().unwrap());
            // The device keeps the guard's kernel. Under compute-sanitizer, unloading one breaks captures.
            for (_, resource) in resources(&device, &streams, Some(GuardMode::Canaries)) {
                work(&resource, &own, &other);
            }
        });
    });
    capture.end("making and dropping resources");
    // What the capture is for: without the exchange, and in a call that cannot do without, it breaks.
    let capture = Capture::begin();
    assert!(device.synchronize().is_err(), "a wait for the whole device is refused");
    let mut graph = ptr::null_mut();
    // SAFETY: the stream is the one of `begin`, on the same thread.
    let code = unsafe { sys::cuStreamEndCapture(capture.0, &raw mut graph) };
    assert_eq!(code, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}
