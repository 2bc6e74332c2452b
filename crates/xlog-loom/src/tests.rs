//! Every interleaving of what the runtime does at the same time.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::bias::{Bias, Me};
use crate::clock::{Begun, ClockCell, Cover, Seen, StreamClock};
use crate::gate::{Attempt, BlockGate, OwnStamps};

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
    clock: StreamClock<u64, Box<ClockCell>>,
    queue: Mutex<Vec<Queued>>,
}

impl Stream {
    fn new(key: u32) -> Arc<Self> {
        Arc::new(Self {
            clock: StreamClock::new(key, Box::default()),
            queue: Mutex::new(Vec::new()),
        })
    }

    /// Queues work and finishes it: returns its stamp.
    fn work(&self) -> u64 {
        self.queue.lock().unwrap().push(Queued::Work);
        self.clock.now()
    }

    /// Records an event: returns what it covers.
    fn record(&self, number: u64) -> u64 {
        let begun = self.begin();
        self.queue.lock().unwrap().push(Queued::Event(number));
        self.recorded(begun.covers, number);
        begun.covers
    }

    // To a clock a thread is as good as another: its lock is a mutex here.

    fn begin(&self) -> Begun<u64> {
        Me::with(false, |me| self.clock.begin(me))
    }

    fn recorded(&self, covers: u64, number: u64) {
        Me::with(false, |me| self.clock.recorded(me, covers, number));
    }

    fn find_or_begin(&self, stamp: u64, asker: u32, news: &mut Option<Seen>) -> Cover<u64> {
        Me::with(false, |me| self.clock.find_or_begin(me, stamp, asker, news))
    }

    fn learn(&self, key: u32, covers: u64, news: &Option<Seen>) {
        Me::with(false, |me| self.clock.learn(me, key, covers, news));
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
        let queue = stream.queue.lock().unwrap().clone();
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
                let mut news = None;
                let cover = a.find_or_begin(stamp, 2, &mut news);
                a.queue.lock().unwrap().push(Queued::Event(7));
                b.queue.lock().unwrap().push(Queued::Wait(cover.covers));
                a.recorded(cover.covers, 7);
                b.learn(1, cover.covers, &news);
            })
        };
        if b.clock.covers(1, stamp) {
            let queue = b.queue.lock().unwrap().clone();
            assert!(queue.iter().any(|q| matches!(q, Queued::Wait(covers) if *covers >= stamp)));
        }
        waiter.join().unwrap();
        assert!(b.clock.covers(1, stamp));
    });
}

#[test]
fn nobody_skips_the_wait_of_a_short_way_that_is_not_queued_yet() {
    loom::model(|| {
        let (a, b) = (Stream::new(1), Stream::new(2));
        let stamp = a.work();
        let waiter = {
            let (a, b) = (Arc::clone(&a), Arc::clone(&b));
            thread::spawn(move || {
                Me::with(false, |me| {
                    // As a stream follows another one in the fewest steps: a stamp that stands is not covered.
                    let covers = if a.clock.now() == stamp {
                        let begun = a.clock.begin_plain(me, 2).unwrap();
                        a.queue.lock().unwrap().push(Queued::Event(7));
                        b.queue.lock().unwrap().push(Queued::Wait(begun.covers));
                        a.clock.recorded(me, begun.covers, 7);
                        begun.covers
                    } else {
                        // The other event may not be recorded yet; then this one would go the long way.
                        let Some((covers, _)) = a.clock.find_plain(me, stamp, 2) else { return };
                        b.queue.lock().unwrap().push(Queued::Wait(covers));
                        a.clock.unpin_as(me);
                        covers
                    };
                    assert!(covers >= stamp);
                    b.clock.learn_plain(me, 1, covers);
                });
            })
        };
        a.record(8);
        if b.clock.covers(1, stamp) {
            let queue = b.queue.lock().unwrap().clone();
            assert!(queue.iter().any(|q| matches!(q, Queued::Wait(covers) if *covers >= stamp)));
        }
        waiter.join().unwrap();
        let queue = a.queue.lock().unwrap().clone();
        let at = |what: Queued| queue.iter().position(|q| *q == what);
        assert!(at(Queued::Work) < at(Queued::Event(8)), "{queue:?}");
    });
}

#[test]
fn what_a_stream_saw_travels_only_with_events_recorded_after_its_wait() {
    loom::model(|| {
        // c waits for an event of b; it may believe that it follows a only if b's wait for a stands before that event.
        let (a, b, c) = (Stream::new(1), Stream::new(2), Stream::new(3));
        let stamp = a.work();
        a.record(1);
        let mut nothing = None;
        let first = a.find_or_begin(stamp, 2, &mut nothing);
        assert!(first.recorded);
        let waiter = {
            let b = Arc::clone(&b);
            thread::spawn(move || {
                b.queue.lock().unwrap().push(Queued::Wait(first.covers));
                b.learn(1, first.covers, &nothing);
            })
        };
        let mut news = None;
        let cover = b.find_or_begin(b.clock.now(), 3, &mut news);
        b.queue.lock().unwrap().push(Queued::Event(9));
        b.recorded(cover.covers, 9);
        c.learn(2, cover.covers, &news);
        waiter.join().unwrap();
        if c.clock.covers(1, stamp) {
            let queue = b.queue.lock().unwrap().clone();
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
        gate.begin(5);
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
    stamps: OwnStamps,
    locked: Mutex<Locked>,
}

impl Block {
    /// As the resource closes a use of the own stream.
    fn close(&self, writes: bool) {
        if self.gate.close(5, writes, 1, &self.stamps) == Attempt::Done {
            return;
        }
        let mut locked = self.locked.lock().unwrap();
        assert!(self.gate.close_counted(writes), "the use was open");
        if locked.free_on_close && !self.gate.has_open() {
            locked.free_on_close = false;
            locked.freed += 1;
        }
    }

    /// As the resource frees a block.
    fn free(&self) {
        let mut locked = self.locked.lock().unwrap();
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
        let block = Arc::new(Block {
            gate: BlockGate::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.gate.begin(5);
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
        let locked = block.locked.lock().unwrap();
        assert_eq!((locked.freed, locked.free_on_close), (1, false));
        assert!(!block.gate.has_open());
    });
}

/// As a pool frees a block that may be at home: by whoever holds the memory of its stream, or by the word.
fn free_from_home(gate: &BlockGate, memory: &Mutex<u32>) -> bool {
    {
        let mut freed = memory.lock().unwrap();
        if gate.is_live_at_home(5) {
            gate.end();
            *freed += 1;
            return true;
        }
    }
    gate.retire_quiet(5) == Attempt::Done
}

fn take_from_home(gate: &BlockGate, memory: &Mutex<u32>) {
    if gate.is_at_home() {
        let _held = memory.lock().unwrap();
        gate.leave_home();
    }
}

#[test]
fn a_block_at_home_is_used_or_freed_and_never_both() {
    loom::model(|| {
        let block = Arc::new((BlockGate::default(), Mutex::new(0)));
        block.0.begin_at_home(5);
        let user = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (gate, memory) = &*block;
                take_from_home(gate, memory);
                gate.open(5, true)
            })
        };
        let (gate, memory) = &*block;
        let freed = free_from_home(gate, memory);
        let opened = user.join().unwrap();
        assert!(freed ^ (opened == Attempt::Done), "freed {freed}, and the use was {opened:?}");
        assert_eq!(gate.has_open(), !freed);
    });
}

#[test]
fn twins_of_a_block_at_home_are_freed_once() {
    loom::model(|| {
        let block = Arc::new((BlockGate::default(), Mutex::new(0)));
        block.0.begin_at_home(5);
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (gate, memory) = &*block;
                take_from_home(gate, memory);
                gate.retire_quiet(5) == Attempt::Done
            })
        };
        let mine = free_from_home(&block.0, &block.1);
        assert!(mine ^ other.join().unwrap());
        assert!(!block.0.is_live(5));
    });
}

#[test]
fn a_use_opened_at_the_moment_of_the_free_is_refused_or_waited_for() {
    loom::model(|| {
        let block = Arc::new(Block {
            gate: BlockGate::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.gate.begin(5);
        let user = {
            let block = Arc::clone(&block);
            thread::spawn(move || match block.gate.open(5, true) {
                Attempt::Done => {
                    assert_eq!(block.locked.lock().unwrap().freed, 0, "freed under an open use");
                    block.close(true);
                    true
                }
                _ => false,
            })
        };
        block.free();
        user.join().unwrap();
        assert_eq!(block.locked.lock().unwrap().freed, 1);
    });
}

#[test]
fn another_stream_that_comes_in_sees_every_use_the_quick_way_finished_before() {
    loom::model(|| {
        let block = Arc::new((BlockGate::default(), OwnStamps::default()));
        block.0.begin(5);
        let own = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (gate, stamps) = &*block;
                if gate.open(5, true) != Attempt::Done {
                    return false;
                }
                gate.close(5, true, 4, stamps) == Attempt::Done
            })
        };
        assert!(block.0.enter_slow(5));
        let seen = block.1.take().0;
        let quick = own.join().unwrap();
        // Closed without the lock means: before the other stream came in.
        if quick {
            assert_eq!(seen, 4);
        }
    });
}

/// A block that belongs to this thread.
fn granted() -> Arc<Block> {
    let block = Arc::new(Block {
        gate: BlockGate::default(),
        stamps: OwnStamps::default(),
        locked: Mutex::new(Locked::default()),
    });
    block.gate.begin(5);
    {
        let _locked = block.locked.lock().unwrap();
        block.gate.grant(5);
    }
    block
}

#[test]
fn a_block_taken_from_its_owner_while_it_opens_a_use_is_not_freed_under_it() {
    loom::model(|| {
        let block = granted();
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.free())
        };
        if block.gate.open(5, true) == Attempt::Done {
            assert_eq!(block.locked.lock().unwrap().freed, 0, "freed under an open use");
            block.close(true);
        }
        other.join().unwrap();
        assert_eq!(block.locked.lock().unwrap().freed, 1);
        assert!(!block.gate.has_open());
    });
}

impl Block {
    /// As the resource opens a use: without the lock, or, where the block is another thread's, with it.
    fn open(&self, writes: bool) {
        if self.gate.open(5, writes) == Attempt::Done {
            return;
        }
        let _locked = self.locked.lock().unwrap();
        self.gate.share();
        assert_eq!(self.gate.open(5, writes), Attempt::Done);
    }
}

#[test]
fn an_owner_and_another_thread_lose_no_use_of_each_other() {
    loom::model(|| {
        let block = granted();
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.open(false))
        };
        block.open(true);
        other.join().unwrap();
        assert!(block.gate.has_counted(false), "the use of the other thread was lost");
        assert!(block.gate.has_counted(true), "the use of the owner was lost");
    });
}

#[test]
fn a_block_is_granted_while_another_thread_opens_a_use() {
    loom::model(|| {
        let block = Arc::new(Block {
            gate: BlockGate::default(),
            stamps: OwnStamps::default(),
            locked: Mutex::new(Locked::default()),
        });
        block.gate.begin(5);
        let other = {
            let block = Arc::clone(&block);
            thread::spawn(move || block.gate.open(5, false) == Attempt::Done)
        };
        {
            let _locked = block.locked.lock().unwrap();
            block.gate.grant(5);
        }
        assert_eq!(block.gate.open(5, true), Attempt::Done);
        let opened = other.join().unwrap();
        assert_eq!(block.gate.has_counted(false), opened);
        assert!(block.gate.has_counted(true));
    });
}

#[test]
fn an_event_that_somebody_names_to_the_driver_is_not_used_again() {
    loom::model(|| {
        let stream = Stream::new(1);
        let stamp = stream.work();
        stream.record(1);
        let found = stream.clock.find(stamp).unwrap();
        let reuser = {
            let stream = Arc::clone(&stream);
            thread::spawn(move || {
                stream.clock.completed_up_to(stamp);
                stream.begin().spare
            })
        };
        let named = found.event;
        let pinned = stream.begin().spare;
        assert_ne!(pinned, Some(named));
        stream.clock.unpin();
        // The other one may have come before or after the pin was given up.
        let _ = reuser.join().unwrap();
    });
}

#[test]
fn an_event_recorded_to_be_waited_for_is_not_used_again_before_the_wait_is_queued() {
    loom::model(|| {
        let (stream, other) = (Stream::new(1), Stream::new(2));
        let stamp = stream.work();
        let reuser = {
            let (stream, other) = (Arc::clone(&stream), Arc::clone(&other));
            thread::spawn(move || {
                stream.clock.completed_up_to(stamp);
                if stream.begin().spare == Some(7) {
                    assert!(!other.queue.lock().unwrap().is_empty());
                }
            })
        };
        let cover = stream.find_or_begin(stamp, 2, &mut None);
        assert!(!cover.recorded);
        stream.queue.lock().unwrap().push(Queued::Event(7));
        other.queue.lock().unwrap().push(Queued::Wait(cover.covers));
        stream.recorded(cover.covers, 7);
        reuser.join().unwrap();
    });
}

#[test]
fn a_thread_that_lost_its_block_while_it_entered_does_not_hide_the_next_owner() {
    loom::model(|| {
        let block = granted();
        let next = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                {
                    let _locked = block.locked.lock().unwrap();
                    block.gate.share();
                    block.gate.grant(5);
                }
                block.open(false);
            })
        };
        block.open(true);
        next.join().unwrap();
        assert!(block.gate.has_counted(false), "the use of the next owner was lost");
        assert!(block.gate.has_counted(true), "the use of the first owner was lost");
    });
}

#[test]
fn an_owner_that_knows_its_name_is_out_when_its_bias_was_taken() {
    loom::model(|| {
        let shared = Arc::new((Bias::<2>::default(), Mutex::new(()), AtomicU32::new(0)));
        assert!(shared.0.claim());
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (bias, lock, count) = &*shared;
                let _locked = lock.lock().unwrap();
                bias.revoke();
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            })
        };
        let (bias, lock, count) = &*shared;
        let step = || count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let entered = Me::with(true, |me| {
            let held = bias.enter_as(me);
            if held.is_some() {
                step();
            }
            held.is_some()
        });
        if !entered {
            let _locked = lock.lock().unwrap();
            bias.revoke();
            step();
        }
        other.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 2, "a step was lost");
        assert!(Me::with(true, |me| bias.enter_as(me).is_none()), "nobody owns it any more");
    });
}

#[test]
fn only_the_owner_enters_by_name_and_not_twice() {
    loom::model(|| {
        let bias = Arc::new(Bias::<2>::default());
        let nobody = |bias: &Bias<2>| Me::with(false, |me| bias.enter_as(me).is_none());
        assert!(nobody(&bias), "what nobody owns is not entered by nobody");
        assert!(Me::with(true, |me| bias.enter_as(me).is_none()), "not claimed");
        assert!(bias.claim());
        assert!(nobody(&bias));
        let other = {
            let bias = Arc::clone(&bias);
            thread::spawn(move || Me::with(true, |me| bias.enter_as(me).is_some()))
        };
        Me::with(true, |me| {
            let held = bias.enter_as(me);
            assert!(held.is_some());
            assert!(bias.enter_as(me).is_none(), "it is inside already");
        });
        assert!(!other.join().unwrap(), "another thread came in");
        assert!(Me::with(true, |me| bias.enter_as(me).is_some()), "it was left");
    });
}

#[test]
fn what_the_lock_gave_to_the_quick_way_is_seen_by_the_next_stream() {
    loom::model(|| {
        // The own stream finished at 7 through the lock; its next use, and one of another stream, come at once.
        let (gate, stamps) = (BlockGate::default(), OwnStamps::default());
        let block = Arc::new((gate, stamps, Mutex::new(false)));
        block.0.begin(5);
        assert!(block.0.enter_slow(5));
        let own = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let (gate, stamps, others) = &*block;
                {
                    let others = others.lock().unwrap();
                    if *others {
                        return None;
                    }
                    stamps.stamp(true, 7);
                    assert!(gate.leave_slow_open(true));
                }
                Some(gate.close(5, true, 8, stamps))
            })
        };
        let (gate, stamps, others) = &*block;
        let seen = {
            let mut others = others.lock().unwrap();
            *others = true;
            assert!(gate.enter_slow(5));
            stamps.take().0
        };
        match own.join().unwrap() {
            // It found the other stream there, and would have gone on through the lock.
            None => assert_eq!(seen, 0),
            Some(Attempt::Done) => assert_eq!(seen, 8, "closed without the lock is closed before"),
            Some(attempt) => {
                assert_eq!(attempt, Attempt::Slow);
                assert!(seen >= 7 && gate.has_counted(true));
            }
        }
    });
}
