//! Who may change something without a lock, and how that is taken away.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::bias::{Bias, Me};

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
        let entered = Me::with(|me| {
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
        assert!(Me::with(|me| bias.enter_as(me).is_none()), "nobody owns it any more");
    });
}

#[test]
fn only_the_owner_enters_by_name_and_not_twice() {
    loom::model(|| {
        let bias = Arc::new(Bias::<2>::default());
        let nobody = |bias: &Bias<2>| Me::with_nobody(|me| bias.enter_as(me).is_none());
        assert!(nobody(&bias), "what nobody owns is not entered by nobody");
        assert!(Me::with(|me| bias.enter_as(me).is_none()), "not claimed");
        assert!(bias.claim());
        assert!(nobody(&bias));
        let other = {
            let bias = Arc::clone(&bias);
            thread::spawn(move || Me::with(|me| bias.enter_as(me).is_some()))
        };
        Me::with(|me| {
            let held = bias.enter_as(me);
            assert!(held.is_some());
            assert!(bias.enter_as(me).is_none(), "it is inside already");
        });
        assert!(!other.join().unwrap(), "another thread came in");
        assert!(Me::with(|me| bias.enter_as(me).is_some()), "it was left");
    });
}
