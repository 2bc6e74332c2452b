//! Streams of a pool: leased and released ones, and the choice for the next lease.
//!
//! A released stream serves again, under a new id, once its work is complete and no handle of it is left. While all are
//! busy a new driver stream is created, up to twice `max_streams` of each priority. Beyond that the earliest released one is
//! reused while busy: a stream runs its work in order, so the new user queues behind the old one.
//!
//! Invariants: no lock is held over a driver call. Every driver stream is leased, released, or held by one call of
//! [`StreamTable::lease`]. It keeps its slot for the lifetime of the table.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use xlog_base::debug_fields;
use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, DriverResult, StreamHandle};

use super::ordering::{ClockHeader, ClockHeaderRef, ClockHeaders, Slab};
use super::runtime::catch_panic;
use super::stream_ids::IssuedId;
use super::{StreamId, StreamPoolError, StreamPriority};
use crate::stream::RawStream;
use crate::{CudaDevice, DeviceStream};

/// Shards of the id map, so that threads which resolve different ids seldom contend.
const SHARDS: usize = 16;
/// Ids that can be resolved without a lock; ids with the same index evict each other.
const KNOWN: usize = 64;
/// The maximum number of driver streams of a pool.
pub(crate) const MAX_STREAM_SLOTS: u32 = 1 << 16;

/// The number of tables created in the process.
static MADE: AtomicU64 = AtomicU64::new(0);

/// The owner of a lease, which releases it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Caller,
    Lease,
    /// An enlisted stream is never released.
    Pool,
}

struct LeasedStream {
    stream: Arc<DeviceStream>,
    holder: Holder,
}

/// A shard of the map of leased streams, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Shard(Mutex<LeasedStreams>);

type LeasedStreams = BTreeMap<StreamId, LeasedStream>;

/// The counters of a pool, and its released streams.
#[derive(Default)]
struct State {
    /// Leased streams, including calls that are about to lease one.
    leased: usize,
    /// Driver streams by priority: leased, released, or being created.
    made: BTreeMap<i32, usize>,
    /// The number of releases so far.
    turn: u64,
    /// Released streams, the oldest first.
    released: BTreeMap<u64, Arc<RawStream>>,
    /// Tasks that wait for a lease, by the number of their wait.
    waiting: BTreeMap<u64, Waker>,
    /// The number of waits so far.
    waits: u64,
}

/// All streams of a pool, shared by the pool object and its leases.
pub(super) struct StreamTable {
    pub(super) device: Arc<CudaDevice>,
    pub(super) max_streams: usize,
    /// Identifies this table in the process.
    pub(super) number: u64,
    default: OnceLock<Arc<DeviceStream>>,
    /// All driver streams, except those that are inline.
    slots: Slab<OnceLock<Arc<RawStream>>, 16>,
    /// The driver streams of the first slots, which need no second load.
    inline: [OnceLock<Arc<RawStream>>; KNOWN],
    pub(super) headers: Arc<ClockHeaders>,
    /// An id, and the slot of its stream plus one. Only a hint: the clock header decides whether the stream is leased under
    /// an id.
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

    pub(super) fn leased(&self) -> usize {
        self.state.lock().leased
    }

    /// Returns the number of driver streams, without the default one.
    pub(super) fn made(&self) -> usize {
        self.state.lock().made.values().sum()
    }

    #[inline]
    pub(super) fn at(&self, slot: u32) -> Option<&Arc<RawStream>> {
        match self.inline.get(slot as usize) {
            Some(inline) => inline.get(),
            None => self.slots.get(slot)?.get(),
        }
    }

    #[inline]
    pub(super) fn raw(&self, id: StreamId) -> Option<&Arc<RawStream>> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let inline = self.inline.get((known as u32).wrapping_sub(1) as usize);
        match inline.and_then(OnceLock::get) {
            Some(raw) if raw.clock().header().is_leased_as(id.0) => Some(raw),
            _ => self.raw_slow(id),
        }
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
        let stream =
            if id == StreamId::DEFAULT { self.default_stream().ok() } else { self.resolve(id) }?;
        let slot = stream.raw().clock().slot();
        let known = (u64::from(id.0) << 32) | (u64::from(slot) + 1);
        self.known[id.0 as usize % KNOWN].store(known, Ordering::Relaxed);
        self.at(slot)
    }

    /// Returns slot and clock header of the stream that is leased under an id, if no lock is needed.
    #[inline]
    pub(super) fn inline_header(&self, id: StreamId) -> Option<(u32, &ClockHeader)> {
        let known = self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed);
        let slot = (known as u32).wrapping_sub(1);
        let header = self.headers.inline.get(slot as usize)?;
        (known >> 32 == u64::from(id.0) && header.is_leased_as(id.0)).then_some((slot, header))
    }

    /// Guesses the slot of the stream of an id: another id with the same index in `known` makes it wrong.
    #[inline]
    pub(super) fn slot_of(&self, id: StreamId) -> u32 {
        (self.known[id.0 as usize % KNOWN].load(Ordering::Relaxed) as u32).wrapping_sub(1)
    }

    /// Returns the stream of an id other than the default one.
    pub(super) fn resolve(&self, id: StreamId) -> Option<Arc<DeviceStream>> {
        self.shard(id).lock().get(&id).map(|entry| entry.stream.clone())
    }

    fn shard(&self, id: StreamId) -> &Mutex<LeasedStreams> {
        &self.shards[id.0 as usize % SHARDS].0
    }

    pub(super) fn default_stream(&self) -> Result<Arc<DeviceStream>, StreamPoolError> {
        if let Some(stream) = self.default.get() {
            return Ok(stream.clone());
        }
        // Created without a lock. The stream of a thread that loses the race serves a later lease.
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
                let waiting = self.state.lock().end_lease();
                wake_all(waiting);
                Err(fork_failed(error))
            }
        }
    }

    /// Wakes a task when a lease ends. The task must try once more after this call, and whenever it is woken. `wait` is the
    /// number of its wait: the first call sets it, and [`StreamTable::forget_wait`] ends it.
    pub(super) fn wake_on_release(&self, wait: &mut Option<u64>, waker: &Waker) {
        // A waker is code of an executor, so it is cloned and dropped outside the lock.
        let waker = waker.clone();
        let replaced = {
            let state = &mut *self.state.lock();
            let number = *wait.get_or_insert_with(|| {
                state.waits += 1;
                state.waits
            });
            state.waiting.insert(number, waker)
        };
        drop(replaced);
    }

    /// Ends a wait, including that of a dropped task.
    pub(super) fn forget_wait(&self, wait: &mut Option<u64>) {
        let waker = wait.take().and_then(|number| self.state.lock().waiting.remove(&number));
        drop(waker);
    }

    /// Chooses or creates a driver stream for one lease. The caller is already counted in `leased`.
    ///
    /// Each caller holds at most one stream that is not in `released`, and at most `max_streams` callers are here or
    /// hold a lease. Once `2 * max_streams` of a priority exist, `released` therefore has one of them.
    fn fork(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        let mut from = 0;
        while let Some((turn, raw)) = self.take_candidate(from, priority) {
            // No thread can create a handle of it here, so the slot and this one stay the only owners.
            if Arc::strong_count(&raw) == 2 && raw.is_unused() {
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
        self.make_with(|slot, header| {
            RawStream::create(self.device.clone(), priority, slot, header)
        })
    }

    /// Issues an id for a stream of other code, for the lifetime of the table.
    pub(super) fn enlist(&self, handle: StreamHandle) -> DriverResult<Arc<DeviceStream>> {
        let raw = self.make_with(|slot, header| {
            Ok(RawStream::enlisted(self.device.clone(), handle, slot, header))
        })?;
        raw.mark_handle_escaped();
        let stream = Arc::new(DeviceStream::new(IssuedId::issue(), raw));
        let entry = LeasedStream { stream: stream.clone(), holder: Holder::Pool };
        self.shard(stream.id()).lock().insert(stream.id(), entry);
        Ok(stream)
    }

    fn make_with(
        &self,
        make: impl FnOnce(u32, ClockHeaderRef) -> DriverResult<RawStream>,
    ) -> DriverResult<Arc<RawStream>> {
        let taken = self.slots.allocate();
        let taken = taken
            .and_then(|(slot, at)| Some((slot, at, ClockHeaderRef::new(&self.headers, slot)?)));
        let Some((slot, at, header)) = taken else {
            let accepted = "at most 65536 driver streams of one pool";
            return Err(DriverError::invalid("stream_create", "one more stream", accepted));
        };
        match make(slot, header) {
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
        // From here on the id names no stream, even for blocks that were allocated on it.
        raw.clock().header().set_leased(None);
        drop(entry);
        let waiting = {
            let mut state = self.state.lock();
            state.keep(raw);
            state.end_lease()
        };
        wake_all(waiting);
        true
    }
}

impl State {
    /// Uncounts a lease; returns the tasks to wake.
    fn end_lease(&mut self) -> BTreeMap<u64, Waker> {
        self.leased -= 1;
        std::mem::take(&mut self.waiting)
    }

    fn keep(&mut self, raw: Arc<RawStream>) {
        self.turn += 1;
        self.released.insert(self.turn, raw);
    }

    /// Removes the earliest released stream of this priority, at turn `from` or later.
    fn take_first(&mut self, from: u64, priority: i32) -> Option<(u64, Arc<RawStream>)> {
        let turn = self
            .released
            .range(from..)
            .find(|(_, raw)| raw.priority() == priority)
            .map(|(turn, _)| *turn)?;
        self.released.remove_entry(&turn)
    }
}

debug_fields!(self: StreamTable { max_streams: self.max_streams, .. });

/// Wakes all tasks, since any of them may not retry. No lock is held: a waker is code of an executor, and its panic must not
/// keep the others from being woken.
fn wake_all(waiting: BTreeMap<u64, Waker>) {
    for waker in waiting.into_values() {
        catch_panic(|| waker.wake());
    }
}

fn fork_failed(error: DriverError) -> StreamPoolError {
    StreamPoolError::ForkFailed(error.to_string())
}
