//! Hazards of segments. Devices are small and simulated, so that every byte can be counted.

mod faults;
mod mapped;
mod model;
mod others;
mod random;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_sim::{SimConfig, SimDevice};

use super::super::super::resource::{PhysicalMeter, ResourceError, ResourceResult, StreamId};
use super::{
    FreeMemory, HandleConfig, InnerSegments, LastWork, MappedSegments, PlainSegments, Segments,
    Span, SpanRequest, UNIT,
};
use crate::CudaDevice;

const ON: StreamId = StreamId::DEFAULT;
/// The mapping granularity of the small devices.
const GRAIN: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

/// Handles of two units, at most eight.
const SMALL: HandleConfig =
    HandleConfig { handle_bytes: 2 * GRAIN, largest_handle: 8 * GRAIN, private_bytes: 0 };

/// A device of `capacity` bytes, under a seed or with a thread per stream.
fn device(seed: Option<u64>, capacity: u64) -> Arc<CudaDevice> {
    let config = SimConfig::default().with_capacity(capacity).with_granularity(GRAIN as usize);
    let config = match seed {
        Some(seed) => config.with_seed(seed),
        None => config,
    };
    Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()))
}

fn sim(device: &CudaDevice) -> &Arc<SimDevice> {
    device.sim().unwrap()
}

/// A request without alignment that may move handles.
fn request(bytes: u64) -> SpanRequest {
    SpanRequest { bytes, align: UNIT, max_moved: usize::MAX }
}

/// A seeded device and one with a thread per stream.
fn devices(capacity: u64) -> [Arc<CudaDevice>; 2] {
    [device(None, capacity), device(Some(7), capacity)]
}

/// Bytes that the device reports as taken.
fn used(device: &CudaDevice) -> u64 {
    let info = device.memory_info().unwrap();
    info.total - info.free
}

fn mapped(device: &Arc<CudaDevice>, maximum: u64) -> MappedSegments {
    MappedSegments::new(Arc::clone(device), maximum).unwrap().with_handles(SMALL)
}

/// Takes bytes up to a limit.
#[derive(Debug)]
struct Meter {
    held: AtomicU64,
    limit: AtomicU64,
}

impl Meter {
    fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { held: AtomicU64::new(0), limit: AtomicU64::new(limit) })
    }

    fn held(&self) -> u64 {
        self.held.load(Ordering::SeqCst)
    }
}

impl PhysicalMeter for Meter {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        let (bytes, limit) = (bytes as u64, self.limit.load(Ordering::SeqCst));
        let fits = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= limit);
        let order = Ordering::SeqCst;
        self.held.fetch_update(order, order, fits).map(|_| ()).map_err(|held| {
            ResourceError::OutOfBudget {
                requested: bytes as usize,
                remaining: limit.saturating_sub(held) as usize,
            }
        })
    }

    fn release(&self, bytes: usize) {
        let before = self.held.fetch_sub(bytes as u64, Ordering::SeqCst);
        assert!(before >= bytes as u64, "{bytes} given back of {before}");
    }
}

fn is_out_of_memory<T: std::fmt::Debug>(outcome: &ResourceResult<T>, bytes: u64) -> bool {
    matches!(outcome, Err(ResourceError::OutOfMemory { requested, .. }) if *requested as u64 == bytes)
}

#[test]
fn what_others_cover_is_cut_out_of_a_span() {
    let span = |ptr, bytes| Span { ptr, bytes };
    let whole = span(10, 10);
    let left = |others: &[Span]| whole.without(others).collect::<Vec<_>>();
    assert_eq!(left(&[span(0, 10), span(20, 5)]), [whole]);
    let others = [span(0, 5), span(12, 3), span(16, 9)];
    assert_eq!(left(&others), [span(10, 2), span(15, 1)]);
    assert_eq!(left(&[span(5, 20)]), []);
}
