//! A held stream holds its work and nobody else: no call that queues waits, and every byte is there afterwards.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use xlog_cuda::device_runtime::StreamPool;
use xlog_testing::{Buffer, WatchedGate, for_each_device, pattern, threads};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

#[test]
fn a_call_that_queues_work_returns_while_its_stream_is_held() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let filled = Buffer::new(device, 3 * MIB);
        let sizes = [KIB, MIB, 32 * MIB];
        let written = sizes.map(|bytes| Buffer::new(device, bytes));
        let copied = Buffer::new(device, MIB);
        let ran = Arc::new(AtomicUsize::new(0));

        let gate = WatchedGate::new(stream.hold().unwrap());
        filled.fill(&stream, 0x5a).unwrap();
        for (salt, buffer) in written.iter().enumerate() {
            buffer.write(&stream, &pattern(buffer.len(), salt as u64)).unwrap();
        }
        written[1].copy_to(&stream, &copied).unwrap();
        let counter = ran.clone();
        stream.host_fn(move || _ = counter.fetch_add(1, Ordering::Relaxed)).unwrap();
        let second = stream.hold().unwrap();
        let counter = ran.clone();
        stream.host_fn(move || _ = counter.fetch_add(1, Ordering::Relaxed)).unwrap();

        assert!(!stream.query().unwrap(), "the held stream says that it is done");
        assert_eq!(ran.load(Ordering::Relaxed), 0, "work ran through a held gate");
        gate.release();
        second.release();
        stream.synchronize().unwrap();

        assert!(stream.query().unwrap());
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        assert!(filled.read(&stream).unwrap().iter().all(|byte| *byte == 0x5a));
        for (salt, buffer) in written.iter().enumerate() {
            assert_eq!(buffer.read(&stream).unwrap(), pattern(buffer.len(), salt as u64));
        }
        assert_eq!(copied.read(&stream).unwrap(), pattern(MIB, 1));
    });
}

#[test]
fn source_of_copy_htod_may_be_reused_at_once_even_behind_a_gate() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let sizes = [1, 4 * KIB, 64 * KIB, MIB + 7];
        let buffers = sizes.map(|bytes| Buffer::new(device, bytes));
        let gate = WatchedGate::new(stream.hold().unwrap());
        let mut source = vec![0; 2 * MIB];
        for (salt, buffer) in buffers.iter().enumerate() {
            source[..buffer.len()].copy_from_slice(&pattern(buffer.len(), 100 + salt as u64));
            buffer.write(&stream, &source[..buffer.len()]).unwrap();
            source.fill(0xee);
        }
        drop(source);
        gate.release();
        for (salt, buffer) in buffers.iter().enumerate() {
            assert_eq!(buffer.read(&stream).unwrap(), pattern(buffer.len(), 100 + salt as u64));
        }
    });
}

#[test]
fn hundreds_of_copies_behind_a_gate_neither_wait_nor_mix() {
    const PIECE: usize = 48 * KIB;
    const PIECES: usize = 400;
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let whole = Buffer::new(device, PIECE * PIECES);
        let gate = WatchedGate::new(stream.hold().unwrap());
        for piece in 0..PIECES {
            let source = pattern(PIECE, piece as u64);
            let at = whole.ptr() + (piece * PIECE) as u64;
            // SAFETY: the piece lies in `whole`, which outlives the work.
            unsafe { stream.copy_htod(at, &source).unwrap() };
        }
        gate.release();
        let back = whole.read(&stream).unwrap();
        for (piece, bytes) in back.chunks(PIECE).enumerate() {
            assert!(bytes == pattern(PIECE, piece as u64), "piece {piece} is damaged");
        }
    });
}

#[test]
fn gate_dropped_releases() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(device, KIB);
        let gate = stream.hold().unwrap();
        buffer.fill(&stream, 9).unwrap();
        drop(gate);
        stream.synchronize().unwrap();
        assert_eq!(buffer.read(&stream).unwrap(), [9; KIB]);
    });
}

#[test]
fn gate_released_from_another_thread() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(device, KIB);
        let gate = stream.hold().unwrap();
        buffer.fill(&stream, 3).unwrap();
        threads(
            device,
            vec![
                Box::new(|| assert_eq!(buffer.read(&stream).unwrap(), [3; KIB])),
                Box::new(move || gate.release()),
            ],
        );
    });
}

#[test]
fn gate_released_by_a_host_function_of_another_stream() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let (held, other) = (pool.lease().unwrap(), pool.lease().unwrap());
        let buffer = Buffer::new(device, KIB);
        let gate = held.hold().unwrap();
        buffer.fill(&held, 4).unwrap();
        other.host_fn(move || gate.release()).unwrap();
        assert_eq!(buffer.read(&held).unwrap(), [4; KIB]);
    });
}

#[test]
fn a_gate_with_nothing_behind_it_holds_and_may_be_released_before_it_is_reached() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let first = stream.hold().unwrap();
        let second = stream.hold().unwrap();
        second.release();
        assert!(!stream.query().unwrap(), "the second gate does not open the first");
        first.release();
        stream.synchronize().unwrap();
        assert!(stream.query().unwrap());
    });
}

#[test]
fn a_held_stream_holds_no_other_stream() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let (held, free) = (pool.lease().unwrap(), pool.default_stream().unwrap());
        let behind = Buffer::new(device, KIB);
        let beside = Buffer::new(device, KIB);
        let gate = WatchedGate::new(held.hold().unwrap());
        behind.fill(&held, 1).unwrap();
        for round in 0..20 {
            beside.fill(&free, round).unwrap();
            assert_eq!(beside.read(&free).unwrap(), [round; KIB]);
        }
        assert!(!held.query().unwrap());
        gate.release();
        assert_eq!(behind.read(&held).unwrap(), [1; KIB]);
    });
}

#[test]
fn host_functions_run_in_the_order_they_were_queued() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let gate = stream.hold().unwrap();
        for number in 0..200 {
            let order = order.clone();
            stream.host_fn(move || order.lock().unwrap().push(number)).unwrap();
        }
        gate.release();
        stream.synchronize().unwrap();
        assert_eq!(*order.lock().unwrap(), (0..200).collect::<Vec<_>>());
    });
}

#[test]
fn a_panic_in_a_host_function_stops_neither_the_stream_nor_the_process() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(device, KIB);
        // `resume_unwind` unwinds without calling the panic hook, which would print.
        stream.host_fn(|| std::panic::resume_unwind(Box::new("provoked"))).unwrap();
        buffer.fill(&stream, 8).unwrap();
        assert_eq!(buffer.read(&stream).unwrap(), [8; KIB]);
    });
}

#[test]
fn zero_bytes_are_legal_queue_nothing_and_wait_for_nothing() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(device, KIB);
        buffer.fill(&stream, 1).unwrap();
        stream.synchronize().unwrap();
        let gate = WatchedGate::new(stream.hold().unwrap());
        for ptr in [buffer.ptr(), buffer.ptr() + KIB as u64, 0] {
            // SAFETY: an empty range touches nothing.
            unsafe {
                stream.memset(ptr, 2, 0).unwrap();
                stream.copy_htod(ptr, &[]).unwrap();
                stream.copy_dtod(ptr, buffer.ptr(), 0).unwrap();
                stream.copy_dtoh(&mut [], ptr).unwrap();
            }
        }
        gate.release();
        assert_eq!(buffer.read(&stream).unwrap(), [1; KIB]);
    });
}
