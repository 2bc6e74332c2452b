//! One stream runs in order; two streams are ordered where an event says so, and only there.

use std::sync::Arc;

use xlog_cuda::device_runtime::{StreamLease, StreamPool};
use xlog_cuda::{CudaDevice, XlogError};
use xlog_testing::{Buffer, WatchedGate, for_each_device, for_each_sim, pattern, threads};

const BYTES: usize = 64 << 10;

#[test]
fn work_of_one_stream_runs_in_the_order_it_was_queued() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let (a, b) = (Buffer::new(device, BYTES), Buffer::new(device, BYTES));
        let gate = stream.hold().unwrap();
        for round in 0..50 {
            a.fill(&stream, 0xff).unwrap();
            a.write(&stream, &pattern(BYTES, round)).unwrap();
            a.copy_to(&stream, &b).unwrap();
            a.fill(&stream, 0).unwrap();
        }
        gate.release();
        assert_eq!(b.read(&stream).unwrap(), pattern(BYTES, 49));
        assert_eq!(a.read(&stream).unwrap(), [0; BYTES]);
    });
}

#[test]
fn wait_for_orders_a_reader_after_a_writer_on_another_stream() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let (writer, reader) = (pool.lease().unwrap(), pool.lease().unwrap());
        let (source, target) = (Buffer::new(device, BYTES), Buffer::new(device, BYTES));
        source.fill(&writer, 0).unwrap();
        let gate = WatchedGate::new(writer.hold().unwrap());
        source.write(&writer, &pattern(BYTES, 5)).unwrap();
        reader.wait_for(&writer).unwrap();
        source.copy_to(&reader, &target).unwrap();
        assert!(!reader.query().unwrap(), "the reader did not wait for the held writer");
        gate.release();
        assert_eq!(target.read(&reader).unwrap(), pattern(BYTES, 5));
    });
}

#[test]
fn a_token_passed_around_a_ring_of_streams_arrives_intact() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 5);
        let streams: Vec<StreamLease> = (0..5).map(|_| pool.lease().unwrap()).collect();
        let cells: Vec<Buffer> = (0..5).map(|_| Buffer::new(device, BYTES)).collect();
        cells[0].write(&streams[0], &pattern(BYTES, 77)).unwrap();
        for step in 0..40 {
            let (from, to) = (step % 5, (step + 1) % 5);
            streams[to].wait_for(&streams[from]).unwrap();
            cells[from].copy_to(&streams[to], &cells[to]).unwrap();
            cells[from].fill(&streams[to], 0xdd).unwrap();
        }
        assert_eq!(cells[0].read(&streams[0]).unwrap(), pattern(BYTES, 77));
    });
}

#[test]
fn wait_for_itself_is_no_deadlock() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        stream.wait_for(&stream).unwrap();
        stream.synchronize().unwrap();
    });
}

#[test]
fn streams_of_two_open_devices_work_apart_and_refuse_to_wait_for_each_other() {
    for_each_device(|first| {
        let second = Arc::new(CudaDevice::open(first.spec()).unwrap());
        let (pool_a, pool_b) =
            (StreamPool::with_defaults(first.clone()), StreamPool::with_defaults(second.clone()));
        let (a, b) = (pool_a.lease().unwrap(), pool_b.lease().unwrap());
        let (left, right) = (Buffer::new(first, BYTES), Buffer::new(&second, BYTES));
        left.fill(&a, 1).unwrap();
        right.fill(&b, 2).unwrap();
        assert_eq!(left.read(&a).unwrap(), [1; BYTES]);
        assert_eq!(right.read(&b).unwrap(), [2; BYTES]);
        let error = a.wait_for(&b).unwrap_err();
        assert!(matches!(error, XlogError::DifferentDevices { .. }), "{error:?}");
        assert!(error.to_string().contains(first.spec()), "{error}");
    });
}

#[test]
fn streams_used_from_eight_threads_keep_their_bytes() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 8);
        let bodies = (0..8_u64)
            .map(|thread| -> Box<dyn FnOnce() + Send + '_> {
                let pool = &pool;
                Box::new(move || {
                    let source = Buffer::new(device, BYTES);
                    let target = Buffer::new(device, BYTES);
                    for round in 0..8 {
                        let stream = pool.lease().unwrap();
                        let bytes = pattern(BYTES, thread << 32 | round);
                        source.write(&stream, &bytes).unwrap();
                        source.copy_to(&stream, &target).unwrap();
                        assert_eq!(target.read(&stream).unwrap(), bytes);
                    }
                })
            })
            .collect();
        threads(device, bodies);
        assert_eq!(pool.non_default_len(), 0);
    });
}

#[test]
fn one_stream_shared_by_eight_threads_takes_all_their_work() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.default_stream().unwrap();
        let buffers: Vec<Buffer> = (0..8).map(|_| Buffer::new(device, BYTES)).collect();
        let bodies = buffers
            .iter()
            .enumerate()
            .map(|(thread, buffer)| -> Box<dyn FnOnce() + Send + '_> {
                let stream = &stream;
                Box::new(move || {
                    for round in 0..10 {
                        buffer.fill(stream, (thread * 16 + round) as u8).unwrap();
                    }
                })
            })
            .collect();
        threads(device, bodies);
        for (thread, buffer) in buffers.iter().enumerate() {
            assert_eq!(buffer.read(&stream).unwrap(), [(thread * 16 + 9) as u8; BYTES]);
        }
    });
}

#[test]
fn an_event_never_recorded_is_no_wait() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let driver = device.driver();
        let event = driver.event_create().unwrap();
        assert!(driver.event_query(event).unwrap());
        driver.stream_wait_event(stream.handle(), event).unwrap();
        stream.synchronize().unwrap();
        driver.event_synchronize(event).unwrap();
        // SAFETY: made here, and not used any more.
        unsafe { driver.event_destroy(event) }.unwrap();
    });
}

#[test]
fn an_event_recorded_again_forgets_its_first_record_but_not_who_waited_for_it() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let leases: Vec<StreamLease> = (0..4).map(|_| pool.lease().unwrap()).collect();
        let [done, held, early, late] = &leases[..] else { unreachable!() };
        let driver = device.driver();
        let event = driver.event_create().unwrap();

        driver.event_record(event, done.handle()).unwrap();
        driver.stream_wait_event(early.handle(), event).unwrap();
        let gate = WatchedGate::new(held.hold().unwrap());
        driver.event_record(event, held.handle()).unwrap();
        driver.stream_wait_event(late.handle(), event).unwrap();

        early.synchronize().unwrap();
        assert!(!driver.event_query(event).unwrap(), "the second record is pending");
        assert!(!late.query().unwrap(), "the late stream waits for the second record");
        gate.release();
        late.synchronize().unwrap();
        assert!(driver.event_query(event).unwrap());
        // SAFETY: made here, and not used any more.
        unsafe { driver.event_destroy(event) }.unwrap();
    });
}

#[test]
fn a_missing_wait_is_reported_with_both_stream_ids() {
    for_each_sim(|device, _| {
        let pool = StreamPool::with_defaults(device.clone());
        let (writer, reader) = (pool.lease().unwrap(), pool.lease().unwrap());
        let (source, target) = (Buffer::new(device, BYTES), Buffer::new(device, BYTES));
        source.fill(&writer, 1).unwrap();
        source.copy_to(&reader, &target).unwrap();
        let failed = [reader.synchronize(), writer.synchronize()];
        assert!(failed.iter().all(Result::is_err), "a race must fail both streams: {failed:?}");
        let races = device.races();
        assert_eq!(races.len(), 1, "{races:#?}");
        let text = races[0].to_string();
        for id in [writer.id(), reader.id()] {
            assert!(text.contains(&id.to_string()), "{text} does not name {id}");
        }
    });
}
