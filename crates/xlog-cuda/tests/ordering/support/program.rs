//! Random programs over streams and threads that use memory through the hooks, and what is known of them.
//!
//! A program has slots that hold at most one block each; a block has two lanes, and all work is on lanes. A step on an
//! empty slot does nothing, so that any interleaving of the threads is a program. See `runner` for what a step does.

use super::Random;

/// A lane of a slot: every step that touches one holds its lock meanwhile.
pub type Lane = (usize, usize);

/// The first lane's bytes; the second has as many.
pub const MAX_LANE: usize = 80;

#[derive(Clone, Debug)]
pub enum Step {
    /// Filled on the stream `first`, the allocation's own or another.
    Alloc {
        slot: usize,
        stream: usize,
        first: usize,
        lane_bytes: usize,
    },
    /// With a stream, a read is prepared there before the free, and queued and finished after it.
    Free {
        slot: usize,
        open: Option<usize>,
    },
    Fill {
        at: Lane,
        stream: usize,
        value: u8,
    },
    Mix {
        at: Lane,
        stream: usize,
        salt: u8,
    },
    Copy {
        to: Lane,
        from: Lane,
        stream: usize,
    },
    Look {
        at: Lane,
        stream: usize,
    },
    /// Both lanes, each by a writer of its own, both open at once.
    Both {
        slot: usize,
        streams: [usize; 2],
        value: u8,
        swap: bool,
    },
    /// A write inside another stream's write, ordered after it by the caller.
    Inside {
        at: Lane,
        outer: usize,
        inner: usize,
        value: u8,
        swap: bool,
    },
    /// Ordered by the caller alone, and told afterwards.
    Recorded {
        at: Lane,
        stream: usize,
        value: u8,
    },
    /// A block that lives for one step and is used on its own stream without hooks.
    Scratch {
        stream: usize,
        bytes: usize,
    },
    Hold {
        stream: usize,
    },
    Release,
    ReapCompleted,
    ReapPending,
    ReadBack {
        at: Lane,
        stream: usize,
    },
    /// Gives a stream back and takes another out.
    Replace {
        stream: usize,
    },
}

#[derive(Clone, Debug)]
pub struct Program {
    pub streams: usize,
    pub slots: usize,
    /// The steps of each thread.
    pub threads: Vec<Vec<Step>>,
    /// True where gates are used: then no step waits.
    pub gates: bool,
    /// True where a block's own stream mostly works on it without hooks, until the first hook on it.
    pub unannounced: bool,
}

impl Program {
    pub fn random(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let threads = 1 + random.below(4);
        Self::of(&mut random, threads)
    }

    /// One thread, and nothing that waits or gives streams back: only the hooks order it.
    pub fn for_control(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x7777);
        let mut program = Self::of(&mut random, 1);
        program.gates = true;
        program.threads[0].retain(|step| {
            !matches!(
                step,
                Step::Hold { .. }
                    | Step::Release
                    | Step::ReapPending
                    | Step::ReadBack { .. }
                    | Step::Replace { .. }
            )
        });
        program
    }

    /// One or two blocks that are written by one stream after another for so long that every lock on the way has its owner, with
    /// anything else in between.
    pub fn handed_on(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x3333);
        let threads = 1 + usize::from(random.chance(30));
        let (streams, slots) = (2 + random.below(3), 1 + random.below(2));
        let gates = random.chance(30);
        let shape = Shape { streams, slots, gates, replace: threads == 1 && random.chance(30) };
        let others = 2 + random.below(20) as u64;
        let mut steps = |first: bool| {
            let born = (0..slots).filter(|_| first);
            let mut steps: Vec<_> = born
                .map(|slot| Step::Alloc { slot, stream: slot, first: slot, lane_bytes: MAX_LANE })
                .collect();
            for turn in 0..60 + random.below(60) {
                let at = (random.below(slots), random.below(2));
                let (stream, value) = (turn % streams.min(2), random.next_u64() as u8);
                steps.push(match turn > 24 && random.chance(others) {
                    true => shape.step(&mut random),
                    false => Step::Fill { at, stream, value },
                });
            }
            steps
        };
        let threads = (0..threads).map(|thread| steps(thread == 0)).collect();
        Self { streams, slots, threads, gates, unannounced: false }
    }

    /// More streams than a clock remembers, for so long that clocks forget.
    pub fn crowded(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x9999);
        let threads = 1 + random.below(3);
        let (streams, slots) = (18 + random.below(30), 2 + random.below(8));
        let shape = Shape { streams, slots, gates: random.chance(50), replace: false };
        let threads = (0..threads)
            .map(|_| {
                let steps = 80 + random.below(80);
                (0..steps).map(|_| shape.step(&mut random)).collect()
            })
            .collect();
        Self { streams, slots, threads, gates: shape.gates, unannounced: false }
    }

    /// Both styles within the rule: until a block's first hook, its own stream works on it without hooks, and with them from then on.
    pub fn mixed(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x5555);
        let threads = 1 + random.below(3);
        let mut program = Self::of(&mut random, threads);
        program.unannounced = true;
        program
    }

    fn of(random: &mut Random, threads: usize) -> Self {
        let (streams, slots) = (2 + random.below(5), 1 + random.below(6));
        let gates = random.chance(50);
        let replace = threads == 1 && random.chance(50);
        let shape = Shape { streams, slots, gates, replace };
        let threads = (0..threads)
            .map(|_| {
                let steps = 15 + random.below(30);
                (0..steps).map(|_| shape.step(random)).collect()
            })
            .collect();
        Self { streams, slots, threads, gates, unannounced: false }
    }
}

struct Shape {
    streams: usize,
    slots: usize,
    gates: bool,
    /// A caller cannot order its own work after a stream that it has given back.
    replace: bool,
}

impl Shape {
    fn step(&self, random: &mut Random) -> Step {
        let stream = random.below(self.streams);
        let other = random.below(self.streams);
        let slot = random.below(self.slots);
        let at = (slot, random.below(2));
        let value = random.next_u64() as u8;
        let swap = random.chance(50);
        match random.below(100) {
            0..15 => {
                let first = if swap { stream } else { other };
                Step::Alloc { slot, stream, first, lane_bytes: 1 + random.below(MAX_LANE) }
            }
            15..25 => Step::Free { slot, open: swap.then_some(other).filter(|_| value < 100) },
            25..40 => Step::Fill { at, stream, value },
            40..50 => Step::Mix { at, stream, salt: value },
            50..60 => {
                let from = (random.below(self.slots), random.below(2));
                match from == at {
                    true => Step::Look { at, stream },
                    false => Step::Copy { to: at, from, stream },
                }
            }
            60..70 => Step::Look { at, stream },
            70..75 => Step::Both { slot, streams: [stream, other], value, swap },
            75..79 if stream != other => {
                Step::Inside { at, outer: stream, inner: other, value, swap }
            }
            79..82 if !self.replace => Step::Recorded { at, stream, value },
            82..88 => Step::Scratch { stream, bytes: 1 + random.below(2 * MAX_LANE) },
            88..92 if self.gates => Step::Hold { stream },
            92..94 if self.gates => Step::Release,
            88..92 => Step::ReadBack { at, stream },
            92..94 => Step::ReapPending,
            94..98 if self.replace => Step::Replace { stream },
            _ => Step::ReapCompleted,
        }
    }
}

/// Everything that is ordered before something, as bits.
#[derive(Clone, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn set(&mut self, i: usize) {
        if self.0.len() <= i / 64 {
            self.0.resize(i / 64 + 1, 0);
        }
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a |= b;
        }
    }
}

/// Which steps of one thread cannot do without their hooks, whatever a resource orders beyond the rules.
///
/// Every hook and every free is taken to order its stream after all that any stream which ever used the block has queued so
/// far: at least as much as any resource does. A step is needed when, without its own hooks, some conflicting earlier work
/// on its lane is still not ordered before it.
pub fn needed(steps: &[Step], streams: usize, slots: usize) -> Vec<usize> {
    (0..steps.len()).filter(|&without| Order::new(streams, slots).races(steps, without)).collect()
}

struct Live {
    home: usize,
    users: Vec<bool>,
    /// Per lane: work that a later reader or writer conflicts with.
    writes: [Vec<usize>; 2],
    reads: [Vec<usize>; 2],
}

struct Order {
    tails: Vec<Bits>,
    live: Vec<Option<Live>>,
    next: usize,
}

impl Order {
    fn new(streams: usize, slots: usize) -> Self {
        Self {
            tails: vec![Bits::default(); streams],
            live: (0..slots).map(|_| None).collect(),
            next: 0,
        }
    }

    fn wait(&mut self, stream: usize, on: usize) {
        let tail = self.tails[on].clone();
        self.tails[stream].join(&tail);
    }

    fn hook(&mut self, slot: usize, stream: usize) {
        let Some(live) = &mut self.live[slot] else { return };
        live.users[stream] = true;
        let users = live.users.clone();
        for (user, _) in users.iter().enumerate().filter(|(_, used)| **used) {
            self.wait(stream, user);
        }
    }

    /// Queues work on a lane; true when something it conflicts with is not ordered before it.
    fn work(&mut self, (slot, lane): Lane, stream: usize, writes: bool) -> bool {
        let (tail, at) = (&mut self.tails[stream], self.next);
        let Some(live) = &mut self.live[slot] else { return false };
        let before = tail.clone();
        let unordered = |list: &[usize]| list.iter().any(|&earlier| !before.has(earlier));
        let races = unordered(&live.writes[lane]) || (writes && unordered(&live.reads[lane]));
        self.next += 1;
        tail.set(at);
        let list = if writes { &mut live.writes } else { &mut live.reads };
        list[lane].push(at);
        races
    }

    fn races(&mut self, steps: &[Step], without: usize) -> bool {
        for (at, step) in steps.iter().enumerate() {
            let hooked = at != without;
            let mut races = false;
            match *step {
                Step::Alloc { slot, stream, first, .. } if self.live[slot].is_none() => {
                    let mut users = vec![false; self.tails.len()];
                    users[stream] = true;
                    let live = Live {
                        home: stream,
                        users,
                        writes: Default::default(),
                        reads: Default::default(),
                    };
                    self.live[slot] = Some(live);
                    for lane in [0, 1] {
                        self.work((slot, lane), stream, true);
                    }
                    self.hook(slot, first);
                    for lane in [0, 1] {
                        self.work((slot, lane), first, true);
                    }
                }
                Step::Free { slot, open } => {
                    if let Some(stream) = open {
                        self.hook(slot, stream);
                        self.work((slot, 0), stream, false);
                    }
                    if let Some(home) = self.live[slot].as_ref().map(|live| live.home) {
                        self.hook(slot, home);
                        self.live[slot] = None;
                    }
                }
                Step::Fill { at, stream, .. }
                | Step::Mix { at, stream, .. }
                | Step::Look { at, stream } => {
                    if hooked {
                        self.hook(at.0, stream);
                    }
                    races = self.work(at, stream, !matches!(step, Step::Look { .. }));
                }
                Step::Copy { to, from, stream } => {
                    if self.live[to.0].is_none() || self.live[from.0].is_none() {
                        continue;
                    }
                    if hooked {
                        self.hook(to.0, stream);
                        self.hook(from.0, stream);
                    }
                    races = self.work(from, stream, false) | self.work(to, stream, true);
                }
                Step::Both { slot, streams, .. } => {
                    streams.iter().for_each(|&stream| self.hook(slot, stream));
                    for (lane, stream) in streams.into_iter().enumerate() {
                        self.work((slot, lane), stream, true);
                    }
                }
                Step::Inside { at, outer, inner, .. } if self.live[at.0].is_some() => {
                    self.hook(at.0, outer);
                    self.work(at, outer, true);
                    self.wait(inner, outer);
                    self.hook(at.0, inner);
                    self.work(at, inner, true);
                }
                Step::Recorded { at, stream, .. } if self.live[at.0].is_some() => {
                    (0..self.tails.len()).for_each(|other| self.wait(stream, other));
                    self.work(at, stream, true);
                    self.hook(at.0, stream);
                }
                _ => {}
            }
            if at == without {
                return races;
            }
        }
        false
    }
}
