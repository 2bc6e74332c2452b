//! What a stream pool hands out: distinct streams, ids that mean one thing, and never a stream that is still busy.

use std::collections::HashSet;
use std::sync::Arc;

use xlog_cuda::device_runtime::{
    DEFAULT_MAX_STREAMS, StreamId, StreamPool, StreamPoolError, StreamPriority,
};
use xlog_cuda::driver::{Access, CaptureStatus, DriverError};
use xlog_cuda::sim::{Call, Fault, SimKernel};
use xlog_cuda::{CudaDevice, XlogError};
use xlog_testing::{Buffer, for_each_device, for_each_sim, threads};

const BYTES: usize = 4096;

#[test]
fn the_default_stream_is_real_owned_and_one_per_pool() {
    for_each_device(|device| {
        let pools = [(); 2].map(|()| StreamPool::with_defaults(device.clone()));
        let streams = [&pools[0], &pools[1]].map(|pool| pool.resolve(StreamId::DEFAULT).unwrap());
        assert_ne!(streams[0].handle(), streams[1].handle());
        assert_eq!(streams[0].handle(), pools[0].resolve(StreamId::DEFAULT).unwrap().handle());
        for stream in &streams {
            assert_eq!(stream.id(), StreamId::DEFAULT);
            let raw = stream.cu_stream();
            assert_eq!(raw.is_some(), device.sim().is_none());
            assert!(raw.is_none_or(|raw| !raw.is_null() && raw as usize > 2));
            let capture = device.driver().stream_capture(stream.handle()).unwrap();
            assert_eq!(capture, CaptureStatus::None);
            let buffer = Buffer::new(device, BYTES);
            buffer.fill(stream, 6).unwrap();
            assert_eq!(buffer.read(stream).unwrap(), [6; BYTES]);
        }
        assert_eq!(pools[0].non_default_len(), 0);
        assert!(!pools[0].release(StreamId::DEFAULT), "the default stream is never given back");
    });
}

#[test]
fn the_default_stream_first_resolved_by_eight_threads_is_one() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let handles = std::sync::Mutex::new(HashSet::new());
        let bodies = (0..8)
            .map(|_| -> Box<dyn FnOnce() + Send + '_> {
                Box::new(|| {
                    let stream = pool.resolve(StreamId::DEFAULT).unwrap();
                    handles.lock().unwrap().insert(stream.handle());
                })
            })
            .collect();
        threads(device, bodies);
        assert_eq!(handles.lock().unwrap().len(), 1);
    });
}

#[test]
fn ids_of_another_pool_given_back_ids_and_invented_ids_do_not_resolve() {
    for_each_device(|device| {
        let (mine, other) =
            (StreamPool::with_defaults(device.clone()), StreamPool::with_defaults(device.clone()));
        let foreign = other.acquire().unwrap();
        let leased = mine.lease().unwrap();
        let acquired = mine.acquire().unwrap();
        assert!(mine.resolve(acquired).is_some() && mine.resolve(leased.id()).is_some());
        assert!(mine.resolve(foreign).is_none());
        assert!(!mine.release(foreign), "another pool's stream was given back");
        assert!(!mine.release(leased.id()), "a lease's stream was given back behind its back");
        assert!(mine.release(acquired));
        assert!(!mine.release(acquired), "given back twice");
        let gone = leased.id();
        drop(leased);
        for id in [foreign, acquired, gone, StreamId(u32::MAX)] {
            assert!(mine.resolve(id).is_none(), "{id} resolves");
            assert_eq!(mine.try_resolve(id).unwrap_err(), XlogError::UnknownStream { id });
        }
        assert!(other.resolve(foreign).is_some());
        assert_eq!((mine.non_default_len(), other.non_default_len()), (0, 1));
    });
}

#[test]
fn an_unknown_stream_is_refused_by_name() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let message = pool.try_resolve(StreamId(u32::MAX)).unwrap_err().to_string();
        assert!(message.contains("4294967295") && message.contains("accepted"), "{message}");
    });
}

#[test]
fn the_seventeenth_acquire_is_refused_and_works_after_a_release() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        assert_eq!(pool.max_streams(), DEFAULT_MAX_STREAMS);
        let ids: Vec<StreamId> =
            (0..DEFAULT_MAX_STREAMS).map(|_| pool.acquire().unwrap()).collect();
        let handles: HashSet<_> =
            ids.iter().map(|id| pool.resolve(*id).unwrap().handle()).collect();
        assert_eq!(handles.len(), DEFAULT_MAX_STREAMS, "two ids share a driver stream");
        let full = StreamPoolError::Capacity { max: DEFAULT_MAX_STREAMS };
        assert_eq!(pool.acquire(), Err(full.clone()));
        assert_eq!(pool.lease().unwrap_err(), full);
        assert!(full.to_string().contains("16"));
        assert_eq!(pool.non_default_len(), DEFAULT_MAX_STREAMS);
        assert!(pool.release(ids[3]));
        let again = pool.acquire().unwrap();
        assert!(!ids.contains(&again), "an id was issued twice");
        assert!(!ids.contains(&StreamId::DEFAULT));
        assert_eq!(pool.acquire(), Err(full));
    });
}

#[test]
fn a_pool_of_zero_streams_is_a_pool_of_one() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 0);
        assert_eq!(pool.max_streams(), 1);
        let _lease = pool.lease().unwrap();
        assert_eq!(pool.acquire(), Err(StreamPoolError::Capacity { max: 1 }));
    });
}

#[test]
fn every_priority_gives_a_stream_that_works_and_streams_keep_theirs() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let buffer = Buffer::new(device, BYTES);
        let mut handles = HashSet::new();
        for priority in [StreamPriority::High, StreamPriority::Normal, StreamPriority::Low] {
            let stream = pool.lease_with(priority).unwrap();
            buffer.fill(&stream, 1).unwrap();
            assert_eq!(buffer.read(&stream).unwrap(), [1; BYTES]);
            handles.insert(stream.handle());
            let id = pool.acquire_with(priority).unwrap();
            assert!(pool.release(id));
        }
        let properties = device.properties();
        if properties.greatest_priority != properties.least_priority {
            assert!(handles.len() >= 2, "an urgent stream served for a normal one");
        }
    });
}

#[test]
fn a_resolved_stream_outlives_lease_pool_and_device_handle() {
    for_each_device(|device| {
        let device = Arc::new(CudaDevice::open(device.spec()).unwrap());
        let buffer = Buffer::new(&device, BYTES);
        let pool = StreamPool::with_defaults(device.clone());
        let (lease, acquired) = (pool.lease().unwrap(), pool.acquire().unwrap());
        let streams = [
            pool.resolve(lease.id()).unwrap(),
            pool.resolve(acquired).unwrap(),
            pool.resolve(StreamId::DEFAULT).unwrap(),
        ];
        drop(lease);
        drop(pool);
        drop(device);
        for (value, stream) in streams.iter().enumerate() {
            buffer.fill(stream, value as u8).unwrap();
            assert_eq!(buffer.read(stream).unwrap(), [value as u8; BYTES]);
        }
    });
}

#[test]
fn a_lease_outlives_its_pool() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 1);
        let lease = pool.lease().unwrap();
        drop(pool);
        lease.synchronize().unwrap();
    });
}

#[test]
fn launch_sim_runs_on_a_simulated_device_and_is_refused_on_a_gpu() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(device, BYTES);
        let kernel = SimKernel::new("count", |args| {
            for (at, byte) in args.bytes_mut(0).iter_mut().enumerate() {
                *byte = at as u8;
            }
        })
        .arg(buffer.ptr(), BYTES, Access::Write);
        match stream.launch_sim(kernel) {
            Ok(()) => {
                let expected: Vec<u8> = (0..BYTES).map(|at| at as u8).collect();
                assert_eq!(buffer.read(&stream).unwrap(), expected);
            }
            Err(error) => {
                assert!(device.sim().is_none(), "{error}");
                let unsupported = DriverError::Unsupported { call: "launch_sim" };
                assert_eq!(error, XlogError::Driver(unsupported));
            }
        }
    });
}

#[test]
fn a_stream_the_driver_refuses_is_an_error_that_changes_nothing_and_can_be_tried_again() {
    for_each_sim(|device, sim| {
        let pool = StreamPool::new(device.clone(), 1);
        let refuse = || sim.faults().fail_nth(Call::StreamCreate, 1, Fault::Code(999));
        refuse();
        let error = pool.acquire().unwrap_err();
        assert!(matches!(&error, StreamPoolError::ForkFailed(why) if why.contains("999")));
        assert_eq!(pool.non_default_len(), 0);
        let id = pool.acquire().unwrap();
        assert!(pool.release(id));

        refuse();
        assert!(pool.resolve(StreamId::DEFAULT).is_none());
        refuse();
        let error = pool.try_resolve(StreamId::DEFAULT).unwrap_err();
        assert!(matches!(error, XlogError::StreamPool(StreamPoolError::ForkFailed(_))));
        assert!(pool.resolve(StreamId::DEFAULT).is_some());
    });
}
