//! The streams behind a pool: which are out, which were given back, and which serves next.
//!
//! A stream that was given back serves again, under a new id, once its work is done and nobody holds a handle of it.
//! While there are only busy ones a new driver stream is made, up to twice `max_streams`. Beyond that the one given back
//! first is reused as it is: a stream runs its work in order, so the new user merely queues behind the old.
//!
//! Invariants: no lock is held over a driver call; every driver stream that was made is in exactly one place: out, given
//! back, or in the hands of one call of [`StreamTable::take_out`].

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, DriverResult};

use super::stream_ids::IssuedId;
use super::{StreamId, StreamPoolError, StreamPriority};
use crate::stream::RawStream;
use crate::{CudaDevice, DeviceStream};

/// Threads that resolve different ids seldom meet on one lock.
const SHARDS: usize = 16;

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
    /// Driver streams that are out, given back, or being made.
    made: usize,
    /// The number of times a stream was given back.
    turn: u64,
    /// Streams given back, the first one first.
    given_back: BTreeMap<u64, Arc<RawStream>>,
}

/// All streams of a pool, held by the pool object and by its leases.
pub(super) struct StreamTable {
    device: Arc<CudaDevice>,
    max_streams: usize,
    default: OnceLock<Arc<DeviceStream>>,
    shards: [Shard; SHARDS],
    state: Mutex<State>,
}

impl StreamTable {
    pub(super) fn new(device: Arc<CudaDevice>, max_streams: usize) -> Self {
        Self {
            device,
            max_streams: max_streams.max(1),
            default: OnceLock::new(),
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

    /// How many streams are out.
    pub(super) fn out(&self) -> usize {
        self.state.lock().out
    }

    /// How many driver streams there are, the default one not counted.
    pub(super) fn made(&self) -> usize {
        self.state.lock().made
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
        // Made without a lock: a thread that loses the race drops its own stream again.
        let raw = self.make(StreamPriority::Normal.on(&self.device)).map_err(fork_failed)?;
        let made = Arc::new(DeviceStream::new(IssuedId::DEFAULT, raw));
        Ok(self.default.get_or_init(|| made).clone())
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
    /// have one out; so when `2 * max_streams` are made, `given_back` is not empty.
    fn fork(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        let mut from = 0;
        while let Some((turn, raw)) = self.take_candidate(from, priority) {
            // Nobody can make a handle of it while it is here, so a count of one stays one.
            if Arc::strong_count(&raw) == 1 && raw.is_done() {
                return Ok(raw);
            }
            self.state.lock().given_back.insert(turn, raw);
            from = turn + 1;
        }
        let replaced = {
            let mut state = self.state.lock();
            if state.made < self.max_streams.saturating_mul(2) {
                state.made += 1;
                None
            } else if let Some((_, raw)) = state.take_first(0, priority) {
                return Ok(raw);
            } else {
                // All that are left have another priority: the first one makes room.
                state.given_back.pop_first()
            }
        };
        drop(replaced);
        self.make(priority).inspect_err(|_| self.state.lock().made -= 1)
    }

    fn take_candidate(&self, from: u64, priority: i32) -> Option<(u64, Arc<RawStream>)> {
        self.state.lock().take_first(from, priority)
    }

    fn make(&self, priority: i32) -> DriverResult<Arc<RawStream>> {
        RawStream::create(self.device.clone(), priority).map(Arc::new)
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
        state.turn += 1;
        let turn = state.turn;
        state.given_back.insert(turn, raw);
        true
    }
}

impl State {
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

fn fork_failed(error: DriverError) -> StreamPoolError {
    StreamPoolError::ForkFailed(error.to_string())
}
