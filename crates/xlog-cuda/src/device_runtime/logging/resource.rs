//! The decorator that logs every operation of the resource below.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use xlog_driver::sync::thread_name;

use super::clock;
use super::clock::next_order;
use super::query::{begin_logging, reset_path};
use super::segments::SegmentLog;
use super::site::current_site;
use super::stack::StackSampler;
use super::unfinished::UnfinishedFrees;
use super::{LogAction, LogRecord, LogResult, LoggingSink, QueryScope, ServedBy};
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    ResourceError, ResourceResult, SegmentWatcher, StreamId, finish_one_by_one, forward_plain,
};
use crate::device_runtime::statistics::Backtraces;

/// The begin of a call by [`clock::now`], and its duration.
#[derive(Clone, Copy)]
struct Call {
    began: u64,
    took: u64,
}

impl Call {
    /// Returns a call that began at `start` and ends now.
    #[inline(always)]
    fn ended(start: u64) -> Self {
        Self { began: start, took: clock::now().saturating_sub(start) }
    }
}

/// Logs every operation of the resource below.
///
/// Allocations, frees and [`reap_pending`](DeviceMemoryResource::reap_pending) give one record each, failures included. Uses of blocks
/// are logged on request ([`with_use_logging`](Self::with_use_logging)). All calls are forwarded; a sink cannot change their outcome.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, InMemorySink, LogAction, LoggingResource, StreamId,
/// };
///
/// let sink = Arc::new(InMemorySink::new());
/// let direct = DirectCudaResource::new(Arc::new(CudaDevice::open("sim")?), 0);
/// let resource = LoggingResource::new(Box::new(direct), sink.clone());
/// let block = resource.allocate(100, StreamId::DEFAULT, AllocTag("rows"))?;
/// resource.deallocate(block)?;
///
/// let log = sink.snapshot();
/// assert_eq!((log[0].action, log[0].bytes), (LogAction::Allocate, Some(100)));
/// assert_eq!((log[1].action, log[1].ptr), (LogAction::Deallocate, log[0].ptr));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LoggingResource<R = Box<dyn DeviceMemoryResource + Send + Sync>> {
    inner: R,
    sink: Arc<dyn LoggingSink>,
    logs_uses: bool,
    stacks: StackSampler,
    device_ordinal: u32,
    process_id: u32,
    /// The offset of the wall clock from the monotonic clock at creation. Records have monotonic times plus this.
    clock_to_unix: u64,
    unfinished: UnfinishedFrees,
    refused: AtomicU64,
    /// Dropped after the resource below, whose drop returns its segments.
    segments: Option<Arc<SegmentLog>>,
}

impl LoggingResource {
    /// Logs the operations of `inner` to `sink`.
    #[must_use]
    pub fn new(
        inner: Box<dyn DeviceMemoryResource + Send + Sync>,
        sink: Arc<dyn LoggingSink>,
    ) -> Self {
        Self::over(inner, sink)
    }
}

impl<R: DeviceMemoryResource> LoggingResource<R> {
    /// [`LoggingResource::new`] over a resource of known type, called without indirection.
    #[must_use]
    pub fn over(inner: R, sink: Arc<dyn LoggingSink>) -> Self {
        begin_logging();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        Self {
            device_ordinal: inner.device_ordinal(),
            inner,
            sink,
            logs_uses: false,
            stacks: StackSampler::default(),
            process_id: std::process::id(),
            clock_to_unix: unix.wrapping_sub(clock::now()),
            unfinished: UnfinishedFrees::default(),
            refused: AtomicU64::new(0),
            segments: None,
        }
    }

    xlog_base::setters! {
        /// Sets whether uses of blocks (prepare, finish, record) are logged too; false by default.
        with_use_logging(enabled: bool) { logs_uses: enabled }
        /// Sets which allocations are logged with the stack of their caller; none by default. `Sampled(n)` counts over all threads.
        ///
        /// Recording a stack takes microseconds. The writer thread resolves it.
        with_stacks(stacks: Backtraces) { stacks: StackSampler::new(stacks) }
    }

    /// Sets whether the segments that a pool below takes from the device and returns are logged too; false by default.
    ///
    /// Segments that the pool holds already are logged as taken now.
    #[must_use]
    pub fn with_segment_logging(mut self, enabled: bool) -> Self {
        self.segments = enabled.then(|| {
            let Self { sink, device_ordinal, process_id, clock_to_unix, .. } = &self;
            let log = SegmentLog::new(sink.clone(), *device_ordinal, *process_id, *clock_to_unix);
            let log = Arc::new(log);
            let watcher: Arc<dyn SegmentWatcher> = log.clone();
            self.inner.watch_segments(&Arc::downgrade(&watcher));
            log
        });
        self
    }

    /// The number of records that the sink refused or lost.
    ///
    /// It is exact after the operations and, for sinks with a writer thread, a flush. It includes lost records of other resources that
    /// share the sink.
    pub fn dropped_records(&self) -> u64 {
        let segments = self.segments.as_ref().map_or(0, |segments| segments.refused());
        let refused = self.refused.load(Ordering::Relaxed).saturating_add(segments);
        refused.saturating_add(self.sink.dropped_records())
    }

    /// The sink.
    pub fn sink(&self) -> &Arc<dyn LoggingSink> {
        &self.sink
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Starts the record of a successful call, without a block.
    #[inline(always)]
    fn record(&self, action: LogAction, order: u64, call: Call) -> LogRecord {
        LogRecord {
            thread_id: u64::from(thread_name()),
            order_counter: order,
            timestamp_nanos: u128::from(self.clock_to_unix.wrapping_add(call.began)),
            query_id: QueryScope::current(),
            latency_nanos: call.took,
            process_id: self.process_id,
            ..LogRecord::new(action, self.device_ordinal)
        }
    }

    /// Makes the record of a free, with the block as the caller passed it.
    #[inline(always)]
    fn free_record(&self, block: &DeviceBlock, order: u64, call: Call) -> LogRecord {
        LogRecord {
            stream_id: Some(block.alloc_stream),
            ptr: Some(block.ptr),
            generation: Some(block.generation),
            bytes: Some(block.bytes),
            tag: Some(block.tag),
            align: Some(block.align),
            ..self.record(LogAction::Deallocate, order, call)
        }
    }

    #[inline(always)]
    fn emit(&self, record: LogRecord) {
        if self.sink.emit(record).is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cold]
    #[inline(never)]
    fn emit_failure(&self, mut record: LogRecord, error: &ResourceError) {
        record.result = LogResult::failed(error);
        self.emit(record);
    }

    /// Emits a record with the outcome of `result`.
    #[inline(always)]
    fn log<T>(&self, record: LogRecord, result: &ResourceResult<T>) {
        match result {
            Ok(_) => self.emit(record),
            Err(error) => self.emit_failure(record, error),
        }
    }

    #[inline(always)]
    fn log_allocation(
        &self,
        call: Call,
        request: AllocRequest,
        result: Result<&DeviceBlock, &ResourceError>,
    ) {
        if self.unfinished.has_any() {
            self.log_finished_frees();
        }
        let record = LogRecord {
            stream_id: Some(request.stream),
            bytes: Some(request.bytes),
            tag: Some(request.tag),
            align: Some(request.align),
            served_by: reset_path(),
            site: current_site(),
            stack: self.stacks.next(),
            ..self.record(LogAction::Allocate, next_order(), call)
        };
        match result {
            Ok(block) => self.emit(LogRecord {
                ptr: Some(block.ptr),
                generation: Some(block.generation),
                granted: Some(block.bytes),
                ..record
            }),
            Err(error) => self.emit_failure(record, error),
        }
    }

    /// Allocates by `call` from the resource below, and logs the allocation.
    #[inline(always)]
    fn logged(
        &self,
        request: AllocRequest,
        call: impl FnOnce(&R) -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let start = clock::now();
        let result = call(&self.inner);
        self.log_allocation(Call::ended(start), request, result.as_ref());
        result
    }

    #[inline]
    fn log_use(
        &self,
        action: LogAction,
        block: BlockId,
        stream: StreamId,
        access: Option<Access>,
        call: impl FnOnce() -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        if !self.logs_uses {
            return call();
        }
        let (order, start) = (next_order(), clock::now());
        let result = call();
        let record = LogRecord {
            stream_id: Some(stream),
            ptr: Some(block.ptr),
            generation: Some(block.generation),
            access,
            ..self.record(action, order, Call::ended(start))
        };
        self.log(record, &result);
        result
    }

    /// Logs the unfinished frees that have completed.
    #[cold]
    #[inline(never)]
    fn log_finished_frees(&self) {
        let is_free = |block| self.inner.block_state(block) == BlockState::Freed;
        for (order, block) in self.unfinished.drain_finished(is_free, next_order) {
            let record = self.free_record(&block, order, Call { began: clock::now(), took: 0 });
            self.emit(LogRecord { served_by: ServedBy::Reaped, ..record });
        }
    }

    /// Stores a failed free if the resource has the block and finishes the free at a later reap.
    fn note_failed_free(&self, block: DeviceBlock, error: &ResourceError) {
        if !error.is_refused_free(BlockId::from_block(&block), &self.inner) {
            self.unfinished.add(block);
            self.log_finished_frees();
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for LoggingResource<R> {
    forward_plain!(self, self.inner);

    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.logged(AllocRequest::new(bytes, stream, tag), |inner| {
            inner.allocate(bytes, stream, tag)
        })
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let claim = DeviceBlock { ..block };
        let (order, start) = (next_order(), clock::now());
        let result = self.inner.deallocate(block);
        let record = self.free_record(&claim, order, Call::ended(start));
        self.log(record, &result);
        if let Err(error) = &result {
            self.note_failed_free(claim, error);
        }
        result
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let start = clock::now();
        let result = self.inner.reap_pending();
        let call = Call::ended(start);
        if self.unfinished.has_any() {
            self.log_finished_frees();
        }
        self.log(self.record(LogAction::ReapPending, next_order(), call), &result);
        result
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        let result = self.inner.reap_completed();
        if self.unfinished.has_any() {
            self.log_finished_frees();
        }
        result
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        let id = BlockId::from_block(block);
        self.log_use(LogAction::UseFinish, id, use_stream, None, || {
            self.inner.record_block_use(block, use_stream)
        })
    }

    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.log_use(LogAction::UsePrepare, block, use_stream, Some(access), || {
            self.inner.prepare_block_use(block, use_stream, access)
        })
    }

    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.log_use(LogAction::UseFinish, block, use_stream, Some(access), || {
            self.inner.finish_block_use(block, use_stream, access)
        })
    }

    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        if !self.logs_uses {
            return self.inner.finish_block_uses(uses, use_stream);
        }
        // Each record has the outcome of its own use.
        finish_one_by_one(self, uses, use_stream)
    }

    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        self.logged(request, |inner| inner.allocate_request(request, reservation))
    }

    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        let start = clock::now();
        let result = self.inner.reserve_budget(bytes);
        // A refused reservation is logged as a refused request. A granted one appears in the records of its blocks. A reservation of 0
        // bytes only queries whether there is a budget.
        if let Err(error) = &result
            && bytes > 0
        {
            let record = self.record(LogAction::Allocate, next_order(), Call::ended(start));
            let (bytes, site) = (Some(bytes), current_site());
            self.emit_failure(LogRecord { bytes, site, ..record }, error);
        }
        result
    }

    fn log_refusal(&self, request: AllocRequest, error: &ResourceError) {
        self.log_allocation(Call::ended(clock::now()), request, Err(error));
        self.inner.log_refusal(request, error);
    }
}

impl<R: DeviceMemoryResource> fmt::Debug for LoggingResource<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoggingResource")
            .field("device_ordinal", &self.device_ordinal)
            .field("logs_uses", &self.logs_uses)
            .field("dropped_records", &self.dropped_records())
            .finish_non_exhaustive()
    }
}
