//! Biased access without a lock, and its revocation.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::bias::Bias;
use crate::threads;

#[test]
fn an_owner_is_out_when_its_bias_was_taken() {
    loom::model(|| {
        let shared = Arc::new((Bias::default(), Mutex::new(()), AtomicU32::new(0)));
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
        let held = bias.enter();
        let entered = held.is_some();
        if entered {
            step();
        }
        drop(held);
        if !entered {
            let _locked = lock.lock().unwrap();
            bias.revoke();
            step();
        }
        other.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 2, "a step was lost");
        assert!(bias.enter().is_none(), "it has no owner any more");
    });
}

#[test]
fn only_the_owner_enters_and_not_twice() {
    loom::model(|| {
        let bias = Arc::new(Bias::default());
        assert!(bias.enter().is_none(), "a thread without a record enters what has no owner");
        assert!(bias.claim());
        let other = {
            let bias = Arc::clone(&bias);
            thread::spawn(move || {
                let without_record = bias.enter().is_some();
                threads::current_or_new();
                without_record || bias.enter().is_some()
            })
        };
        let held = bias.enter();
        assert!(held.is_some());
        assert!(bias.enter().is_none(), "it is inside already");
        drop(held);
        assert!(!other.join().unwrap(), "another thread came in");
        assert!(bias.enter().is_some(), "it was left");
    });
}

/// Steps as a mutex does that could not be entered at once: an owner after a temporary revocation enters again, another thread revokes.
fn step_through_the_lock(bias: &Bias, lock: &Mutex<()>, count: &AtomicU32) -> bool {
    let locked = lock.lock().unwrap();
    let held = bias.enter();
    if held.is_some() {
        drop(locked);
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        return true;
    }
    bias.revoke();
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    false
}

#[test]
fn an_owner_kept_out_by_a_visit_goes_on_alone_and_as_the_owner() {
    loom::model(|| {
        let shared = Arc::new((Bias::default(), Mutex::new(()), AtomicU32::new(0)));
        assert!(shared.0.claim());
        let visitor = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (bias, lock, count) = &*shared;
                let _locked = lock.lock().unwrap();
                let owner = bias.owner();
                bias.revoke();
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                bias.restore(owner);
            })
        };
        let (bias, lock, count) = &*shared;
        for _ in 0..2 {
            match bias.enter() {
                Some(_held) => count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
                None => assert!(step_through_the_lock(bias, lock, count), "it was only a visit"),
            }
        }
        visitor.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 3, "a step was lost");
        assert!(bias.is_mine());
    });
}

/// A counter with its lock. Two concurrent steps would lose one.
#[derive(Default)]
struct Shared {
    bias: Bias,
    lock: Mutex<()>,
    count: AtomicU32,
}

impl Shared {
    fn step(&self) {
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Revokes the bias, steps, and becomes the owner.
    fn step_and_claim(&self) {
        let _locked = self.lock.lock().unwrap();
        self.bias.revoke();
        self.step();
        assert!(self.bias.claim());
    }

    /// Steps like the lock: by the bias if this thread owns it, else after revoking it.
    fn step_by_any_means(&self) {
        match self.bias.enter() {
            Some(_held) => self.step(),
            None => {
                let _locked = self.lock.lock().unwrap();
                self.bias.revoke();
                self.step();
            }
        }
    }
}

/// A late former owner announces itself while the next owner is inside and a third thread revokes.
#[test]
fn a_late_former_owner_hides_no_later_one() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Arc::new(Shared::default());
        assert!(shared.bias.claim());
        let next = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.step_and_claim();
                shared.step_by_any_means();
            })
        };
        let revoker = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let _locked = shared.lock.lock().unwrap();
                shared.bias.revoke();
                shared.step();
            })
        };
        shared.step_by_any_means();
        next.join().unwrap();
        revoker.join().unwrap();
        assert_eq!(shared.count.load(Ordering::Relaxed), 4, "a step was lost");
    });
}

#[test]
fn two_owners_by_turns_lose_no_step() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.step_and_claim();
                shared.step_by_any_means();
            })
        };
        shared.step_and_claim();
        shared.step_by_any_means();
        other.join().unwrap();
        assert_eq!(shared.count.load(Ordering::Relaxed), 4, "a step was lost");
    });
}

/// The successor has the record of an ended thread, and with it a bias that it never claimed.
#[test]
fn a_successor_sees_what_the_ended_owner_did_and_is_kept_out_like_it() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Arc::new(Shared::default());
        let revoker = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let _locked = shared.lock.lock().unwrap();
                shared.bias.revoke();
                shared.step();
            })
        };
        let owner = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.step_and_claim();
                shared.step_by_any_means();
                threads::end();
            })
        };
        // No join orders the owner's steps before this thread's; only the record does.
        threads::current_or_new();
        shared.step_by_any_means();
        owner.join().unwrap();
        revoker.join().unwrap();
        assert_eq!(shared.count.load(Ordering::Relaxed), 4, "a step was lost");
    });
}

#[test]
fn an_owner_inside_of_one_enters_others_while_there_are_slots_and_none_twice() {
    loom::model(|| {
        let shared: Arc<[Shared; 3]> = Arc::default();
        assert!(shared.iter().all(|one| one.bias.claim()));
        let revoker = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let _locked = shared[1].lock.lock().unwrap();
                shared[1].bias.revoke();
                shared[1].step();
            })
        };
        let outer = shared[0].bias.enter();
        assert!(outer.is_some());
        let inner = shared[1].bias.enter();
        assert!(shared[0].bias.enter().is_none(), "it is inside already");
        if inner.is_some() {
            assert!(shared[2].bias.enter().is_none(), "no slot is left");
            shared[1].step();
            // Not in the order of entry.
            drop(outer);
            assert!(shared[1].bias.enter().is_none(), "it is inside already");
            assert!(shared[0].bias.enter().is_some(), "it was left");
        }
        let entered = u32::from(inner.is_some());
        drop(inner);
        revoker.join().unwrap();
        assert_eq!(shared[1].count.load(Ordering::Relaxed), 1 + entered, "a step was lost");
    });
}
