//! The CUDA driver on a real GPU, chosen by `XLOG_TEST_DEVICE=cuda:N`; without it every test here says so and passes.
//!
//! What must not block runs under a watchdog, so a call that waits for a held stream is a failure and not a hang.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use xlog_driver::cuda::{CudaDriver, device_count, driver_version};
use xlog_driver::{Driver, DriverError, MapAccess, PoolOptions, ReusePolicy, StreamHandle};

const PATIENCE: Duration = Duration::from_secs(120);

fn ordinal() -> Option<usize> {
    let spec = std::env::var("XLOG_TEST_DEVICE").ok();
    let ordinal = spec.as_deref().and_then(|spec| spec.strip_prefix("cuda:")?.parse().ok());
    if ordinal.is_none() {
        eprintln!("skipped: XLOG_TEST_DEVICE does not name a CUDA device");
    }
    ordinal
}

/// Runs `body` on the device in a thread and fails if it takes longer than a blocked call would.
fn on_device(body: impl FnOnce(Arc<CudaDriver>) + Send + 'static) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let Some(ordinal) = ordinal() else { return };
    // The driver maps many streams onto few hardware queues, so a stream held by one test could delay another's.
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (done, waiting) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        body(CudaDriver::open(ordinal).expect("the device opens"));
        let _ = done.send(());
    });
    match waiting.recv_timeout(PATIENCE) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a call blocks"),
        _ => worker.join().expect("the body passes"),
    }
}

fn write(device: &CudaDriver, dst: u64, src: &[u8], stream: StreamHandle) {
    // SAFETY: callers pass a live block of at least this size.
    unsafe { device.copy_htod(dst, src, stream) }.expect("copy_htod");
}

fn read(device: &CudaDriver, src: u64, bytes: usize, stream: StreamHandle) -> Vec<u8> {
    let mut back = vec![0; bytes];
    // SAFETY: callers pass a live block of at least this size.
    unsafe { device.copy_dtoh(&mut back, src, stream) }.expect("copy_dtoh");
    back
}

fn fill(device: &CudaDriver, dst: u64, value: u8, bytes: usize, stream: StreamHandle) {
    // SAFETY: callers pass a live block of at least this size.
    unsafe { device.memset(dst, value, bytes, stream) }.expect("memset");
}

fn free(device: &CudaDriver, block: u64) {
    // SAFETY: callers have synchronised with all work on the block.
    unsafe { device.free(block) }.expect("free");
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| ((index * 131) >> 5) as u8).collect()
}

#[test]
fn properties_are_plausible() {
    on_device(|device| {
        let properties = device.properties();
        println!("{properties:#?}");
        assert!(!properties.name.is_empty());
        assert_eq!(properties.driver_version, driver_version().unwrap());
        assert!((properties.ordinal as usize) < device_count().unwrap());
        assert!(properties.greatest_priority <= properties.least_priority);
        let info = device.memory_info().unwrap();
        assert!(0 < info.free && info.free <= info.total && info.total <= properties.total_bytes);
        assert_eq!(properties.virtual_memory, properties.granularity > 0);
    });
}

#[test]
fn bytes_survive_the_way_there_and_back() {
    on_device(|device| {
        let stream = device.stream_create(0).unwrap();
        for bytes in [1, 4, 4095, 4096, 4097, 1 << 20, (4 << 20) + 1, (33 << 20) + 7] {
            let block = device.alloc(bytes).unwrap();
            let source = pattern(bytes);
            write(&device, block, &source, stream);
            assert!(read(&device, block, bytes, stream) == source, "{bytes} bytes");
            free(&device, block);
        }
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn queueing_on_a_held_stream_returns() {
    on_device(|device| {
        let stream = device.stream_create(0).unwrap();
        let event = device.event_create().unwrap();
        let bytes = 40 << 20;
        let (first, second) = (device.alloc(bytes).unwrap(), device.alloc(bytes).unwrap());
        let ran = Arc::new(AtomicU32::new(0));
        let gate = device.hold(stream).unwrap();
        fill(&device, first, 0x11, bytes, stream);
        let mut source = pattern(bytes);
        write(&device, first, &source[..4], stream);
        write(&device, first, &source, stream);
        let expected = source.clone();
        source.fill(0);
        // SAFETY: both blocks are live and as long.
        unsafe { device.copy_dtod(second, first, bytes, stream) }.unwrap();
        let counter = Arc::clone(&ran);
        device
            .host_fn(stream, Box::new(move || _ = counter.fetch_add(1, Ordering::Relaxed)))
            .unwrap();
        device.event_record(event, stream).unwrap();
        let inner = device.hold(stream).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(device.stream_query(stream), Ok(false));
        assert_eq!(device.event_query(event), Ok(false));
        assert_eq!(ran.load(Ordering::Relaxed), 0);
        gate.release();
        device.event_synchronize(event).unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        assert_eq!(device.stream_query(stream), Ok(false), "the inner gate holds");
        drop(inner);
        assert!(read(&device, second, bytes, stream) == expected);
        free(&device, first);
        free(&device, second);
        device.synchronize().unwrap();
        // SAFETY: made here, and not used any more.
        unsafe { device.event_destroy(event) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn a_held_stream_holds_no_other_and_no_creation() {
    on_device(|device| {
        let (held, other) = (device.stream_create(0).unwrap(), device.stream_create(-1).unwrap());
        let block = device.alloc(4096).unwrap();
        let gate = device.hold(held).unwrap();
        fill(&device, block, 0x42, 4096, other);
        assert!(read(&device, block, 4096, other).iter().all(|byte| *byte == 0x42));
        let stream = device.stream_create(0).unwrap();
        let event = device.event_create().unwrap();
        let more = device.alloc(64 << 20).unwrap();
        device.memory_info().unwrap();
        assert_eq!(device.stream_query(held), Ok(false));
        gate.release();
        device.stream_synchronize(held).unwrap();
        // SAFETY: made here, and not used any more.
        unsafe { device.event_destroy(event) }.unwrap();
        for stream in [held, other, stream] {
            // SAFETY: made here, and not used any more.
            unsafe { device.stream_destroy(stream) }.unwrap();
        }
        free(&device, more);
        free(&device, block);
    });
}

#[test]
fn one_thread_that_waits_for_bytes_blocks_no_other() {
    on_device(|device| {
        let (held, other) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let block = device.alloc(8 << 20).unwrap();
        fill(&device, block, 7, 8 << 20, held);
        let gate = device.hold(held).unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(&device, block, 8 << 20, held));
            std::thread::sleep(Duration::from_millis(50));
            let more = device.alloc(4096).unwrap();
            fill(&device, more, 1, 4096, other);
            write(&device, more, &[2; 4096], other);
            device.stream_synchronize(other).unwrap();
            assert!(!reader.is_finished());
            gate.release();
            assert!(reader.join().unwrap().iter().all(|byte| *byte == 7));
            free(&device, more);
        });
        free(&device, block);
    });
}

#[test]
fn a_thousand_gates_in_a_row() {
    on_device(|device| {
        let stream = device.stream_create(0).unwrap();
        for _ in 0..1000 {
            device.hold(stream).unwrap().release();
        }
        device.stream_synchronize(stream).unwrap();
        let gates: Vec<_> = (0..100).map(|_| device.hold(stream).unwrap()).collect();
        assert_eq!(device.stream_query(stream), Ok(false));
        drop(gates);
        device.stream_synchronize(stream).unwrap();
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn a_gate_outlives_its_driver_and_the_device_opens_again() {
    on_device(|device| {
        let ordinal = device.properties().ordinal as usize;
        let stream = device.stream_create(0).unwrap();
        let gate = device.hold(stream).unwrap();
        drop(device);
        std::thread::spawn(move || gate.release()).join().unwrap();
        for _ in 0..3 {
            let again = CudaDriver::open(ordinal).unwrap();
            let block = again.alloc(4096).unwrap();
            free(&again, block);
        }
    });
}

#[test]
fn host_functions_run_in_order_and_a_panic_is_swallowed() {
    on_device(|device| {
        let stream = device.stream_create(0).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for number in 0..10 {
            let seen = Arc::clone(&seen);
            let work = move || {
                seen.lock().unwrap().push(number);
                if number == 5 {
                    std::panic::resume_unwind(Box::new(()));
                }
            };
            device.host_fn(stream, Box::new(work)).unwrap();
        }
        device.stream_synchronize(stream).unwrap();
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn a_gate_released_in_a_host_function_lets_the_other_stream_go() {
    on_device(|device| {
        let (held, other) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let gate = device.hold(held).unwrap();
        device.host_fn(other, Box::new(move || gate.release())).unwrap();
        device.stream_synchronize(held).unwrap();
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(held) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(other) }.unwrap();
    });
}

#[test]
fn a_stream_id_is_never_used_twice() {
    on_device(|device| {
        let mut ids = std::collections::HashSet::new();
        for _ in 0..100 {
            let stream = device.stream_create(0).unwrap();
            assert!(ids.insert(device.stream_id(stream).unwrap()));
            // SAFETY: made here, and not used any more.
            unsafe { device.stream_destroy(stream) }.unwrap();
        }
    });
}

#[test]
fn events_order_streams() {
    on_device(|device| {
        let (first, second) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let event = device.event_create().unwrap();
        assert_eq!(device.event_query(event), Ok(true), "never recorded");
        device.stream_wait_event(second, event).unwrap();
        assert_eq!(device.stream_query(second), Ok(true));
        let gate = device.hold(first).unwrap();
        device.event_record(event, first).unwrap();
        device.stream_wait_event(second, event).unwrap();
        assert_eq!(device.stream_query(second), Ok(false));
        gate.release();
        device.stream_synchronize(second).unwrap();
        assert_eq!(device.event_query(event), Ok(true));
        // SAFETY: made here, and not used any more.
        unsafe { device.event_destroy(event) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(first) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(second) }.unwrap();
    });
}

#[test]
fn too_much_memory_is_out_of_memory() {
    on_device(|device| {
        let too_much = usize::try_from(device.properties().total_bytes).unwrap() * 2;
        let error = device.alloc(too_much).unwrap_err();
        assert!(
            matches!(error, DriverError::OutOfMemory { requested, .. } if requested == too_much as u64)
        );
        if let Some(pools) = device.async_pools() {
            let stream = device.stream_create(0).unwrap();
            let pool = pools.pool_create(&PoolOptions::default()).unwrap();
            assert!(pools.alloc_async(too_much, pool, stream).unwrap_err().is_out_of_memory());
            // SAFETY: made here, and not used any more.
            unsafe { pools.pool_destroy(pool) }.unwrap();
            // SAFETY: as above.
            unsafe { device.stream_destroy(stream) }.unwrap();
        }
        if let Some(memory) = device.virtual_memory() {
            let rounded = too_much.next_multiple_of(memory.granularity());
            assert!(memory.create(rounded).unwrap_err().is_out_of_memory());
        }
        let block = device.alloc(4096).unwrap();
        free(&device, block);
    });
}

#[test]
fn a_pool_keeps_counts_and_keeps_its_maximum() {
    on_device(|device| {
        let Some(pools) = device.async_pools() else {
            return;
        };
        let stream = device.stream_create(0).unwrap();
        let options = PoolOptions {
            max_bytes: Some(256 << 20),
            reuse: ReusePolicy::DETERMINISTIC,
            ..PoolOptions::default()
        };
        let pool = pools.pool_create(&options).unwrap();
        let gate = device.hold(stream).unwrap();
        let block = pools.alloc_async(64 << 20, pool, stream).unwrap();
        fill(&device, block, 3, 64 << 20, stream);
        gate.release();
        assert!(read(&device, block, 64 << 20, stream).iter().all(|byte| *byte == 3));
        let usage = pools.pool_usage(pool).unwrap();
        println!("{usage:?}");
        assert!(usage.used >= 64 << 20 && usage.reserved >= usage.used);
        let over = pools.alloc_async(512 << 20, pool, stream).unwrap_err();
        assert!(over.is_out_of_memory(), "{over}");
        // SAFETY: the block is live, and all its uses were queued on this stream.
        unsafe { pools.free_async(block, stream) }.unwrap();
        device.stream_synchronize(stream).unwrap();
        assert!(pools.pool_usage(pool).unwrap().reserved >= 64 << 20, "kept by the threshold");
        pools.pool_trim(pool, 0).unwrap();
        assert_eq!(pools.pool_usage(pool).unwrap().reserved, 0);
        // SAFETY: made here, and not used any more.
        unsafe { pools.pool_destroy(pool) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn memory_can_be_mapped_used_and_mapped_elsewhere() {
    on_device(|device| {
        let Some(memory) = device.virtual_memory() else {
            return;
        };
        let stream = device.stream_create(0).unwrap();
        let bytes = memory.granularity();
        let base = memory.reserve(2 * bytes, 0).unwrap();
        let handle = memory.create(bytes).unwrap();
        for (address, value) in [(base, 5), (base + bytes as u64, 6)] {
            // SAFETY: the range lies in the reservation, and nothing is mapped there.
            unsafe { memory.map(address, bytes, handle) }.unwrap();
            // SAFETY: the range is one mapping, without work on it.
            unsafe { memory.set_access(address, bytes, MapAccess::ReadWrite) }.unwrap();
            fill(&device, address, value, bytes, stream);
            assert!(read(&device, address, bytes, stream).iter().all(|byte| *byte == value));
            // SAFETY: as above; the copy back has waited for everything.
            let read_only = unsafe { memory.set_access(address, bytes, MapAccess::Read) };
            println!("read-only access: {read_only:?}");
            // SAFETY: the range is one mapping, and all work on it has completed.
            unsafe { memory.unmap(address, bytes) }.unwrap();
        }
        // SAFETY: made here, and not used any more.
        unsafe { memory.destroy(handle) }.unwrap();
        // SAFETY: nothing is mapped in the reservation.
        unsafe { memory.release(base, 2 * bytes) }.unwrap();
        // SAFETY: as above.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}

#[test]
fn a_block_may_be_freed_on_a_thread_that_never_saw_the_device() {
    on_device(|device| {
        let block = device.alloc(4096).unwrap();
        let other = Arc::clone(&device);
        std::thread::spawn(move || free(&other, block)).join().unwrap();
    });
}

#[test]
fn page_locked_memory_is_copied_behind_a_held_stream_without_waiting() {
    on_device(|device| {
        const BYTES: usize = 32 << 20;
        let host = device.host_memory().expect("every CUDA device has it");
        let began = Instant::now();
        let memory = host.alloc_host(BYTES).unwrap();
        let allocated = began.elapsed();
        assert_eq!((memory.device % 4096, memory.host.addr().get() % 4096), (0, 0));
        assert_eq!(device.memory_at(memory.device), Ok(None), "it is not memory of the device");
        let block = device.alloc(BYTES).unwrap();
        let stream = device.stream_create(0).unwrap();
        let expected = pattern(BYTES);
        // SAFETY: the memory is live and has this many bytes; no work uses it yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.host.as_ptr(), BYTES) };
        bytes.copy_from_slice(&expected);
        let gate = device.hold(stream).unwrap();
        // SAFETY: both ranges are live, here and below.
        unsafe { device.copy_dtod(block, memory.device, BYTES, stream) }.unwrap();
        assert_eq!(device.stream_query(stream), Ok(false));
        let began = Instant::now();
        gate.release();
        device.stream_synchronize(stream).unwrap();
        let copied = began.elapsed();
        assert!(read(&device, block, BYTES, stream) == expected);
        fill(&device, memory.device, 0x5a, BYTES / 2, stream);
        fill(&device, block, 0xa5, BYTES, stream);
        let (half, rest) = (BYTES as u64 / 2, BYTES / 2);
        // SAFETY: as above.
        unsafe { device.copy_dtod(memory.device + half, block, rest, stream) }.unwrap();
        device.stream_synchronize(stream).unwrap();
        // SAFETY: as above; all work has completed.
        let bytes = unsafe { std::slice::from_raw_parts(memory.host.as_ptr(), BYTES) };
        assert!(bytes[..rest].iter().all(|byte| *byte == 0x5a));
        assert!(bytes[rest..].iter().all(|byte| *byte == 0xa5));
        let began = Instant::now();
        // SAFETY: allocated here, all work has completed, and no reference is left.
        unsafe { host.free_host(memory) }.unwrap();
        let freed = began.elapsed();
        println!(
            "32 MiB: allocated in {allocated:?}, to the device in {copied:?}, freed in {freed:?}"
        );
        free(&device, block);
        // SAFETY: made here, and not used any more.
        unsafe { device.stream_destroy(stream) }.unwrap();
    });
}
