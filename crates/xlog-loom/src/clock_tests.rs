//! Clocks: what an event covers, what a stream knows of others, and which events may be reused.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::clock::{Begun, ClockHeader, Cover, StreamClock};
use crate::vector_clock::VectorClock;

/// An entry in the queue of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Queued {
    Work,
    /// An event with this number.
    Event(u64),
    /// A recycled event with this number.
    Again(u64),
    /// A wait for an event of the other stream that covers this stamp.
    Wait(u64),
}

struct Stream {
    clock: StreamClock<u64, Box<ClockHeader>>,
    queue: Mutex<Vec<Queued>>,
}

impl Stream {
    fn new(key: u32) -> Arc<Self> {
        Arc::new(Self {
            clock: StreamClock::new(key, Box::default()),
            queue: Mutex::new(Vec::new()),
        })
    }

    /// Queues work, finishes it, and returns its stamp.
    fn work(&self) -> u64 {
        self.queue.lock().unwrap().push(Queued::Work);
        self.clock.now()
    }

    /// Records an event and returns what it covers.
    fn record(&self, number: u64) -> u64 {
        let begun = self.begin();
        self.queue.lock().unwrap().push(Queued::Event(number));
        self.recorded(begun.covers, number);
        begun.covers
    }

    /// Makes a stream with a recyclable event.
    fn with_spare(key: u32, number: u64) -> Arc<Self> {
        let stream = Self::new(key);
        let covers = stream.record(number);
        stream.clock.completed_up_to(covers);
        stream
    }

    /// The position of an entry in the queue.
    fn place_of(&self, what: Queued) -> Option<usize> {
        self.queue.lock().unwrap().iter().position(|queued| *queued == what)
    }

    // The clock does not depend on the thread: its lock is a mutex here.

    fn begin(&self) -> Begun<u64> {
        self.clock.begin()
    }

    fn recorded(&self, covers: u64, number: u64) {
        self.clock.recorded(covers, number);
    }

    fn find_or_begin(
        &self,
        stamp: u64,
        asker: u32,
        joined_clock: &mut Option<VectorClock>,
    ) -> Cover<u64> {
        self.clock.find_or_begin(stamp, asker, joined_clock)
    }

    fn join(&self, key: u32, covers: u64, joined_clock: &Option<VectorClock>) {
        self.clock.join(key, covers, joined_clock);
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
        // A lookup of the stamp finds an event that covers it, or none.
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
                let mut joined_clock = None;
                let cover = a.find_or_begin(stamp, 2, &mut joined_clock);
                a.queue.lock().unwrap().push(Queued::Event(7));
                b.queue.lock().unwrap().push(Queued::Wait(cover.covers));
                a.recorded(cover.covers, 7);
                b.join(1, cover.covers, &joined_clock);
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

/// Makes `b` wait on `a` like a stream, by event 6 if none can be found or recycled. True if the event was recorded before.
fn wait_on(b: &Stream, a: &Stream, stamp: u64) -> bool {
    let mut joined_clock = None;
    let cover = a.find_or_begin(stamp, b.clock.slot(), &mut joined_clock);
    assert!(cover.covers >= stamp);
    if cover.recorded {
        b.queue.lock().unwrap().push(Queued::Wait(cover.covers));
        a.clock.unpin();
    } else {
        let event = cover.event.unwrap_or(6);
        a.queue.lock().unwrap().push(Queued::Again(event));
        b.queue.lock().unwrap().push(Queued::Wait(cover.covers));
        a.recorded(cover.covers, event);
    }
    b.join(a.clock.slot(), cover.covers, &joined_clock);
    cover.recorded
}

#[test]
fn nobody_skips_a_wait_that_is_not_queued_yet_while_another_event_is_recorded() {
    loom::model(|| {
        let (a, b) = (Stream::with_spare(1, 5), Stream::new(2));
        b.join(1, 1, &None);
        let stamp = a.work();
        let waiter = {
            let (a, b) = (Arc::clone(&a), Arc::clone(&b));
            thread::spawn(move || wait_on(&b, &a, stamp))
        };
        a.record(8);
        if b.clock.covers(1, stamp) {
            let queue = b.queue.lock().unwrap().clone();
            assert!(queue.iter().any(|q| matches!(q, Queued::Wait(covers) if *covers >= stamp)));
        }
        waiter.join().unwrap();
        assert!(b.clock.covers(1, stamp));
        assert!(a.place_of(Queued::Work) < a.place_of(Queued::Event(8)));
    });
}

#[test]
fn an_event_is_not_found_before_it_is_recorded() {
    loom::model(|| {
        let a = Stream::with_spare(1, 5);
        let stamp = a.work();
        let recorder = {
            let a = Arc::clone(&a);
            thread::spawn(move || {
                let Begun { covers, recycled } = a.begin();
                let event = recycled.unwrap();
                a.queue.lock().unwrap().push(Queued::Again(event));
                a.recorded(covers, event);
            })
        };
        if let Some(found) = a.clock.find(stamp) {
            assert_eq!(found.event, 5);
            assert!(a.place_of(Queued::Work) < a.place_of(Queued::Again(5)));
            assert!(a.place_of(Queued::Again(5)).is_some(), "found before it was recorded");
            a.clock.unpin();
        }
        recorder.join().unwrap();
        assert!(a.clock.find(stamp).is_some());
    });
}

#[test]
fn an_event_is_not_used_again_before_it_is_recorded() {
    loom::model(|| {
        let a = Stream::with_spare(1, 5);
        let stamp = a.work();
        let recorder = {
            let a = Arc::clone(&a);
            thread::spawn(move || {
                let Begun { covers, recycled } = a.begin();
                // The other thread may have taken the only event.
                let Some(event) = recycled else { return };
                a.queue.lock().unwrap().push(Queued::Again(event));
                a.recorded(covers, event);
            })
        };
        // The device is found to be idle.
        a.clock.completed_up_to(stamp);
        let covers = a.clock.now();
        if a.begin().recycled == Some(5) && covers > stamp {
            assert!(a.place_of(Queued::Again(5)).is_some(), "used again before it was recorded");
        }
        recorder.join().unwrap();
    });
}

#[test]
fn a_found_event_is_not_used_again_before_the_wait_is_queued() {
    loom::model(|| {
        let (a, b) = (Stream::new(1), Stream::new(2));
        b.join(1, 1, &None);
        let stamp = a.work();
        a.record(7);
        let reuser = {
            let (a, b) = (Arc::clone(&a), Arc::clone(&b));
            thread::spawn(move || {
                a.clock.completed_up_to(stamp);
                // Retired events are checked again when an event is needed.
                let reused = a.begin().recycled == Some(7);
                (reused, b.queue.lock().unwrap().is_empty())
            })
        };
        let was_found = wait_on(&b, &a, stamp);
        let (reused, before) = reuser.join().unwrap();
        assert!(!(was_found && reused && before), "used again while another thread named it");
        let recorded_again = a.place_of(Queued::Again(7)).is_some();
        assert!(reused || recorded_again || a.begin().recycled == Some(7), "it is lost");
    });
}

#[test]
fn what_a_stream_saw_by_a_recorded_tail_travels_only_with_events_recorded_after_its_wait() {
    loom::model(|| {
        let (a, b, c) = (Stream::with_spare(1, 5), Stream::new(2), Stream::new(3));
        b.join(1, 1, &None);
        let stamp = a.work();
        let waiter = {
            let (a, b) = (Arc::clone(&a), Arc::clone(&b));
            thread::spawn(move || wait_on(&b, &a, stamp))
        };
        let mut joined_clock = None;
        let cover = b.find_or_begin(b.clock.now(), 3, &mut joined_clock);
        b.queue.lock().unwrap().push(Queued::Event(9));
        b.recorded(cover.covers, 9);
        c.join(2, cover.covers, &joined_clock);
        assert!(!waiter.join().unwrap(), "nothing was recorded before");
        if c.clock.covers(1, stamp) {
            let queue = b.queue.lock().unwrap().clone();
            let wait = queue.iter().position(|q| matches!(q, Queued::Wait(_))).unwrap();
            let event = queue.iter().position(|q| *q == Queued::Event(9)).unwrap();
            assert!(wait < event, "{queue:?}");
        }
    });
}

#[test]
fn what_a_stream_saw_travels_only_with_events_recorded_after_its_wait() {
    loom::model(|| {
        // c waits for an event of b. It may assume that it follows a only if b's wait for a was queued before that event.
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
                b.join(1, first.covers, &nothing);
            })
        };
        let mut joined_clock = None;
        let cover = b.find_or_begin(b.clock.now(), 3, &mut joined_clock);
        b.queue.lock().unwrap().push(Queued::Event(9));
        b.recorded(cover.covers, 9);
        c.join(2, cover.covers, &joined_clock);
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
                stream.begin().recycled
            })
        };
        let named = found.event;
        let pinned = stream.begin().recycled;
        assert_ne!(pinned, Some(named));
        stream.clock.unpin();
        // The other thread may have run before or after the pin was released.
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
                if stream.begin().recycled == Some(7) {
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
