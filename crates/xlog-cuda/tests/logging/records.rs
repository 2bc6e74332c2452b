//! What a record says, and that nothing a sink does changes the outcome of an operation.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::support::{KEYS, ROWS, Recycler, STREAM, direct, twin};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::logging::note_path;
use xlog_cuda::device_runtime::{
    Access, AllocRequest, AllocTag, AsyncCudaResource, BlockId, DeviceBlock, DeviceMemoryResource,
    InMemorySink, LogAction, LogRecord, LogResult, LoggingResource, LoggingSink, QueryScope,
    ResourceError, ResourceResult, ServedBy, SinkError, StreamId, StreamPool,
};

fn logged() -> (LoggingResource, Arc<InMemorySink>) {
    let sink = Arc::new(InMemorySink::new());
    (LoggingResource::new(Box::new(direct()), sink.clone()), sink)
}

#[test]
fn a_record_says_what_happened() {
    let (resource, sink) = logged();
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let block = resource.allocate(1000, STREAM, ROWS).unwrap();
    let (ptr, generation, align) = (block.ptr, block.generation, block.align);
    resource.deallocate(block).unwrap();
    resource.reap_pending().unwrap();
    let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();

    let log = sink.snapshot();
    let actions: Vec<String> = log.iter().map(|record| record.action.to_string()).collect();
    assert_eq!(actions, ["allocate", "deallocate", "reap_pending"]);
    for record in &log[..2] {
        assert_eq!(record.device_ordinal, 0);
        assert_eq!(record.stream_id, Some(STREAM));
        assert_eq!(record.ptr, Some(ptr));
        assert_eq!(record.bytes, Some(1000));
        assert_eq!(record.tag, Some(ROWS));
        assert_eq!(record.generation, Some(generation));
    }
    // What was asked for, so that a replay asks for the same; and what the block that came back said.
    assert_eq!((log[0].align, log[1].align), (Some(256), Some(align)));
    assert_eq!((log[0].granted, log[1].granted), (Some(1000), None));
    assert_eq!((log[2].ptr, log[2].stream_id, log[2].tag), (None, None, None));
    for record in &log {
        assert_eq!(record.result, LogResult::Ok);
        assert_eq!(record.thread_id, log[0].thread_id);
        assert_eq!(record.process_id, std::process::id());
        assert_eq!(record.served_by, ServedBy::Unknown);
        // The wall clock may be set a little while a test runs.
        let slack = 1_000_000_000;
        assert!(
            record.timestamp_nanos + slack >= before && record.timestamp_nanos <= after + slack
        );
    }
    assert!(log.windows(2).all(|two| two[0].order_counter < two[1].order_counter));
    assert!(log.windows(2).all(|two| two[0].timestamp_nanos <= two[1].timestamp_nanos));
}

#[test]
fn failures_are_logged_with_kind_and_message() {
    let (resource, sink) = logged();
    assert!(resource.allocate(0, STREAM, ROWS).is_err());
    assert!(
        resource.allocate_request(AllocRequest::new(64, STREAM, KEYS).aligned(3), None).is_err()
    );
    let block = resource.allocate(64, STREAM, ROWS).unwrap();
    let claim = twin(&block);
    resource.deallocate(block).unwrap();
    let refused = resource.deallocate(claim).unwrap_err();

    let log = sink.snapshot();
    let kinds: Vec<_> = log
        .iter()
        .map(|record| match &record.result {
            LogResult::Ok => "ok",
            LogResult::Err { kind, .. } => kind,
        })
        .collect();
    assert_eq!(kinds, ["invalid_request", "invalid_request", "ok", "ok", "use_after_free"]);
    assert_eq!((log[0].bytes, log[0].ptr, log[0].granted), (Some(0), None, None));
    assert_eq!((log[1].align, log[1].tag), (Some(3), Some(KEYS)));
    let LogResult::Err { message, .. } = &log[4].result else { unreachable!() };
    assert_eq!(*message, refused.to_string());
}

/// Refuses what it does not like, and forgets the rest.
struct Picky(AtomicU64);

impl LoggingSink for Picky {
    fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        match record.action {
            LogAction::Allocate => Err(SinkError::Refused("no room".to_owned())),
            LogAction::Deallocate => Err(SinkError::Io("disk full".to_owned())),
            _ => Ok(()),
        }
    }
}

#[test]
fn a_failing_sink_is_counted_and_fails_nothing() {
    let sink = Arc::new(Picky(AtomicU64::new(0)));
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let block = resource.allocate(100, STREAM, ROWS).unwrap();
                    resource.deallocate(block).unwrap();
                }
            });
        }
    });
    resource.reap_pending().unwrap();
    assert_eq!(sink.0.load(Ordering::Relaxed), 4001);
    assert_eq!(resource.dropped_records(), 4000);
    assert_eq!(resource.bytes_outstanding(), 0);
}

#[test]
fn each_answer_is_logged_refusals_included() {
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    let blocks = [10, 20, 30].map(|bytes| resource.allocate(bytes, STREAM, ROWS).unwrap());
    let log = sink.snapshot();
    assert_eq!(log.iter().map(|record| record.bytes.unwrap()).collect::<Vec<_>>(), [10, 20, 30]);
    assert!(log.iter().zip(&blocks).all(|(record, block)| record.ptr == Some(block.ptr)));

    sink.clear();
    assert!(sink.is_empty());
    let [first, second, third] = blocks;
    let stale = twin(&second);
    let wrong = stale.generation;
    let answers = [second, first, stale, third].map(|block| resource.deallocate(block));
    assert_eq!(
        answers,
        [Ok(()), Ok(()), Err(ResourceError::UseAfterFree { generation: wrong }), Ok(())]
    );
    let ended: Vec<bool> = sink.snapshot().iter().map(|record| record.result.is_ok()).collect();
    assert_eq!(ended, [true, true, false, true]);

    sink.clear();
    resource.inner().fails.store(true, Ordering::Relaxed);
    assert!(resource.allocate(10, STREAM, ROWS).is_err());
    let log = sink.snapshot();
    assert_eq!((log.len(), log[0].bytes, log[0].result.is_ok()), (1, Some(10), false));
}

#[test]
fn uses_are_logged_only_when_asked_for() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let pool = Arc::new(StreamPool::with_defaults(device.clone()));
    let other = pool.lease().unwrap();
    for enabled in [false, true] {
        let sink = Arc::new(InMemorySink::new());
        let inner = AsyncCudaResource::new(device.clone(), 0, pool.clone());
        let resource =
            LoggingResource::new(Box::new(inner), sink.clone()).with_use_logging(enabled);
        assert!(resource.supports_block_use_tracking());
        let block = resource.allocate(256, STREAM, ROWS).unwrap();
        let id = BlockId::from_block(&block);
        resource.prepare_block_use(id, other.id(), Access::Write).unwrap();
        resource.finish_block_use(id, other.id(), Access::Write).unwrap();
        resource.record_block_use(&block, other.id()).unwrap();
        assert!(resource.prepare_block_use(id, StreamId(u32::MAX), Access::Read).is_err());
        resource.deallocate(block).unwrap();
        resource.reap_pending().unwrap();

        let log = sink.snapshot();
        let uses: Vec<_> = log
            .iter()
            .filter(|record| matches!(record.action, LogAction::UsePrepare | LogAction::UseFinish))
            .map(|record| (record.action, record.access, record.result.is_ok()))
            .collect();
        let due = [
            (LogAction::UsePrepare, Some(Access::Write), true),
            (LogAction::UseFinish, Some(Access::Write), true),
            (LogAction::UseFinish, None, true),
            (LogAction::UsePrepare, Some(Access::Read), false),
        ];
        assert_eq!(uses, if enabled { due.to_vec() } else { vec![] });
        assert_eq!(log.len(), 3 + uses.len());
    }
}

#[test]
fn query_scopes_nest_and_belong_to_their_thread() {
    let (resource, sink) = logged();
    let allocate = || {
        let block = resource.allocate(64, STREAM, ROWS).unwrap();
        resource.deallocate(block).unwrap();
    };
    allocate();
    let outer = QueryScope::enter(1);
    allocate();
    {
        let _inner = QueryScope::enter(2);
        allocate();
        std::thread::scope(|scope| {
            scope.spawn(allocate);
        });
    }
    allocate();
    // Guards may end in any order: the scopes left open count.
    let later = QueryScope::enter(3);
    drop(outer);
    allocate();
    drop(later);
    allocate();
    let queries: Vec<_> = sink.snapshot().iter().step_by(2).map(|record| record.query_id).collect();
    assert_eq!(queries, [None, Some(1), Some(2), None, Some(1), Some(3), None]);
}

/// Says which path served, as a pool would.
struct Noting(Recycler);

impl DeviceMemoryResource for Noting {
    xlog_testing::decorates!(0);
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes == 128 {
            note_path(ServedBy::Magazine);
        }
        self.0.allocate(bytes, stream, tag)
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.0.deallocate(block)
    }
}

#[test]
fn a_path_is_said_of_its_own_allocation_only() {
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::over(Noting(Recycler::default()), sink.clone());
    for bytes in [128, 256] {
        let block = resource.allocate(bytes, STREAM, ROWS).unwrap();
        resource.deallocate(block).unwrap();
    }
    let paths: Vec<_> = sink.snapshot().iter().map(|record| record.served_by).collect();
    use ServedBy::{Magazine, Unknown};
    assert_eq!(paths, [Magazine, Unknown, Unknown, Unknown]);
}
