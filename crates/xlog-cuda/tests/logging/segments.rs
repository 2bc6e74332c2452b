//! Segments in the log: what a pool holds of the device, in use or not, from its taking to its return.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::ROWS;
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    DeviceMemoryResource, DirectCudaResource, InMemorySink, LogAction, LogRecord, LoggingResource,
    PoolConfig, PoolResource, PoolSegments, StreamId, StreamPool,
};

const MIB: usize = 1 << 20;

struct Logged {
    resource: LoggingResource<Arc<PoolResource>>,
    pool: Arc<PoolResource>,
    streams: Arc<StreamPool>,
    sink: Arc<InMemorySink>,
}

fn logged(config: PoolConfig) -> Logged {
    let device = Arc::new(CudaDevice::open("sim:5").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool = Arc::new(PoolResource::new(device, 0, streams.clone(), config).unwrap());
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::over(pool.clone(), sink.clone()).with_segment_logging(true);
    Logged { resource, pool, streams, sink }
}

/// The ranges that are held after these records, by address. Every block must lie in them.
fn held(records: &mut [LogRecord]) -> Vec<(u64, u64)> {
    records.sort_by_key(|record| record.order_counter);
    let mut held: Vec<(u64, u64)> = Vec::new();
    for record in records {
        let (from, bytes) = (record.ptr.unwrap_or(0), record.bytes.unwrap_or(0) as u64);
        let to = from + bytes;
        match record.action {
            LogAction::SegmentTake => {
                assert!(held.iter().all(|range| range.1 <= from || to <= range.0), "{held:?}");
                held.push((from, to));
            }
            LogAction::SegmentReturn => {
                let owner = held.iter().position(|range| range.0 <= from && to <= range.1);
                let range = held.swap_remove(owner.unwrap());
                held.extend([(range.0, from), (to, range.1)].into_iter().filter(|r| r.0 < r.1));
            }
            LogAction::Allocate => {
                // A block may lie across segments that are adjacent.
                held.sort_unstable();
                let end = held.iter().fold(from, |end, range| {
                    if range.0 <= end && end < range.1 { range.1 } else { end }
                });
                assert!(end >= to, "{from:#x}, {bytes} bytes, not in {held:x?}");
            }
            _ => {}
        }
    }
    held.sort_unstable();
    held
}

fn bytes(held: &[(u64, u64)]) -> usize {
    held.iter().map(|range| (range.1 - range.0) as usize).sum()
}

#[test]
fn every_segment_is_in_the_log_from_its_taking_to_its_return() {
    for segments in [PoolSegments::Mapped, PoolSegments::Plain] {
        let Logged { resource, pool, streams, sink } =
            logged(PoolConfig::default().with_segments(segments));
        let (one, two) = (streams.lease().unwrap(), streams.lease().unwrap());
        let mut blocks = Vec::new();
        for at in 0..40_usize {
            let stream = if at % 2 == 0 { one.id() } else { two.id() };
            blocks.push(resource.allocate((at % 7 + 1) * 3 * MIB, stream, ROWS).unwrap());
            if at % 3 == 2 {
                let block = blocks.swap_remove(at / 3);
                resource.deallocate(block).unwrap();
            }
            let reserved = bytes(&held(&mut sink.snapshot()));
            assert_eq!(Some(reserved), pool.physical_bytes(), "{segments:?}, step {at}");
        }
        for block in blocks {
            resource.deallocate(block).unwrap();
        }
        resource.reap_pending().unwrap();
        assert!(resource.trim().unwrap() > 0, "{segments:?}");
        let left = held(&mut sink.snapshot());
        assert_eq!(Some(bytes(&left)), pool.physical_bytes(), "{segments:?}");
        let returns =
            sink.snapshot().iter().filter(|r| r.action == LogAction::SegmentReturn).count();
        assert!(returns > 0, "{segments:?}");
    }
}

#[test]
fn segments_of_before_the_log_are_in_it_and_those_of_after_it_are_not() {
    let config = PoolConfig::default().with_initial(64 * MIB);
    let Logged { resource, pool, sink, .. } = logged(config);
    assert_eq!(bytes(&held(&mut sink.snapshot())), 64 * MIB);
    drop(resource);
    let records = sink.len();
    let block = pool.allocate(256 * MIB, StreamId::DEFAULT, ROWS).unwrap();
    assert_eq!(sink.len(), records);
    pool.deallocate(block).unwrap();
}

#[test]
fn a_log_has_no_segments_unless_it_was_asked_for_them() {
    let Logged { pool, .. } = logged(PoolConfig::default());
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::over(pool, sink.clone());
    let block = resource.allocate(MIB, StreamId::DEFAULT, ROWS).unwrap();
    resource.deallocate(block).unwrap();
    assert_eq!(sink.len(), 2);
    // A resource without segments has none to log.
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let direct = DirectCudaResource::new(device, 0);
    let resource = LoggingResource::over(direct, sink.clone()).with_segment_logging(true);
    let block = resource.allocate(MIB, StreamId::DEFAULT, ROWS).unwrap();
    resource.deallocate(block).unwrap();
    assert_eq!(sink.len(), 4);
}
