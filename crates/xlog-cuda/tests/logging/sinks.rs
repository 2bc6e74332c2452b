//! The file sinks: what is in the files, what is counted, and what never reaches an operation.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Directory, KEYS, ROWS, Recycler, STREAM};
use xlog_cuda::device_runtime::logging::{Overflow, RecorderConfig};
use xlog_cuda::device_runtime::{
    BinarySink, CsvSink, DeviceMemoryResource, InMemorySink, LogAction, LogRecord, LoggingResource,
    LoggingSink, NullSink, QueryScope, SinkError,
};
use xlog_trace::{Action, Names, Reader, Record, Source};

fn exercise(resource: &dyn DeviceMemoryResource) {
    let _query = QueryScope::enter(9);
    let rows = resource.allocate(1000, STREAM, ROWS).unwrap();
    let keys = resource.allocate(50, STREAM, KEYS).unwrap();
    resource.deallocate(rows).unwrap();
    resource.reap_pending().unwrap();
    resource.deallocate(keys).unwrap();
}

fn read(path: &std::path::Path) -> (Vec<Record>, Names) {
    let mut reader = Reader::open(path).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        records.push(record);
    }
    (records, reader.names().clone())
}

#[test]
fn files_say_what_the_memory_sink_says() {
    let directory = Directory::new();
    for format in ["csv", "xtrace"] {
        let path = directory.file(format);
        let sink: Arc<dyn LoggingSink> = match format {
            "csv" => Arc::new(CsvSink::create(&path).unwrap()),
            _ => Arc::new(BinarySink::create(&path).unwrap()),
        };
        // Both sinks see the same records.
        struct Both(Arc<dyn LoggingSink>, InMemorySink);
        impl LoggingSink for Both {
            fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
                self.1.emit(record.clone())?;
                self.0.emit(record)
            }
        }
        let both = Arc::new(Both(sink.clone(), InMemorySink::new()));
        let resource = LoggingResource::over(Recycler::default(), both.clone());
        exercise(&resource);
        resource.inner().fails.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(resource.allocate(77, STREAM, ROWS).is_err());
        sink.flush().unwrap();

        let (records, names) = read(&path);
        let due = both.1.snapshot();
        assert_eq!(records.len(), due.len());
        for (record, due) in records.iter().zip(&due) {
            assert_eq!(record.order(), due.order_counter);
            assert_eq!(record.thread(), due.thread_id);
            assert_eq!(record.process(), std::process::id());
            assert_eq!(u128::from(record.time_nanos()), due.timestamp_nanos);
            assert_eq!(record.device(), due.device_ordinal);
            assert_eq!(record.ptr(), due.ptr);
            assert_eq!(record.stream(), due.stream_id.map(|stream| stream.0));
            assert_eq!(record.bytes(), due.bytes.map(|bytes| bytes as u64));
            assert_eq!(record.granted(), due.granted.map(|bytes| bytes as u64));
            assert_eq!(record.alignment(), due.align.map(|align| align as u64));
            assert_eq!(record.generation(), due.generation.map(|generation| generation.0));
            assert_eq!(record.query_id(), due.query_id);
            assert_eq!(u64::from(record.latency_nanos()), due.latency_nanos);
            assert_eq!(record.action().to_string(), due.action.to_string());
            assert_eq!(record.is_failure(), !due.result.is_ok());
            let tag = record.tag().and_then(|tag| names.text(tag));
            assert_eq!(tag, due.tag.map(|tag| tag.0));
        }
        let failure = records.last().unwrap().failure().unwrap();
        assert_eq!(names.text(failure.kind), Some("out_of_budget"));
        assert_eq!(
            names.text(failure.message),
            Some("out of budget: 77 bytes requested, 1 remain")
        );
    }
}

#[test]
fn csv_has_the_promised_columns_first() {
    let directory = Directory::new();
    let path = directory.file("log.csv");
    let sink = Arc::new(CsvSink::create(&path).unwrap());
    exercise(&LoggingResource::over(Recycler::default(), sink.clone()));
    drop(sink);
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines = text.lines();
    let header: Vec<_> = lines.next().unwrap().split(',').collect();
    let due =
        ["thread", "time", "action", "pointer", "bytes", "stream", "device", "tag", "query_id"];
    assert_eq!(header[..9], due);
    let first: Vec<_> = lines.next().unwrap().split(',').collect();
    assert_eq!(first[2], "allocate");
    assert!(first[3].starts_with("0x"));
    assert_eq!(first[4..9], ["1000", "0", "3", "rows", "9"]);
    let nanos: u128 = first[1].parse().unwrap();
    assert!(nanos > 1_600_000_000_000_000_000, "{nanos} is not wall-clock time");
    assert_eq!(lines.count(), 4);
}

#[test]
fn a_file_that_cannot_be_made_is_an_error_that_names_it() {
    let directory = Directory::new();
    let path = directory.file("missing").join("log.csv");
    let error = CsvSink::create(&path).unwrap_err();
    assert!(matches!(&error, SinkError::Io(text) if text.contains("log.csv")), "{error}");
    let config = RecorderConfig::new().with_ring_records(1);
    let error = BinarySink::with_config(directory.file("log"), config).unwrap_err();
    assert!(matches!(&error, SinkError::Refused(text) if text.contains("ring_records")), "{error}");
}

#[test]
fn what_overflows_the_ring_is_counted_exactly() {
    let directory = Directory::new();
    let path = directory.file("log.xtrace");
    let config =
        RecorderConfig::new().with_ring_records(16).with_write_interval(Duration::from_secs(60));
    let sink = Arc::new(BinarySink::with_config(&path, config).unwrap());
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2_000 {
                    let block = resource.allocate(64, STREAM, ROWS).unwrap();
                    resource.deallocate(block).unwrap();
                }
            });
        }
    });
    sink.flush().unwrap();
    let dropped = resource.dropped_records();
    assert!(dropped > 0, "rings of 16 records held 16,000");
    assert_eq!(sink.stats().written + dropped, 16_000);
    drop(resource);
    drop(sink);
    assert_eq!(read(&path).0.len() as u64 + dropped, 16_000);
}

#[test]
fn a_sink_that_waits_for_room_drops_nothing() {
    let directory = Directory::new();
    let path = directory.file("log.xtrace");
    let config = RecorderConfig::new().with_ring_records(16).with_overflow(Overflow::Block);
    let sink = Arc::new(BinarySink::with_config(&path, config).unwrap());
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    for _ in 0..500 {
        let block = resource.allocate(64, STREAM, ROWS).unwrap();
        resource.deallocate(block).unwrap();
    }
    sink.flush().unwrap();
    assert_eq!((resource.dropped_records(), sink.stats().written), (0, 1000));
}

#[test]
fn memory_and_null_sinks_do_as_they_say() {
    let memory = InMemorySink::new();
    assert!(memory.is_empty());
    for order in [2, 1] {
        let mut record = LogRecord::new(LogAction::Allocate, 7);
        record.order_counter = order;
        memory.emit(record).unwrap();
    }
    assert_eq!(memory.len(), 2);
    let orders: Vec<_> = memory.snapshot().iter().map(|record| record.order_counter).collect();
    assert_eq!(orders, [1, 2]);
    memory.clear();
    assert_eq!((memory.len(), memory.dropped_records()), (0, 0));
    NullSink::new().emit(LogRecord::new(LogAction::ReapPending, 0)).unwrap();
}

/// A soak: `XLOG_LOGGING_SOAK=1000000` operations on each of 16 threads, as fast as a writer can keep up.
#[test]
fn sixteen_threads_drop_nothing_while_the_writer_keeps_up() {
    let soak = std::env::var("XLOG_LOGGING_SOAK").ok().map(|text| text.parse::<u64>().unwrap());
    let operations = soak.unwrap_or(4_000);
    let directory = Directory::new();
    let path = directory.file("log.xtrace");
    let sink = Arc::new(BinarySink::create(&path).unwrap());
    let resource = LoggingResource::over(Recycler::default(), sink.clone());
    let started = Instant::now();
    // A ring of a thread that has ended may go to the next one before it is empty; here each has its own.
    let all_begun = std::sync::Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                assert!(operations >= 2);
                let block = resource.allocate(64, STREAM, ROWS).unwrap();
                resource.deallocate(block).unwrap();
                all_begun.wait();
                for pair in 1..operations / 2 {
                    let block = resource.allocate(64, STREAM, ROWS).unwrap();
                    resource.deallocate(block).unwrap();
                    // The writer keeps up with what it is given time for: half a ring at once.
                    if pair % 4096 == 4095 {
                        sink.flush().unwrap();
                    }
                }
            });
        }
    });
    sink.flush().unwrap();
    println!("16 threads x {operations} operations in {:?}: {:?}", started.elapsed(), sink.stats());
    assert_eq!(resource.dropped_records(), 0);
    assert_eq!(sink.stats().written, 16 * operations);
    drop((resource, sink));
    if soak.is_none() {
        let (records, _) = read(&path);
        assert_eq!(records.len() as u64, 16 * operations);
        let allocations = records.iter().filter(|record| record.action() == Action::Allocate);
        assert_eq!(allocations.count() as u64, 8 * operations);
    }
}
