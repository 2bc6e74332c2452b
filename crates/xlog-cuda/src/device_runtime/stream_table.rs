//! The streams behind a pool: which are out, which were given back, and which serves next.
//!
//! A stream that was given back serves again, under a new id, once its work is done and nobody holds a handle of it.
//! While there are only busy ones a new driver stream is made, up to twice `max_streams` of each priority. Beyond that the one
//! given back first is reused as it is: a stream runs its work in order, so the new user merely queues behind the old.
//!
//! Invariants: no lock is held over a driver call; every driver stream that was made is out, given back, or in the hands of one
//! call of [`StreamTable::lease`]; it also keeps the *place* where it was made for as long as the table lives, so that others
//! can name it by a number.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, DriverResult};

use super::ordering::clock::ClockHeader;
use super::ordering::clock_headers::{ClockHeaderRef, ClockHeaders};
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
pub(crate) const MAX_STREAM_SLOTS: u32 = 1 << 16;

/// How many tables the process has made.
static MADE: AtomicU64 = AtomicU64::new(0);

/// Who gives a stream back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Caller,
    Lease,
}

/// A stream that is out.
struct LeasedStream {
    stream: Arc<DeviceStream>,
    holder: Holder,
}

/// A part of the table of streams that are out, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Shard(Mutex<BTreeMap<StreamId, LeasedStream>>);

impl Deref for Shard {
    type Target = Mutex<BTreeMap<StreamId, LeasedStream>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// What the pool counts and keeps.
#[derive(Default)]
struct State {
    /// Streams that are out, and calls that are about to take one out.
    leased: usize,
    /// Driver streams that are out, given back, or being made, by priority.
    made: BTreeMap<i32, usize>,
    /// The number of times a stream was given back.
    turn: u64,
    /// Streams given back, the first one first.
    released: BTreeMap<u64, Arc<RawStream>>,
}

/// All streams of a pool, held by the pool object and by its leases.
pub(super) struct StreamTable {
    device: Arc<CudaDevice>,
    max_streams: usize,
    /// Tells this table from every other one of the process.
    number: u64,
    default: OnceLock<Arc<DeviceStream>>,
    /// Every driver stream that was made, except those that are near.
    slots: Slab<OnceLock<Arc<RawStream>>, 16>,
    /// Those at the first places, which are found by one step.
    inline: [OnceLock<Arc<RawStream>>; KNOWN],
    headers: Arc<ClockHeaders>,
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
            slots: Slab::new(MAX_STREAM_SLOTS),
            inline: [const { OnceLock::new() }; KNOWN],
            headers: ClockHeaders::new(MAX_STREAM_SLOTS),
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
    pub(super) fn leased(&self) -> usize {
        self.state.lock().leased
    }

    /// How many driver streams there are, the default one not counted.
    pub(super) fn made(&self) -> usize {
        self.state.lock().made.values().sum()
    }

    /// The driver stream at a place.
    #[inline]
    pub(super) fn at(&self, slot: u32) -> Option<&Arc<RawStream>> {
        match self.inline.get(slot as usize) {
            Some(inline) => inline.get(),
            None => self.slots.get(slot)?.get(),
        }
    }

    pub(super) fn headers(&self) -> &Arc<ClockHeaders> {
        &self.headers
    }

    /// The driver stream that is out under an id.
    #[inline]
    pub(super) fn raw(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let inline = self.inline.get((known as u32).wrapping_sub(1) as usize);
        match inline.and_then(OnceLock::get) {
            Some(raw) if raw.clock().header().is_leased_as(id.0) => Some(raw),
            _ => self.raw_slow(id),
        }
    }

    /// The same if its raw handle was not handed out.
    #[inline]
    pub(super) fn raw_private(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let inline = self.inline.get((known as u32).wrapping_sub(1) as usize);
        match inline.and_then(OnceLock::get) {
            Some(raw) if raw.clock().header().is_private_as(id.0) => Some(raw),
            _ => self.raw_private_slow(id),
        }
    }

    #[cold]
    #[inline(never)]
    fn raw_private_slow(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        self.raw_slow(id).filter(|raw| !raw.clock().header().handle_escaped())
    }

    #[inline(never)]
    fn raw_slow(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        if known >> 32 == u64::from(id.0)
            && let Some(raw) = self.at((known as u32).wrapping_sub(1))
            && raw.clock().header().is_leased_as(id.0)
        {
            return Some(raw);
        }
        self.raw_by_map(id)
    }

    /// The place of the stream that is out under an id, and its cell, if it is one of those that are found at once.
    #[inline]
    pub(super) fn inline_header(&self, id: StreamId) -> Option<(u32, &ClockHeader)> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let slot = (known as u32).wrapping_sub(1);
        let header = self.headers.inline(slot)?;
        (known >> 32 == u64::from(id.0) && header.is_leased_as(id.0)).then_some((slot, header))
    }

    /// The place that the stream of an id mostly has; a guess, which another id of the same rest by [`KNOWN`] makes wrong.
    #[inline]
    pub(super) fn slot_of(&self, id: StreamId) -> u32 {
        (self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed) as u32).wrapping_sub(1)
    }

    #[cold]
    fn raw_by_map(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let stream =
            if id == StreamId::DEFAULT { self.default_stream().ok() } else { self.resolve(id) }?;
        let slot = stream.raw().clock().slot();
        let known = (u64::from(id.0) << 32) | (u64::from(slot) + 1);
        self.known[id.0 as usize % KNOWN].store(known, Ordering::Relaxed);
        self.at(slot)
    }

    /// The stream of an id other than the default one.
    pub(super) fn resolve(&self, id: StreamId) -> Option<Arc<DeviceStream>> {
        self.shard(id).lock().get(&id).map(|entry| entry.stream.clone())
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

    pub(super) fn lease(
        &self,
        priority: StreamPriority,
        holder: Holder,
    ) -> Result<Arc<DeviceStream>, StreamPoolError> {
        {
            let mut state = self.state.lock();
            if state.leased >= self.max_streams {
                return Err(StreamPoolError::Capacity { max: self.max_streams });
            }
            state.leased += 1;
        }
        match self.fork(priority.on(&self.device)) {
            Ok(raw) => {
                let stream = Arc::new(DeviceStream::new(IssuedId::issue(), raw));
                let entry = LeasedStream { stream: stream.clone(), holder };
                self.shard(stream.id()).lock().insert(stream.id(), entry);
                Ok(stream)
            }
            Err(error) => {
                self.state.lock().leased -= 1;
                Err(fork_failed(error))
            }
        }
    }

    /// A driver stream for one lease, in the order of the module documentation. The caller counts in `leased` already.
    ///
    /// Each caller holds at most one stream that is not in `released`, and at most `max_streams` of them are here or
    /// have one out; so when `2 * max_streams` of a priority are made, `released` has one of them.
    fn fork(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        let mut from = 0;
        while let Some((turn, raw)) = self.take_candidate(from, priority) {
            // Nobody can make a handle of it while it is here, so what is at its place and here stays all.
            if Arc::strong_count(&raw) == 2 && raw.is_done() {
                return Ok(raw);
            }
            self.state.lock().released.insert(turn, raw);
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
        let taken = self.slots.allocate();
        let taken = taken
            .and_then(|(slot, at)| Some((slot, at, ClockHeaderRef::new(&self.headers, slot)?)));
        let Some((slot, at, header)) = taken else {
            let accepted = "at most 65536 driver streams of one pool";
            return Err(DriverError::invalid("stream_create", "one more stream", accepted));
        };
        match RawStream::create(self.device.clone(), priority, slot, header) {
            Ok(raw) => {
                let at = self.inline.get(slot as usize).unwrap_or(at);
                Ok(at.get_or_init(|| Arc::new(raw)).clone())
            }
            Err(error) => {
                self.slots.free([slot]);
                Err(error)
            }
        }
    }

    pub(super) fn release(&self, id: StreamId, holder: Holder) -> bool {
        let entry = {
            let mut shard = self.shard(id).lock();
            match shard.get(&id) {
                Some(entry) if entry.holder == holder => shard.remove(&id),
                _ => None,
            }
        };
        let Some(entry) = entry else {
            return false;
        };
        let raw = entry.stream.raw().clone();
        // From here on the id names no stream, also for blocks that were allocated on it.
        raw.clock().header().set_leased(None);
        drop(entry);
        let mut state = self.state.lock();
        state.leased -= 1;
        state.keep(raw);
        true
    }
}

impl State {
    fn keep(&mut self, raw: Arc<RawStream>) {
        self.turn += 1;
        self.released.insert(self.turn, raw);
    }

    /// Takes the stream of this priority that was given back first, at turn `from` or later.
    fn take_first(&mut self, from: u64, priority: i32) -> Option<(u64, Arc<RawStream>)> {
        let turn = self
            .released
            .range(from..)
            .find(|(_, raw)| raw.priority() == priority)
            .map(|(turn, _)| *turn)?;
        self.released.remove_entry(&turn)
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
