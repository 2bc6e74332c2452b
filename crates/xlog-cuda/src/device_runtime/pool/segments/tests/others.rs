//! Plain and inner segments, and properties common to all three kinds.

use super::super::super::super::async_resource::AsyncCudaResource;
use super::super::super::super::stream_pool::StreamPool;
use super::model::Model;
use super::*;

fn plain(device: &Arc<CudaDevice>, maximum: u64) -> PlainSegments {
    PlainSegments::new(Arc::clone(device), maximum)
}

#[test]
fn two_plain_segments_never_become_one_range() {
    for device in devices(32 * MIB) {
        let segments = plain(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        let spans =
            [4 * MIB - UNIT, 4 * MIB, 6 * MIB - UNIT].map(|bytes| model.grow(bytes).unwrap());
        assert_eq!(spans.map(|s| s.bytes + UNIT), [4 * MIB, 6 * MIB, 6 * MIB]);
        assert_eq!(model.idle.spans().len(), 3);
        assert_eq!(
            (segments.reserved(), segments.segment_count(), used(&device)),
            (16 * MIB, 3, 16 * MIB)
        );
        model.lend(Span { ptr: spans[1].ptr + MIB, bytes: UNIT }, 4);
        assert_eq!(model.defragment(7 * MIB), Ok(None), "nothing can be moved");
        assert_eq!(model.release(5 * MIB), Ok(4 * MIB - UNIT));
        assert_eq!(model.release(u64::MAX), Ok(6 * MIB - UNIT));
        assert_eq!((segments.segment_count(), used(&device)), (1, 6 * MIB));
        model.finish();
        assert_eq!(used(&device), 0);
        assert!(device.races().is_empty());
    }
}

#[test]
fn plain_growth_ends_at_the_limit_and_at_the_end_of_the_device() {
    let device = device(None, 8 * MIB);
    let segments = plain(&device, 7 * MIB);
    let meter = Meter::new(u64::MAX);
    segments.meter_physical(meter.clone()).unwrap();
    segments.grow(4 * MIB - UNIT, ON).unwrap();
    assert_eq!(segments.grow(1, ON).unwrap().bytes + UNIT, 2 * MIB);
    assert!(segments.grow(1, ON).unwrap_err().to_string().contains("6291456 of at most 7340032"));
    segments.set_limit(u64::MAX);
    segments.grow(2 * MIB - UNIT, ON).unwrap();
    assert!(is_out_of_memory(&segments.grow(1, ON), 1));
    assert!(is_out_of_memory(&segments.grow(u64::MAX, ON), u64::MAX));
    assert_eq!((meter.held(), segments.reserved(), used(&device)), (8 * MIB, 8 * MIB, 8 * MIB));
}

fn over_async(device: &Arc<CudaDevice>, maximum: u64) -> (InnerSegments, Arc<StreamPool>) {
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(device)));
    let inner = AsyncCudaResource::new(Arc::clone(device), 0, Arc::clone(&streams));
    (InnerSegments::new(Box::new(inner), maximum), streams)
}

#[test]
fn inner_segments_are_blocks_of_the_stream_that_grew_and_go_back_to_it() {
    for device in devices(64 * MIB) {
        let (segments, streams) = over_async(&device, 9 * MIB);
        let lease = streams.lease().unwrap();
        let first = segments.grow(MIB - UNIT, lease.id()).unwrap();
        let second = segments.grow(3 * MIB, lease.id()).unwrap();
        assert_eq!((first.bytes + UNIT, second.bytes), (MIB, 3 * MIB));
        assert_eq!(segments.inner().bytes_outstanding() as u64, segments.reserved());
        #[allow(unsafe_code)]
        // SAFETY: the block is live and is used on its own stream.
        unsafe { lease.memset(second.ptr, 1, second.bytes as usize) }.unwrap();
        lease.synchronize().unwrap();
        let gathered =
            segments.defragment(FreeMemory::idle(&[first, second]), request(4 * MIB), lease.id());
        assert_eq!(gathered, (None, vec![], Ok(())));
        assert!(is_out_of_memory(&segments.grow(6 * MIB, lease.id()), 6 * MIB + UNIT));
        assert_eq!(segments.release(&[first, second], 2 * MIB), (vec![first], Ok(())));
        assert_eq!(segments.release(&[second], u64::MAX), (vec![second], Ok(())));
        segments.inner().reap_pending().unwrap();
        assert_eq!((segments.reserved(), segments.inner().bytes_outstanding()), (0, 0));
        let unknown = segments.grow(1, StreamId(u32::MAX));
        assert!(matches!(unknown, Err(ResourceError::StreamMisuse(_))));
        assert_eq!((segments.reserved(), segments.segment_count()), (0, 0));
        assert!(device.races().is_empty());
    }
}

#[test]
fn inner_segments_leave_the_announcement_to_the_inner_resource() {
    let device = device(None, 64 * MIB);
    let (segments, _streams) = over_async(&device, u64::MAX);
    let meter = Meter::new(u64::MAX);
    segments.meter_physical(meter.clone()).unwrap();
    let span = segments.grow(5 * MIB, ON).unwrap();
    assert_eq!(meter.held(), used(&device));
    assert!(meter.held() >= 5 * MIB);
    segments.release(&[span], u64::MAX).1.unwrap();
    segments.inner().reap_pending().unwrap();
    segments.inner().trim().unwrap();
    assert_eq!((meter.held(), used(&device)), (0, 0));
}

#[test]
fn kinds_and_units_are_told_apart() {
    let device = device(None, 64 * MIB);
    let (inner, _streams) = over_async(&device, u64::MAX);
    let all: [Box<dyn Segments>; 3] =
        [Box::new(mapped(&device, u64::MAX)), Box::new(plain(&device, u64::MAX)), Box::new(inner)];
    let told: Vec<_> = all.iter().map(|s| (s.kind(), s.granularity())).collect();
    assert_eq!(told, [("mapped", GRAIN), ("plain", 2 * MIB), ("inner", UNIT)]);
    for segments in all {
        assert_eq!(segments.reserved(), 0);
        assert_eq!(segments.release(&[], u64::MAX), (vec![], Ok(())));
    }
}
