//! A memory resource as somebody else would write it: one lock, one event per use, nothing clever.
//!
//! It keeps the whole contract, or all of it but one [`Flaw`]: so it shows that the suite can be passed by a resource that
//! shares no code with ours, and that each rule of the suite catches a resource that breaks it.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_cuda::device_runtime::{
    Access, AllocTag, BlockId, BlockState, BudgetReservation, DeviceBlock, DeviceMemoryResource,
    DeviceStream, Generation, ResourceError, ResourceResult, StreamId, StreamPool,
};
use xlog_cuda::driver::sync::Mutex;
use xlog_cuda::driver::{DriverError, EventHandle};
use xlog_cuda::{CudaDevice, XlogError};

/// What the stranger got wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    None,
    /// A first use elsewhere does not wait for the allocation.
    NotBornDependent,
    ReadIgnoresWrites,
    ReadWaitsForReads,
    WriteIgnoresReads,
    FreeIgnoresReads,
    /// A finished write forgets every other use, also those it never waited for.
    FinishForgetsAll,
    /// A finished write forgets the reads, also those it never waited for.
    FinishForgetsReads,
    FreesUnderOpenUses,
    /// Work on the live block does not keep the block.
    FreesUnderWork,
    RetiredAcceptsUses,
    FinishNeedsNoPrepare,
    RecordDoesNothing,
    RecordSupersedes,
    TrustsBytes,
    TrustsAllocStream,
    IgnoresGeneration,
    IgnoresOrdinal,
    PointerBeforeOrdinal,
    /// The check and the change of state are two steps.
    ChecksThenFrees,
    CountsFreeAtOnce,
    CountsRefusals,
    ReapCompletedWaits,
    ReapPendingForgets,
    NeedsLiveAllocStream,
    RefusesFinishOnGoneStream,
    TracksNothingSilently,
    AcceptsZero,
}

struct Use {
    event: EventHandle,
    writes: bool,
    recorded: bool,
}

struct Open {
    stream: Arc<DeviceStream>,
    access: Access,
    waited: Vec<EventHandle>,
}

struct Record {
    id: BlockId,
    stream: Arc<DeviceStream>,
    bytes: usize,
    uses: Vec<Use>,
    open: Vec<Open>,
    /// The calls of `while_live` that run.
    works: usize,
    retired: bool,
    /// Set when the free is queued: completes with it.
    freed: Option<EventHandle>,
}

impl Record {
    fn is_used(&self) -> bool {
        !self.open.is_empty() || self.works > 0
    }

    fn awaits_free(&self) -> bool {
        self.retired && self.freed.is_none() && !self.is_used()
    }
}

#[derive(Default)]
struct State {
    records: BTreeMap<Generation, Record>,
    outstanding: usize,
}

pub struct Stranger {
    device: Arc<CudaDevice>,
    pool: Arc<StreamPool>,
    flaw: Flaw,
    state: Mutex<State>,
}

fn failed(error: impl Into<XlogError>) -> ResourceError {
    match error.into() {
        XlogError::Driver(error) => error.into(),
        other => ResourceError::Driver(other.to_string()),
    }
}

impl Stranger {
    pub fn new(device: &Arc<CudaDevice>, pool: &Arc<StreamPool>, flaw: Flaw) -> Self {
        Self { device: device.clone(), pool: pool.clone(), flaw, state: Mutex::default() }
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn stream(&self, id: StreamId) -> ResourceResult<Arc<DeviceStream>> {
        self.pool
            .resolve(id)
            .ok_or_else(|| ResourceError::StreamMisuse(format!("{id} is not known here")))
    }

    /// An event behind what is queued on a stream. A driver that fails once is asked again.
    fn event(&self, stream: &DeviceStream) -> ResourceResult<EventHandle> {
        let driver = self.device.driver();
        let recorded = || {
            let event = driver.event_create()?;
            driver.event_record(event, stream.handle())?;
            Ok(event)
        };
        recorded().or_else(|_: DriverError| recorded()).map_err(failed)
    }

    fn find<'a>(&self, state: &'a mut State, id: BlockId) -> ResourceResult<&'a mut Record> {
        let unknown = ResourceError::UseAfterFree { generation: id.generation };
        let foreign = id.device_ordinal != self.device.ordinal() && !self.has(Flaw::IgnoresOrdinal);
        if foreign && !(self.has(Flaw::PointerBeforeOrdinal) && id.ptr == 0) {
            return Err(ResourceError::Driver(format!("{id:?} is another device's")));
        }
        if self.has(Flaw::IgnoresGeneration) {
            let found = state.records.values_mut().filter(|r| r.id.ptr == id.ptr);
            return found.max_by_key(|r| r.id.generation).ok_or(unknown);
        }
        let found = state.records.get_mut(&id.generation);
        found.filter(|record| record.id.ptr == id.ptr).ok_or(unknown)
    }

    fn live<'a>(&self, state: &'a mut State, id: BlockId) -> ResourceResult<&'a mut Record> {
        let record = self.find(state, id)?;
        match record.retired {
            true => Err(ResourceError::UseAfterFree { generation: id.generation }),
            false => Ok(record),
        }
    }

    /// Queues the free of a retired record that nobody uses any more.
    fn free(&self, record: &mut Record, stream: &DeviceStream) -> ResourceResult<()> {
        let driver = self.device.driver();
        for used in &record.uses {
            if used.writes || !self.has(Flaw::FreeIgnoresReads) {
                driver.stream_wait_event(stream.handle(), used.event).map_err(failed)?;
            }
        }
        let pools = driver.async_pools().unwrap();
        // SAFETY: the record is live and its stream waits for every use; with a flaw it may not, which is the point.
        unsafe { pools.free_async(record.id.ptr, stream.handle()) }.map_err(failed)?;
        record.freed = Some(self.event(stream)?);
        Ok(())
    }

    fn reap(&self, wait: bool) -> ResourceResult<()> {
        let driver = self.device.driver();
        let mut state = self.state.lock();
        // Frees that failed.
        for record in state.records.values_mut() {
            if record.awaits_free() {
                let stream = record.stream.clone();
                self.free(record, &stream)?;
            }
        }
        let queued: Vec<_> =
            state.records.values().filter_map(|r| Some((r.id.generation, r.freed?))).collect();
        for (generation, event) in queued {
            if wait {
                driver.event_synchronize(event).map_err(failed)?;
            } else if !driver.event_query(event).map_err(failed)? {
                continue;
            }
            if let Some(record) = state.records.remove(&generation) {
                if !self.has(Flaw::CountsFreeAtOnce) {
                    state.outstanding -= record.bytes.min(state.outstanding);
                }
                for event in record.uses.iter().map(|used| used.event).chain(record.freed) {
                    // SAFETY: made here, and not used any more.
                    unsafe { driver.event_destroy(event) }.map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    fn retire(&self, block: &DeviceBlock) -> ResourceResult<()> {
        if self.has(Flaw::ChecksThenFrees) {
            self.live(&mut self.state.lock(), block.into())?;
        }
        let mut state = self.state.lock();
        let trusted = self.has(Flaw::ChecksThenFrees);
        let record = match trusted {
            true => self.find(&mut state, block.into())?,
            false => self.live(&mut state, block.into())?,
        };
        if self.has(Flaw::NeedsLiveAllocStream) {
            self.stream(record.stream.id())?;
        }
        let first = !std::mem::replace(&mut record.retired, true);
        let counted = if self.has(Flaw::TrustsBytes) { block.bytes } else { record.bytes };
        record.bytes = counted;
        if first && (!record.is_used() || self.has(Flaw::FreesUnderOpenUses)) {
            let stream = match self.has(Flaw::TrustsAllocStream) {
                true => self.stream(block.alloc_stream)?,
                false => record.stream.clone(),
            };
            self.free(record, &stream)?;
        }
        if self.has(Flaw::CountsFreeAtOnce) {
            state.outstanding -= counted.min(state.outstanding);
        }
        Ok(())
    }
}

impl DeviceMemoryResource for Stranger {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        if bytes == 0 && !self.has(Flaw::AcceptsZero) {
            return Err(ResourceError::InvalidRequest {
                value: "0 bytes".to_owned(),
                accepted: "at least one".to_owned(),
            });
        }
        let asked = bytes;
        let bytes = bytes.max(1);
        let stream = self.stream(stream)?;
        let pool = self.device.memory_pool().map_err(failed)?;
        let mut state = self.state.lock();
        if self.has(Flaw::CountsRefusals) {
            state.outstanding += bytes;
        }
        let pools = self.device.driver().async_pools().unwrap();
        let ptr = pools.alloc_async(bytes, pool, stream.handle()).map_err(|error| match error {
            DriverError::OutOfMemory { call, .. } => {
                DriverError::OutOfMemory { call, requested: asked as u64 }.into()
            }
            other => failed(other),
        })?;
        if !self.has(Flaw::CountsRefusals) {
            state.outstanding += bytes;
        }
        let block = DeviceBlock {
            ptr,
            device_ordinal: self.device.ordinal(),
            alloc_stream: stream.id(),
            bytes,
            align: 256,
            tag,
            generation: Generation::next(),
            state: BlockState::Live,
        };
        let born = Use { event: self.event(&stream)?, writes: true, recorded: false };
        let uses = if self.has(Flaw::NotBornDependent) { vec![] } else { vec![born] };
        let id = BlockId::from_block(&block);
        let (open, works, retired, freed) = (vec![], 0, false, None);
        let record = Record { id, stream, bytes, uses, open, works, retired, freed };
        state.records.insert(block.generation, record);
        Ok(block)
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.retire(&block)
    }

    fn device_ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn bytes_outstanding(&self) -> usize {
        self.state.lock().outstanding
    }

    fn reserve_budget(&self, _bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        Ok(None)
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        match self.has(Flaw::ReapPendingForgets) {
            true => Ok(()),
            false => self.reap(true),
        }
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        self.reap(self.has(Flaw::ReapCompletedWaits))
    }

    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        let stream = self.stream(use_stream)?;
        let mut state = self.state.lock();
        let record = self.live(&mut state, block.into())?;
        if self.has(Flaw::RecordDoesNothing) {
            return Ok(());
        }
        if self.has(Flaw::RecordSupersedes) {
            record.uses.clear();
        }
        record.uses.push(Use { event: self.event(&stream)?, writes: true, recorded: true });
        Ok(())
    }

    fn supports_block_use_tracking(&self) -> bool {
        !self.has(Flaw::TracksNothingSilently)
    }

    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        let stream = self.stream(use_stream)?;
        let mut state = self.state.lock();
        let record = match self.has(Flaw::RetiredAcceptsUses) {
            true => self.find(&mut state, block)?,
            false => self.live(&mut state, block)?,
        };
        let mut waited = Vec::new();
        for used in &record.uses {
            let needed = match (access.writes(), used.writes) {
                (false, true) => !self.has(Flaw::ReadIgnoresWrites),
                (false, false) => self.has(Flaw::ReadWaitsForReads),
                (true, true) => true,
                (true, false) => !self.has(Flaw::WriteIgnoresReads),
            };
            if needed {
                let driver = self.device.driver();
                driver.stream_wait_event(stream.handle(), used.event).map_err(failed)?;
                waited.push(used.event);
            }
        }
        record.open.push(Open { stream, access, waited });
        Ok(())
    }

    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        if self.has(Flaw::RefusesFinishOnGoneStream) {
            self.stream(use_stream)?;
        }
        let mut state = self.state.lock();
        let record = self.find(&mut state, block)?;
        let open = record
            .open
            .iter()
            .position(|open| open.stream.id() == use_stream && open.access == access);
        let Some(open) = open else {
            return match self.has(Flaw::FinishNeedsNoPrepare) {
                true => Ok(()),
                false => Err(ResourceError::StreamMisuse("no such use is open".to_owned())),
            };
        };
        let open = record.open.remove(open);
        if access.writes() {
            record.uses.retain(|used| {
                let forget = self.has(Flaw::FinishForgetsAll)
                    || (self.has(Flaw::FinishForgetsReads) && !used.writes)
                    || open.waited.contains(&used.event);
                !forget || used.recorded
            });
        }
        let event = self.event(&open.stream)?;
        record.uses.push(Use { event, writes: access.writes(), recorded: false });
        if record.awaits_free() {
            let stream = record.stream.clone();
            self.free(record, &stream)?;
        }
        Ok(())
    }

    fn while_live(&self, block: BlockId, work: &mut dyn FnMut()) -> ResourceResult<()> {
        let kept = usize::from(!self.has(Flaw::FreesUnderWork));
        self.live(&mut self.state.lock(), block)?.works += kept;
        work();
        let mut state = self.state.lock();
        let Ok(record) = self.find(&mut state, block) else { return Ok(()) };
        record.works -= kept;
        if record.awaits_free() {
            let stream = record.stream.clone();
            self.free(record, &stream)?;
        }
        Ok(())
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        match self.find(&mut self.state.lock(), block) {
            Ok(record) if record.retired => BlockState::Retired,
            Ok(_) => BlockState::Live,
            Err(_) => BlockState::Freed,
        }
    }
}
