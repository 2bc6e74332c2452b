//! Calls while other code captures a stream: exactly those that would break the capture run in the relaxed mode.

use crate::cuda::CudaDriver;
use crate::cuda::fake::{self, Without, fail, logged, with};
use crate::{AsyncPools, Driver, DriverResult, HostMemory, PoolOptions, VirtualMemory, Waited};

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// Functions that the driver refuses beside a capture in the default mode, or that are not known to be allowed.
const REFUSED: &[&str] = &[
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemAddressReserve",
    "cuMemAddressFree",
];

/// Functions that queue work and are allowed in every mode.
const ALLOWED: &[&str] = &[
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync_v2",
    "cuLaunchHostFunc",
];

/// Makes every call that reaches the driver, except those that depend on a failed one. Returns the first error.
fn every_call(device: &CudaDriver) -> DriverResult<()> {
    let stream = device.stream_create(0)?;
    let event = device.event_create()?;
    let outcome = every_call_on(device, stream, event);
    // SAFETY: made here, and not used any more.
    let destroyed =
        unsafe { device.event_destroy(event) }.and(unsafe { device.stream_destroy(stream) });
    outcome.and(destroyed)
}

fn every_call_on(
    device: &CudaDriver,
    stream: crate::StreamHandle,
    event: crate::EventHandle,
) -> DriverResult<()> {
    let mut outcome = Ok(());
    let mut note = |this: DriverResult<()>| {
        if outcome.is_ok() {
            outcome = this;
        }
    };
    note(device.event_record(event, stream));
    note(device.stream_wait_event(stream, event));
    note(device.stream_query(stream).map(drop));
    note(device.stream_id(stream).map(drop));
    note(device.stream_capture(stream).map(drop));
    note(device.event_synchronize(event));
    note(device.event_query(event).map(drop));
    note(device.stream_synchronize(stream));
    note(device.host_fn(stream, Box::new(|| {})));
    note(device.hold(stream).map(|gate| gate.release()));
    note(device.synchronize_streams().map(drop));
    note(device.memory_info().map(drop));
    let block = device.alloc(4096);
    if let Ok(block) = block {
        let mut back = [0; 16];
        // SAFETY: the fake's memory; nothing else uses it.
        unsafe {
            note(device.memset(block, 1, 16, stream));
            note(device.copy_htod(block, &[2; 16], stream));
            note(device.copy_dtod(block + 64, block, 16, stream));
            note(device.copy_dtoh(&mut back, block, stream));
            note(device.free(block));
        }
    }
    note(block.map(drop));
    // SAFETY: allocated here, and nothing uses it.
    note(device.alloc_host(4096).and_then(|memory| unsafe { device.free_host(memory) }));
    note(pools(device, stream));
    // SAFETY: reserved here, and nothing is mapped.
    let reserved = device.reserve(2 << 20, 0);
    note(reserved.clone().map(drop));
    if let Ok(address) = reserved {
        // SAFETY: reserved above, and nothing was mapped there.
        note(unsafe { device.release(address, 2 << 20) });
    }
    outcome
}

fn pools(device: &CudaDriver, stream: crate::StreamHandle) -> DriverResult<()> {
    let pool = device.pool_create(&PoolOptions::default())?;
    let used = device
        .pool_usage(pool)
        .and_then(|_| {
            let block = device.alloc_async(256, pool, stream)?;
            // SAFETY: just allocated on this stream, and nothing uses it.
            unsafe { device.free_async(block, stream) }
        })
        .and_then(|()| device.pool_trim(pool, 0));
    // SAFETY: made here, and not used any more.
    used.and(unsafe { device.pool_destroy(pool) })
}

/// The modes in which a call was made.
fn modes_of(call: &str) -> Vec<u32> {
    with(|state| {
        let of_call = state.modes.iter().filter(|(name, _)| *name == call);
        let mut modes: Vec<u32> = of_call.map(|(_, mode)| *mode).collect();
        modes.dedup();
        modes
    })
}

#[test]
fn what_breaks_a_capture_is_called_in_relaxed_mode_and_nothing_else() {
    let device = fake::device();
    every_call(&device).unwrap();
    drop(device);
    for call in REFUSED {
        assert_eq!(modes_of(call), [RELAXED], "{call}");
    }
    for call in ALLOWED {
        let modes = modes_of(call);
        // A copy through pinned memory, and a gate, record their events on the way.
        let is_plain = modes.contains(&GLOBAL) || modes.is_empty();
        assert!(is_plain, "{call} pays for an exchange: {modes:?}");
        assert!(!modes.is_empty(), "{call} was not made");
    }
    assert_eq!(with(|state| state.capture_mode), GLOBAL);
}

#[test]
fn the_mode_is_restored_whatever_a_call_answers() {
    for call in REFUSED.iter().chain(ALLOWED) {
        for code in [2, 1, 700] {
            let device = fake::device();
            fail(call, code);
            let _ = every_call(&device);
            assert_eq!(with(|state| state.capture_mode), GLOBAL, "{call} answered {code}");
            fail(call, 0);
            drop(device);
            assert_eq!(with(|state| state.capture_mode), GLOBAL, "{call} answered {code}");
        }
    }
}

#[test]
fn a_thread_that_is_relaxed_already_stays_so() {
    let device = fake::device();
    with(|state| state.capture_mode = RELAXED);
    every_call(&device).unwrap();
    assert_eq!(with(|state| state.capture_mode), RELAXED);
    drop(device);
    assert_eq!(with(|state| state.capture_mode), RELAXED);
}

#[test]
fn a_driver_that_cannot_exchange_the_mode_works_without() {
    let api = fake::load(Without(&[c"cuThreadExchangeStreamCaptureMode"])).unwrap();
    let device = CudaDriver::open_with(api, 0).unwrap();
    every_call(&device).unwrap();
    drop(device);
    let api = fake::api();
    fail("cuThreadExchangeStreamCaptureMode", 1);
    let device = CudaDriver::open_with(api, 0).unwrap();
    every_call(&device).unwrap();
    assert_eq!(with(|state| state.capture_mode), GLOBAL);
}

#[test]
fn a_wait_for_all_streams_covers_destroyed_ones_and_never_waits_for_the_context() {
    let device = fake::device();
    let (held, idle) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
    let gate = device.hold(held).unwrap();
    // SAFETY: made here, and not used any more.
    unsafe { device.stream_destroy(held) }.unwrap();
    gate.release();
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForAll);
    assert_eq!(logged("cuEventSynchronize"), 1, "the destroyed stream was waited for");
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForAll);
    assert_eq!(logged("cuEventSynchronize"), 1, "an idle stream needs no event");
    // SAFETY: made here, and not used any more.
    unsafe { device.stream_destroy(idle) }.unwrap();
    drop(device);
    assert_eq!(
        logged("cuCtxSynchronize"),
        0,
        "a wait for the context breaks captures in every mode"
    );
    assert_eq!(logged("cuEventCreate"), logged("cuEventDestroy_v2"));
}

#[test]
fn a_stream_that_is_captured_is_not_waited_for() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    with(|state| state.capturing = 1);
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForSome);
    with(|state| state.capturing = 0);
    gate.release();
    assert_eq!(logged("cuEventRecord") + logged("cuEventSynchronize"), 0);
    assert_eq!(device.synchronize_streams().unwrap(), Waited::ForAll);
}
