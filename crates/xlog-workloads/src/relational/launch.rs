//! The session of a workload: its streams, the launches on them, and the order between them.
//!
//! Every launch uses a [`LaunchRecorder`]: it names each buffer with the kernel's access, which is prepared before the kernel is
//! queued and finished afterwards. For tests, an [`Omission`] delays the preparation of one use until after the kernel, like a
//! program that forgot it. All later work still follows the use. The waits that the late preparation inserts are those that
//! the kernel lacked.
//!
//! Two other things order work: the host's reads, and the reuse of memory. So a test can supply the numbers that the host would
//! read, from an earlier run. The copy then stays on the device, the host waits for nothing, and an open use on every block
//! keeps it from being freed before the session ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xlog_base::Mutex;
use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, PoolSnapshot, StreamLease, XlogDeviceRuntime,
};
use xlog_cuda::{
    DeviceRepr, DeviceStream, GpuMemoryManager, LaunchRecorder, Result, StreamId, XlogError,
};

use super::kernels::Kernels;
use super::touched::{Range, touch, unprepared, untouch};
use super::{Column, address};
use crate::stack::Stack;

/// The preparation to delay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Omission {
    /// The launch, in the order of launches from 0.
    pub launch: usize,
    /// Its buffer, in the order of naming from 0.
    pub buffer: usize,
}

/// One launch, for tests that delay its preparations one by one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launched {
    /// The kernel.
    pub kernel: &'static str,
    /// Its stream.
    pub stream: StreamId,
    /// The number of named buffers.
    pub buffers: usize,
}

/// The options of a session.
#[derive(Clone, Default, Debug)]
#[non_exhaustive]
pub struct SessionOptions {
    /// The preparation to delay, for tests.
    pub omission: Option<Omission>,
    /// Whether to keep all launches, and all numbers that were read.
    pub trace: bool,
    /// The numbers that the host would read, in this order, for tests: the host does not wait, and no memory is reused.
    pub foretold: Option<Arc<[u64]>>,
}

impl SessionOptions {
    xlog_base::setters! {
        /// Delays one preparation.
        with_omission(omission: Omission) { omission: Some(omission) }
        /// Supplies the numbers that the host would read.
        with_foretold(numbers: Arc<[u64]>) { foretold: Some(numbers) }
    }

    /// Keeps all launches, and all numbers that were read.
    #[must_use]
    pub fn with_trace(mut self) -> Self {
        self.trace = true;
        self
    }
}

/// A stack with loaded kernels and leased streams, for any number of threads.
pub struct Session<'s> {
    stack: &'s Stack,
    manager: GpuMemoryManager,
    kernels: Kernels,
    streams: Vec<StreamLease>,
    options: SessionOptions,
    launches: AtomicUsize,
    bytes_moved: AtomicU64,
    /// Waits that the delayed preparation inserted.
    missed_waits: AtomicU64,
    trace: Mutex<Vec<Launched>>,
    /// The numbers that were read, if they are kept.
    numbers: Mutex<Vec<u64>>,
    /// Ranges that were accessed without a prepared use.
    unprepared: AtomicU64,
    /// The number of reads.
    reads: AtomicUsize,
    /// Blocks that an open use keeps from being freed.
    held: Mutex<Vec<(BlockId, StreamId)>>,
    /// The pool at the largest sampled allocation.
    peak: Mutex<(usize, Option<PoolSnapshot>)>,
}

impl<'s> Session<'s> {
    /// Loads the kernels and leases `streams` streams, at least one.
    pub fn open(stack: &'s Stack, streams: usize, options: SessionOptions) -> Result<Self> {
        let runtime = stack.runtime();
        let kernels = Kernels::load(runtime.device())?;
        let leases = (0..streams.max(1))
            .map(|_| Ok(runtime.stream_pool().lease()?))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            stack,
            // The manager requires that every launch names its buffers.
            manager: GpuMemoryManager::with_runtime(runtime.clone()).tracked_only(),
            kernels,
            streams: leases,
            options,
            launches: AtomicUsize::new(0),
            bytes_moved: AtomicU64::new(0),
            missed_waits: AtomicU64::new(0),
            trace: Mutex::new(Vec::new()),
            numbers: Mutex::new(Vec::new()),
            unprepared: AtomicU64::new(0),
            reads: AtomicUsize::new(0),
            held: Mutex::new(Vec::new()),
            peak: Mutex::new((0, None)),
        })
    }

    /// Returns the stream of a step: steps cycle through all streams.
    #[must_use]
    pub fn stream(&self, step: usize) -> StreamId {
        // A session has at least one stream.
        self.streams.get(step % self.streams.len()).map_or(StreamId::DEFAULT, StreamLease::id)
    }

    /// Returns the number of streams.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Waits for all work on its streams.
    pub fn synchronize(&self) -> Result<()> {
        let pool = self.runtime().stream_pool();
        self.streams.iter().try_for_each(|lease| pool.try_resolve(lease.id())?.synchronize())
    }

    /// Returns the session's memory manager, with its counters.
    pub fn manager(&self) -> &GpuMemoryManager {
        &self.manager
    }

    /// Returns its runtime.
    pub fn runtime(&self) -> &XlogDeviceRuntime {
        self.manager.runtime()
    }

    /// Allocates a buffer of `len` elements on a stream.
    pub fn alloc<T: DeviceRepr>(
        &self,
        stream: StreamId,
        len: usize,
        tag: &'static str,
    ) -> Result<Column<T>> {
        let column = self.manager.on_stream(stream).alloc_tagged(len, AllocTag(tag))?;
        if let (Some(block), true) = (column.id(), self.options.foretold.is_some()) {
            // A use on the block's own stream waits for nothing, and nothing waits for it while it is open.
            self.runtime().prepare_block_use(block, stream, Access::Read)?;
            self.held.lock().push((block, stream));
        }
        Ok(column)
    }

    /// Begins a launch of `kernel` on a stream.
    pub fn launch(&self, kernel: &'static str, stream: StreamId) -> Launch<'_> {
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        Launch {
            session: self,
            kernel,
            number,
            buffers: 0,
            bytes: 0,
            recorder: LaunchRecorder::new_strict(stream),
            late: None,
            prepared: Vec::new(),
        }
    }

    /// Fills a buffer with one byte on a stream, as a separate launch.
    #[allow(unsafe_code)]
    pub fn fill<T>(&self, stream: StreamId, column: &Column<T>, value: u8) -> Result<()> {
        let bytes = column.size_bytes();
        self.launch("fill", stream).write(column).moves(bytes).run(|_, stream| {
            touch(address(column), bytes, Access::Write);
            // SAFETY: the buffer is live and `bytes` long, and the recorder orders the fill.
            unsafe { stream.memset(address(column), value, bytes) }
        })
    }

    /// Replaces the sums of tiles by the sums of all tiles before each, as a separate launch.
    #[allow(unsafe_code)]
    pub fn scan_sums(&self, stream: StreamId, sums: &Column<u64>) -> Result<()> {
        let launch = self.launch("scan_sums", stream).read_write(sums);
        // SAFETY: the launch names the buffer.
        launch
            .moves(sums.size_bytes() * 2)
            .run(|kernels, stream| unsafe { kernels.scan_sums(stream, sums) })
    }

    /// Reads the last element of a buffer, after all prior work on it. The host sees no other data before the end.
    #[allow(unsafe_code)]
    pub fn read_last(&self, stream: StreamId, column: &Column<u64>) -> Result<u64> {
        let mut bytes = [0; size_of::<u64>()];
        let last = address(column) + column.size_bytes().saturating_sub(bytes.len()) as u64;
        if let Some(numbers) = &self.options.foretold {
            let kept = self.alloc::<u64>(stream, 1, "foretold number")?;
            self.launch("read back", stream).read(column).write(&kept).run(|_, stream| {
                touch(last, bytes.len(), Access::Read);
                touch(address(&kept), bytes.len(), Access::Write);
                // SAFETY: both buffers are live, the first ends eight bytes after this address, and the recorder orders the copy.
                unsafe { stream.copy_dtod(address(&kept), last, bytes.len()) }
            })?;
            let read = self.reads.fetch_add(1, Ordering::Relaxed);
            return numbers.get(read).copied().ok_or_else(|| {
                XlogError::Kernel(format!(
                    "number {read} is read, and {} are foretold",
                    numbers.len()
                ))
            });
        }
        self.launch("read back", stream).read(column).run(|_, stream| {
            touch(last, bytes.len(), Access::Read);
            // SAFETY: the buffer is live and ends eight bytes after this address, and the recorder orders the copy.
            unsafe { stream.copy_dtoh(&mut bytes, last) }
        })?;
        let number = u64::from_le_bytes(bytes);
        if self.options.trace {
            self.numbers.lock().push(number);
        }
        Ok(number)
    }

    /// Samples the pool if more is allocated than at all earlier samples.
    pub fn sample_pool(&self) {
        let allocated = self.manager.allocated_bytes();
        let peak = || self.peak.lock();
        if allocated > peak().0 {
            // Outside the lock: the pool may switch to another logical thread.
            let seen = self.stack.snapshot();
            let mut peak = peak();
            if allocated > peak.0 {
                *peak = (allocated, seen);
            }
        }
    }

    /// Returns the pool at the largest sampled allocation.
    pub fn pool_at_peak(&self) -> Option<PoolSnapshot> {
        self.peak.lock().1.clone()
    }

    /// Returns the number of launches so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }

    /// Returns the bytes that launches had to read and write so far.
    pub fn bytes_moved(&self) -> u64 {
        self.bytes_moved.load(Ordering::Relaxed)
    }

    /// Returns the waits that the kernel with the delayed preparation lacked.
    pub fn missed_waits(&self) -> u64 {
        self.missed_waits.load(Ordering::Relaxed)
    }

    /// Returns how many ranges simulated launches accessed without a prepared use, if launches are kept.
    pub fn unprepared(&self) -> u64 {
        self.unprepared.load(Ordering::Relaxed)
    }

    /// Returns the numbers that the host read, if they are kept and not supplied.
    pub fn numbers(&self) -> Vec<u64> {
        self.numbers.lock().clone()
    }

    /// Returns all launches, if they are kept.
    pub fn trace(&self) -> Vec<Launched> {
        self.trace.lock().clone()
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let held = std::mem::take(self.held.get_mut());
        for (block, stream) in held {
            // A failed device keeps the block; the failure was reported where it occurred.
            let _ = self.manager.runtime().finish_block_use(block, stream, Access::Read);
        }
    }
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("manager", &self.manager)
            .field("streams", &self.streams.len())
            .field("launches", &self.launches())
            .finish_non_exhaustive()
    }
}

/// A launch whose buffers are being named.
#[derive(Debug)]
#[must_use = "nothing is launched before run"]
pub struct Launch<'l> {
    session: &'l Session<'l>,
    kernel: &'static str,
    number: usize,
    buffers: usize,
    bytes: usize,
    recorder: LaunchRecorder,
    late: Option<LaunchRecorder>,
    /// The uses prepared before the kernel is queued.
    prepared: Vec<Range>,
}

impl Launch<'_> {
    /// Names a buffer that the kernel reads.
    pub fn read<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::Read).read(column);
        self
    }

    /// Names a buffer that the kernel writes without reading it.
    pub fn write<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::Write).write(column);
        self
    }

    /// Names a buffer that the kernel reads and writes.
    pub fn read_write<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::ReadWrite).read_write(column);
        self
    }

    /// Sets the bytes that the kernel must read and write, for the throughput.
    pub fn moves(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// Returns the recorder for the next buffer.
    fn next<T>(&mut self, column: &Column<T>, access: Access) -> &mut LaunchRecorder {
        let here = Omission { launch: self.number, buffer: self.buffers };
        self.buffers += 1;
        if self.session.options.omission == Some(here) {
            let stream = self.recorder.stream();
            return self.late.insert(LaunchRecorder::new_strict(stream));
        }
        if self.session.options.trace {
            self.prepared.push((address(column), column.size_bytes(), access));
        }
        &mut self.recorder
    }

    /// Prepares the uses, queues the kernel, and finishes the uses.
    pub fn run(self, queue: impl FnOnce(&Kernels, &DeviceStream) -> Result<()>) -> Result<()> {
        let Self { session, kernel, buffers, bytes, recorder, late, prepared, .. } = self;
        let runtime = session.runtime();
        if session.options.trace {
            let launched = Launched { kernel, stream: recorder.stream(), buffers };
            session.trace.lock().push(launched);
        }
        session.bytes_moved.fetch_add(bytes as u64, Ordering::Relaxed);
        untouch();
        recorder.run(runtime, |stream| queue(&session.kernels, stream))?;
        if session.options.trace {
            session.unprepared.fetch_add(unprepared(&prepared), Ordering::Relaxed);
        }
        if let Some(mut late) = late {
            let before = runtime.statistics().waits_inserted;
            late.preflight(runtime)?;
            let missed = runtime.statistics().waits_inserted - before;
            session.missed_waits.fetch_add(missed, Ordering::Relaxed);
            late.commit(runtime)?;
        }
        Ok(())
    }
}
