//! Threads that share a slot, beside others that have one of their own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_ledger::{Ledger, LedgerError, UNIT};

use crate::support::{Random, TestDirectory, seed};

/// Everything that crosses threads is Send and Sync.
#[test]
fn a_ledger_can_be_shared() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Ledger>();
    shared::<xlog_ledger::LedgerView>();
    shared::<LedgerError>();
}

#[test]
fn threads_of_two_slots_never_hold_more_than_the_limit() {
    const LIMIT: u64 = 512;
    const STEPS: usize = 15_000;
    let seed = seed("threads_of_two_slots_never_hold_more_than_the_limit");
    let directory = TestDirectory::new();
    let config =
        directory.config(LIMIT).with_chunk(32 * UNIT).with_lock_deadline(Duration::from_secs(120));
    let ledgers = [Ledger::open(config.clone()).unwrap(), Ledger::open(config).unwrap()];
    let truth = AtomicU64::new(0);
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (ledgers, truth, refused) = (&ledgers, &truth, &refused);
            scope.spawn(move || {
                let mut random = Random::new(seed ^ thread << 56);
                let ledger = &ledgers[thread as usize % 2];
                let mut held = Vec::new();
                for _ in 0..STEPS {
                    if random.below_u64(5) < 3 {
                        let units = 1 + random.below_u64(60);
                        match ledger.charge(units * UNIT) {
                            Ok(()) => {
                                let now = truth.fetch_add(units, Ordering::SeqCst) + units;
                                assert!(now <= LIMIT, "{now} units of {LIMIT}");
                                held.push(units);
                            }
                            Err(LedgerError::Full { .. }) => {
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(other) => panic!("{other}"),
                        }
                    } else if let Some(units) = held.pop() {
                        truth.fetch_sub(units, Ordering::SeqCst);
                        ledger.release(units * UNIT).unwrap();
                    }
                }
                for units in held {
                    truth.fetch_sub(units, Ordering::SeqCst);
                    ledger.release(units * UNIT).unwrap();
                }
            });
        }
    });
    assert!(refused.load(Ordering::Relaxed) > 0, "the limit was never met");
    assert_eq!(ledgers.each_ref().map(Ledger::used), [0, 0]);
    ledgers[0].charge(LIMIT * UNIT).expect("all of it is free again");
}

#[test]
fn a_thread_that_holds_the_file_lock_delays_the_others_up_to_the_deadline() {
    let directory = TestDirectory::new();
    let config = directory.config(100).with_lock_deadline(Duration::from_millis(30));
    let ledger = Ledger::open(config.with_name("holder")).unwrap();
    let lock = ledger.hold_file_lock().unwrap();
    let begin = Instant::now();
    let error = std::thread::scope(|scope| scope.spawn(|| ledger.charge(1)).join().unwrap());
    match error {
        Err(LedgerError::Busy { holder: Some(holder), .. }) => {
            assert_eq!(holder.pid, std::process::id());
            assert_eq!(holder.name.as_deref(), Some("holder"));
        }
        other => panic!("{other:?}"),
    }
    assert!(begin.elapsed() >= Duration::from_millis(30));
    drop(lock);
    ledger.charge(1).unwrap();
}
