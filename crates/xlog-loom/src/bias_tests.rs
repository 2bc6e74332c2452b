//! Who may change something without a lock, and how that is taken away.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::bias::{Bias, CurrentThread};

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
        let entered = CurrentThread::with(|current| {
            let held = bias.enter_as(current);
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
        assert!(
            CurrentThread::with(|current| bias.enter_as(current).is_none()),
            "nobody owns it any more"
        );
    });
}

#[test]
fn only_the_owner_enters_by_name_and_not_twice() {
    loom::model(|| {
        let bias = Arc::new(Bias::<2>::default());
        let nobody = |bias: &Bias<2>| {
            CurrentThread::with_no_thread(|current| bias.enter_as(current).is_none())
        };
        assert!(nobody(&bias), "what nobody owns is not entered by nobody");
        assert!(CurrentThread::with(|current| bias.enter_as(current).is_none()), "not claimed");
        assert!(bias.claim());
        assert!(nobody(&bias));
        let other = {
            let bias = Arc::clone(&bias);
            thread::spawn(move || CurrentThread::with(|current| bias.enter_as(current).is_some()))
        };
        CurrentThread::with(|current| {
            let held = bias.enter_as(current);
            assert!(held.is_some());
            assert!(bias.enter_as(current).is_none(), "it is inside already");
        });
        assert!(!other.join().unwrap(), "another thread came in");
        assert!(CurrentThread::with(|current| bias.enter_as(current).is_some()), "it was left");
    });
}

/// What a mutex does that was not entered at once: whom a visitor kept out owns it still, others take it away.
fn step_through_the_lock(bias: &Bias<2>, lock: &Mutex<()>, count: &AtomicU32) -> bool {
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
        let shared = Arc::new((Bias::<2>::default(), Mutex::new(()), AtomicU32::new(0)));
        assert!(shared.0.claim());
        let visitor = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (bias, lock, count) = &*shared;
                let _locked = lock.lock().unwrap();
                let owner = bias.owner();
                if !bias.try_revoke() {
                    return 0;
                }
                count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                bias.restore(owner);
                1
            })
        };
        let (bias, lock, count) = &*shared;
        for _ in 0..2 {
            match bias.enter() {
                Some(_held) => count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
                None => assert!(step_through_the_lock(bias, lock, count), "it was only a visit"),
            }
        }
        let visits = visitor.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 2 + visits, "a step was lost");
        assert!(bias.is_mine());
    });
}
