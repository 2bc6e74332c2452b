//! The driver fails inside the guard: no page and no byte of its own memory is lost or uncounted.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AsyncCudaResource, DebugGuardResource, DeviceMemoryResource, DirectCudaResource, GuardConfig,
    GuardMode, PhysicalMeter, ResourceResult, StreamPool,
};
use xlog_cuda::sim::{Call, Fault, SimConfig, SimDevice};

use crate::support::{ROWS, quiet};

/// Bytes taken and not given.
#[derive(Default)]
pub(crate) struct Meter(AtomicUsize);

impl Meter {
    pub(crate) fn bytes(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl PhysicalMeter for Meter {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        self.0.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    }
    fn release(&self, bytes: usize) {
        let before = self.0.fetch_sub(bytes, Ordering::SeqCst);
        assert!(before >= bytes, "{bytes} bytes were given back of {before}");
    }
}

/// A seeded device with small pages.
pub(crate) fn device() -> Arc<CudaDevice> {
    let config = SimConfig::default().with_seed(7).with_granularity(1 << 16);
    Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()))
}

/// Bytes of the device that are taken.
pub(crate) fn taken(device: &CudaDevice) -> usize {
    let info = device.driver().memory_info().unwrap();
    (info.total - info.free) as usize
}

fn pages() -> GuardConfig {
    quiet().with_mode(GuardMode::Pages).with_quarantine(0, 0)
}

#[test]
fn a_failed_unmapping_keeps_its_pages_counted_until_a_reap_gives_them_back() {
    for call in [Call::Create, Call::Map, Call::SetAccess, Call::Destroy, Call::Unmap] {
        for failures in [1, 2] {
            let device = device();
            let pool = Arc::new(StreamPool::with_defaults(device.clone()));
            let memory = AsyncCudaResource::new(device.clone(), 0, pool.clone());
            let guard = DebugGuardResource::on_home(memory, pages());
            let meter = Arc::new(Meter::default());
            guard.meter_physical(meter.clone()).unwrap();
            let stream = pool.lease().unwrap();
            for nth in 1..=failures {
                device.sim().unwrap().faults().fail_nth(call, nth, Fault::Code(999));
            }
            for _ in 0..3 {
                let given = guard.allocate(1000, stream.id(), ROWS);
                assert!(meter.bytes() >= taken(&device), "{} failed", call.name());
                let Ok(block) = given else { continue };
                guard.deallocate(block).unwrap();
                // The failure may come with the reap.
                let _ = guard.reap_pending();
                assert!(meter.bytes() >= taken(&device), "{} failed", call.name());
            }
            device.sim().unwrap().faults().clear();
            guard.reap_pending().unwrap();
            assert_eq!(guard.bytes_outstanding(), 0, "{} failed", call.name());
            guard.trim().unwrap();
            assert_eq!(meter.bytes(), taken(&device), "{} failed", call.name());
            drop(guard);
            assert_eq!((taken(&device), meter.bytes()), (0, 0), "{} failed", call.name());
        }
    }
}

#[test]
fn the_guards_own_memory_is_metered() {
    for mode in [GuardMode::Canaries, GuardMode::Pages] {
        let device = device();
        let config = quiet().with_mode(mode).with_quarantine(0, 0);
        let memory = DirectCudaResource::new(device.clone(), 0);
        let guard = DebugGuardResource::on_home(memory, config);
        let meter = Arc::new(Meter::default());
        guard.meter_physical(meter.clone()).unwrap();
        assert!(taken(&device) > 0, "the guard holds memory for what its looks find");
        assert_eq!(meter.bytes(), taken(&device));
        let block =
            guard.allocate(1000, xlog_cuda::device_runtime::StreamId::DEFAULT, ROWS).unwrap();
        assert_eq!(meter.bytes(), taken(&device));
        guard.deallocate(block).unwrap();
        guard.reap_pending().unwrap();
        drop(guard);
        assert_eq!((taken(&device), meter.bytes()), (0, 0));
    }
}
