//! The streams behind a pool: which are out, which were given back, and which serves next.
//!
//! A stream that was given back serves again, under a new id, once its work is done and nobody holds a handle of it.
//! While there are only busy ones a new driver stream is made, up to twice `max_streams` of each priority. Beyond that the one
//! given back first is reused as it is: a stream runs its work in order, so the new user merely queues behind the old.
//!
//! Invariants: no lock is held over a driver call; every driver stream that was made is out, given back, or in the hands of one
//! call of [`StreamTable::take_out`]; it also keeps the *place* where it was made for as long as the table lives, so that others
//! can name it by a number.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, DriverResult};

use super::ordering::cells::{CellRef, Cells};
use super::ordering::clock::ClockCell;
use super::ordering::slab::Slab;
use super::stream_ids::IssuedId;
use super::{StreamId, StreamPoolError, StreamPriority};
use crate::stream::RawStream;
use crate::{CudaDevice, DeviceStream};

/// Threads that resolve different ids seldom meet on one lock.
const SHARDS: usize = 16;
/// Ids that are found without a lock, if no other takes their place.
const KNOWN: usize = 64;
/// Driver streams a pool can have.
pub(crate) const MAX_PLACES: u32 = 1 << 16;

/// How many tables the process has made.
static MADE: AtomicU64 = AtomicU64::new(0);

/// Who gives a stream back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Caller,
    Lease,
}

/// A stream that is out.
struct Slot {
    stream: Arc<DeviceStream>,
    holder: Holder,
}

/// A part of the table of streams that are out, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Shard(Mutex<BTreeMap<StreamId, Slot>>);

impl Deref for Shard {
    type Target = Mutex<BTreeMap<StreamId, Slot>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// What the pool counts and keeps.
#[derive(Default)]
struct State {
    /// Streams that are out, and calls that are about to take one out.
    out: usize,
    /// Driver streams that are out, given back, or being made, by priority.
    made: BTreeMap<i32, usize>,
    /// The number of times a stream was given back.
    turn: u64,
    /// Streams given back, the first one first.
    given_back: BTreeMap<u64, Arc<RawStream>>,
}

/// All streams of a pool, held by the pool object and by its leases.
pub(super) struct StreamTable {
    device: Arc<CudaDevice>,
    max_streams: usize,
    /// Tells this table from every other one of the process.
    number: u64,
    default: OnceLock<Arc<DeviceStream>>,
    /// Every driver stream that was made, except those that are near.
    places: Slab<OnceLock<Arc<RawStream>>, 16>,
    /// Those at the first places, which are found by one step.
    near: [OnceLock<Arc<RawStream>>; KNOWN],
    cells: Arc<Cells>,
    /// An id and the place of its stream, plus one. Only a hint: whether a stream is out under an id, its clock says.
    known: [AtomicU64; KNOWN],
    shards: [Shard; SHARDS],
    state: Mutex<State>,
}

impl StreamTable {
    pub(super) fn new(device: Arc<CudaDevice>, max_streams: usize) -> Self {
        Self {
            device,
            max_streams: max_streams.max(1),
            number: MADE.fetch_add(1, Ordering::Relaxed) + 1,
            default: OnceLock::new(),
            places: Slab::new(MAX_PLACES),
            near: [const { OnceLock::new() }; KNOWN],
            cells: Cells::new(MAX_PLACES),
            known: [const { AtomicU64::new(0) }; KNOWN],
            shards: Default::default(),
            state: Mutex::new(State::default()),
        }
    }

    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(super) fn max_streams(&self) -> usize {
        self.max_streams
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// How many streams are out.
    pub(super) fn out(&self) -> usize {
        self.state.lock().out
    }

    /// How many driver streams there are, the default one not counted.
    pub(super) fn made(&self) -> usize {
        self.state.lock().made.values().sum()
    }

    /// The driver stream at a place.
    #[inline]
    pub(super) fn at(&self, place: u32) -> Option<&Arc<RawStream>> {
        match self.near.get(place as usize) {
            Some(near) => near.get(),
            None => self.places.get(place)?.get(),
        }
    }

    pub(super) fn cells(&self) -> &Arc<Cells> {
        &self.cells
    }

    /// The driver stream that is out under an id.
    #[inline]
    pub(super) fn raw(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let near = self.near.get((known as u32).wrapping_sub(1) as usize);
        match near.and_then(OnceLock::get) {
            Some(raw) if raw.clock().cell().is_out_as(id.0) => Some(raw),
            _ => self.raw_far(id),
        }
    }

    /// The same if its raw handle was not handed out.
    #[inline]
    pub(super) fn raw_private(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let near = self.near.get((known as u32).wrapping_sub(1) as usize);
        match near.and_then(OnceLock::get) {
            Some(raw) if raw.clock().cell().is_private_as(id.0) => Some(raw),
            _ => self.raw_private_far(id),
        }
    }

    #[cold]
    #[inline(never)]
    fn raw_private_far(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        self.raw_far(id).filter(|raw| !raw.clock().cell().is_exposed())
    }

    #[inline(never)]
    fn raw_far(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        if known >> 32 == u64::from(id.0)
            && let Some(raw) = self.at((known as u32).wrapping_sub(1))
            && raw.clock().cell().is_out_as(id.0)
        {
            return Some(raw);
        }
        self.raw_by_map(id)
    }

    /// The place of the stream that is out under an id, and its cell, if it is one of those that are found at once.
    #[inline]
    pub(super) fn near(&self, id: StreamId) -> Option<(u32, &ClockCell)> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let place = (known as u32).wrapping_sub(1);
        let cell = self.cells.near(place)?;
        (known >> 32 == u64::from(id.0) && cell.is_out_as(id.0)).then_some((place, cell))
    }

    /// The place that the stream of an id mostly has; a guess, which another id of the same rest by [`KNOWN`] makes wrong.
    #[inline]
    pub(super) fn place_of(&self, id: StreamId) -> u32 {
        (self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed) as u32).wrapping_sub(1)
    }

    #[cold]
    fn raw_by_map(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let stream =
            if id == StreamId::DEFAULT { self.default_stream().ok() } else { self.resolve(id) }?;
        let place = stream.raw().clock().key();
        let known = (u64::from(id.0) << 32) | (u64::from(place) + 1);
        self.known[id.0 as usize % KNOWN].store(known, Ordering::Relaxed);
        self.at(place)
    }

    /// The stream of an id other than the default one.
    pub(super) fn resolve(&self, id: StreamId) -> Option<Arc<DeviceStream>> {
        self.shard(id).lock().get(&id).map(|slot| slot.stream.clone())
    }

    fn shard(&self, id: StreamId) -> &Shard {
        &self.shards[id.0 as usize % SHARDS]
    }

    pub(super) fn default_stream(&self) -> Result<Arc<DeviceStream>, StreamPoolError> {
        if let Some(stream) = self.default.get() {
            return Ok(stream.clone());
        }
        // Made without a lock: the stream of a thread that loses the race serves a lease later.
        let priority = StreamPriority::Normal.on(&self.device);
        let raw = self.make(priority).map_err(fork_failed)?;
        let mine = raw.clone();
        let kept =
            self.default.get_or_init(|| Arc::new(DeviceStream::new(IssuedId::DEFAULT, mine)));
        if !Arc::ptr_eq(kept.raw(), &raw) {
            let mut state = self.state.lock();
            *state.made.entry(priority).or_default() += 1;
            state.keep(raw);
        }
        Ok(kept.clone())
    }

    pub(super) fn take_out(
        &self,
        priority: StreamPriority,
        holder: Holder,
    ) -> Result<Arc<DeviceStream>, StreamPoolError> {
        {
            let mut state = self.state.lock();
            if state.out >= self.max_streams {
                return Err(StreamPoolError::Capacity { max: self.max_streams });
            }
            state.out += 1;
        }
        match self.fork(priority.on(&self.device)) {
            Ok(raw) => {
                let stream = Arc::new(DeviceStream::new(IssuedId::issue(), raw));
                let slot = Slot { stream: stream.clone(), holder };
                self.shard(stream.id()).lock().insert(stream.id(), slot);
                Ok(stream)
            }
            Err(error) => {
                self.state.lock().out -= 1;
                Err(fork_failed(error))
            }
        }
    }

    /// A driver stream for one lease, in the order of the module documentation. The caller counts in `out` already.
    ///
    /// Each caller holds at most one stream that is not in `given_back`, and at most `max_streams` of them are here or
    /// have one out; so when `2 * max_streams` of a priority are made, `given_back` has one of them.
    fn fork(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        let mut from = 0;
        while let Some((turn, raw)) = self.take_candidate(from, priority) {
            // Nobody can make a handle of it while it is here, so what is at its place and here stays all.
            if Arc::strong_count(&raw) == 2 && raw.is_done() {
                return Ok(raw);
            }
            self.state.lock().given_back.insert(turn, raw);
            from = turn + 1;
        }
        {
            let mut state = self.state.lock();
            let made = state.made.entry(priority).or_default();
            if *made < self.max_streams.saturating_mul(2) {
                *made += 1;
            } else if let Some((_, raw)) = state.take_first(0, priority) {
                return Ok(raw);
            }
        }
        self.make(priority).inspect_err(|_| {
            if let Some(made) = self.state.lock().made.get_mut(&priority) {
                *made -= 1;
            }
        })
    }

    fn take_candidate(&self, from: u64, priority: i32) -> Option<(u64, Arc<RawStream>)> {
        self.state.lock().take_first(from, priority)
    }

    fn make(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        let taken = self.places.take();
        let taken =
            taken.and_then(|(place, at)| Some((place, at, CellRef::new(&self.cells, place)?)));
        let Some((place, at, cell)) = taken else {
            let accepted = "at most 65536 driver streams of one pool";
            return Err(DriverError::invalid("stream_create", "one more stream", accepted));
        };
        match RawStream::create(self.device.clone(), priority, place, cell) {
            Ok(raw) => {
                let at = self.near.get(place as usize).unwrap_or(at);
                Ok(at.get_or_init(|| Arc::new(raw)).clone())
            }
            Err(error) => {
                self.places.give([place]);
                Err(error)
            }
        }
    }

    pub(super) fn give_back(&self, id: StreamId, holder: Holder) -> bool {
        let slot = {
            let mut shard = self.shard(id).lock();
            match shard.get(&id) {
                Some(slot) if slot.holder == holder => shard.remove(&id),
                _ => None,
            }
        };
        let Some(slot) = slot else {
            return false;
        };
        let raw = slot.stream.raw().clone();
        // From here on the id names no stream, also for blocks that were allocated on it.
        raw.clock().cell().set_out(None);
        drop(slot);
        let mut state = self.state.lock();
        state.out -= 1;
        state.keep(raw);
        true
    }
}

impl State {
    fn keep(&mut self, raw: Arc<RawStream>) {
        self.turn += 1;
        self.given_back.insert(self.turn, raw);
    }

    /// Takes the stream of this priority that was given back first, at turn `from` or later.
    fn take_first(&mut self, from: u64, priority: i32) -> Option<(u64, Arc<RawStream>)> {
        let turn = self
            .given_back
            .range(from..)
            .find(|(_, raw)| raw.priority() == priority)
            .map(|(turn, _)| *turn)?;
        self.given_back.remove_entry(&turn)
    }
}

impl fmt::Debug for StreamTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamTable")
            .field("max_streams", &self.max_streams)
            .finish_non_exhaustive()
    }
}

fn fork_failed(error: DriverError) -> StreamPoolError {
    StreamPoolError::ForkFailed(error.to_string())
}
