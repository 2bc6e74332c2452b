//! The fixture of a check: a new resource, its device and streams, and the outcome.
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, ResourceError,
    ResourceResult, StreamId, StreamLease, StreamPool, StreamPoolError,
};
use xlog_cuda::driver::{DriverError, Gate};
use xlog_cuda::{CudaDevice, DeviceStream, XlogError};

use crate::forwarding::Below;
use crate::{BoxedResource, Built};

/// Longer than any correct call on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The tag of the suite's blocks.
pub(crate) const TAG: AllocTag = AllocTag("conformance");

/// The reason why a check ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    Failed(String),
    Skipped(String),
}

impl From<ResourceError> for Stop {
    fn from(error: ResourceError) -> Self {
        Self::Failed(format!("refused what must succeed: {error}"))
    }
}

impl From<XlogError> for Stop {
    fn from(error: XlogError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<StreamPoolError> for Stop {
    fn from(error: StreamPoolError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<DriverError> for Stop {
    fn from(error: DriverError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Fails the check unless `holds` is true.
pub(crate) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Stop> {
    if holds { Ok(()) } else { Err(Stop::Failed(otherwise())) }
}

/// The kinds of refusal that the rules require.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    StreamMisuse,
    Driver,
    UseAfterFree,
    OutOfMemory,
    Any,
}

impl Refusal {
    /// Fails the check unless `result` is this refusal.
    pub(crate) fn expect<T>(self, result: ResourceResult<T>, what: &str) -> Result<(), Stop> {
        let error = match result {
            Ok(_) => return Err(Stop::Failed(format!("{what} succeeded, {self:?} was due"))),
            Err(error) => error,
        };
        let right = match self {
            Self::StreamMisuse => matches!(error, ResourceError::StreamMisuse(_)),
            Self::Driver => matches!(error, ResourceError::Driver(_)),
            Self::UseAfterFree => matches!(error, ResourceError::UseAfterFree { .. }),
            Self::OutOfMemory => matches!(
                error,
                ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. }
            ),
            Self::Any => true,
        };
        ensure(right, || format!("{what} was refused with {error:?}, {self:?} was due"))
    }
}

/// Makes a forged block with the same fields.
pub(crate) fn twin(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}

/// A held stream with a watchdog that releases it if a call waits for it too long.
pub(crate) struct HeldStream {
    open: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<bool>>,
}

impl HeldStream {
    /// Releases the stream. Fails if the watchdog had to release it before.
    pub(crate) fn release(mut self) -> Result<(), Stop> {
        ensure(!self.finish(), || format!("a call waited {PATIENCE:?} for a held stream"))
    }

    fn finish(&mut self) -> bool {
        drop(self.open.take());
        self.watchdog.take().is_some_and(|watchdog| watchdog.join().unwrap_or(true))
    }
}

impl Drop for HeldStream {
    fn drop(&mut self) {
        self.finish();
    }
}

fn watch(gate: Gate) -> Result<HeldStream, Stop> {
    let (open, opened) = mpsc::channel::<()>();
    let watchdog = std::thread::Builder::new()
        .name("conformance watchdog".to_owned())
        .spawn(move || {
            let late = opened.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            gate.release();
            late
        })
        .map_err(|error| Stop::Failed(format!("no watchdog thread: {error}")))?;
    Ok(HeldStream { open: Some(open), watchdog: Some(watchdog) })
}

/// A new resource with its device and streams.
pub(crate) struct Fixture {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) pool: Arc<StreamPool>,
    pub(crate) resource: BoxedResource,
    /// The probe below a decorator.
    pub(crate) below: Option<Below>,
}

impl Fixture {
    pub(crate) fn new(device: &Arc<CudaDevice>, pool: &Arc<StreamPool>, built: Built) -> Self {
        let Built { resource, below } = built;
        Self { device: device.clone(), pool: pool.clone(), resource, below }
    }

    pub(crate) fn tracks(&self) -> bool {
        self.resource.supports_block_use_tracking()
    }

    /// Skips a rule about uses, or about frees that do not wait, if the resource tracks no uses.
    pub(crate) fn only_where_tracked(&self) -> Result<(), Stop> {
        match self.tracks() {
            true => Ok(()),
            false => Err(Stop::Skipped("the resource tracks no uses".to_owned())),
        }
    }

    pub(crate) fn leases<const N: usize>(&self) -> Result<[StreamLease; N], Stop> {
        let leases =
            (0..N).map(|_| self.pool.lease()).collect::<Result<Vec<_>, StreamPoolError>>()?;
        leases.try_into().map_err(|_| Stop::Failed("the pool gave too few streams".to_owned()))
    }

    pub(crate) fn allocate(&self, bytes: usize, stream: StreamId) -> Result<DeviceBlock, Stop> {
        Ok(self.resource.allocate(bytes, stream, TAG)?)
    }

    pub(crate) fn allocate_all(
        &self,
        sizes: &[usize],
        stream: StreamId,
    ) -> Result<Vec<DeviceBlock>, Stop> {
        sizes.iter().map(|&bytes| self.allocate(bytes, stream)).collect()
    }

    pub(crate) fn free(&self, blocks: Vec<DeviceBlock>) -> Result<(), Stop> {
        for block in blocks {
            self.resource.deallocate(block)?;
        }
        Ok(())
    }

    pub(crate) fn outstanding(&self, due: usize, when: &str) -> Result<(), Stop> {
        let counted = self.resource.bytes_outstanding();
        ensure(counted == due, || format!("{counted} bytes outstanding {when}, {due} were due"))
    }

    pub(crate) fn state(&self, block: BlockId, due: BlockState, when: &str) -> Result<(), Stop> {
        let state = self.resource.block_state(block);
        ensure(state == due, || format!("the block is {state:?} {when}, {due:?} was due"))
    }

    pub(crate) fn hold(&self, stream: &DeviceStream) -> Result<HeldStream, Stop> {
        watch(stream.hold()?)
    }

    /// Queues work on a block: with the hooks if the resource tracks uses, otherwise after a wait for the block's own stream.
    pub(crate) fn work<T>(
        &self,
        block: BlockId,
        stream: &DeviceStream,
        access: Access,
        queue: impl FnOnce() -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        if self.tracks() {
            self.resource.prepare_block_use(block, stream.id(), access)?;
            let queued = queue();
            self.resource.finish_block_use(block, stream.id(), access)?;
            return queued;
        }
        if stream.id() != block.alloc_stream {
            stream.wait_for(&*self.pool.try_resolve(block.alloc_stream)?)?;
        }
        queue()
    }

    /// Checks that nothing is outstanding after the last free.
    pub(crate) fn drain(&self) -> Result<(), Stop> {
        self.resource.reap_pending()?;
        self.outstanding(0, "after the last free and a reap")
    }

    /// Runs the bodies as host threads (logical ones under a seed) and returns the first failure.
    pub(crate) fn threads<'a>(
        &self,
        bodies: Vec<Box<dyn FnOnce() -> Result<(), Stop> + Send + 'a>>,
    ) -> Result<(), Stop> {
        let outcomes = xlog_base::Mutex::new(Vec::new());
        let jobs = bodies.into_iter().map(|body| {
            let outcomes = &outcomes;
            let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
                let outcome = body();
                outcomes.lock().push(outcome);
            });
            job
        });
        let jobs = jobs.collect::<Vec<_>>();
        match self.device.sim() {
            Some(sim) => sim.run_threads(jobs),
            None => std::thread::scope(|scope| {
                for job in jobs {
                    scope.spawn(job);
                }
            }),
        }
        let outcomes = outcomes.into_inner();
        outcomes.into_iter().collect()
    }
}
