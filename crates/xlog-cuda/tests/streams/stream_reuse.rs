//! Which driver stream serves the next lease: never one that is still busy while another can be had, and never too many.

use std::collections::HashSet;

use xlog_cuda::device_runtime::{
    StreamId, StreamLease, StreamPool, StreamPoolError, StreamPriority,
};
use xlog_cuda::sim::{Call, Fault};
use xlog_testing::{Buffer, WatchedGate, for_each_device, for_each_sim, threads};

const BYTES: usize = 4096;

#[test]
fn ten_thousand_leases_need_few_driver_streams_and_never_repeat_an_id() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 4);
        let buffer = Buffer::new(device, BYTES);
        let (mut ids, mut handles) = (HashSet::new(), HashSet::new());
        let first = pool.lease().unwrap().stream().clone();
        for round in 0..10_000 {
            let lease = pool.lease().unwrap();
            if round % 16 == 0 {
                lease.wait_for(&first).unwrap();
                buffer.fill(&lease, round as u8).unwrap();
                first.wait_for(&lease).unwrap();
            }
            assert!(ids.insert(lease.id()), "{} was issued twice", lease.id());
            handles.insert(lease.handle());
        }
        assert!(handles.len() <= 2 * pool.max_streams(), "{} driver streams", handles.len());
        assert_eq!(pool.non_default_len(), 0);
        assert!(!ids.contains(&StreamId::DEFAULT) && !ids.contains(&StreamId(u32::MAX)));
    });
}

#[test]
fn an_idle_stream_given_back_serves_the_next_lease() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 4);
        let handle = pool.lease().unwrap().handle();
        for _ in 0..5 {
            assert_eq!(pool.lease().unwrap().handle(), handle, "a driver stream too many");
        }
    });
}

#[test]
fn a_busy_stream_given_back_does_not_serve_the_next_lease() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 2);
        let (behind, beside) = (Buffer::new(device, BYTES), Buffer::new(device, BYTES));
        let lease = pool.lease().unwrap();
        let busy = lease.handle();
        let gate = WatchedGate::new(lease.hold().unwrap());
        behind.fill(&lease, 1).unwrap();
        drop(lease);

        let next = pool.lease().unwrap();
        assert_ne!(next.handle(), busy, "the lease queues behind a stranger's gate");
        beside.fill(&next, 2).unwrap();
        assert_eq!(beside.read(&next).unwrap(), [2; BYTES]);

        gate.release();
        device.synchronize().unwrap();
        assert_eq!(behind.read(&next).unwrap(), [1; BYTES]);
        assert_eq!(pool.lease().unwrap().handle(), busy, "now it is idle");
    });
}

#[test]
fn a_stream_somebody_still_holds_does_not_serve_the_next_lease() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 2);
        let kept = pool.lease().unwrap().stream().clone();
        let next = pool.lease().unwrap();
        assert_ne!(next.handle(), kept.handle());
        let handle = kept.handle();
        drop((kept, next));
        assert_eq!(pool.lease().unwrap().handle(), handle);
    });
}

#[test]
fn beyond_twice_the_maximum_the_first_given_back_is_reused_in_its_own_order() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 1);
        let buffer = Buffer::new(device, BYTES);
        let hold = || {
            let lease = pool.lease().unwrap();
            let gate = WatchedGate::new(lease.hold().unwrap());
            (lease.handle(), gate)
        };
        let ((first, gate), (second, other_gate)) = (hold(), hold());
        assert_ne!(first, second);
        let third = pool.lease().unwrap();
        assert_eq!(third.handle(), first, "a third driver stream, or not the oldest");
        buffer.fill(&third, 5).unwrap();
        assert!(!third.query().unwrap());
        gate.release();
        assert_eq!(buffer.read(&third).unwrap(), [5; BYTES]);
        other_gate.release();
    });
}

#[test]
fn a_busy_stream_of_another_priority_makes_room_without_losing_its_work() {
    for_each_device(|device| {
        let properties = device.properties();
        if properties.greatest_priority == properties.least_priority {
            return;
        }
        let pool = StreamPool::new(device.clone(), 1);
        let buffers = [(); 2].map(|()| Buffer::new(device, BYTES));
        let gates: Vec<WatchedGate> = buffers
            .iter()
            .map(|buffer| {
                let lease = pool.lease().unwrap();
                let gate = WatchedGate::new(lease.hold().unwrap());
                buffer.fill(&lease, 7).unwrap();
                gate
            })
            .collect();
        let urgent = pool.lease_with(StreamPriority::High).unwrap();
        urgent.synchronize().unwrap();
        gates.into_iter().for_each(WatchedGate::release);
        device.synchronize().unwrap();
        for buffer in &buffers {
            assert_eq!(buffer.read(&urgent).unwrap(), [7; BYTES]);
        }
    });
}

#[test]
fn work_queued_by_a_lease_runs_after_lease_and_pool_are_gone() {
    for_each_device(|device| {
        let buffer = Buffer::new(device, BYTES);
        let pool = StreamPool::new(device.clone(), 1);
        let lease = pool.lease().unwrap();
        let gate = lease.hold().unwrap();
        buffer.fill(&lease, 0x77).unwrap();
        drop(lease);
        drop(pool);
        gate.release();
        device.synchronize().unwrap();
        let reader = StreamPool::new(device.clone(), 1);
        assert_eq!(buffer.read(&reader.lease().unwrap()).unwrap(), [0x77; BYTES]);
    });
}

#[test]
fn eight_threads_never_have_more_streams_out_than_the_pool_allows() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 3);
        let out = std::sync::Mutex::new(HashSet::new());
        let bodies = (0..8)
            .map(|_| -> Box<dyn FnOnce() + Send + '_> {
                Box::new(|| {
                    for _ in 0..100 {
                        match pool.lease() {
                            Ok(lease) => visit(&out, &lease),
                            Err(error) => {
                                assert_eq!(error, StreamPoolError::Capacity { max: 3 });
                                std::thread::yield_now();
                            }
                        }
                    }
                })
            })
            .collect();
        threads(device, bodies);
        assert_eq!(pool.non_default_len(), 0);
        assert!(pool.lease().is_ok());

        fn visit(out: &std::sync::Mutex<HashSet<u64>>, lease: &StreamLease) {
            let handle = lease.handle().number();
            {
                let mut out = out.lock().unwrap();
                assert!(out.insert(handle), "two leases on one idle driver stream");
                assert!(out.len() <= 3);
            }
            lease.query().unwrap();
            out.lock().unwrap().remove(&handle);
        }
    });
}

#[test]
fn a_stream_that_cannot_be_asked_whether_it_is_done_is_not_reused() {
    for_each_sim(|device, sim| {
        let pool = StreamPool::new(device.clone(), 1);
        let handle = pool.lease().unwrap().handle();
        sim.faults().fail_nth(Call::StreamIsIdle, 1, Fault::Code(999));
        assert_ne!(pool.lease().unwrap().handle(), handle);
    });
}

#[test]
fn a_pool_gives_all_its_driver_streams_back() {
    for_each_sim(|device, sim| {
        let pool = StreamPool::new(device.clone(), 4);
        let leases: Vec<_> = (0..4).map(|_| pool.lease().unwrap()).collect();
        let kept = leases[0].stream().clone();
        let _ = pool.acquire();
        pool.default_stream().unwrap();
        drop(leases);
        drop(pool);
        let made = sim.faults().calls(Call::StreamCreate);
        assert_eq!(made, 5);
        assert_eq!(sim.faults().calls(Call::StreamDestroy), made - 1, "one handle is left");
        drop(kept);
        assert_eq!(sim.faults().calls(Call::StreamDestroy), made);
    });
}

#[test]
fn streams_the_driver_refused_do_not_count_as_made() {
    for_each_sim(|device, sim| {
        let pool = StreamPool::new(device.clone(), 1);
        for _ in 0..5 {
            sim.faults().fail_nth(Call::StreamCreate, 1, Fault::Code(999));
            assert!(pool.lease().is_err());
        }
        let lease = pool.lease().unwrap();
        let busy = lease.handle();
        let gate = WatchedGate::new(lease.hold().unwrap());
        drop(lease);
        assert_ne!(pool.lease().unwrap().handle(), busy, "there is room for a second stream");
        gate.release();
    });
}
