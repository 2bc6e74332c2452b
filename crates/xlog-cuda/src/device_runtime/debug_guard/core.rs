//! The guard's work on a block, from its allocation to its free.
//!
//! If the resource below tracks uses, the guard queues its fills and checks as uses on the block's own stream. They follow all announced
//! uses, and the host does not wait. If that stream was returned to its pool, the guard uses the default stream, ordered after the old
//! one.
//!
//! A block between guard pages is unmapped by its free if its work has completed by then. Otherwise a later request, free or
//! collection unmaps it. Until then the free is reported to a device that checks the order of accesses.
//!
//! If the resource below does not track uses, the host waits before and after the guard's work.
//!
//! Invariant: the registry's lock is not held over a call of the driver or of the resource below.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use xlog_driver::sync::Mutex;
use xlog_driver::{Access, DriverResult, Waited};

use super::checker::{Check, Checker};
use super::config::{GuardConfig, GuardMode};
use super::journal::Journal;
use super::pages::{ADDRESSES, Mapped, Pages};
use super::redzones::{CANARY, FREED, FRESH, Redzones};
use super::registry::{
    BlockJob, BlockRegistry, Due, GuardedBlock, Pending, QuarantineLimits, Stage, StreamPoint,
};
use super::report::{BlockInfo, FoundBy};
use super::sampling::Sampling;
use crate::CudaDevice;
use crate::device_runtime::ordering::StripedCounters;
use crate::device_runtime::resource::{
    AllocRequest, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation,
    ResourceError, ResourceHome, ResourceResult, StreamId, first_error,
};
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// The device and streams that a guard works on.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) device: Arc<CudaDevice>,
    pub(super) streams: Arc<StreamPool>,
    pub(super) checker: Checker,
    /// Whether the resource below tracks uses.
    pub(super) tracked: bool,
}

impl Parts {
    pub(super) fn new(home: ResourceHome, tracked: bool) -> ResourceResult<Self> {
        let ResourceHome { device, streams, .. } = home;
        let streams = match streams {
            Some(streams) => streams,
            None if tracked => {
                return Err(ResourceError::invalid(
                    "a guard over a resource that tracks uses and names no streams",
                    "a resource whose home() names its streams, or DebugGuardResource::over",
                ));
            }
            None => Arc::new(StreamPool::new(device.clone(), 1)),
        };
        Ok(Self { checker: Checker::new(device.clone()), device, streams, tracked })
    }
}

/// Returns why the resource below does not belong to this device and these streams.
fn mismatch<R: DeviceMemoryResource>(inner: &R, home: &ResourceHome) -> Option<String> {
    inner.home()?.mismatch(&home.device, home.streams.as_deref()?)
}

/// A guard, shared by the resource and its handles.
#[derive(Debug)]
pub(super) struct GuardCore<R> {
    pub(super) sampling: Sampling,
    pub(super) inner: R,
    pub(super) config: GuardConfig,
    pub(super) ordinal: u32,
    pub(super) parts: ResourceResult<Parts>,
    pub(super) journal: Arc<Journal>,
    pub(super) registry: Mutex<BlockRegistry>,
    pub(super) pages: Option<Pages>,
    /// Whether the device was found lost.
    pub(super) lost: AtomicBool,
    /// Locked by the thread that collects results.
    pub(super) collector_lock: Mutex<()>,
    pub(super) counters: StripedCounters,
}

/// The use of a block by the guard's own work.
#[derive(Clone, Copy)]
pub(super) struct GuardWork {
    pub(super) access: Access,
    /// Whether the work follows all uses of the block.
    pub(super) after_uses: bool,
}

/// A block that was just retired, and the point after its last check.
struct Retired {
    generation: Generation,
    point: Option<StreamPoint>,
}

/// The result of work queued on a block, and the point after it.
pub(super) struct Worked<T> {
    pub(super) done: T,
    pub(super) point: Option<StreamPoint>,
}

impl<R: DeviceMemoryResource> GuardCore<R> {
    pub(super) fn new(inner: R, config: GuardConfig, home: Option<ResourceHome>) -> Self {
        let tracked = inner.supports_block_use_tracking();
        let parts = match home {
            Some(home)
                if config.mode != GuardMode::Canaries
                    && home.device.driver().virtual_memory().is_none() =>
            {
                Err(ResourceError::invalid(
                    format!("guard pages on device {:?}", home.device.spec()),
                    "a device with virtual memory, or GuardMode::Canaries",
                ))
            }
            Some(home) => match mismatch(&inner, &home) {
                Some(mismatch) => Err(ResourceError::Driver(format!(
                    "the parts of this guard do not belong together: {mismatch}"
                ))),
                None => Parts::new(home, tracked),
            },
            None => Err(ResourceError::invalid(
                "a guard over a resource that names no device",
                "a resource with a home(), or DebugGuardResource::over",
            )),
        };
        if let Ok(parts) = &parts {
            // Not at the first allocation: a GPU loads a kernel only when all running work has ended, and that work may wait for
            // the allocating thread. The first allocation retries a failure and returns it.
            let _ = parts.checker.make_ready();
        }
        let pages = match (&parts, config.mode) {
            (Ok(parts), GuardMode::Pages | GuardMode::Sampled(_)) => {
                Some(Pages::new(parts.device.clone(), &config))
            }
            _ => None,
        };
        let sampling = match (&pages, config.mode) {
            (Some(_), GuardMode::Sampled(every)) => Some(every),
            _ => None,
        };
        Self {
            sampling: Sampling::new(sampling, ADDRESSES),
            ordinal: inner.device_ordinal(),
            parts,
            pages,
            lost: AtomicBool::new(false),
            journal: Arc::new(Journal::new(&config)),
            registry: Mutex::new(BlockRegistry::default()),
            collector_lock: Mutex::new(()),
            counters: StripedCounters::default(),
            inner,
            config,
        }
    }

    pub(super) fn parts(&self) -> ResourceResult<&Parts> {
        self.parts.as_ref().map_err(Clone::clone)
    }

    /// Fills a new block inside `redzones` and registers it. Its memory is that of `block`, or mapped memory that `block` stands in for.
    pub(super) fn hand_out(
        &self,
        block: DeviceBlock,
        redzones: Redzones,
        mapped: Option<Mapped>,
        request: &AllocRequest,
    ) -> Result<DeviceBlock, (DeviceBlock, ResourceError)> {
        let parts = match self.parts() {
            Ok(parts) => parts,
            Err(error) => return Err((block, error)),
        };
        let AllocRequest { stream, tag, .. } = *request;
        let below = BlockId::from_block(&block);
        let stream_slot = parts.streams.raw(stream).map(|raw| raw.clock().slot());
        let stream_slot = stream_slot.filter(|_| parts.tracked);
        let fill = GuardWork { access: Access::Write, after_uses: false };
        let filled = self.work(below, stream_slot, fill, |raw| {
            self.fill(raw, redzones.base, CANARY, redzones.front)?;
            self.fill(raw, redzones.back_at(), CANARY, redzones.back)?;
            if self.config.poison {
                self.fill(raw, redzones.user(), FRESH, redzones.bytes)?;
            }
            Ok(())
        });
        if let Err(error) = filled {
            return Err((block, error));
        }
        let (bytes, generation) = (redzones.bytes, block.generation);
        let given =
            DeviceBlock::live(redzones.user(), bytes, self.ordinal, stream, tag, generation);
        let moment = self.journal.moment(stream);
        let info = Arc::new(BlockInfo::new(generation, redzones, tag, self.ordinal, moment));
        let charge = block.bytes;
        let entry = GuardedBlock {
            info,
            below,
            block: Some(block),
            charge,
            stream_slot,
            stage: Stage::Live,
            open: 0,
            lingers: false,
            announced: false,
            mapped,
        };
        self.registry.lock().blocks.insert(generation, entry);
        Ok(given)
    }

    /// Maps memory between guard pages, for which `block` stands in. An error returns the block.
    pub(super) fn hand_out_mapped(
        &self,
        pages: &Pages,
        block: DeviceBlock,
        request: &AllocRequest,
    ) -> Result<DeviceBlock, (DeviceBlock, ResourceError)> {
        let AllocRequest { bytes, align, .. } = *request;
        if !pages.has_room(bytes) {
            // Freed memory may be waiting for its collection.
            let _ = self.collect(false);
        } else {
            self.collect_due();
        }
        let (mapped, redzones) = match pages.map(bytes, align) {
            Ok(mapped) => mapped,
            Err(error) => return Err((block, error)),
        };
        if let Some(from) = pages.addresses() {
            self.sampling.set_guarded(from);
        }
        // Part of the fill may be queued.
        self.hand_out(block, redzones, Some(mapped), request).inspect_err(|_| pages.abandon(mapped))
    }

    /// Queues work of the guard on a block. `None` if a captured stream may still use the block: nothing was queued, and a reap retries.
    pub(super) fn work<T>(
        &self,
        below: BlockId,
        stream_slot: Option<u32>,
        work: GuardWork,
        queue: impl FnOnce(&RawStream) -> ResourceResult<T>,
    ) -> ResourceResult<Option<Worked<T>>> {
        let GuardWork { access, .. } = work;
        let parts = self.parts()?;
        let streams = &parts.streams;
        if !parts.tracked {
            let driver = parts.device.driver();
            if work.after_uses && driver.synchronize_streams()? == Waited::ForSome {
                return Ok(None);
            }
            let raw = self.default_stream(parts)?;
            let done = queue(&raw)?;
            driver.stream_synchronize(raw.handle())?;
            return Ok(Some(Worked { done, point: None }));
        }
        let own = streams.raw(below.alloc_stream);
        let (id, raw) = match own.filter(|raw| Some(raw.clock().slot()) == stream_slot) {
            Some(raw) => (below.alloc_stream, raw.clone()),
            None => (StreamId::DEFAULT, self.default_stream(parts)?),
        };
        self.inner.prepare_block_use(below, id, access)?;
        let follow = || match stream_slot.and_then(|stream_slot| streams.at(stream_slot)) {
            // Work on the block's own stream may be unannounced.
            Some(old) => raw.wait_on_clock(old, old.clock().now(), &self.counters),
            None => Ok(()),
        };
        let done = follow().map_err(ResourceError::from).and_then(|()| queue(&raw));
        let clock = raw.clock();
        let point = Some(StreamPoint { stream_slot: clock.slot(), stamp: clock.now() });
        let finished = self.inner.finish_block_use(below, id, access);
        let done = done?;
        finished?;
        Ok(Some(Worked { done, point }))
    }

    /// [`GuardCore::work`] on a block that is freed or checked. `None` while its stream is captured: the work would become part of the
    /// graph and run again after the memory is reused.
    pub(super) fn work_outside<T>(
        &self,
        job: &BlockJob,
        work: GuardWork,
        queue: impl FnOnce(&RawStream) -> ResourceResult<T>,
    ) -> ResourceResult<Option<Worked<T>>> {
        let streams = &self.parts()?.streams;
        let own = job.stream_slot.and_then(|slot| streams.at(slot));
        if own.is_some_and(|own| own.check_not_capturing("guard").is_err()) {
            return Ok(None);
        }
        self.work(job.below, job.stream_slot, work, queue)
    }

    /// Announces all work that the block's own stream has queued so far, before the first announced use of the block is prepared. The guard
    /// announces its own work on that stream, so the resource below cannot detect unannounced work of the user.
    ///
    /// Returns true if it did; the caller then calls [`GuardCore::set_announced`] after the use is prepared.
    pub(super) fn announce_own(&self, block: BlockId, below: BlockId) -> ResourceResult<bool> {
        let stream_slot = match self.registry.lock().blocks.get(&block.generation) {
            Some(entry) if !entry.announced => entry.stream_slot,
            _ => return Ok(false),
        };
        let work = GuardWork { access: Access::Write, after_uses: true };
        self.work(below, stream_slot, work, |_| Ok(()))?;
        Ok(true)
    }

    /// Marks that the user of a block announces uses.
    pub(super) fn set_announced(&self, block: BlockId) {
        if let Some(entry) = self.registry.lock().blocks.get_mut(&block.generation) {
            entry.announced = true;
        }
    }

    fn default_stream(&self, parts: &Parts) -> ResourceResult<Arc<RawStream>> {
        let made = parts.streams.default_stream();
        let stream = made.map_err(|error| ResourceError::Driver(error.to_string()))?;
        Ok(stream.raw().clone())
    }

    fn fill(&self, raw: &RawStream, ptr: u64, value: u8, bytes: usize) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        let Ok(parts) = &self.parts else { return Ok(()) };
        #[allow(unsafe_code)]
        // SAFETY: the range lies in a block of the resource below that the guard has not freed; the work is a use of it.
        unsafe {
            parts.device.driver().memset(ptr, value, bytes, raw.handle())
        }
    }

    /// Accepts a freed block from its user.
    pub(super) fn return_block(&self, block: BlockId) -> ResourceResult<()> {
        let (info, is_open) = {
            let mut registry = self.registry.lock();
            let entry = registry.find(block)?;
            if entry.stage != Stage::Live {
                return Err(ResourceError::UseAfterFree { generation: block.generation });
            }
            entry.stage = Stage::Returned;
            let taken = (entry.info.clone(), entry.open > 0);
            registry.held_back += 1;
            taken
        };
        let _ = info.freed.set(self.journal.moment(info.allocated.stream));
        let outcome = if is_open { Ok(()) } else { self.retire(block.generation) };
        self.collect_due();
        outcome?;
        if self.config.synchronous && !is_open {
            self.collect(true)?;
            if let Some(damage) = self.journal.pop_unreported_of(&info) {
                return Err(damage);
            }
        }
        Ok(())
    }

    /// Checks a freed block, poisons it and puts it into the quarantine.
    fn retire(&self, generation: Generation) -> ResourceResult<()> {
        let limits = QuarantineLimits {
            bytes: self.config.quarantine_bytes,
            blocks: self.config.quarantine_blocks,
        };
        let (job, is_mapped) = {
            let registry = self.registry.lock();
            let Some(job) = registry.job(generation) else { return Ok(()) };
            (job, registry.is_mapped(generation))
        };
        let work = GuardWork { access: Access::Write, after_uses: true };
        let mut is_idle = false;
        let worked = self.work_outside(&job, work, |raw| {
            let redzones = &job.info.redzones;
            // The stream is ordered after every use of the block by now.
            is_idle = is_mapped && raw.poll_tail();
            if is_idle {
                return Ok((self.check_idle(&job)?, Ok(())));
            }
            let check = self.check(&job, false, raw)?;
            let ended = match is_mapped {
                true => self.end_range(raw, redzones),
                false if self.config.poison => {
                    self.fill(raw, redzones.user(), FREED, redzones.bytes)
                }
                false => Ok(()),
            };
            Ok((check, ended))
        });
        let point = worked.and_then(|worked| match worked {
            Some(Worked { done: (check, ended), point }) => {
                self.track_check(&job.info, check, point, FoundBy::Free);
                ended.map(|()| Some(point)).map_err(ResourceError::from)
            }
            None => Ok(None),
        });
        match point {
            Ok(Some(_)) if is_idle => {
                // The block is freed even if its pages cannot be unmapped: a sweep retries them.
                let _ = self.unmap_block(generation);
                self.free_below(generation, None)
            }
            Ok(Some(point)) if is_mapped => {
                self.registry.lock().unmapping.push((generation, point));
                self.free_below(generation, point)
            }
            Ok(Some(point)) => {
                let evicted = self.registry.lock().enter_quarantine(generation, point, limits);
                self.release_all(evicted, Retired { generation, point })
            }
            not_yet => {
                self.registry.lock().unfinished.push((generation, Due::Retire));
                not_yet.map(|_| ())
            }
        }
    }

    /// Reports the end of a block between guard pages to a device that checks the order of accesses. Until the pages are unmapped, only
    /// that check detects a late access.
    fn end_range(&self, raw: &RawStream, redzones: &Redzones) -> DriverResult<()> {
        match self.parts.as_ref().ok().and_then(|parts| parts.device.observer()) {
            Some(observer) => observer.end_range(redzones.user(), redzones.bytes, raw.handle()),
            None => Ok(()),
        }
    }

    /// Checks the redzones of a block whose work has completed.
    fn check_idle(&self, job: &BlockJob) -> ResourceResult<Check> {
        Ok(Check::Done(self.parts()?.checker.check_idle(&job.info.redzones)?))
    }

    pub(super) fn check(
        &self,
        job: &BlockJob,
        inside: bool,
        raw: &RawStream,
    ) -> ResourceResult<Check> {
        match &self.parts {
            Ok(parts) => parts.checker.check(&job.info.redzones, inside, raw.handle()),
            Err(_) => Ok(Check::Done(Default::default())),
        }
    }

    /// Stores a queued check, or the findings of a completed one.
    pub(super) fn track_check(
        &self,
        info: &Arc<BlockInfo>,
        check: Check,
        point: Option<StreamPoint>,
        found_by: FoundBy,
    ) {
        match check {
            Check::Done(findings) => _ = self.journal.enter(info, &findings, found_by),
            Check::Queued(slot) => {
                let pending = Pending { info: info.clone(), slot, point, found_by };
                self.registry.lock().pending.push(pending);
            }
        }
    }

    /// Releases evicted blocks. The block that was just retired needs no second check.
    fn release_all(&self, evicted: Vec<Generation>, retired: Retired) -> ResourceResult<()> {
        first_error(evicted, |generation| match generation == retired.generation {
            true => self.free_below(generation, retired.point),
            false => self.release(generation),
        })
    }

    /// Checks an evicted block and frees it below.
    fn release(&self, generation: Generation) -> ResourceResult<()> {
        let Some(job) = self.registry.lock().job(generation) else { return Ok(()) };
        let inside = self.config.poison;
        let work = GuardWork { access: Access::Read, after_uses: true };
        let worked = self.work_outside(&job, work, |raw| self.check(&job, inside, raw));
        match worked {
            Ok(Some(Worked { done, point })) => {
                self.track_check(&job.info, done, point, FoundBy::Release);
                self.free_below(generation, point)
            }
            not_yet => {
                self.registry.lock().unfinished.push((generation, Due::Release));
                not_yet.map(|_| ())
            }
        }
    }

    fn free_below(&self, generation: Generation, point: Option<StreamPoint>) -> ResourceResult<()> {
        let taken = self.registry.lock().release_block(generation, point);
        let Some((below, block)) = taken else { return Ok(()) };
        // After a failure the resource below has the block, and finishes the free at a reap.
        let freed = self.inner.deallocate(block);
        if self.inner.block_state(below) == BlockState::Freed {
            // The resource below may reuse the memory in stream order, before the check has run. The guard reports the block as freed
            // only after the check.
            let is_mapped = self.registry.lock().is_mapped(generation);
            match !is_mapped && self.is_complete(point) {
                true => self.registry.lock().remove(&[generation]),
                false => self.registry.lock().linger(generation),
            }
        }
        freed
    }

    pub(super) fn perform(&self, generation: Generation, due: Due) -> ResourceResult<()> {
        match due {
            Due::Nothing => Ok(()),
            Due::Retire => self.retire(generation),
            Due::Release => self.release(generation),
        }
    }

    /// Retries failed steps.
    pub(super) fn retry(&self) -> ResourceResult<()> {
        let unfinished = std::mem::take(&mut self.registry.lock().unfinished);
        first_error(unfinished, |(generation, due)| self.perform(generation, due))
    }

    /// Removes the blocks that the resource below has freed.
    pub(super) fn prune(&self) {
        let given = self.registry.lock().released_blocks();
        let is_freed = |below: BlockId, point: Option<StreamPoint>| {
            self.inner.block_state(below) == BlockState::Freed && self.is_complete(point)
        };
        let freed: Vec<_> = given
            .into_iter()
            .filter(|(_, below, point)| is_freed(*below, *point))
            .map(|(generation, ..)| generation)
            .collect();
        if !freed.is_empty() {
            self.registry.lock().remove(&freed);
        }
    }

    /// Evicts all blocks from the quarantine.
    pub(super) fn flush(&self) -> ResourceResult<()> {
        let evicted = self.registry.lock().evict_all();
        first_error(evicted, |generation| self.release(generation))
    }
}
