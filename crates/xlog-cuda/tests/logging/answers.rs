//! Every request and its answer is in the log: refusals of the budget, and frees that a reap finished.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::{Directory, KEYS, ROWS};
use xlog_cuda::device_runtime::{
    AsyncCudaResource, BlockId, BlockState, CaptureOptions, DeviceMemoryResource,
    GlobalDeviceBudget, InMemorySink, LogAction, LogRecord, LogResult, LoggingResource,
    RuntimeConfig, ServedBy, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::sim::{Call, Fault};
use xlog_cuda::{CudaDevice, GpuMemoryManager};
use xlog_trace::{Action, Reader, Source, Summary};

const STREAM: StreamId = StreamId::DEFAULT;
const KIB: usize = 1 << 10;

#[test]
fn what_the_budget_refuses_is_in_the_log_with_kind_and_numbers() {
    let folder = Directory::new();
    let file = folder.file("refused.xtrace");
    let config =
        RuntimeConfig::default().with_budget("1MiB".parse().unwrap()).with_log(file.clone());
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let runtime = Arc::new(XlogDeviceRuntime::with_config(device, &config).unwrap());
    let manager = GpuMemoryManager::with_runtime(Arc::clone(&runtime));

    let first = runtime.allocate(512 * KIB, STREAM, ROWS).unwrap();
    runtime.allocate(2048 * KIB, STREAM, KEYS).unwrap_err();
    runtime.allocate(768 * KIB, STREAM, KEYS).unwrap_err();
    manager.reserve_bytes(4096 * KIB).unwrap_err();
    let mut reservation = manager.reserve_bytes(256 * KIB).unwrap();
    let buffer = reservation.alloc::<u8>(256 * KIB).unwrap();
    drop((buffer, reservation));
    runtime.deallocate(first).unwrap();
    drop((manager, runtime));

    let mut reader = Reader::open(&file).unwrap();
    let mut requests = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        if record.action() != Action::Allocate {
            continue;
        }
        let failure = record.failure().map(|failure| {
            let text = |id| reader.names().text_or_empty(Some(id)).to_owned();
            (text(failure.kind), text(failure.message))
        });
        requests.push((record.bytes().unwrap() as usize / KIB, failure));
    }
    let sizes: Vec<usize> = requests.iter().map(|request| request.0).collect();
    assert_eq!(sizes, [512, 2048, 768, 4096, 256]);
    for (size, failure) in &requests {
        match failure {
            None => assert!([512, 256].contains(size), "{size} KiB were refused"),
            Some((kind, message)) => {
                assert_eq!(kind, "out_of_budget");
                assert!(message.contains(&(size * KIB).to_string()), "{message}");
                assert!(message.contains(&(512 * KIB).to_string()), "{message}");
            }
        }
    }
    let summary = Summary::of(&mut Reader::open(&file).unwrap()).unwrap();
    assert_eq!((summary.total.failures, summary.total.live_blocks), (3, 0));
}

#[test]
fn what_a_manager_or_a_capture_refuses_is_in_the_log_too() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let sink = Arc::new(InMemorySink::new());
    let inner = AsyncCudaResource::new(Arc::clone(&device), 0, Arc::clone(&streams));
    let log = LoggingResource::new(Box::new(inner), sink.clone());
    let runtime = Arc::new(XlogDeviceRuntime::with_resource(device, 0, streams, Box::new(log)));

    let manager = GpuMemoryManager::with_runtime(Arc::clone(&runtime));
    let small = manager.clone().with_limit(4 * KIB);
    small.alloc::<u8>(5 * KIB).unwrap_err();
    small.reserve_bytes(6 * KIB).unwrap_err();
    let options = CaptureOptions::default().with_limit(2048 * KIB);
    let graph = runtime.capture_with(STREAM, &options, |scope| {
        runtime.allocate(4096 * KIB, scope.id(), KEYS).unwrap_err();
        Ok(())
    });
    drop(graph.unwrap());

    let refused = |record: &LogRecord| match &record.result {
        LogResult::Err { kind, .. } => Some((record.bytes?, record.stream_id, *kind)),
        LogResult::Ok => None,
    };
    assert_eq!(
        sink.snapshot().iter().filter_map(refused).collect::<Vec<_>>(),
        [
            (5 * KIB, Some(STREAM), "out_of_budget"),
            (6 * KIB, Some(STREAM), "out_of_budget"),
            (4096 * KIB, Some(STREAM), "capture"),
        ]
    );
    assert!(sink.snapshot()[0].site.is_some());
}

fn said(log: &[LogRecord]) -> Vec<(LogAction, bool, Option<u64>)> {
    let ok = |record: &LogRecord| record.result == LogResult::Ok;
    log.iter()
        .map(|record| (record.action, ok(record), record.generation.map(|number| number.0)))
        .collect()
}

#[test]
fn a_free_that_failed_half_way_is_a_free_in_the_log_once_it_is_finished() {
    let device = Arc::new(CudaDevice::open("sim:1").unwrap());
    let pool = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let inner = AsyncCudaResource::new(Arc::clone(&device), 0, pool);
    let budget = GlobalDeviceBudget::new(Box::new(inner), 64 * KIB);
    let sink = Arc::new(InMemorySink::new());
    let resource = LoggingResource::new(Box::new(budget), sink.clone());
    let fail_next_free = || {
        device.sim().unwrap().faults().fail_nth(Call::FreeAsync, 1, Fault::Code(999));
    };

    // A reap finishes it.
    let block = resource.allocate(48 * KIB, STREAM, ROWS).unwrap();
    let (id, first) = (BlockId::from_block(&block), Some(block.generation.0));
    fail_next_free();
    resource.deallocate(block).unwrap_err();
    assert_eq!(resource.block_state(id), BlockState::Retired);
    resource.reap_pending().unwrap();
    assert_eq!(resource.block_state(id), BlockState::Freed);
    let log = sink.snapshot();
    assert_eq!(
        said(&log),
        [
            (LogAction::Allocate, true, first),
            (LogAction::Deallocate, false, first),
            (LogAction::Deallocate, true, first),
            (LogAction::ReapPending, true, None),
        ]
    );
    assert_eq!(
        (log[2].served_by, log[2].ptr, log[2].tag),
        (ServedBy::Reaped, log[0].ptr, Some(ROWS))
    );

    // A request that needs the memory has the budget reap: the free is in the log before the block that follows.
    sink.clear();
    let block = resource.allocate(48 * KIB, STREAM, ROWS).unwrap();
    let second = Some(block.generation.0);
    fail_next_free();
    resource.deallocate(block).unwrap_err();
    let block = resource.allocate(48 * KIB, STREAM, KEYS).unwrap();
    let third = Some(block.generation.0);
    assert_eq!(
        said(&sink.snapshot()),
        [
            (LogAction::Allocate, true, second),
            (LogAction::Deallocate, false, second),
            (LogAction::Deallocate, true, second),
            (LogAction::Allocate, true, third),
        ]
    );

    // A refused free is none, now and later.
    sink.clear();
    let twin = crate::support::twin(&block);
    resource.deallocate(block).unwrap();
    resource.deallocate(twin).unwrap_err();
    resource.reap_pending().unwrap();
    assert_eq!(
        said(&sink.snapshot()),
        [
            (LogAction::Deallocate, true, third),
            (LogAction::Deallocate, false, third),
            (LogAction::ReapPending, true, None),
        ]
    );

    // Each block has its own answer.
    sink.clear();
    let blocks = [KIB, KIB].map(|bytes| resource.allocate(bytes, STREAM, ROWS).unwrap());
    let [failed, freed] = [&blocks[0], &blocks[1]].map(|block| Some(block.generation.0));
    sink.clear();
    fail_next_free();
    let [failing, freeing] = blocks;
    resource.deallocate(failing).unwrap_err();
    resource.deallocate(freeing).unwrap();
    resource.reap_pending().unwrap();
    assert_eq!(
        said(&sink.snapshot()),
        [
            (LogAction::Deallocate, false, failed),
            (LogAction::Deallocate, true, freed),
            (LogAction::Deallocate, true, failed),
            (LogAction::ReapPending, true, None),
        ]
    );
}
