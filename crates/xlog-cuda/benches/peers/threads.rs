//! Threads that allocate and free at once, and a task that moves from thread to thread, on any number of streams.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use crate::generators::Xorshift;
use crate::rows::Rows;
use crate::workloads::{MIB, Maker, Peer, failed};

const STEPS: usize = 1_000_000;
const SLOTS: usize = 64;
/// Workers that a migrating task visits, and its steps on each.
const WORKERS: usize = 16;
const STEPS_ON_A_WORKER: usize = 100;

/// Which threads run on which streams, and what they allocate.
pub struct Shape {
    pub tasks: Tasks,
    pub streams: usize,
    /// Whether each block of a task is on the next stream. Otherwise all blocks of task number n are on stream n.
    pub streams_in_turn: bool,
    pub max_bytes: usize,
}

#[derive(Clone, Copy)]
pub enum Tasks {
    /// This number of tasks, each on a thread of its own.
    Pinned(usize),
    /// One, which moves on to the next of 16 threads after 100 steps.
    Migrating,
}

impl Shape {
    /// Threads with a stream each.
    pub fn apart(threads: usize) -> Self {
        let tasks = Tasks::Pinned(threads);
        Self { tasks, streams: threads, streams_in_turn: false, max_bytes: MIB }
    }

    /// Threads on one stream.
    pub fn shared(threads: usize) -> Self {
        Self { streams: 1, ..Self::apart(threads) }
    }

    /// Parses `STREAMS-THREADS`, for blocks of up to `kib` KiB; `migrating` may stand for the threads.
    pub fn parse(text: &str, kib: usize) -> Option<Self> {
        let (streams, threads) = text.split_once('-')?;
        let tasks = match threads {
            "migrating" => Tasks::Migrating,
            count => Tasks::Pinned(count.parse().ok().filter(|count| *count > 0)?),
        };
        let streams = streams.parse().ok().filter(|count| *count > 0)?;
        Some(Self { tasks, streams, streams_in_turn: true, max_bytes: kib << 10 })
    }

    fn threads(&self) -> usize {
        match self.tasks {
            Tasks::Pinned(count) => count,
            Tasks::Migrating => WORKERS,
        }
    }
}

/// A table of slots; a step picks one and fills or empties it.
struct Task<'a, P: Peer> {
    peer: &'a P,
    streams: &'a [P::Stream],
    /// The stream of the next block.
    stream: usize,
    stride: usize,
    max_bytes: usize,
    slots: Vec<Option<P::Block>>,
    random: Xorshift,
}

impl<'a, P: Peer> Task<'a, P> {
    fn new(number: usize, shape: &Shape, peer: &'a P, streams: &'a [P::Stream]) -> Self {
        Self {
            peer,
            streams,
            stream: number % streams.len(),
            stride: usize::from(shape.streams_in_turn),
            max_bytes: shape.max_bytes,
            slots: (0..SLOTS).map(|_| None).collect(),
            random: Xorshift(0x9e37_79b9 + number as u64),
        }
    }

    /// Whether there was memory.
    #[inline]
    fn step(&mut self) -> bool {
        let slot = &mut self.slots[self.random.below(SLOTS)];
        match slot.take() {
            Some(block) => self.peer.free(block),
            None => {
                let bytes = 1 + self.random.below(self.max_bytes);
                let Ok(block) = self.peer.allocate(bytes, &self.streams[self.stream]) else {
                    return false;
                };
                *slot = Some(block);
                self.stream += self.stride;
                if self.stream >= self.streams.len() {
                    self.stream = 0;
                }
            }
        }
        true
    }

    fn end(&mut self) {
        self.slots.drain(..).flatten().for_each(|block| self.peer.free(block));
    }
}

/// What the threads of a row have in common.
#[derive(Default)]
struct Race {
    ready: AtomicUsize,
    start: OnceLock<Instant>,
    done: AtomicUsize,
    is_short: AtomicBool,
}

impl Race {
    /// Spins until the start: a processor that has slept takes its time to wake.
    fn wait_for_start(&self) -> Instant {
        self.ready.fetch_add(1, Ordering::Release);
        loop {
            match self.start.get() {
                Some(start) => break *start,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Starts all threads, and returns when.
    fn start(&self, threads: usize) -> Instant {
        while self.ready.load(Ordering::Acquire) < threads {
            std::thread::yield_now();
        }
        *self.start.get_or_init(Instant::now)
    }

    /// Makes `most` steps, or fewer if `seconds` pass; returns how many.
    fn work<P: Peer>(&self, task: &mut Task<'_, P>, most: usize, seconds: f64) -> usize {
        let own = Instant::now();
        for step in 0..most {
            if step % 256 == 255 && own.elapsed().as_secs_f64() > seconds {
                return step;
            }
            if !task.step() {
                self.is_short.store(true, Ordering::Relaxed);
            }
        }
        most
    }
}

/// Steps of all threads in millions a second.
pub fn threads<M: Maker>(rows: &Rows<'_>, shape: &Shape, maker: &M) -> Result<(), String> {
    let count = shape.threads();
    if count > 2 * std::thread::available_parallelism().map_or(1, usize::from) {
        return Err("more than two threads for each core".to_owned());
    }
    let peer = maker.make(false)?;
    let streams: Vec<_> = (0..shape.streams).map(|_| peer.stream()).collect::<Result<_, _>>()?;
    let limit = rows.options.seconds / 2.0;
    let race = Race::default();
    let seconds = match shape.tasks {
        Tasks::Pinned(_) => pinned(&race, shape, &peer, &streams, limit),
        Tasks::Migrating => migrating(&race, shape, &peer, &streams, limit),
    };
    peer.synchronize();
    if race.is_short.into_inner() {
        return Err(failed());
    }
    rows.value(race.done.into_inner() as f64 / seconds / 1e6, "Mops/s");
    Ok(())
}

/// Each task on its thread. Returns the seconds of the slowest.
fn pinned<P: Peer>(race: &Race, shape: &Shape, peer: &P, streams: &[P::Stream], limit: f64) -> f64 {
    std::thread::scope(|scope| {
        let workers = (0..shape.threads()).map(|number| {
            scope.spawn(move || {
                let mut task = Task::new(number, shape, peer, streams);
                race.work(&mut task, STEPS / 10, limit / 2.0);
                let start = race.wait_for_start();
                race.done.fetch_add(race.work(&mut task, STEPS, limit), Ordering::Relaxed);
                let time = start.elapsed().as_secs_f64();
                task.end();
                time
            })
        });
        let workers: Vec<_> = workers.collect();
        race.start(shape.threads());
        let times = workers.into_iter().map(|worker| worker.join().unwrap_or(f64::INFINITY));
        times.fold(0.0, f64::max)
    })
}

/// One task that visits the threads in turn. The first round of visits warms up. Returns its seconds.
fn migrating<P: Peer>(
    race: &Race,
    shape: &Shape,
    peer: &P,
    streams: &[P::Stream],
    limit: f64,
) -> f64 {
    const WARM: usize = 20 * WORKERS;
    let task = Mutex::new(Task::new(0, shape, peer, streams));
    // Whose turn it is, and when the first visit began that counts.
    let (turn, began) = (AtomicUsize::new(0), OnceLock::<Instant>::new());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (task, turn, began, is_over) = (&task, &turn, &began, &is_over);
        for number in 0..WORKERS {
            scope.spawn(move || {
                race.wait_for_start();
                while !is_over.load(Ordering::Relaxed) {
                    let visit = turn.load(Ordering::Acquire);
                    if visit % WORKERS != number {
                        std::hint::spin_loop();
                        continue;
                    }
                    let mut task = task.lock().unwrap_or_else(PoisonError::into_inner);
                    if visit >= WARM {
                        let start = *began.get_or_init(Instant::now);
                        if start.elapsed().as_secs_f64() > limit {
                            is_over.store(true, Ordering::Relaxed);
                            break;
                        }
                        race.done.fetch_add(STEPS_ON_A_WORKER, Ordering::Relaxed);
                    }
                    race.work(&mut task, STEPS_ON_A_WORKER, f64::INFINITY);
                    drop(task);
                    turn.store(visit + 1, Ordering::Release);
                }
            });
        }
        race.start(WORKERS);
    });
    let seconds = began.get().map_or(f64::INFINITY, |start| start.elapsed().as_secs_f64());
    task.lock().unwrap_or_else(PoisonError::into_inner).end();
    seconds
}
