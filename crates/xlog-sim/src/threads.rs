//! Logical host threads.
//!
//! With a seed, the threads of a test run one at a time. Each is a real thread that runs only in its turn. The seed chooses the next thread
//! at every driver call, and wherever a thread would block on an `xlog_driver::sync::Mutex`. If every thread waits and no stream can
//! progress, that is a proven deadlock.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;

use xlog_base::{Condvar, Mutex, MutexGuard, SplitMix};
use xlog_driver::sync;

/// A body of a logical thread.
pub(crate) type Body<'a> = Box<dyn FnOnce() + Send + 'a>;

struct Group {
    machine: u64,
    turn: Mutex<Turn>,
    /// Wakes each thread when its turn comes.
    own_turn: Vec<Condvar>,
}

struct Turn {
    current: usize,
    rng: SplitMix,
    finished: Vec<bool>,
    /// For each waiting thread, the progress count at which it could do nothing.
    waiting: Vec<Option<u64>>,
    /// The threads that have done nothing but wait since their last poll.
    in_wait: Vec<bool>,
    /// The latest progress count at which a thread could do nothing.
    progress: u64,
}

thread_local! {
    static MEMBER: RefCell<Option<(Arc<Group>, usize)>> = const { RefCell::new(None) };
}

fn member(machine: u64) -> Option<(Arc<Group>, usize)> {
    MEMBER.with(|slot| slot.borrow().clone()).filter(|(group, _)| group.machine == machine)
}

/// True on a logical thread of this machine.
pub(crate) fn is_logical(machine: u64) -> bool {
    MEMBER.with(|slot| slot.borrow().as_ref().is_some_and(|(group, _)| group.machine == machine))
}

/// Offers a switch to another thread, as the seed decides.
pub(crate) fn yield_point(machine: u64) {
    if let Some((group, index)) = member(machine) {
        group.hand_over(index, false);
    }
}

/// Records that this thread can do nothing at `progress`. Returns true if that holds for all threads.
pub(crate) fn blocked(machine: u64, progress: u64) -> bool {
    let Some((group, index)) = member(machine) else {
        return false;
    };
    let mut turn = group.lock();
    turn.begin_wait(index);
    turn.progress = progress;
    turn.waiting[index] = Some(progress);
    let stuck = (0..turn.finished.len())
        .all(|other| turn.finished[other] || turn.waiting[other] == Some(progress));
    if stuck {
        // This thread continues with an error and may unblock the others.
        turn.waiting[index] = None;
        turn.in_wait[index] = false;
    }
    drop(turn);
    if !stuck {
        group.hand_over(index, true);
    }
    stuck
}

/// Runs the bodies as ordinary threads until all have returned, and resumes the first panic.
pub(crate) fn run_plain(bodies: Vec<Body<'_>>) {
    let outcomes: Vec<std::thread::Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.into_iter().map(|body| scope.spawn(body)).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    if let Some(payload) = outcomes.into_iter().find_map(Result::err) {
        resume_unwind(payload);
    }
}

/// Runs the bodies as logical threads until all have returned, and resumes the first panic.
pub(crate) fn run(machine: u64, seed: u64, bodies: Vec<Body<'_>>) {
    if bodies.is_empty() {
        return;
    }
    let mut rng = SplitMix::new(seed);
    let own_turn = bodies.iter().map(|_| Condvar::new()).collect();
    let group = Arc::new(Group {
        machine,
        turn: Mutex::new(Turn {
            current: rng.below(bodies.len()),
            finished: vec![false; bodies.len()],
            waiting: vec![None; bodies.len()],
            in_wait: vec![false; bodies.len()],
            progress: 0,
            rng,
        }),
        own_turn,
    });
    let panic = Mutex::new(None);
    std::thread::scope(|scope| {
        for (index, body) in bodies.into_iter().enumerate() {
            let (group, panic) = (Arc::clone(&group), &panic);
            scope.spawn(move || {
                let outcome = group.run_member(index, body);
                if let Err(payload) = outcome {
                    panic.lock().get_or_insert(payload);
                }
            });
        }
    });
    if let Some(payload) = panic.into_inner() {
        resume_unwind(payload);
    }
}

impl Turn {
    /// Begins or continues a wait. A thread that ran may have released a lock, so all waiting threads poll again.
    fn begin_wait(&mut self, index: usize) {
        if !self.in_wait[index] {
            self.in_wait[index] = true;
            self.waiting.fill(None);
        }
    }

    /// Chooses the next thread among those that have not finished, without this one if it must wait.
    fn choose(&mut self, index: usize, must: bool) {
        let runnable: Vec<usize> = (0..self.finished.len())
            .filter(|&other| !(self.finished[other] || must && other == index))
            .collect();
        if !runnable.is_empty() {
            self.current = runnable[self.rng.below(runnable.len())];
        }
    }
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock()
    }

    fn run_member(self: Arc<Self>, index: usize, body: Body<'_>) -> std::thread::Result<()> {
        MEMBER.with(|slot| *slot.borrow_mut() = Some((Arc::clone(&self), index)));
        self.await_turn(self.lock(), index);
        let hook: sync::Scheduler = {
            let group = Arc::clone(&self);
            Rc::new(move |turn| group.hand_over(index, turn == sync::Turn::Must))
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| sync::with_scheduler(hook, body)));
        MEMBER.with(|slot| *slot.borrow_mut() = None);
        let mut turn = self.lock();
        turn.finished[index] = true;
        turn.waiting.fill(None);
        turn.choose(index, false);
        self.wake(turn, index);
        outcome
    }

    /// Passes the turn to a thread that the seed chooses, perhaps this one, and waits until it returns.
    fn hand_over(&self, index: usize, must: bool) {
        let mut turn = self.lock();
        if must {
            turn.begin_wait(index);
        } else {
            turn.in_wait[index] = false;
        }
        turn.waiting[index] = must.then_some(turn.progress);
        if !must && turn.rng.below(2) == 0 {
            return;
        }
        turn.choose(index, must);
        if turn.current != index {
            self.wake(turn, index);
            self.await_turn(self.lock(), index);
        }
    }

    /// Wakes the thread whose turn it is, unless it is this one. Unlocks first, so that thread finds the lock free.
    fn wake(&self, turn: MutexGuard<'_, Turn>, index: usize) {
        let current = turn.current;
        drop(turn);
        if current != index {
            self.own_turn[current].notify_one();
        }
    }

    fn await_turn(&self, mut turn: MutexGuard<'_, Turn>, index: usize) {
        while turn.current != index {
            turn = self.own_turn[index].wait(turn);
        }
    }
}
