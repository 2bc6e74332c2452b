//! The rings between emitting threads and the writer, and the state that both sides share.
//!
//! Each thread has one single-producer, single-consumer ring per recorder. A thread that ends returns its ring to the
//! registry. The writer keeps reading it, so no record is lost, and a new thread reuses it once it has space.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, PushError, RingBuffer};
use xlog_base::{Condvar, Mutex, MutexGuard};

use super::RecorderStats;
use super::config::{OnError, Overflow, RecorderConfig};
use crate::error::TraceError;
use crate::record::{Fields, Record};

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// The number of no recorder.
const NO_RECORDER: u64 = 0;

/// The number of idle rings beyond which one is reused although it still holds records.
const MAX_IDLE: usize = 64;

thread_local! {
    static SLOTS: RefCell<Slots> = const { RefCell::new(Slots(Vec::new())) };
}

/// The rings of one thread, the most recently used first.
struct Slots(Vec<Slot>);

/// Detaches the thread from its rings in the child of a fork, where no writer reads them.
///
/// Takes no lock and allocates nothing. The next emit takes the slow path, which checks the process.
pub(super) fn forget_rings() {
    let _ = SLOTS.try_with(|slots| {
        if let Ok(mut slots) = slots.try_borrow_mut() {
            slots.0.iter_mut().for_each(|slot| slot.recorder = NO_RECORDER);
        }
    });
}

struct Slot {
    recorder: u64,
    ring: Ring,
    until_wake: usize,
    home: Weak<RecorderShared>,
}

/// The producer of a ring, with the count of refused records.
#[derive(Debug)]
struct Ring {
    producer: Producer<Record>,
    dropped: Arc<AtomicU64>,
}

impl Drop for Slots {
    fn drop(&mut self) {
        for slot in self.0.drain(..) {
            if let Some(home) = slot.home.upgrade() {
                home.registry().idle.push(slot.ring);
            }
        }
    }
}

/// Where a record went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placed {
    Yes,
    Full,
    NoRing,
}

#[derive(Debug, Default)]
struct Registry {
    /// Rings that the writer does not poll yet.
    fresh: Vec<Consumer<Record>>,
    /// Rings of threads that ended.
    idle: Vec<Ring>,
    dropped: Vec<Arc<AtomicU64>>,
}

impl Registry {
    /// Returns the fullest idle ring whose thread need not wake the writer at once, so that threads with few records share a ring and
    /// wake it together. A fuller one is returned only if [`MAX_IDLE`] rings wait for a writer that cannot keep up.
    fn pop_idle(&mut self, ring_records: usize) -> Option<Ring> {
        let used = |ring: &Ring| ring_records.saturating_sub(ring.producer.slots());
        let all = self.idle.iter().map(used).enumerate();
        let fits = |(_, used): &(usize, usize)| *used < wake_after(ring_records);
        let found = match all.clone().filter(fits).max_by_key(|(_, used)| *used) {
            None if self.idle.len() >= MAX_IDLE => all.min_by_key(|(_, used)| *used),
            fullest => fullest,
        };
        found.map(|(at, _)| self.idle.swap_remove(at))
    }
}

#[derive(Debug, Default)]
struct Progress {
    flushed: u64,
    ended: bool,
    error: Option<(io::ErrorKind, String)>,
}

/// The state that the recorder, the emitting threads and the writer share.
#[derive(Debug)]
pub(super) struct RecorderShared {
    id: u64,
    pub(super) process: u32,
    ring_records: usize,
    overflow: Overflow,
    block_limit: Duration,
    registry: Mutex<Registry>,
    unplaced: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) dropped_io: AtomicU64,
    pub(super) left_out: AtomicU64,
    pub(super) io_errors: AtomicU64,
    requests: AtomicU64,
    /// Whether a wait for space timed out and the writer has taken no record since.
    stalled: AtomicBool,
    closing: AtomicBool,
    is_silent: bool,
    said_elsewhere: AtomicBool,
    progress: Mutex<Progress>,
    progressed: Condvar,
    writer: OnceLock<Thread>,
}

impl RecorderShared {
    pub(super) fn new(config: &RecorderConfig) -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            process: std::process::id(),
            ring_records: config.ring_records,
            overflow: config.overflow,
            block_limit: config.block_limit,
            registry: Mutex::default(),
            unplaced: AtomicU64::new(0),
            written: AtomicU64::new(0),
            dropped_io: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            io_errors: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            stalled: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            is_silent: matches!(config.on_error, OnError::Silent),
            said_elsewhere: AtomicBool::new(false),
            progress: Mutex::default(),
            progressed: Condvar::new(),
            writer: OnceLock::new(),
        }
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    /// Returns whether this process is a fork of the writer's process and so has no writer.
    pub(super) fn is_elsewhere(&self) -> bool {
        self.process != std::process::id()
    }

    #[cold]
    fn say_elsewhere(&self) {
        if !self.is_silent && !self.said_elsewhere.swap(true, Ordering::Relaxed) {
            // A failure to print this has no channel left.
            drop(writeln!(
                io::stderr(),
                "xlog-trace: this process is a fork of {}, which writes the log; the records of this one are counted as \
                 dropped, this is said once",
                self.process
            ));
        }
    }

    pub(super) fn set_writer(&self, thread: Thread) {
        // The only caller of `new` sets it once.
        let _ = self.writer.set(thread);
    }

    fn wake(&self) {
        if let Some(thread) = self.writer.get() {
            thread.unpark();
        }
    }

    /// Copies a record into this thread's ring.
    #[inline]
    pub(super) fn place(self: &Arc<Self>, record: Record) -> Placed {
        SLOTS
            .try_with(|slots| {
                let Ok(mut slots) = slots.try_borrow_mut() else { return Placed::NoRing };
                match slots.0.first_mut() {
                    Some(slot) if slot.recorder == self.id => self.push(slot, record),
                    _ => self.place_elsewhere(&mut slots.0, record),
                }
            })
            .unwrap_or(Placed::NoRing)
    }

    /// Constructs a record in this thread's ring.
    #[inline(always)]
    pub(super) fn place_fields(self: &Arc<Self>, fields: &Fields) -> Placed {
        SLOTS
            .try_with(|slots| {
                let Ok(mut slots) = slots.try_borrow_mut() else { return Placed::NoRing };
                let slot = match slots.0.first_mut() {
                    Some(slot) if slot.recorder == self.id => slot,
                    _ => return self.place_elsewhere(&mut slots.0, Record::from_fields(*fields)),
                };
                let Ok(mut room) = slot.ring.producer.write_chunk_uninit(1) else {
                    return Placed::Full;
                };
                let Some(place) = room.as_mut_slices().0.first_mut() else { return Placed::Full };
                place.write(Record::from_fields(*fields));
                #[allow(unsafe_code)]
                // SAFETY: the chunk is one record long, and that record was just written.
                unsafe {
                    room.commit_all();
                }
                self.placed(slot);
                Placed::Yes
            })
            .unwrap_or(Placed::NoRing)
    }

    #[inline]
    fn placed(&self, slot: &mut Slot) {
        slot.until_wake -= 1;
        if slot.until_wake == 0 {
            slot.until_wake = wake_after(self.ring_records);
            self.wake();
        }
    }

    #[inline]
    fn push(&self, slot: &mut Slot, record: Record) -> Placed {
        match slot.ring.producer.push(record) {
            Ok(()) => {
                self.placed(slot);
                Placed::Yes
            }
            Err(PushError::Full(_)) => Placed::Full,
        }
    }

    /// Handles a thread that last used another recorder or has no ring of this one.
    #[cold]
    fn place_elsewhere(self: &Arc<Self>, slots: &mut Vec<Slot>, record: Record) -> Placed {
        if self.is_elsewhere() {
            self.say_elsewhere();
            return Placed::NoRing;
        }
        if let Some(index) = slots.iter().position(|slot| slot.recorder == self.id) {
            slots.swap(0, index);
        } else {
            // Rings of dropped recorders.
            slots.retain(|slot| !slot.ring.producer.is_abandoned());
            let ring = self.ring();
            // The previous thread's records count too: the writer wakes as if that thread had gone on.
            let used = self.ring_records.saturating_sub(ring.producer.slots());
            let slot = Slot {
                recorder: self.id,
                ring,
                until_wake: wake_after(self.ring_records).saturating_sub(used).max(1),
                home: Arc::downgrade(self),
            };
            slots.insert(0, slot);
        }
        match slots.first_mut() {
            Some(slot) => self.push(slot, record),
            None => Placed::NoRing,
        }
    }

    fn ring(&self) -> Ring {
        let mut registry = self.registry();
        if let Some(ring) = registry.pop_idle(self.ring_records) {
            return ring;
        }
        let (producer, consumer) = RingBuffer::new(self.ring_records);
        let dropped = Arc::new(AtomicU64::new(0));
        registry.fresh.push(consumer);
        registry.dropped.push(Arc::clone(&dropped));
        Ring { producer, dropped }
    }

    /// Handles a record whose ring is full: waits for space or counts it, as configured.
    #[cold]
    pub(super) fn overflowed(self: &Arc<Self>, record: Record) {
        self.wake();
        if self.overflow == Overflow::Block && !self.stalled.load(Ordering::Relaxed) {
            let started = Instant::now();
            let mut rounds = 0u32;
            while started.elapsed() < self.block_limit && !self.progress().ended {
                if rounds < 20 {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep(Duration::from_micros(100));
                }
                rounds += 1;
                if self.place(record) == Placed::Yes {
                    return;
                }
                self.wake();
            }
            self.stalled.store(true, Ordering::Relaxed);
        }
        let counted = SLOTS.try_with(|slots| {
            let slots = slots.try_borrow().ok()?;
            let slot = slots.0.first().filter(|slot| slot.recorder == self.id)?;
            slot.ring.dropped.fetch_add(1, Ordering::Relaxed);
            Some(())
        });
        if !matches!(counted, Ok(Some(()))) {
            self.count_unplaced();
        }
    }

    #[cold]
    pub(super) fn count_unplaced(&self) {
        self.unplaced.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn drain_new_rings(&self, rings: &mut Vec<Consumer<Record>>) {
        rings.append(&mut self.registry().fresh);
    }

    /// Records that the writer has taken records from the rings.
    pub(super) fn moved_on(&self) {
        if self.stalled.load(Ordering::Relaxed) {
            self.stalled.store(false, Ordering::Relaxed);
        }
    }

    /// Requests a flush and waits for it, at most `limit`.
    pub(super) fn flush(&self, limit: Option<Duration>) {
        let mine = self.requests.fetch_add(1, Ordering::AcqRel) + 1;
        self.wake();
        self.wait(limit, |progress| progress.flushed >= mine);
    }

    /// Makes the writer end the file and waits for it, at most `limit`.
    pub(super) fn close_within(&self, limit: Duration) {
        self.close();
        self.wait(Some(limit), |_| false);
    }

    /// Waits until `is_done` or until the writer has ended, at most `limit`. A fork of the writer's process does not wait.
    fn wait(&self, limit: Option<Duration>, is_done: impl Fn(&Progress) -> bool) {
        if self.is_elsewhere() {
            return;
        }
        let started = Instant::now();
        let mut progress = self.progress();
        while !is_done(&progress) && !progress.ended {
            let wait = match limit {
                Some(limit) => match limit.checked_sub(started.elapsed()) {
                    Some(left) => left,
                    None => return,
                },
                None => Duration::from_secs(1),
            };
            progress = self.progressed.wait_timeout(progress, wait);
        }
    }

    pub(super) fn requested(&self) -> u64 {
        self.requests.load(Ordering::Acquire)
    }

    pub(super) fn flushed(&self, request: u64) {
        let mut progress = self.progress();
        if progress.flushed < request {
            progress.flushed = request;
            self.progressed.notify_all();
        }
    }

    pub(super) fn ended(&self) {
        self.progress().ended = true;
        self.progressed.notify_all();
    }

    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(super) fn set_error(&self, error: Option<(io::ErrorKind, String)>) {
        self.progress().error = error;
    }

    pub(super) fn last_error(&self) -> Result<(), TraceError> {
        if self.is_elsewhere() {
            let text =
                format!("process {} writes the log, of which this one is a fork", self.process);
            let source = io::Error::new(io::ErrorKind::Unsupported, text);
            return Err(TraceError::Io { context: "recording".to_owned(), source });
        }
        match &self.progress().error {
            None => Ok(()),
            Some((kind, text)) => Err(TraceError::Io {
                context: "recording".to_owned(),
                source: io::Error::new(*kind, text.clone()),
            }),
        }
    }

    pub(super) fn stats(&self) -> RecorderStats {
        let registry = self.registry();
        let overflow: u64 =
            registry.dropped.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        RecorderStats {
            written: self.written.load(Ordering::Relaxed),
            dropped_overflow: overflow + self.unplaced.load(Ordering::Relaxed),
            dropped_io: self.dropped_io.load(Ordering::Relaxed),
            left_out: self.left_out.load(Ordering::Relaxed),
            io_errors: self.io_errors.load(Ordering::Relaxed),
            rings: registry.dropped.len(),
        }
    }
}

/// The number of records after which a thread wakes the writer.
fn wake_after(ring_records: usize) -> usize {
    (ring_records / 4).max(1)
}
