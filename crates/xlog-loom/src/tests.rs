//! Every interleaving of what the runtime does at the same time.

use loom::thread;

use crate::clock::{ClockCell, StreamClock};
use crate::gate::{Attempt, BlockGate};
use crate::primitive::{Arc, Mutex};

/// What stands in the queue of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Queued {
    Work,
    /// An event with this number.
    Event(u64),
    /// A wait for an event of the other stream that covers this stamp.
    Wait(u64),
}

/// A stream: its clock, and the driver's queue.
struct Stream {
    clock: StreamClock<u64>,
    queue: Mutex<Vec<Queued>>,
}

impl Stream {
    fn new(key: u64) -> Arc<Self> {
        Arc::new(Self {
            clock: StreamClock::new(key, Arc::new(ClockCell::new())),
            queue: Mutex::new(Vec::new()),
        })
    }

    /// Queues work and finishes it: returns its stamp.
    fn work(&self) -> u64 {
        self.queue.lock().push(Queued::Work);
        self.clock.now()
    }

    /// Records an event: returns what it covers.
    fn record(&self, number: u64) -> u64 {
        let begun = self.clock.begin();
        self.queue.lock().push(Queued::Event(number));
        self.clock.recorded(begun, number).0.covers
    }
}

#[test]
fn an_event_never_claims_work_that_was_queued_after_it() {
    loom::model(|| {
        let stream = Stream::new(1);
        let worker = {
            let stream = Arc::clone(&stream);
            thread::spawn(move || stream.work())
        };
        let other = {
            let stream = Arc::clone(&stream);
            thread::spawn(move || stream.record(2))
        };
        let mine = stream.record(1);
        let stamp = worker.join().unwrap();
        let theirs = other.join().unwrap();
        let queue = stream.queue.lock().clone();
        let at = |what: Queued| queue.iter().position(|q| *q == what).unwrap();
        for (covers, event) in [(mine, 1), (theirs, 2)] {
            if covers >= stamp {
                assert!(at(Queued::Work) < at(Queued::Event(event)), "{queue:?}, {covers} {stamp}");
            }
        }
        assert_ne!(mine, theirs, "two events cover the same stamps only by accident");
        // Whoever asks for the stamp finds an event that covers it, or none.
        if let Some(found) = stream.clock.find(stamp) {
            assert!(found.covers >= stamp);
            assert!(at(Queued::Work) < at(Queued::Event(found.event)));
        }
    });
}

#[test]
fn nobody_skips_a_wait_that_is_not_queued_yet() {
    loom::model(|| {
        let (a, b) = (Stream::new(1), Stream::new(2));
        let stamp = a.work();
        let waiter = {
            let (a, b) = (Arc::clone(&a), Arc::clone(&b));
            thread::spawn(move || {
                let begun = a.clock.begin();
                a.queue.lock().push(Queued::Event(7));
                let (recorded, _) = a.clock.recorded(begun, 7);
                b.queue.lock().push(Queued::Wait(recorded.covers));
                b.clock.learn(1, &recorded);
            })
        };
        if b.clock.covers(1, stamp) {
            let queue = b.queue.lock().clone();
            assert!(queue.iter().any(|q| matches!(q, Queued::Wait(covers) if *covers >= stamp)));
        }
        waiter.join().unwrap();
        assert!(b.clock.covers(1, stamp));
    });
}

#[test]
fn what_a_stream_saw_travels_only_with_events_recorded_after_its_wait() {
    loom::model(|| {
        // c waits for an event of b; it may believe that it follows a only if b's wait for a stands before that event.
        let (a, b, c) = (Stream::new(1), Stream::new(2), Stream::new(3));
        let stamp = a.work();
        a.record(1);
        let first = a.clock.find(stamp).unwrap();
        let waiter = {
            let b = Arc::clone(&b);
            thread::spawn(move || {
                b.queue.lock().push(Queued::Wait(first.covers));
                b.clock.learn(1, &first);
            })
        };
        let begun = b.clock.begin();
        b.queue.lock().push(Queued::Event(9));
        let (recorded, _) = b.clock.recorded(begun, 9);
        c.clock.learn(2, &recorded);
        waiter.join().unwrap();
        if c.clock.covers(1, stamp) {
            let queue = b.queue.lock().clone();
            let wait = queue.iter().position(|q| matches!(q, Queued::Wait(_))).unwrap();
            let event = queue.iter().position(|q| *q == Queued::Event(9)).unwrap();
            assert!(wait < event, "{queue:?}");
        }
    });
}

#[test]
fn of_two_threads_that_free_twins_one_wins() {
    loom::model(|| {
        let gate = Arc::new(BlockGate::default());
        gate.begin(5, 1);
        let other = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.retire(5))
        };
        let mine = gate.retire(5);
        assert!(mine ^ other.join().unwrap());
        assert!(!gate.is_live(5));
    });
}

/// The part of a record that the lock guards.
#[derive(Default)]
struct Locked {
    free_on_close: bool,
    freed: u32,
}

struct Block {
    gate: BlockGate,
    locked: Mutex<Locked>,
}

impl Block {
    /// As the resource closes a use of the own stream.
    fn close(&self, writes: bool) {
        if self.gate.close(5, writes, 1) == Attempt::Done {
            return;
        }
        let mut locked = self.locked.lock();
        assert!(self.gate.close_counted(writes), "the use was open");
        if locked.free_on_close && !self.gate.has_open() {
            locked.free_on_close = false;
            locked.freed += 1;
        }
    }

    /// As the resource frees a block.
    fn free(&self) {
        let mut locked = self.locked.lock();
        assert!(self.gate.retire(5));
        if self.gate.has_open() {
            locked.free_on_close = true;
        } else {
            locked.freed += 1;
        }
    }
}

#[test]
fn a_block_returned_while_uses_close_is_freed_once_and_not_before_the_last() {
    loom::model(|| {
        let block =
            Arc::new(Block { gate: BlockGate::default(), locked: Mutex::new(Locked::default()) });
        block.gate.begin(5, 1);
        assert_eq!(block.gate.open(5, false), Attempt::Done);
        assert_eq!(block.gate.open(5, true), Attempt::Done);
        let reader = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.close(false))
        };
        let writer = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.close(true))
        };
        block.free();
        reader.join().unwrap();
        writer.join().unwrap();
        let locked = block.locked.lock();
        assert_eq!((locked.freed, locked.free_on_close), (1, false));
        assert!(!block.gate.has_open());
    });
}

#[test]
fn a_use_opened_at_the_moment_of_the_free_is_refused_or_waited_for() {
    loom::model(|| {
        let block =
            Arc::new(Block { gate: BlockGate::default(), locked: Mutex::new(Locked::default()) });
        block.gate.begin(5, 1);
        let user = {
            let block = Arc::clone(&block);
            thread::spawn(move || match block.gate.open(5, true) {
                Attempt::Done => {
                    assert_eq!(block.locked.lock().freed, 0, "freed under an open use");
                    block.close(true);
                    true
                }
                _ => false,
            })
        };
        block.free();
        user.join().unwrap();
        assert_eq!(block.locked.lock().freed, 1);
    });
}

#[test]
fn another_stream_that_comes_in_sees_every_use_the_quick_way_finished_before() {
    loom::model(|| {
        let gate = Arc::new(BlockGate::default());
        gate.begin(5, 1);
        let own = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || {
                if gate.open(5, true) != Attempt::Done {
                    return false;
                }
                gate.close(5, true, 4) == Attempt::Done
            })
        };
        assert!(gate.enter_slow(5));
        let seen = gate.own_write();
        let quick = own.join().unwrap();
        // Closed without the lock means: before the other stream came in.
        if quick {
            assert_eq!(seen, 4);
        }
    });
}
