//! Every interleaving of threads that charge, fail and release against a limit.

use loom::thread;

use crate::primitive::{Arc, Mutex};
use crate::quota::{AuditSnapshot, Charge, ThreadQuotas};
use crate::tree::DEVICE;

/// A budget around a resource that counts bytes.
struct Model {
    quotas: ThreadQuotas<(), 2>,
    limit: usize,
    /// The minimum of the limit over the test.
    least: usize,
    below: Mutex<Below>,
}

/// The resource, and for each thread the maximum use since its call began.
struct Below {
    used: usize,
    most: [usize; 2],
}

fn charge(bytes: usize) -> Charge {
    Charge { bytes, tag: 0, scope: DEVICE }
}

fn audit(quotas: &ThreadQuotas<(), 2>, bytes: usize) -> Result<(), AuditSnapshot> {
    quotas.charge_audited(&charge(bytes), |_, _| {}, |_, snapshot| snapshot)
}

impl Model {
    fn new(limit: usize) -> Arc<Self> {
        Self::lowered(limit, limit)
    }

    fn lowered(limit: usize, least: usize) -> Arc<Self> {
        let below = Mutex::new(Below { used: 0, most: [0; 2] });
        Arc::new(Self { quotas: ThreadQuotas::new(limit), limit, least, below })
    }

    /// Charges and allocates. Returns true if granted; a refusal is checked. `works` is the outcome of the resource.
    fn allocate(&self, thread: usize, bytes: usize, works: bool) -> bool {
        {
            let mut below = self.below.lock();
            below.most[thread] = below.used;
        }
        let quotas = &self.quotas;
        let taken = quotas.charge(&charge(bytes)) || self.audit_until_certain(bytes);
        if !taken {
            let most = self.below.lock().most[thread];
            assert!(most + bytes > self.least, "{bytes} bytes always fitted: {most} were used");
            return false;
        }
        if !works {
            quotas.release(&charge(bytes));
            return false;
        }
        let mut below = self.below.lock();
        below.used += bytes;
        let used = below.used;
        assert!(used <= self.limit, "{used} bytes are used");
        below.most.iter_mut().for_each(|most| *most = used.max(*most));
        drop(below);
        quotas.end(bytes);
        true
    }

    /// Audits like a request with a distant deadline.
    fn audit_until_certain(&self, bytes: usize) -> bool {
        loop {
            match audit(&self.quotas, bytes) {
                Ok(()) => return true,
                Err(snapshot) if !snapshot.may_fit => return false,
                Err(_) => loom::thread::yield_now(),
            }
        }
    }

    fn free(&self, bytes: usize) {
        self.quotas.begin(bytes);
        self.below.lock().used -= bytes;
        self.quotas.release(&charge(bytes));
    }

    fn is_whole(&self) {
        let snapshot = self.quotas.snapshot(0, DEVICE);
        assert_eq!((snapshot.charged, snapshot.in_flight, snapshot.pending), (0, 0, 0));
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
                    budget.free(2);
                }
            })
        };
        if budget.allocate(0, 2, true) {
            budget.free(2);
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
        budget.free(1);
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
            thread::spawn(move || budget.free(2))
        };
        if budget.allocate(0, 1, true) {
            budget.free(1);
        }
        other.join().unwrap();
        budget.is_whole();
    });
}

#[test]
fn credit_in_another_shard_is_found() {
    loom::model(|| {
        let budget = Model::new(8);
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                assert!(budget.allocate(1, 1, true));
                // The byte stays in this thread's shard.
                budget.free(1);
            })
        };
        assert!(budget.allocate(0, 7, true));
        other.join().unwrap();
        assert!(budget.allocate(0, 1, true), "8 bytes fit, whatever shard has them");
        budget.free(7);
        budget.free(1);
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
                    budget.free(2);
                }
            })
        };
        budget.quotas.set_limit(1, || {});
        budget.quotas.set_limit(4, || {});
        other.join().unwrap();
        budget.is_whole();
        assert!(budget.allocate(0, 4, true));
    });
}

/// The other thread's charge never ends during this call. What fits beside it is granted anyway.
#[test]
fn a_charge_in_flight_closes_nothing() {
    loom::model(|| {
        let budget = Model::new(4);
        let other = {
            let budget = Arc::clone(&budget);
            thread::spawn(move || {
                assert!(budget.quotas.charge(&charge(2)) || budget.audit_until_certain(2));
                // Does not fit, whether the charge in flight ends or not.
                audit(&budget.quotas, 5).is_err()
            })
        };
        assert!(budget.allocate(0, 2, true), "2 of 4 bytes are in flight");
        assert!(other.join().unwrap());
        budget.free(2);
        budget.quotas.release(&charge(2));
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
                budget.free(1);
                assert!(budget.allocate(1, 1, true), "it was this thread's own byte");
            })
        };
        assert!(budget.allocate(0, 1, true), "one byte always fits");
        other.join().unwrap();
        assert!(!budget.allocate(0, 1, true));
        budget.free(1);
        budget.free(1);
        budget.is_whole();
    });
}
