//! Streams, events, gates, host functions and logical threads, on both engines.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::support::{Random, devices, edge, memset, read};
use xlog_driver::{Access, Driver, DriverError, StreamHandle};
use xlog_sim::{KernelSlice, LatencyModel, SimConfig, SimDevice, SimKernel};

#[test]
fn work_of_one_stream_runs_in_the_order_it_was_queued() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for i in 0..300 {
            let seen = Arc::clone(&seen);
            device.host_fn(stream, Box::new(move || seen.lock().unwrap().push(i))).unwrap();
        }
        device.stream_synchronize(stream).unwrap();
        assert_eq!(*seen.lock().unwrap(), (0..300).collect::<Vec<_>>());
    }
}

#[test]
fn a_never_recorded_event_is_no_wait_and_complete() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let event = device.event_create().unwrap();
        device.stream_wait_event(stream, event).unwrap();
        assert!(device.event_query(event).unwrap());
        device.event_synchronize(event).unwrap();
        device.stream_synchronize(stream).unwrap();
    }
}

#[test]
fn a_wait_holds_to_the_record_it_saw_when_the_event_is_recorded_again() {
    for device in devices() {
        let (a, b, c) = (
            device.stream_create(0).unwrap(),
            device.stream_create(0).unwrap(),
            device.stream_create(0).unwrap(),
        );
        let block = device.alloc(64).unwrap();
        let event = device.event_create().unwrap();
        memset(&device, block, 7, 64, a);
        device.event_record(event, a).unwrap();
        device.stream_wait_event(b, event).unwrap();
        // The same event now stands for a held stream; b must not wait for it.
        let gate = device.hold(c).unwrap();
        device.event_record(event, c).unwrap();
        assert_eq!(read(&device, block, 64, b), [7; 64]);
        assert!(!device.event_query(event).unwrap());
        gate.release();
        device.event_synchronize(event).unwrap();
        assert!(device.event_query(event).unwrap());
    }
}

#[test]
fn an_event_destroyed_after_its_wait_was_queued_still_orders() {
    for device in devices() {
        let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let block = device.alloc(64).unwrap();
        let gate = device.hold(a).unwrap();
        memset(&device, block, 5, 64, a);
        edge(&device, a, b);
        memset(&device, block, 6, 64, b);
        gate.release();
        assert_eq!(read(&device, block, 64, b), [6; 64]);
        assert!(device.races().is_empty());
    }
}

#[test]
fn a_call_that_queues_work_returns_while_its_stream_is_held() {
    for device in devices() {
        let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
        let (x, y) = (device.alloc(1 << 20).unwrap(), device.alloc(1 << 20).unwrap());
        let event = device.event_create().unwrap();
        let ran = Arc::new(AtomicUsize::new(0));
        let gate = device.hold(a).unwrap();
        let second = device.hold(a).unwrap();
        memset(&device, x, 1, 1 << 20, a);
        let mut source = vec![2; 1 << 19];
        // SAFETY: the blocks are live and long enough.
        unsafe {
            device.copy_htod(x, &source, a).unwrap();
            source.fill(99);
            device.copy_dtod(y, x, 1 << 20, a).unwrap();
        }
        let counter = Arc::clone(&ran);
        device
            .host_fn(
                a,
                Box::new(move || {
                    counter.fetch_add(1, Ordering::SeqCst);
                }),
            )
            .unwrap();
        device.event_record(event, a).unwrap();
        device.stream_wait_event(b, event).unwrap();
        assert!(!device.stream_query(a).unwrap() && !device.stream_query(b).unwrap());
        assert!(!device.event_query(event).unwrap());
        gate.release();
        assert_eq!(ran.load(Ordering::SeqCst), 0, "the second gate is still closed");
        drop(second);
        let bytes = read(&device, y, 1 << 20, b);
        assert_eq!(ran.load(Ordering::SeqCst), 1);
        assert!(
            bytes[..1 << 19].iter().all(|&b| b == 2) && bytes[1 << 19..].iter().all(|&b| b == 1)
        );
    }
}

#[test]
fn a_wait_that_cannot_end_is_called_a_deadlock() {
    for seed in [None, Some(4)] {
        let mut config = SimConfig::default().with_patience(Duration::from_millis(50));
        config.seed = seed;
        let device = SimDevice::open(config).unwrap();
        let stream = device.stream_create(0).unwrap();
        let block = device.alloc(8).unwrap();
        let gate = device.hold(stream).unwrap();
        let stuck = device.stream_synchronize(stream).unwrap_err();
        assert!(matches!(stuck, DriverError::Deadlock { .. }), "{stuck}");
        assert!(stuck.to_string().contains("closed gate"), "{stuck}");
        // SAFETY: the block is live.
        let copy = unsafe { device.copy_dtoh(&mut [0; 8], block, stream) };
        assert!(matches!(copy, Err(DriverError::Deadlock { .. })));
        gate.release();
        device.stream_synchronize(stream).unwrap();
    }
}

/// A host function that blocks until the sender is dropped.
fn block(device: &SimDevice, stream: StreamHandle) -> mpsc::Sender<()> {
    let (go, wait) = mpsc::channel::<()>();
    let work = move || {
        let _ = wait.recv();
    };
    device.host_fn(stream, Box::new(work)).unwrap();
    go
}

#[test]
fn patience_ends_although_a_stream_the_wait_does_not_depend_on_runs() {
    let config = SimConfig::default().with_patience(Duration::from_millis(50));
    let device = SimDevice::open(config).unwrap();
    let (a, b, busy) = (stream(&device), stream(&device), stream(&device));
    let go = block(&device, a);
    let gate = device.hold(b).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                device.host_fn(busy, Box::new(|| {})).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let stuck = device.stream_synchronize(b);
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(stuck, Err(DriverError::Deadlock { .. })), "{stuck:?}");
    });
    gate.release();
    drop(go);
    device.synchronize().unwrap();
}

#[test]
fn patience_lasts_while_anything_the_wait_depends_on_runs() {
    let config = SimConfig::default().with_patience(Duration::from_millis(20));
    let device = SimDevice::open(config).unwrap();
    let (a, b, c) = (stream(&device), stream(&device), stream(&device));
    let go = block(&device, a);
    edge(&device, a, b);
    edge(&device, b, c);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            drop(go);
        });
        device.stream_synchronize(c).unwrap();
    });
}

fn stream(device: &SimDevice) -> StreamHandle {
    device.stream_create(0).unwrap()
}

#[test]
fn a_stalled_host_function_stalls_no_other_stream() {
    let device = SimDevice::open(SimConfig::default()).unwrap();
    let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let block = device.alloc(64).unwrap();
    memset(&device, block, 1, 64, a);
    device
        .host_fn(
            a,
            Box::new(move || {
                let _ = wait.recv();
            }),
        )
        .unwrap();
    // A racy read must be reported, not waited for.
    let _ = read_racy(&device, block, b);
    assert_eq!(device.races().len(), 1);
    go.send(()).unwrap();
    let _ = device.stream_synchronize(a);
    device.stream_synchronize(a).unwrap();
}

fn read_racy(device: &SimDevice, block: u64, stream: xlog_driver::StreamHandle) -> Vec<u8> {
    let mut out = vec![0; 64];
    // SAFETY: the block is live.
    let outcome = unsafe { device.copy_dtoh(&mut out, block, stream) };
    assert!(matches!(outcome, Err(DriverError::Race { .. })));
    out
}

#[test]
fn a_panicking_host_function_harms_nobody_and_a_panicking_kernel_loses_the_device() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        device
            .host_fn(stream, Box::new(|| std::panic::resume_unwind(Box::new("planned"))))
            .unwrap();
        device.stream_synchronize(stream).unwrap();
        let kernel = SimKernel::new("bad", |_| std::panic::resume_unwind(Box::new("planned")));
        device.launch(stream, kernel).unwrap();
        let lost = device.stream_synchronize(stream).unwrap_err();
        assert!(lost.is_device_lost() && lost.to_string().contains("'bad'"), "{lost}");
    }
}

#[test]
fn a_kernel_sees_exactly_what_it_declared() {
    for device in devices() {
        let stream = device.stream_create(0).unwrap();
        let (x, y) = (device.alloc(16).unwrap(), device.alloc(16).unwrap());
        memset(&device, x, 3, 16, stream);
        let kernel = SimKernel::new("add", |args| {
            assert_eq!((args.len(), args.is_empty()), (2, false));
            assert!(args.bytes_mut(0).is_empty(), "declared as read");
            assert!(args.bytes(9).is_empty());
            if let [KernelSlice::Read(from), KernelSlice::Write(to)] = args.slices() {
                for (to, from) in to.iter_mut().zip(from.iter()) {
                    *to = from + 1;
                }
            }
        });
        device.launch(stream, kernel.arg(x, 16, Access::Read).arg(y, 16, Access::Write)).unwrap();
        assert_eq!(read(&device, y, 16, stream), [4; 16]);
        let overlap =
            SimKernel::new("overlap", |_| {}).arg(x, 16, Access::Read).arg(x + 8, 8, Access::Write);
        let refused = device.launch(stream, overlap).unwrap_err().to_string();
        assert!(
            refused.contains("overlapping") && refused.contains(&format!("{x:#x}")),
            "{refused}"
        );
    }
}

#[test]
fn work_queued_by_many_threads_all_runs() {
    for device in devices() {
        let streams: Vec<_> = (0..4).map(|_| device.stream_create(0).unwrap()).collect();
        let count = Arc::new(AtomicU64::new(0));
        let bodies = (0..4)
            .map(|i| {
                let (device, count, streams) = (&device, &count, &streams);
                let body = move || {
                    for j in 0..200 {
                        let count = Arc::clone(count);
                        let work = Box::new(move || {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                        device.host_fn(streams[(i + j) % 4], work).unwrap();
                        if j % 50 == 0 {
                            device.stream_synchronize(streams[j % 4]).unwrap();
                        }
                    }
                };
                Box::new(body) as Box<dyn FnOnce() + Send>
            })
            .collect();
        device.run_threads(bodies);
        device.synchronize().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 800);
    }
}

#[test]
fn simulated_time_adds_what_waits_and_overlaps_what_does_not() {
    let model = LatencyModel::h200();
    let megabytes = 1 << 30;
    let one = Duration::from_nanos(model.work_start + megabytes / model.device_bandwidth);
    let run = |streams: usize, ordered: bool| {
        let config = SimConfig::default().with_seed(1).with_latency(model.clone());
        let device = SimDevice::open(config).unwrap();
        let streams: Vec<_> = (0..streams).map(|_| device.stream_create(0).unwrap()).collect();
        for pair in streams.windows(2) {
            let block = device.alloc(megabytes as usize).unwrap();
            let kernel =
                SimKernel::new("work", |_| {}).arg(block, megabytes as usize, Access::Write);
            device.launch(pair[0], kernel).unwrap();
            if ordered {
                edge(&device, pair[0], pair[1]);
            }
        }
        device.synchronize().unwrap();
        device.simulated_time()
    };
    let (apart, in_row) = (run(5, false), run(5, true));
    assert!(in_row >= one * 4, "{in_row:?}");
    assert!(apart < one * 2 + Duration::from_millis(1), "{apart:?}");
    let off = SimDevice::open(SimConfig::default()).unwrap();
    off.synchronize().unwrap();
    assert_eq!(off.simulated_time(), Duration::ZERO);
}

#[test]
fn devices_and_gates_may_go_in_any_order() {
    for seed in [None, Some(2)] {
        let mut config = SimConfig::default();
        config.seed = seed;
        let device = SimDevice::open(config).unwrap();
        let stream = device.stream_create(0).unwrap();
        let gate = device.hold(stream).unwrap();
        let kept = Arc::clone(&device);
        device.host_fn(stream, Box::new(move || drop(kept))).unwrap();
        drop(device);
        gate.release();
    }
}

#[test]
fn random_use_of_one_stream_by_unordered_threads_loses_nothing() {
    let device = SimDevice::open(SimConfig::default()).unwrap();
    let stream = device.stream_create(0).unwrap();
    let total = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        for id in 0..4 {
            let (device, total) = (&device, &total);
            scope.spawn(move || {
                let mut random = Random::new(id);
                let block = device.alloc(256).unwrap();
                for i in 0..300 {
                    memset(device, block, i as u8, 256, stream);
                    if random.chance(30) {
                        assert_eq!(read(device, block, 256, stream), [i as u8; 256]);
                    }
                    let total = Arc::clone(total);
                    let add = Box::new(move || {
                        total.fetch_add(1, Ordering::Relaxed);
                    });
                    device.host_fn(stream, add).unwrap();
                }
            });
        }
    });
    device.stream_synchronize(stream).unwrap();
    assert_eq!(total.load(Ordering::Relaxed), 1200);
}
