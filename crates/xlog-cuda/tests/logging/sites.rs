//! The call site in the records of allocations.

#![allow(clippy::unwrap_used)]

use std::panic::Location;
use std::sync::Arc;

use crate::support::{Directory, KEYS, ROWS};
use xlog_cuda::device_runtime::{
    AllocTag, DirectCudaResource, InMemorySink, LogAction, LogRecord, LoggingResource,
    RuntimeConfig, StreamId, StreamPool, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, GpuMemoryManager};
use xlog_trace::{Action, Reader, Source};

/// A runtime over a log in memory.
fn logged() -> (Arc<XlogDeviceRuntime>, Arc<InMemorySink>) {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let streams = Arc::new(StreamPool::with_defaults(Arc::clone(&device)));
    let sink = Arc::new(InMemorySink::new());
    let direct = DirectCudaResource::new(Arc::clone(&device), 0);
    let resource = LoggingResource::new(Box::new(direct), sink.clone());
    let runtime = XlogDeviceRuntime::with_resource(device, 0, streams, Box::new(resource));
    (Arc::new(runtime), sink)
}

fn line_of(record: &LogRecord) -> Option<(&'static str, u32)> {
    record.site.map(|site| (site.file(), site.line()))
}

#[track_caller]
fn here() -> (&'static str, u32) {
    (Location::caller().file(), Location::caller().line())
}

#[test]
fn an_allocation_has_the_line_of_its_caller_and_a_free_has_none() {
    let (runtime, sink) = logged();
    let memory = GpuMemoryManager::with_runtime(Arc::clone(&runtime));
    let (typed, at) = (memory.alloc_tagged::<u32>(64, ROWS).unwrap(), here());
    let (raw, raw_at) = (memory.alloc_raw(64).unwrap(), here());
    let (block, block_at) = (runtime.allocate(64, StreamId::DEFAULT, KEYS).unwrap(), here());
    drop((typed, raw));
    runtime.deallocate(block).unwrap();
    let log = sink.snapshot();
    let allocated: Vec<_> = log.iter().filter(|r| r.action == LogAction::Allocate).collect();
    let lines: Vec<_> = allocated.iter().map(|record| line_of(record)).collect();
    assert_eq!(lines, [Some(at), Some(raw_at), Some(block_at)]);
    let freed = log.iter().filter(|record| record.action == LogAction::Deallocate);
    assert!(freed.clone().count() == 3 && freed.clone().all(|record| record.site.is_none()));
}

#[test]
fn a_reservation_names_the_line_that_spends_it() {
    let (runtime, sink) = logged();
    let memory = GpuMemoryManager::with_runtime(runtime);
    let mut reserved = memory.reserve_bytes(4096).unwrap();
    let (_buffer, at) = (reserved.alloc::<u8>(512).unwrap(), here());
    assert_eq!(line_of(&sink.snapshot()[0]), Some(at));
}

#[test]
fn a_call_of_the_resource_itself_does_not_get_the_line_of_an_earlier_call() {
    let (runtime, sink) = logged();
    let block = runtime.allocate(64, StreamId::DEFAULT, ROWS).unwrap();
    let direct = runtime.resource().allocate(64, StreamId::DEFAULT, ROWS).unwrap();
    runtime.deallocate(block).unwrap();
    runtime.deallocate(direct).unwrap();
    let log = sink.snapshot();
    assert!(log[0].site.is_some() && log[1].site.is_none());
}

#[test]
fn a_refused_request_has_its_line_too() {
    let (runtime, sink) = logged();
    let asked = (runtime.allocate(usize::MAX / 2, StreamId::DEFAULT, ROWS).is_err(), here());
    assert!(asked.0);
    let log = sink.snapshot();
    assert!(!log[0].result.is_ok());
    assert_eq!(line_of(&log[0]), Some(asked.1));
}

#[test]
fn files_have_the_line_as_text() {
    let folder = Directory::new();
    for name in ["sites.xtrace", "sites.csv"] {
        let file = folder.file(name);
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let config = RuntimeConfig::default().with_log(&file);
        let runtime = Arc::new(XlogDeviceRuntime::with_config(device, &config).unwrap());
        let memory = GpuMemoryManager::with_runtime(Arc::clone(&runtime));
        let mut lines = Vec::new();
        for _ in 0..3 {
            let (buffer, at) = (memory.alloc_tagged::<u8>(100, AllocTag("rows")).unwrap(), here());
            drop(buffer);
            lines.push(format!("{}:{}", at.0, at.1));
        }
        drop(memory);
        drop(runtime);
        let mut reader = Reader::open(&file).unwrap();
        let mut read = Vec::new();
        while let Some(record) = reader.next_record().unwrap() {
            if record.action() == Action::Allocate {
                read.push(reader.names().text_or_empty(record.site()).to_owned());
            } else {
                assert_eq!(record.site(), None);
            }
        }
        assert_eq!(read, lines, "{name}");
    }
}
