//! Records of the segments that a pool below takes from the device and returns to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::thread_name;

use super::clock::next_order;
use super::{LogAction, LogRecord, LoggingSink, QueryScope, clock};
use crate::device_runtime::resource::{SegmentRange, SegmentWatcher};

/// Logs segments to a sink.
pub(super) struct SegmentLog {
    pub(super) sink: Arc<dyn LoggingSink>,
    pub(super) device_ordinal: u32,
    pub(super) process_id: u32,
    /// Equal to that of the logging resource.
    pub(super) clock_to_unix: u64,
    refused: AtomicU64,
}

impl SegmentLog {
    pub(super) fn new(
        sink: Arc<dyn LoggingSink>,
        device_ordinal: u32,
        process_id: u32,
        clock_to_unix: u64,
    ) -> Self {
        Self { sink, device_ordinal, process_id, clock_to_unix, refused: AtomicU64::new(0) }
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn emit(&self, action: LogAction, segment: SegmentRange, order: u64) {
        let record = LogRecord {
            ptr: Some(segment.ptr),
            bytes: usize::try_from(segment.bytes).ok(),
            thread_id: u64::from(thread_name()),
            order_counter: order,
            timestamp_nanos: u128::from(self.clock_to_unix.wrapping_add(clock::now())),
            query_id: QueryScope::current(),
            process_id: self.process_id,
            ..LogRecord::new(action, self.device_ordinal)
        };
        if self.sink.emit(record).is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl SegmentWatcher for SegmentLog {
    fn taken(&self, segment: SegmentRange) {
        self.emit(LogAction::SegmentTake, segment, next_order());
    }

    fn ticket(&self) -> u64 {
        next_order()
    }

    fn returned(&self, segment: SegmentRange, ticket: u64) {
        self.emit(LogAction::SegmentReturn, segment, ticket);
    }
}
