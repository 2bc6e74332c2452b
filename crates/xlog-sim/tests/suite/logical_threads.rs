//! Logical host threads: replayed by their seed, and a deadlock only where there is one.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{self, Random, devices, read, seeded};
use xlog_driver::{Access, Driver, DriverError, EventHandle, StreamHandle, sync};
use xlog_sim::{SimConfig, SimDevice, SimKernel};

type Body<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Two logical threads that meet in every way they can: a lock held over driver calls, and gates.
fn interplay(seed: u64) -> (u64, Vec<u32>) {
    let device = seeded(seed);
    let log = sync::Mutex::new(Vec::new());
    let streams: Vec<_> = (0..3).map(|_| device.stream_create(0).unwrap()).collect();
    let gate = Mutex::new(Some(device.hold(streams[2]).unwrap()));
    let bodies: Vec<Body<'_>> = (0..3_u32)
        .map(|id| {
            let (device, log, streams, gate) = (&device, &log, &streams, &gate);
            Box::new(move || {
                for round in 0..10 {
                    let mut log = log.lock();
                    device.host_fn(streams[id as usize % 2], Box::new(|| {})).unwrap();
                    device.stream_synchronize(streams[id as usize % 2]).unwrap();
                    log.push(id * 100 + round);
                }
                if id == 0 {
                    device.stream_synchronize(streams[2]).unwrap();
                } else if id == 1 {
                    drop(gate.lock().unwrap().take());
                }
            }) as Body<'_>
        })
        .collect();
    device.run_threads(bodies);
    (device.order_hash(), log.into_inner())
}

#[test]
fn logical_threads_are_replayed_by_their_seed() {
    let mut orders = HashSet::new();
    for seed in 0..30 {
        let once = interplay(seed);
        assert_eq!(once, interplay(seed), "seed {seed}");
        assert_eq!(once.1.len(), 30);
        orders.insert(once.1);
    }
    assert!(orders.len() > 25, "only {} interleavings of 30 seeds", orders.len());
}

#[test]
fn a_deadlock_of_logical_threads_is_proven_not_timed_out() {
    let config = SimConfig::default().with_seed(9).with_patience(Duration::from_secs(3600));
    let device = SimDevice::open(config).unwrap();
    let (a, b) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
    let gates = [device.hold(a).unwrap(), device.hold(b).unwrap()];
    let errors = AtomicUsize::new(0);
    let bodies: Vec<Body<'_>> = [a, b]
        .into_iter()
        .zip(gates.into_iter().rev())
        .map(|(mine, other)| {
            let (device, errors) = (&device, &errors);
            Box::new(move || {
                // Each waits for its own stream before it opens the other's gate.
                if let Err(error) = device.stream_synchronize(mine) {
                    assert!(matches!(error, DriverError::Deadlock { .. }), "{error}");
                    errors.fetch_add(1, Ordering::SeqCst);
                }
                other.release();
            }) as Body<'_>
        })
        .collect();
    device.run_threads(bodies);
    assert_eq!(errors.load(Ordering::SeqCst), 1, "one is told, which lets the other go on");
    device.synchronize().unwrap();
}

#[test]
fn a_lock_held_by_a_thread_that_waits_for_ever_is_a_proven_deadlock_too() {
    let config = SimConfig::default().with_seed(3).with_patience(Duration::from_secs(3600));
    let device = SimDevice::open(config).unwrap();
    let stream = device.stream_create(0).unwrap();
    let gate = device.hold(stream).unwrap();
    let lock = sync::Mutex::new(0);
    let bodies: Vec<Body<'_>> = vec![
        Box::new(|| {
            let mut held = lock.lock();
            assert!(matches!(device.stream_synchronize(stream), Err(DriverError::Deadlock { .. })));
            *held += 1;
        }),
        Box::new(|| {
            device.stream_query(stream).unwrap();
            *lock.lock() += 1;
        }),
    ];
    device.run_threads(bodies);
    assert_eq!(*lock.lock(), 2);
    gate.release();
}

#[test]
fn a_panic_of_a_logical_thread_reaches_the_test_after_all_have_ended() {
    let device = seeded(1);
    let stream = device.stream_create(0).unwrap();
    let done = AtomicUsize::new(0);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let (device, done) = (&device, &done);
        device.run_threads(vec![
            Box::new(|| resume_unwind(Box::new("planned"))),
            Box::new(move || {
                device.stream_synchronize(stream).unwrap();
                done.fetch_add(1, Ordering::SeqCst);
            }),
        ]);
    }));
    assert!(outcome.is_err());
    assert_eq!(done.load(Ordering::SeqCst), 1);
}

#[test]
fn a_panic_keeps_its_payload_on_both_engines() {
    for device in devices() {
        let run = || device.run_threads(vec![Box::new(|| {}), Box::new(|| panic_any(42_u32))]);
        let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(payload.downcast_ref::<u32>(), Some(&42), "{device:?}");
    }
}

#[test]
fn a_thread_that_queues_for_a_lock_given_up_meanwhile_is_no_part_of_a_deadlock() {
    for seed in 0..300 {
        let device = seeded(seed);
        let stream = device.stream_create(0).unwrap();
        let event = device.event_create().unwrap();
        let gate = sync::Mutex::new(Some(device.hold(stream).unwrap()));
        device.event_record(event, stream).unwrap();
        let (device, gate) = (&device, &gate);
        let wait = move || device.event_synchronize(event).unwrap();
        let hold_then_wait = move || {
            let held = gate.lock();
            device.stream_query(stream).unwrap();
            device.stream_query(stream).unwrap();
            drop(held);
            device.event_synchronize(event).unwrap();
        };
        let open = move || drop(gate.lock().take());
        device.run_threads(vec![Box::new(wait), Box::new(hold_then_wait), Box::new(open)]);
    }
}

/// A counter on the device, and who used it last.
struct Counter {
    block: u64,
    last: EventHandle,
    added: u8,
}

/// Threads that add to counters on streams of their own, each counter under its lock; `ordered` threads wait for the
/// last user of a counter.
fn counting(program: u64, device: &SimDevice, ordered: bool) -> Vec<(u64, u8)> {
    let mut random = Random::new(program);
    let threads = 2 + random.below(3);
    let setup = device.stream_create(0).unwrap();
    let counters: Vec<sync::Mutex<Counter>> = (0..1 + random.below(3))
        .map(|_| {
            let (block, last) = (device.alloc(64).unwrap(), device.event_create().unwrap());
            support::memset(device, block, 0, 64, setup);
            sync::Mutex::new(Counter { block, last, added: 0 })
        })
        .collect();
    device.stream_synchronize(setup).unwrap();
    let counters = &counters;
    let bodies = (0..threads)
        .map(|_| {
            let mut random = Random::new(random.next_u64());
            let stream = device.stream_create(0).unwrap();
            Box::new(move || {
                for _ in 0..12 {
                    // Locks are taken in the order of their index, sometimes two at once.
                    let first = random.below(counters.len());
                    let second = first + 1 + random.below(2);
                    let mut held = counters[first].lock();
                    add(device, stream, &mut held, ordered);
                    if random.chance(30) && second < counters.len() {
                        add(device, stream, &mut counters[second].lock(), ordered);
                    }
                    if ordered && random.chance(25) {
                        device.stream_synchronize(stream).unwrap();
                    }
                    if random.chance(15) {
                        // A gate that a host function of another stream opens.
                        let opener = device.stream_create(0).unwrap();
                        let gate = device.hold(stream).unwrap();
                        device.host_fn(opener, Box::new(move || gate.release())).unwrap();
                        // SAFETY: made here, and not used any more.
                        unsafe { device.stream_destroy(opener) }.unwrap();
                    }
                }
            }) as Body<'_>
        })
        .collect();
    device.run_threads(bodies);
    let results = counters.iter().map(|counter| {
        let counter = counter.lock();
        (counter.block, counter.added)
    });
    results.collect()
}

fn add(device: &SimDevice, stream: StreamHandle, counter: &mut Counter, ordered: bool) {
    if ordered {
        device.stream_wait_event(stream, counter.last).unwrap();
    }
    let kernel = SimKernel::new("add", |args| {
        for byte in args.bytes_mut(0) {
            *byte = byte.wrapping_add(1);
        }
    });
    device.launch(stream, kernel.arg(counter.block, 64, Access::ReadWrite)).unwrap();
    device.event_record(counter.last, stream).unwrap();
    counter.added = counter.added.wrapping_add(1);
}

#[test]
fn random_threads_that_share_locks_and_wait_for_each_other_are_silent_and_count_right() {
    for program in 0..60 {
        for device in [seeded(program), seeded(program + 1000)] {
            let counters = counting(program, &device, true);
            device.synchronize().unwrap();
            let reader = device.stream_create(0).unwrap();
            for (block, added) in counters {
                assert_eq!(read(&device, block, 64, reader), [added; 64], "program {program}");
            }
            assert!(device.races().is_empty(), "program {program}: {}", device.races()[0]);
        }
    }
    for program in 0..20 {
        let device = SimDevice::open(SimConfig::default()).unwrap();
        counting(program, &device, true);
        device.synchronize().unwrap();
    }
}

#[test]
fn random_threads_that_share_locks_but_do_not_wait_for_each_other_are_reported() {
    for program in 0..60 {
        for device in [seeded(program), seeded(program + 1000)] {
            counting(program, &device, false);
            assert!(device.synchronize().is_err(), "program {program}: silent");
        }
    }
}

#[test]
fn random_threads_are_replayed_by_their_seed() {
    for program in 0..20 {
        let run = || {
            let device = seeded(program);
            counting(program, &device, true);
            (device.order_hash(), device.faults().total_calls())
        };
        assert_eq!(run(), run(), "program {program}");
    }
}
