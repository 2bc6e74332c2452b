//! The decorator that logs every operation of the resource below.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use xlog_driver::sync::thread_name;

use super::clock;
use super::order::next_order;
use super::query::{begin_logging, reset_path};
use super::unfinished::UnfinishedFrees;
use super::{LogAction, LogRecord, LogResult, LoggingSink, QueryScope, ServedBy};
use crate::device_runtime::budget::BudgetReservation;
use crate::device_runtime::resource::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    MIN_ALIGN, ResourceError, ResourceResult, Seal, StreamId,
};

/// Logs every operation of the resource below.
///
/// Allocations, frees and [`reap_pending`](DeviceMemoryResource::reap_pending) give one record each, failures included; a batch
/// gives one for each block. Uses of blocks are logged on request ([`with_use_logging`](Self::with_use_logging)). Everything is
/// forwarded; nothing a sink does changes the outcome of an operation.
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
    device_ordinal: u32,
    process_id: u32,
    /// The offset of the wall clock from the monotonic clock at creation: records have monotonic times plus this.
    clock_to_unix: u64,
    unfinished: UnfinishedFrees<RecordFields>,
    refused: AtomicU64,
}

impl LoggingResource {
    /// Logs what `inner` does to `sink`.
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
            process_id: std::process::id(),
            clock_to_unix: unix.wrapping_sub(clock::now()),
            unfinished: UnfinishedFrees::new(),
            refused: AtomicU64::new(0),
        }
    }

    /// Whether uses of blocks (prepare, finish, record) are logged too. They are not by default.
    #[must_use]
    pub fn with_use_logging(mut self, enabled: bool) -> Self {
        self.logs_uses = enabled;
        self
    }

    /// Operations whose record is not in the log: the sink refused or lost it.
    ///
    /// Exact after the operations and, for sinks with a writer thread, a flush. Includes losses of other resources that share the
    /// sink.
    #[must_use]
    pub fn dropped_records(&self) -> u64 {
        self.refused.load(Ordering::Relaxed).saturating_add(self.sink.dropped_records())
    }

    /// The sink.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn LoggingSink> {
        &self.sink
    }

    /// The resource below.
    #[must_use]
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Makes the record of a success in place: a copy of the large record would cost more than filling it in.
    #[inline(always)]
    fn record(&self, action: LogAction, order: u64, call: Call, about: RecordFields) -> LogRecord {
        let thread_id = u64::from(thread_name());
        LogRecord {
            action,
            device_ordinal: self.device_ordinal,
            stream_id: about.stream,
            ptr: about.block.map(|block| block.0),
            bytes: about.bytes,
            tag: about.tag,
            generation: about.block.map(|block| block.1),
            thread_id,
            order_counter: order,
            timestamp_nanos: u128::from(self.clock_to_unix.wrapping_add(call.began)),
            result: LogResult::Ok,
            query_id: QueryScope::current(),
            granted: about.granted,
            align: about.align,
            latency_nanos: call.took,
            served_by: about.served_by,
            access: about.access,
            process_id: self.process_id,
        }
    }

    #[inline(always)]
    fn emit(&self, record: LogRecord) {
        if self.sink.emit(record).is_err() {
            self.count_refused();
        }
    }

    #[cold]
    fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    #[cold]
    #[inline(never)]
    fn emit_failure(
        &self,
        action: LogAction,
        order: u64,
        call: Call,
        about: RecordFields,
        error: &ResourceError,
    ) {
        let mut record = self.record(action, order, call, about);
        record.result = LogResult::failed(error);
        self.emit(record);
    }

    /// The times of a call that began at `start` and has just ended.
    #[inline(always)]
    fn ended(start: u64) -> Call {
        Call { began: start, took: clock::now().saturating_sub(start) }
    }

    #[inline(always)]
    fn log_allocation(
        &self,
        call: Call,
        request: Request,
        result: Result<&DeviceBlock, &ResourceError>,
    ) {
        if self.unfinished.has_any() {
            self.log_finished_frees();
        }
        let order = next_order();
        match result {
            Ok(block) => {
                let about = RecordFields {
                    block: Some((block.ptr, block.generation)),
                    granted: Some(block.bytes),
                    align: Some(request.align.unwrap_or(MIN_ALIGN)),
                    ..request.about(reset_path())
                };
                self.emit(self.record(LogAction::Allocate, order, call, about));
            }
            Err(error) => {
                let about = RecordFields { align: request.align, ..request.about(reset_path()) };
                self.emit_failure(LogAction::Allocate, order, call, about, error);
            }
        }
    }

    /// Allocates by `call` from the resource below, and logs that.
    #[inline(always)]
    fn logged(
        &self,
        request: Request,
        call: impl FnOnce(&R) -> ResourceResult<DeviceBlock>,
    ) -> ResourceResult<DeviceBlock> {
        let start = clock::now();
        let result = call(&self.inner);
        self.log_allocation(Self::ended(start), request, result.as_ref());
        result
    }

    /// Emits one record of `action` with the outcome of `result`.
    #[inline(always)]
    fn log<T>(
        &self,
        action: LogAction,
        order: u64,
        call: Call,
        about: RecordFields,
        result: &ResourceResult<T>,
    ) {
        match result {
            Ok(_) => self.emit(self.record(action, order, call, about)),
            Err(error) => self.emit_failure(action, order, call, about, error),
        }
    }

    #[inline]
    fn log_use(
        &self,
        action: LogAction,
        used: BlockUse,
        call: impl FnOnce() -> ResourceResult<()>,
    ) -> ResourceResult<()> {
        if !self.logs_uses {
            return call();
        }
        let (order, start) = (next_order(), clock::now());
        let result = call();
        let about = RecordFields {
            stream: Some(used.stream),
            block: Some((used.block.ptr, used.block.generation)),
            access: used.access,
            ..RecordFields::default()
        };
        self.log(action, order, Self::ended(start), about, &result);
        result
    }

    /// Emits the successes of frees that had failed half way and are now complete.
    #[cold]
    #[inline(never)]
    fn log_finished_frees(&self) {
        let is_free = |block| self.inner.block_state(block) == BlockState::Freed;
        for (order, about) in self.unfinished.drain_finished(is_free, next_order) {
            let call = Call { began: clock::now(), took: 0 };
            let about = RecordFields { served_by: ServedBy::Reaped, ..about };
            self.emit(self.record(LogAction::Deallocate, order, call, about));
        }
    }

    /// Notes a failed free, if the resource has the block nevertheless and finishes the free at a later reap.
    fn note_failed_free(&self, block: BlockId, about: RecordFields, error: &ResourceError) {
        let is_here = block.device_ordinal == self.device_ordinal;
        if is_here && !self.was_refused(block, error) {
            self.unfinished.add(block, about);
            self.log_finished_frees();
        }
    }

    /// Returns whether a failed free changed nothing. Otherwise the resource keeps the block, and a reap finishes the free.
    fn was_refused(&self, block: BlockId, error: &ResourceError) -> bool {
        let named = matches!(error, ResourceError::UseAfterFree { generation } if *generation == block.generation);
        named || self.inner.block_state(block) == BlockState::Live
    }
}

/// When a call began, by [`clock::now`], and how long it took.
#[derive(Clone, Copy)]
struct Call {
    began: u64,
    took: u64,
}

/// A use of a block on a stream.
#[derive(Clone, Copy)]
struct BlockUse {
    block: BlockId,
    stream: StreamId,
    /// `None` for work of unknown access.
    access: Option<Access>,
}

/// The fields of a record that depend on the operation.
#[derive(Clone, Copy, Default)]
struct RecordFields {
    stream: Option<StreamId>,
    block: Option<(u64, Generation)>,
    bytes: Option<usize>,
    tag: Option<AllocTag>,
    granted: Option<usize>,
    align: Option<usize>,
    served_by: ServedBy,
    access: Option<Access>,
}

impl RecordFields {
    /// The fields of a block as its owner passed it.
    #[inline(always)]
    fn claim(block: &DeviceBlock) -> Self {
        Self {
            stream: Some(block.alloc_stream),
            block: Some((block.ptr, block.generation)),
            bytes: Some(block.bytes),
            tag: Some(block.tag),
            align: Some(block.align),
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy)]
struct Request {
    bytes: usize,
    align: Option<usize>,
    stream: StreamId,
    tag: AllocTag,
}

impl Request {
    #[inline(always)]
    fn about(self, served_by: ServedBy) -> RecordFields {
        RecordFields {
            stream: Some(self.stream),
            bytes: Some(self.bytes),
            tag: Some(self.tag),
            served_by,
            ..RecordFields::default()
        }
    }
}

impl<R: DeviceMemoryResource> DeviceMemoryResource for LoggingResource<R> {
    #[inline]
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.inner)
    }

    fn is_trusted(&self, seal: Seal) -> bool {
        self.inner.is_trusted(seal)
    }

    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }

    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let request = Request { bytes, align: None, stream, tag };
        self.logged(request, |inner| inner.allocate(bytes, stream, tag))
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        let (id, about) = (BlockId::from_block(&block), RecordFields::claim(&block));
        let (order, start) = (next_order(), clock::now());
        let result = self.inner.deallocate(block);
        let call = Self::ended(start);
        // The outcome is rebuilt and the fields are passed separately, so that neither is in memory on the fast path.
        match result {
            Ok(()) => {
                self.emit(self.record(LogAction::Deallocate, order, call, about));
                Ok(())
            }
            Err(error) => {
                let RecordFields { stream, block, bytes, tag, align, .. } = about;
                let about =
                    RecordFields { stream, block, bytes, tag, align, ..RecordFields::default() };
                self.emit_failure(LogAction::Deallocate, order, call, about, &error);
                self.note_failed_free(id, about, &error);
                Err(error)
            }
        }
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        let start = clock::now();
        let result = self.inner.reap_pending();
        let call = Self::ended(start);
        if self.unfinished.has_any() {
            self.log_finished_frees();
        }
        self.log(LogAction::ReapPending, next_order(), call, RecordFields::default(), &result);
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
        let used = BlockUse { block: id, stream: use_stream, access: None };
        self.log_use(LogAction::UseFinish, used, || self.inner.record_block_use(block, use_stream))
    }

    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let used = BlockUse { block, stream: use_stream, access: Some(access) };
        self.log_use(LogAction::UsePrepare, used, || {
            self.inner.prepare_block_use(block, use_stream, access)
        })
    }

    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let used = BlockUse { block, stream: use_stream, access: Some(access) };
        self.log_use(LogAction::UseFinish, used, || {
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
        // One by one, so that each record has the outcome of its own use.
        let mut outcome = Ok(());
        for &(block, access) in uses {
            let this = self.finish_block_use(block, use_stream, access);
            outcome = outcome.and(this);
        }
        outcome
    }

    fn allocate_aligned(
        &self,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let request = Request { bytes, align: Some(align), stream, tag };
        self.logged(request, |inner| inner.allocate_aligned(bytes, align, stream, tag))
    }

    fn allocate_batch(
        &self,
        sizes: &[usize],
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<Vec<DeviceBlock>> {
        let start = clock::now();
        let result = self.inner.allocate_batch(sizes, stream, tag);
        let call = Self::ended(start);
        let request = |bytes| Request { bytes, align: None, stream, tag };
        match &result {
            Ok(blocks) => {
                let served_by = reset_path();
                for (at, block) in blocks.iter().enumerate() {
                    super::note_path(served_by);
                    let bytes = sizes.get(at).copied().unwrap_or(block.bytes);
                    self.log_allocation(call, request(bytes), Ok(block));
                }
            }
            Err(error) => {
                // No block was allocated: one failure record with all bytes.
                let bytes = sizes.iter().fold(0_usize, |sum, bytes| sum.saturating_add(*bytes));
                self.log_allocation(call, request(bytes), Err(error));
            }
        }
        result
    }

    /// One by one, so that each block's own outcome is logged, also if it fails half way.
    fn deallocate_batch(&self, blocks: Vec<DeviceBlock>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for block in blocks {
            let freed = self.deallocate(block);
            outcome = outcome.and(freed);
        }
        outcome
    }

    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        let start = clock::now();
        let result = self.inner.reserve_budget(bytes);
        // A refused reservation is a refused request. A granted one appears in the records of its blocks. A reservation of 0 bytes
        // only asks whether there is a budget.
        if let Err(error) = &result
            && bytes > 0
        {
            let about = RecordFields { bytes: Some(bytes), ..RecordFields::default() };
            let (order, call) = (next_order(), Self::ended(start));
            self.emit_failure(LogAction::Allocate, order, call, about, error);
        }
        result
    }

    fn allocate_reserved(
        &self,
        reservation: &mut BudgetReservation,
        bytes: usize,
        align: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        let request = Request { bytes, align: Some(align), stream, tag };
        self.logged(request, |inner| {
            inner.allocate_reserved(reservation, bytes, align, stream, tag)
        })
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
