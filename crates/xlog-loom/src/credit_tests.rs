//! Every interleaving of threads that take, fail and free against a limit.

use loom::thread;

use crate::credit::Credits;
use crate::flights::Seat;
use crate::primitive::{Arc, Mutex};
use crate::tree::DEVICE;

/// What a budget does around a resource that counts bytes.
struct Model {
    credits: Credits<(), 2>,
    limit: usize,
    /// The lowest that the limit is.
    least: usize,
    below: Mutex<Below>,
}

/// The resource, and the most that each thread has seen it use since its call began.
struct Below {
    used: usize,
    most: [usize; 2],
}

fn seat(index: usize) -> Seat {
    Seat { index, shared: false }
}

impl Model {
    fn new(limit: usize) -> Arc<Self> {
        Self::lowered(limit, limit)
    }

    fn lowered(limit: usize, least: usize) -> Arc<Self> {
        let below = Mutex::new(Below { used: 0, most: [0; 2] });
        Arc::new(Self { credits: Credits::new(limit), limit, least, below })
    }

    /// True when granted; a refusal is checked. `works` says what the resource does.
    fn allocate(&self, thread: usize, bytes: usize, works: bool) -> bool {
        {
            let mut below = self.below.lock();
            below.most[thread] = below.used;
        }
        let seat = seat(thread);
        let credits = &self.credits;
        let taken = credits.take_own(seat, bytes, |()| ()).is_some()
            || credits.take(seat, bytes, DEVICE, |()| ()).is_some()
            || self.audit_until_certain(seat, bytes);
        if !taken {
            let most = self.below.lock().most[thread];
            assert!(most + bytes > self.least, "{bytes} bytes always fitted: {most} were used");
            return false;
        }
        if !works {
            credits.release(seat, bytes, DEVICE, |()| ());
            return false;
        }
        let mut below = self.below.lock();
        below.used += bytes;
        let used = below.used;
        assert!(used <= self.limit, "{used} bytes are used");
        below.most.iter_mut().for_each(|most| *most = used.max(*most));
        drop(below);
        credits.end(seat, bytes);
        true
    }

    /// As a request does whose deadline is far away.
    fn audit_until_certain(&self, seat: Seat, bytes: usize) -> bool {
        loop {
            match self.credits.gather(seat, bytes, DEVICE, |()| ()) {
                Ok(()) => return true,
                Err(sight) if !sight.may_fit => return false,
                Err(_) => loom::thread::yield_now(),
            }
        }
    }

    fn free(&self, thread: usize, bytes: usize) {
        let seat = seat(thread);
        self.credits.begin(seat, bytes);
        self.below.lock().used -= bytes;
        if !self.credits.release_own(seat, bytes, |()| ()) {
            self.credits.release(seat, bytes, DEVICE, |()| ());
        }
    }

    fn is_whole(&self) {
        let sight = self.credits.sight(0, DEVICE);
        assert_eq!((sight.charged, sight.in_flight, sight.pending), (0, 0, 0));
    }
}

#[test]
fn two_threads_never_exceed_the_limit_together() {
    loom::model(|| {
        let budget = Model::new(3);
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                if budget.allocate(1, 2, true) {
                    budget.free(1, 2);
                }
            })
        };
        if budget.allocate(0, 2, true) {
            budget.free(0, 2);
        }
        other.join().unwrap();
        budget.is_whole();
    });
}

#[test]
fn an_allocation_that_fails_below_refuses_nobody() {
    loom::model(|| {
        let budget = Model::new(1);
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || budget.allocate(1, 1, false))
        };
        assert!(budget.allocate(0, 1, true), "nothing was ever used");
        other.join().unwrap();
        budget.free(0, 1);
        budget.is_whole();
    });
}

#[test]
fn a_free_on_its_way_refuses_nobody_who_came_after_it() {
    loom::model(|| {
        let budget = Model::new(2);
        assert!(budget.allocate(1, 2, true));
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || budget.free(1, 2))
        };
        if budget.allocate(0, 1, true) {
            budget.free(0, 1);
        }
        other.join().unwrap();
        budget.is_whole();
    });
}

#[test]
fn credit_in_another_shard_is_found() {
    loom::model(|| {
        let budget = Model::new(8);
        assert!(budget.allocate(1, 1, true));
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                budget.free(1, 1);
                assert!(budget.allocate(1, 2, true));
            })
        };
        assert!(budget.allocate(0, 5, true));
        other.join().unwrap();
        budget.free(0, 5);
        budget.free(1, 2);
        budget.is_whole();
    });
}

#[test]
fn a_limit_lowered_meanwhile_loses_nothing() {
    loom::model(|| {
        let budget = Model::lowered(4, 1);
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                if budget.allocate(1, 2, true) {
                    budget.free(1, 2);
                }
            })
        };
        budget.credits.set_limit(1, || {});
        budget.credits.set_limit(4, || {});
        other.join().unwrap();
        budget.is_whole();
        assert!(budget.allocate(0, 4, true));
    });
}

/// The other thread's charge never ends while this one asks: it is held below. What fits beside it is granted all the same.
#[test]
fn a_charge_in_flight_closes_nothing() {
    loom::model(|| {
        let budget = Model::new(4);
        assert!(budget.credits.take(seat(1), 2, DEVICE, |()| ()).is_some());
        let other = {
            let budget = Arc::clone(&budget);
            // Does not fit, whether the charge in flight ends or not.
            thread::spawn(move || budget.credits.gather(seat(1), 5, DEVICE, |()| ()).is_err())
        };
        assert!(budget.allocate(0, 2, true), "2 of 4 bytes are in flight");
        assert!(other.join().unwrap());
        budget.free(0, 2);
        budget.credits.release(seat(1), 2, DEVICE, |()| ());
        budget.is_whole();
    });
}

/// Two threads charge at the limit while one of them releases.
#[test]
fn a_release_at_the_limit_is_never_lost() {
    loom::model(|| {
        let budget = Model::new(2);
        assert!(budget.allocate(1, 1, true));
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                budget.free(1, 1);
                assert!(budget.allocate(1, 1, true), "it was this thread's own byte");
            })
        };
        assert!(budget.allocate(0, 1, true), "one byte always fits");
        other.join().unwrap();
        assert!(!budget.allocate(0, 1, true));
        budget.free(0, 1);
        budget.free(1, 1);
        budget.is_whole();
    });
}
