//! Guarded blocks from allocation to release: what is queued when, and on which stream.
//!
//! Where the resource below tracks uses, everything is queued on the block's own stream as a use like any other, so it follows
//! what was announced and the host waits for nothing. A block whose stream was given back is looked at on the default stream,
//! made to follow the old one. Below that, where uses are not tracked, the host waits before and after, as such a resource does.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use xlog_driver::sync::Mutex;
use xlog_driver::{Access, DriverResult};

use super::books::{Books, Due, Entry, Job, Mark, Pending, Stage};
use super::check::{Checker, Look};
use super::config::{GuardConfig, GuardMode};
use super::journal::Journal;
use super::pages::{ADDRESSES, Mapped, Pages};
use super::report::{BlockInfo, FoundBy};
use super::sampling::Sampling;
use super::zone::{CANARY, FREED, FRESH, Zone};
use crate::CudaDevice;
use crate::device_runtime::ordering::striped_counters::StripedCounters;
use crate::device_runtime::resource::{
    AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation, ResourceError,
    ResourceHome, ResourceResult, StreamId,
};
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// Looks that may be on their way before a free asks which are done.
const MANY: usize = 128;

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
                return Err(ResourceError::InvalidRequest {
                    value: "a guard over a resource that tracks uses and names no streams"
                        .to_owned(),
                    accepted:
                        "a resource whose home() names its streams, or DebugGuardResource::over"
                            .to_owned(),
                });
            }
            None => Arc::new(StreamPool::new(device.clone(), 1)),
        };
        Ok(Self { checker: Checker::new(device.clone()), device, streams, tracked })
    }
}

/// Why the resource below does not work where the guard is to.
fn misfit<R: DeviceMemoryResource>(inner: &R, home: &ResourceHome) -> Option<String> {
    inner.home()?.misfit(&home.device, home.streams.as_deref()?)
}

/// A guard, shared by the resource and its handles.
#[derive(Debug)]
pub(super) struct Core<R> {
    pub(super) sampling: Sampling,
    pub(super) inner: R,
    pub(super) config: GuardConfig,
    pub(super) ordinal: u32,
    pub(super) parts: ResourceResult<Parts>,
    pub(super) journal: Arc<Journal>,
    pub(super) books: Mutex<Books>,
    pub(super) pages: Option<Pages>,
    /// Whether the device was found lost.
    pub(super) lost: AtomicBool,
    /// Held by who collects what looks found.
    pub(super) turn: Mutex<()>,
    pub(super) counters: StripedCounters,
}

/// What was queued on a block, and where.
pub(super) struct Worked<T> {
    pub(super) done: T,
    pub(super) mark: Mark,
}

impl<R: DeviceMemoryResource> Core<R> {
    pub(super) fn new(inner: R, config: GuardConfig, home: Option<ResourceHome>) -> Self {
        let tracked = inner.supports_block_use_tracking();
        let parts = match home {
            Some(home)
                if config.mode != GuardMode::Canaries
                    && home.device.driver().virtual_memory().is_none() =>
            {
                Err(ResourceError::InvalidRequest {
                    value: format!("guard pages on device {:?}", home.device.spec()),
                    accepted: "a device with virtual memory, or GuardMode::Canaries".to_owned(),
                })
            }
            Some(home) => match misfit(&inner, &home) {
                Some(misfit) => Err(ResourceError::Driver(format!(
                    "the parts of this guard do not belong together: {misfit}"
                ))),
                None => Parts::new(home, tracked),
            },
            None => Err(ResourceError::InvalidRequest {
                value: "a guard over a resource that names no device".to_owned(),
                accepted: "a resource with a home(), or DebugGuardResource::over".to_owned(),
            }),
        };
        if let Ok(parts) = &parts {
            // Here rather than with the first block: a GPU loads a kernel only when all that runs has ended, and whoever allocates may
            // be about to let that go on. What fails is tried again, and told, with the first block.
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
            books: Mutex::new(Books::default()),
            turn: Mutex::new(()),
            counters: StripedCounters::default(),
            inner,
            config,
        }
    }

    pub(super) fn parts(&self) -> ResourceResult<&Parts> {
        self.parts.as_ref().map_err(Clone::clone)
    }

    /// Hands out `zone`, which is `block` of the resource below, or memory of its own that `block` stands in for.
    pub(super) fn hand_out(
        &self,
        block: DeviceBlock,
        zone: Zone,
        mapped: Option<Mapped>,
        (stream, tag): (StreamId, AllocTag),
    ) -> Result<DeviceBlock, (DeviceBlock, ResourceError)> {
        let parts = match self.parts() {
            Ok(parts) => parts,
            Err(error) => return Err((block, error)),
        };
        let below = BlockId::from_block(&block);
        let place = parts.streams.raw(stream).map(|raw| raw.clock().slot());
        let place = place.filter(|_| parts.tracked);
        let filled = self.work(below, place, (Access::Write, false), |raw| {
            self.fill(raw, zone.base, CANARY, zone.front)?;
            self.fill(raw, zone.back_at(), CANARY, zone.back)?;
            if self.config.poison {
                self.fill(raw, zone.user(), FRESH, zone.bytes)?;
            }
            Ok(())
        });
        if let Err(error) = filled {
            return Err((block, error));
        }
        let (bytes, generation) = (zone.bytes, block.generation);
        let given = DeviceBlock::live((zone.user(), bytes), self.ordinal, stream, tag, generation);
        let moment = self.journal.moment(stream);
        let info = Arc::new(BlockInfo::new(generation, zone, tag, self.ordinal, moment));
        let charge = block.bytes;
        let entry = Entry {
            info,
            below,
            block: Some(block),
            charge,
            place,
            stage: Stage::Live,
            open: 0,
            lingers: false,
            announced: false,
            mapped,
        };
        self.books.lock().entries.insert(generation, entry);
        Ok(given)
    }

    /// Hands out memory between guard pages, for which `block` stands in. The block comes back with a failure.
    pub(super) fn hand_out_mapped(
        &self,
        pages: &Pages,
        block: DeviceBlock,
        (bytes, align): (usize, usize),
        who: (StreamId, AllocTag),
    ) -> Result<DeviceBlock, (DeviceBlock, ResourceError)> {
        if !pages.has_room(bytes) {
            // What was freed may only wait to be seen.
            let _ = self.collect(false);
        }
        let (mapped, zone) = match pages.map(bytes, align) {
            Ok(mapped) => mapped,
            Err(error) => return Err((block, error)),
        };
        if let Some(from) = pages.addresses() {
            self.sampling.set_guarded(from);
        }
        // Part of the fill may be queued.
        self.hand_out(block, zone, Some(mapped), who).inspect_err(|_| pages.leave(mapped))
    }

    /// Queues work of the guard on a block. `late` work follows everything that the block was used for.
    pub(super) fn work<T>(
        &self,
        below: BlockId,
        place: Option<u32>,
        (access, late): (Access, bool),
        queue: impl FnOnce(&RawStream) -> ResourceResult<T>,
    ) -> ResourceResult<Worked<T>> {
        let parts = self.parts()?;
        let streams = &parts.streams;
        if !parts.tracked {
            let driver = parts.device.driver();
            if late {
                // A stream that is being captured is left out: what it wrote late is reported as damage, and the free below waits for it.
                let _waited = driver.synchronize_streams()?;
            }
            let raw = self.default_stream(parts)?;
            let done = queue(&raw)?;
            driver.stream_synchronize(raw.handle())?;
            return Ok(Worked { done, mark: None });
        }
        let own = streams.raw(below.alloc_stream);
        let (id, raw) = match own.filter(|raw| Some(raw.clock().slot()) == place) {
            Some(raw) => (below.alloc_stream, raw.clone()),
            None => (StreamId::DEFAULT, self.default_stream(parts)?),
        };
        self.inner.prepare_block_use(below, id, access)?;
        let follow = || match place.and_then(|place| streams.at(place)) {
            // Work on a block's own stream is not announced.
            Some(old) => raw.wait_on_clock(old, old.clock().now(), &self.counters),
            None => Ok(()),
        };
        let done = follow().map_err(ResourceError::from).and_then(|()| queue(&raw));
        let mark = Some((raw.clock().slot(), raw.clock().now()));
        let finished = self.inner.finish_block_use(below, id, access);
        let done = done?;
        finished?;
        Ok(Worked { done, mark })
    }

    /// Until a use that the user of a block announces is prepared: announces to the resource below what the block's own stream has
    /// queued so far. The guard's own work on that stream is announced there, so that resource cannot tell that the user's was not.
    /// True when it did, and [`Core::set_announced`] is to be called once the use is prepared.
    pub(super) fn announce_own(&self, block: BlockId, below: BlockId) -> ResourceResult<bool> {
        let place = match self.books.lock().entries.get(&block.generation) {
            Some(entry) if !entry.announced => entry.place,
            _ => return Ok(false),
        };
        self.work(below, place, (Access::Write, true), |_| Ok(()))?;
        Ok(true)
    }

    /// From here on the user's announcements decide.
    pub(super) fn set_announced(&self, block: BlockId) {
        if let Some(entry) = self.books.lock().entries.get_mut(&block.generation) {
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
        // SAFETY: the range lies in a block of the resource below that the guard has not given back; the work is a use of it.
        unsafe {
            parts.device.driver().memset(ptr, value, bytes, raw.handle())
        }
    }

    /// Takes a block from its user.
    pub(super) fn give_back(&self, block: BlockId) -> ResourceResult<()> {
        let (info, is_open) = {
            let mut books = self.books.lock();
            let entry = books.find(block)?;
            if entry.stage != Stage::Live {
                return Err(ResourceError::UseAfterFree { generation: block.generation });
            }
            entry.stage = Stage::Returned;
            let taken = (entry.info.clone(), entry.open > 0);
            books.held_back += 1;
            taken
        };
        let _ = info.freed.set(self.journal.moment(info.allocated.stream));
        let outcome = if is_open { Ok(()) } else { self.retire(block.generation) };
        if self.books.lock().pending.len() >= MANY {
            // What fails here comes back with a reap.
            let _ = self.collect(false);
        }
        outcome?;
        if self.config.synchronous && !is_open {
            self.collect(true)?;
            if let Some(damage) = self.journal.take_untold_of(&info) {
                return Err(damage);
            }
        }
        Ok(())
    }

    /// Looks at a returned block, fills it and holds it back.
    fn retire(&self, generation: Generation) -> ResourceResult<()> {
        let limits = (self.config.quarantine_bytes, self.config.quarantine_blocks);
        let (job, is_mapped) = {
            let books = self.books.lock();
            let Some(job) = books.job(generation) else { return Ok(()) };
            (job, books.is_mapped(generation))
        };
        let worked = self.work(job.below, job.place, (Access::Write, true), |raw| {
            let look = self.look(&job, false, raw)?;
            let zone = &job.info.zone;
            let filled = match self.config.poison && !is_mapped {
                true => self.fill(raw, zone.user(), FREED, zone.bytes),
                false => Ok(()),
            };
            Ok((look, filled))
        });
        let mark = match worked {
            Ok(Worked { done: (look, filled), mark }) => {
                self.await_look(&job.info, look, mark, FoundBy::Free);
                filled.map(|()| mark).map_err(ResourceError::from)
            }
            Err(error) => Err(error),
        };
        match mark {
            Ok(mark) if is_mapped => {
                self.books.lock().unmapping.push((generation, mark));
                self.give_below(generation, mark)
            }
            Ok(mark) => {
                let leaving = self.books.lock().hold(generation, mark, limits);
                self.release_all(leaving, (generation, mark))
            }
            Err(error) => {
                self.books.lock().unfinished.push((generation, Due::Retire));
                Err(error)
            }
        }
    }

    pub(super) fn look(&self, job: &Job, inside: bool, raw: &RawStream) -> ResourceResult<Look> {
        match &self.parts {
            Ok(parts) => parts.checker.look(&job.info.zone, inside, raw.handle()),
            Err(_) => Ok(Look::Done(Default::default())),
        }
    }

    /// Remembers a look, or what it found.
    pub(super) fn await_look(
        &self,
        info: &Arc<BlockInfo>,
        look: Look,
        mark: Mark,
        found_by: FoundBy,
    ) {
        match look {
            Look::Done(findings) => _ = self.journal.enter(info, &findings, found_by),
            Look::Queued(slot) => {
                let pending = Pending { info: info.clone(), slot, mark, found_by };
                self.books.lock().pending.push(pending);
            }
        }
    }

    /// Releases blocks that left the quarantine. What was retired a moment ago needs no second look.
    fn release_all(
        &self,
        leaving: Vec<Generation>,
        (just_retired, mark): (Generation, Mark),
    ) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for generation in leaving {
            let this = match generation == just_retired {
                true => self.give_below(generation, mark),
                false => self.release(generation),
            };
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Looks at a block that leaves the quarantine and gives it to the resource below.
    fn release(&self, generation: Generation) -> ResourceResult<()> {
        let Some(job) = self.books.lock().job(generation) else { return Ok(()) };
        let inside = self.config.poison;
        let worked = self
            .work(job.below, job.place, (Access::Read, true), |raw| self.look(&job, inside, raw));
        match worked {
            Ok(Worked { done, mark }) => {
                self.await_look(&job.info, done, mark, FoundBy::Release);
                self.give_below(generation, mark)
            }
            Err(error) => {
                self.books.lock().unfinished.push((generation, Due::Release));
                Err(error)
            }
        }
    }

    fn give_below(&self, generation: Generation, mark: Mark) -> ResourceResult<()> {
        let taken = self.books.lock().take_block(generation, mark);
        let Some((below, block)) = taken else { return Ok(()) };
        // After a failure the resource below has it, and finishes the free at a reap.
        let freed = self.inner.deallocate(block);
        if self.inner.block_state(below) == BlockState::Freed {
            // One that hands memory out again in the order of its stream need not wait for the look; the guard's word does.
            let is_mapped = self.books.lock().is_mapped(generation);
            match !is_mapped && self.is_complete(mark) {
                true => self.books.lock().forget(&[generation], self.config.history_blocks),
                false => self.books.lock().linger(generation),
            }
        }
        freed
    }

    pub(super) fn do_due(&self, generation: Generation, due: Due) -> ResourceResult<()> {
        match due {
            Due::Nothing => Ok(()),
            Due::Retire => self.retire(generation),
            Due::Release => self.release(generation),
        }
    }

    /// Tries again what failed half way.
    pub(super) fn retry(&self) -> ResourceResult<()> {
        let unfinished = std::mem::take(&mut self.books.lock().unfinished);
        let mut outcome = Ok(());
        for (generation, due) in unfinished {
            let this = self.do_due(generation, due);
            outcome = outcome.and(this);
        }
        outcome
    }

    /// Forgets what the resource below has freed.
    pub(super) fn prune(&self) {
        let given = self.books.lock().given_below();
        let is_freed = |below: BlockId, mark: Mark| {
            self.inner.block_state(below) == BlockState::Freed && self.is_complete(mark)
        };
        let freed: Vec<_> = given
            .into_iter()
            .filter(|(_, below, mark)| is_freed(*below, *mark))
            .map(|(generation, ..)| generation)
            .collect();
        if !freed.is_empty() {
            self.books.lock().forget(&freed, self.config.history_blocks);
        }
    }

    /// Lets everything out of the quarantine.
    pub(super) fn flush(&self) -> ResourceResult<()> {
        let leaving = self.books.lock().let_all_go();
        let mut outcome = Ok(());
        for generation in leaving {
            let this = self.release(generation);
            outcome = outcome.and(this);
        }
        outcome
    }
}
