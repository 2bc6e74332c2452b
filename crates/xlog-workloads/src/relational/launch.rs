//! Where kernels are launched: the streams of a workload, what its launches moved, and the order between them.
//!
//! Every launch goes through a [`LaunchRecorder`]: each buffer is named with what the kernel does to it, its use is prepared before
//! the kernel is queued and finished after it. For tests, an [`Omission`] leaves the preparation of one use out, as a program
//! would that forgot it: the kernel is queued first, and only then its use is opened and closed, so that all later work still
//! follows it. What the late preparation then finds to wait for is what the kernel ran without.
//!
//! Two things put work in order that no preparation did: a number that the host reads, and memory that is handed out again. So
//! numbers can be foretold: they are those of a run before, the copy stays on the device, the host waits for nothing, and a use of
//! every block stays open, so that none is freed before the session ends.

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

/// The preparation that is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Omission {
    /// Which launch, in the order of launches from 0.
    pub launch: usize,
    /// Which of its buffers, in the order they were named from 0.
    pub buffer: usize,
}

/// One launch, for tests that leave out its preparations one by one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launched {
    /// The kernel.
    pub kernel: &'static str,
    /// Its stream.
    pub stream: StreamId,
    /// How many buffers were named.
    pub buffers: usize,
}

/// How a session is run.
#[derive(Clone, Default, Debug)]
#[non_exhaustive]
pub struct SessionOptions {
    /// The preparation to leave out, in tests.
    pub omission: Option<Omission>,
    /// Whether to keep a list of all launches, and of all numbers that were read.
    pub trace: bool,
    /// The numbers that the host will read, in this order, so that it does not have to wait for them; no memory is handed out
    /// twice then. In tests.
    pub foretold: Option<Arc<[u64]>>,
}

impl SessionOptions {
    /// Leaves out one preparation.
    #[must_use]
    pub fn with_omission(mut self, omission: Omission) -> Self {
        self.omission = Some(omission);
        self
    }

    /// Keeps a list of all launches, and of all numbers that were read.
    #[must_use]
    pub fn with_trace(mut self) -> Self {
        self.trace = true;
        self
    }

    /// Foretells the numbers that the host will read.
    #[must_use]
    pub fn with_foretold(mut self, numbers: Arc<[u64]>) -> Self {
        self.foretold = Some(numbers);
        self
    }
}

/// A stack with kernels loaded and streams leased, for any number of threads.
pub struct Session<'s> {
    stack: &'s Stack,
    manager: GpuMemoryManager,
    kernels: Kernels,
    streams: Vec<StreamLease>,
    options: SessionOptions,
    launches: AtomicUsize,
    bytes_moved: AtomicU64,
    /// Waits that the late preparation of the omitted use asked for.
    missed_waits: AtomicU64,
    trace: Mutex<Vec<Launched>>,
    /// The numbers that were read, if they are to be kept.
    numbers: Mutex<Vec<u64>>,
    /// Ranges that were touched without a use that was prepared for it.
    unprepared: AtomicU64,
    /// How many numbers were read.
    reads: AtomicUsize,
    /// Blocks that are kept from being handed out again.
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
            // Every launch names its buffers.
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

    /// The stream of a step: steps go round all streams.
    #[must_use]
    pub fn stream(&self, step: usize) -> StreamId {
        // A session has at least one stream.
        self.streams.get(step % self.streams.len()).map_or(StreamId::DEFAULT, StreamLease::id)
    }

    /// How many streams there are.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Waits for all work on its streams.
    pub fn synchronize(&self) -> Result<()> {
        let pool = self.runtime().stream_pool();
        self.streams.iter().try_for_each(|lease| pool.try_resolve(lease.id())?.synchronize())
    }

    /// The memory of the session, with its counters.
    pub fn manager(&self) -> &GpuMemoryManager {
        &self.manager
    }

    /// The runtime below.
    pub fn runtime(&self) -> &XlogDeviceRuntime {
        self.manager.runtime()
    }

    /// A buffer of `len` elements on a stream.
    pub fn alloc<T: DeviceRepr>(
        &self,
        stream: StreamId,
        len: usize,
        tag: &'static str,
    ) -> Result<Column<T>> {
        let column = self.manager.on_stream(stream).alloc_tagged(len, AllocTag(tag))?;
        if let (Some(block), true) = (column.id(), self.options.foretold.is_some()) {
            // On its own stream, where it waits for nothing and nothing waits for it until it is closed.
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

    /// Fills a buffer with one byte on a stream, as a launch of its own.
    #[allow(unsafe_code)]
    pub fn fill<T>(&self, stream: StreamId, column: &Column<T>, value: u8) -> Result<()> {
        let bytes = column.size_bytes();
        self.launch("fill", stream).write(column).moves(bytes).run(|_, stream| {
            touch(address(column), bytes, Access::Write);
            // SAFETY: the buffer is live and this long, and the recorder orders the fill.
            unsafe { stream.memset(address(column), value, bytes) }
        })
    }

    /// Replaces the sums of tiles by the sums of all tiles before each, as a launch of its own.
    #[allow(unsafe_code)]
    pub fn scan_sums(&self, stream: StreamId, sums: &Column<u64>) -> Result<()> {
        let launch = self.launch("scan_sums", stream).read_write(sums);
        // SAFETY: the launch names the buffer.
        launch
            .moves(sums.size_bytes() * 2)
            .run(|kernels, stream| unsafe { kernels.scan_sums(stream, sums) })
    }

    /// The last element of a buffer, copied on a stream when all before it is done. This is all of the data that the host sees
    /// before the end.
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

    /// Samples the pool if more is allocated than at any earlier sample.
    pub fn sample_pool(&self) {
        let allocated = self.manager.allocated_bytes();
        let peak = || self.peak.lock();
        if allocated > peak().0 {
            // Not under the lock: a pool may hand over to another logical thread.
            let seen = self.stack.snapshot();
            let mut peak = peak();
            if allocated > peak.0 {
                *peak = (allocated, seen);
            }
        }
    }

    /// The pool at the largest sampled allocation.
    pub fn pool_at_peak(&self) -> Option<PoolSnapshot> {
        self.peak.lock().1.clone()
    }

    /// Launches so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }

    /// Bytes that launches had to read and write so far.
    pub fn bytes_moved(&self) -> u64 {
        self.bytes_moved.load(Ordering::Relaxed)
    }

    /// Waits that the omitted preparation would have inserted.
    pub fn missed_waits(&self) -> u64 {
        self.missed_waits.load(Ordering::Relaxed)
    }

    /// Ranges that launches on a simulated device touched and had no use of prepared for, if launches were to be kept.
    pub fn unprepared(&self) -> u64 {
        self.unprepared.load(Ordering::Relaxed)
    }

    /// All numbers that the host read, if they were to be kept and not foretold.
    pub fn numbers(&self) -> Vec<u64> {
        self.numbers.lock().clone()
    }

    /// All launches, if they were to be kept.
    pub fn trace(&self) -> Vec<Launched> {
        self.trace.lock().clone()
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let held = std::mem::take(self.held.get_mut());
        for (block, stream) in held {
            // A device that has failed keeps the block; the failure was reported where it was met.
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
    /// The uses that were prepared before the kernel is queued.
    prepared: Vec<Range>,
}

impl Launch<'_> {
    /// The kernel reads the buffer.
    pub fn read<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::Read).read(column);
        self
    }

    /// The kernel writes the buffer without reading it.
    pub fn write<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::Write).write(column);
        self
    }

    /// The kernel reads and writes the buffer.
    pub fn read_write<T>(mut self, column: &Column<T>) -> Self {
        self.next(column, Access::ReadWrite).read_write(column);
        self
    }

    /// How many bytes the kernel has to read and write, for the throughput.
    pub fn moves(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// The recorder that the next buffer is named to.
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
