//! Handles that this device did not make never reach the driver.

use crate::cuda::fake::{self, with};
use crate::{
    AsyncPools, Driver, DriverError, DriverResult, EventHandle, PoolHandle, PoolOptions,
    StreamHandle,
};

/// Every safe call that takes a handle.
fn every_call(
    device: &dyn Driver,
    pools: &dyn AsyncPools,
    stream: StreamHandle,
    event: EventHandle,
    pool: PoolHandle,
) -> Vec<(&'static str, DriverResult<()>)> {
    vec![
        ("stream_synchronize", device.stream_synchronize(stream)),
        ("stream_query", device.stream_query(stream).map(drop)),
        ("stream_is_idle", device.stream_is_idle(stream).map(drop)),
        ("stream_id", device.stream_id(stream).map(drop)),
        ("stream_capture", device.stream_capture(stream).map(drop)),
        ("stream_wait_event", device.stream_wait_event(stream, event)),
        ("event_record", device.event_record(event, stream)),
        ("event_query", device.event_query(event).map(drop)),
        ("event_synchronize", device.event_synchronize(event)),
        ("host_fn", device.host_fn(stream, Box::new(|| {}))),
        ("hold", device.hold(stream).map(drop)),
        ("pool_usage", pools.pool_usage(pool).map(drop)),
        ("pool_trim", pools.pool_trim(pool, 0)),
        ("alloc_async", pools.alloc_async(256, pool, stream).map(drop)),
    ]
}

/// Returns the calls that reached the driver after the first `before`, without those that bind the context.
fn reached(before: usize) -> Vec<&'static str> {
    with(|state| {
        let since = state.log[before..].iter().copied();
        since.filter(|call| !call.starts_with("cuCtx") && !call.starts_with("cuThread")).collect()
    })
}

#[test]
fn a_handle_that_another_device_made_is_refused_by_every_call() {
    let device = fake::device();
    let pools = device.async_pools().unwrap();
    let (stream, event) = (device.stream_create(0).unwrap(), device.event_create().unwrap());
    let pool = pools.pool_create(&PoolOptions::default()).unwrap();
    let refused = |stream, event, pool| {
        let before = with(|state| state.log.len());
        for (call, answer) in every_call(&*device, pools, stream, event, pool) {
            assert!(matches!(answer, Err(DriverError::Invalid { .. })), "{call}: {answer:?}");
        }
        assert_eq!(reached(before), [""; 0], "the driver saw a handle that it did not make");
    };
    // Numbers, also those of live handles: an address alone is not a handle.
    for number in [0, 1, 2, 0x77, stream.number(), event.number(), u64::MAX] {
        let handles = (
            StreamHandle::numbered(number),
            EventHandle::numbered(number),
            PoolHandle::numbered(number),
        );
        refused(handles.0, handles.1, handles.2);
    }
    // Handles of the same device from another open.
    let api = std::sync::Arc::clone(&device.core.context.api);
    let other = crate::cuda::CudaDriver::open_with(api, 0).unwrap();
    let foreign_pool = other.pool_create(&PoolOptions::default()).unwrap();
    refused(other.stream_create(0).unwrap(), other.event_create().unwrap(), foreign_pool);
    assert_eq!(device.raw_stream(other.stream_create(0).unwrap()), None);
    // And those of a device that was closed.
    let (gone, over) = (other.stream_create(0).unwrap(), other.event_create().unwrap());
    drop(other);
    refused(gone, over, foreign_pool);
    for (call, answer) in every_call(&*device, pools, stream, event, pool) {
        assert_eq!(answer, Ok(()), "{call} refuses its own handles");
    }
}

#[test]
fn a_handle_shows_the_address_that_the_driver_knows() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let raw = device.raw_stream(stream).unwrap();
    assert_eq!(raw.addr() as u64, stream.number());
    assert_eq!(format!("{stream}"), format!("stream {:#x}", stream.number()));
    assert_ne!(stream, StreamHandle::numbered(stream.number()));
}
