//! Streams awaited by tasks: on tokio, and on an executor that has one thread and no reactor.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use xlog_cuda::device_runtime::{
    AsyncCudaResource, InMemorySink, LoggingResource, QueryScope, StreamLease, StreamPool,
};
use xlog_cuda::prelude::*;
use xlog_testing::{Buffer, WatchedGate, for_each_device, for_each_sim};

type Task<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

struct Unpark {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Runs tasks on this thread, each only after it was woken.
fn run_here(tasks: Vec<Task<'_>>) {
    let wake = || Arc::new(Unpark { thread: thread::current(), is_woken: AtomicBool::new(true) });
    let mut tasks: Vec<_> = tasks.into_iter().map(|task| (task, wake())).collect();
    while !tasks.is_empty() {
        let mut is_idle = true;
        tasks.retain_mut(|(task, woken)| {
            if !woken.is_woken.swap(false, Ordering::AcqRel) {
                return true;
            }
            is_idle = false;
            let waker = Waker::from(woken.clone());
            task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
        });
        if is_idle {
            thread::park();
        }
    }
}

fn on_tokio(tasks: Vec<Task<'static>>, threads: usize) {
    let mut builder = match threads {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let executor = builder.worker_threads(threads.max(1)).build().unwrap();
    let tasks: Vec<_> = tasks.into_iter().map(|task| executor.spawn(task)).collect();
    executor.block_on(async {
        for task in tasks {
            task.await.unwrap();
        }
    });
}

fn runtime(device: &Arc<CudaDevice>) -> Arc<XlogDeviceRuntime> {
    Arc::new(XlogDeviceRuntime::with_config(device.clone(), &RuntimeConfig::default()).unwrap())
}

/// 40 tasks for the 16 streams of a runtime; each verifies its bytes and counts itself.
fn forty_tasks(runtime: &Arc<XlogDeviceRuntime>, done: &Arc<AtomicUsize>) -> Vec<Task<'static>> {
    assert_eq!(runtime.stream_pool().max_streams(), 16);
    let task = |number: u32| -> Task<'static> {
        let (runtime, done) = (runtime.clone(), done.clone());
        Box::pin(async move {
            let stream = runtime.stream_pool().lease_async().await.unwrap();
            let memory = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(stream.id());
            let rows = memory.alloc_from(&[number; 1000]).unwrap();
            stream.done().await.unwrap();
            let mut copy = memory.alloc_zeroed::<u32>(1000).unwrap();
            copy.copy_from(&rows).unwrap();
            stream.done().await.unwrap();
            assert!(stream.query().unwrap());
            assert_eq!(copy.to_vec().unwrap(), [number; 1000]);
            done.fetch_add(1, Ordering::Relaxed);
        })
    };
    (0..40).map(task).collect()
}

#[test]
fn forty_tasks_on_sixteen_streams_wait_instead_of_failing() {
    for_each_device(|device| {
        let runtime = runtime(device);
        let done = Arc::new(AtomicUsize::new(0));
        run_here(forty_tasks(&runtime, &done));
        on_tokio(forty_tasks(&runtime, &done), 0);
        assert_eq!(done.load(Ordering::Relaxed), 80);
        assert_eq!(runtime.stream_pool().non_default_len(), 0);
        assert!(device.races().is_empty());
    });
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let (runtime, done) = (runtime(&device), Arc::new(AtomicUsize::new(0)));
    on_tokio(forty_tasks(&runtime, &done), 4);
    assert_eq!(done.load(Ordering::Relaxed), 40);
    assert!(device.races().is_empty());
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_stream_is_done_after_the_work_queued_before_the_call_and_not_earlier() {
    for_each_device(|device| {
        let pool = StreamPool::with_defaults(device.clone());
        let stream = pool.lease().unwrap();
        let first = WatchedGate::new(stream.hold().unwrap());
        let mut done = pin!(stream.done());
        let second = WatchedGate::new(stream.hold().unwrap());
        assert!(poll_once(done.as_mut()).is_pending());
        drop(stream.done()); // cancels only the wait
        first.release();
        run_here(vec![Box::pin(async { done.as_mut().await.unwrap() })]);
        assert!(poll_once(pin!(stream.done())).is_pending(), "the second gate is closed");
        second.release();
        run_here(vec![Box::pin(async { stream.done().await.unwrap() })]);
        assert!(stream.query().unwrap());
    });
}

#[test]
fn a_race_is_an_error_of_the_awaited_stream() {
    for_each_sim(|device, _| {
        let pool = StreamPool::with_defaults(device.clone());
        let (a, b) = (pool.lease().unwrap(), pool.lease().unwrap());
        let buffer = Buffer::new(device, 64);
        buffer.fill(&a, 1).unwrap();
        buffer.fill(&b, 2).unwrap();
        let failed = Arc::new(AtomicBool::new(false));
        run_here(vec![Box::pin(async {
            let outcomes = [a.done().await, b.done().await];
            failed.store(outcomes.iter().any(Result::is_err), Ordering::Relaxed);
        })]);
        assert!(failed.load(Ordering::Relaxed));
        let _ = (a.synchronize(), b.synchronize());
    });
}

#[test]
fn a_waiting_task_that_is_dropped_takes_no_stream_and_no_wake_from_another() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 1);
        let only = pool.lease().unwrap();
        let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(pool.lease_async())).collect();
        for lease in &mut waiting {
            assert!(poll_once(lease.as_mut()).is_pending());
        }
        drop(waiting);
        let taken: std::sync::Mutex<Option<StreamLease>> = std::sync::Mutex::new(None);
        let mut only = Some(only);
        run_here(vec![
            Box::pin(async { *taken.lock().unwrap() = Some(pool.lease_async().await.unwrap()) }),
            Box::pin(async { drop(only.take()) }),
        ]);
        assert!(taken.lock().unwrap().is_some());
        assert_eq!(pool.non_default_len(), 1);
    });
}

/// Counts its wakes, and panics in each if it is to.
#[derive(Default)]
struct Counting {
    panics: bool,
    wakes: AtomicUsize,
}

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "the waker panics");
    }
}

#[test]
fn a_waiting_task_that_is_dropped_leaves_no_waker_behind() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 1);
        let only = pool.lease().unwrap();
        let task = Arc::new(Counting::default());
        for _ in 0..100 {
            let waker = Waker::from(task.clone());
            let mut lease = Box::pin(pool.lease_async());
            for _ in 0..3 {
                let polled = lease.as_mut().poll(&mut Context::from_waker(&waker));
                assert!(polled.is_pending());
            }
            assert_eq!(Arc::strong_count(&task), 3, "one for the waker, one for the wait");
            drop((lease, waker));
            assert_eq!(Arc::strong_count(&task), 1, "the pool keeps a waker of a dropped task");
        }
        drop(only);
        assert_eq!(task.wakes.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_waker_that_panics_keeps_no_other_task_asleep_and_the_lease_is_dropped() {
    for_each_device(|device| {
        let pool = StreamPool::new(device.clone(), 1);
        let only = pool.lease().unwrap();
        let tasks = [true, false, true, false]
            .map(|panics| Arc::new(Counting { panics, ..Counting::default() }));
        let mut leases = Vec::new();
        for task in &tasks {
            let mut lease = Box::pin(pool.lease_async());
            let waker = Waker::from(task.clone());
            assert!(lease.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            leases.push(lease);
        }
        drop(only);
        assert!(tasks.iter().all(|task| task.wakes.load(Ordering::SeqCst) == 1));
        assert_eq!(pool.non_default_len(), 0);
    });
}

#[test]
fn a_query_scope_follows_its_future_and_no_other_task() {
    for_each_device(|device| {
        let (ordinal, streams) =
            (device.ordinal(), Arc::new(StreamPool::with_defaults(device.clone())));
        let resource = AsyncCudaResource::new(device.clone(), ordinal, streams.clone());
        let sink = Arc::new(InMemorySink::new());
        let logged = LoggingResource::new(Box::new(resource), sink.clone());
        let runtime =
            XlogDeviceRuntime::with_resource(device.clone(), ordinal, streams, Box::new(logged));
        let memory = GpuMemoryManager::with_runtime(Arc::new(runtime));
        let query = |id: u64| -> Task<'_> {
            let memory = &memory;
            Box::pin(QueryScope::follow(id, async move {
                for _ in 0..3 {
                    let stream = memory.runtime().stream_pool().lease_async().await.unwrap();
                    let bytes = memory.on_stream(stream.id()).alloc::<u8>(id as usize).unwrap();
                    stream.done().await.unwrap();
                    assert_eq!(QueryScope::current(), Some(id));
                    drop(bytes);
                }
            }))
        };
        run_here(vec![query(100), query(200)]);
        assert_eq!(QueryScope::current(), None);
        for record in sink.snapshot() {
            if let Some(bytes) = record.bytes {
                assert_eq!(record.query_id, Some(bytes as u64), "{record:?}");
            }
        }
        assert_eq!(sink.len(), 12);
    });
}
