//! The limit: exact, for several openers, with grants that get in nobody's way.

use xlog_ledger::{Ledger, LedgerError, LedgerResult, MAX_LIMIT, UNIT};

use crate::support::{Random, TestDirectory, seed};

fn available(result: LedgerResult<()>) -> u64 {
    match result {
        Err(LedgerError::Full { available, .. }) => available,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn exactly_the_limit_fits_and_one_byte_more_does_not() {
    let directory = TestDirectory::new();
    for chunk in [0, 10, 100] {
        let ledger = Ledger::open(directory.config(100).with_chunk(chunk * UNIT)).unwrap();
        ledger.charge(100 * UNIT).unwrap();
        match ledger.charge(1) {
            Err(LedgerError::Full { requested, available, limit, own, others, .. }) => {
                let numbers = (requested, available, limit, own, others);
                assert_eq!(numbers, (1, 0, 100 * UNIT, 100 * UNIT, 0));
            }
            other => panic!("{other:?}"),
        }
        ledger.release(100 * UNIT).unwrap();
        assert_eq!(available(ledger.charge(100 * UNIT + 1)), 100 * UNIT);
        ledger.charge(99 * UNIT + 1).expect("rounds up to the limit");
        ledger.release(99 * UNIT + 1).unwrap();
        assert_eq!(ledger.used(), 0);
    }
}

#[test]
fn requests_no_word_can_hold_are_refused_with_numbers() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    for bytes in [MAX_LIMIT, MAX_LIMIT + 1, u64::MAX] {
        assert_eq!(available(ledger.charge(bytes)), 100 * UNIT);
        assert!(matches!(ledger.release(bytes), Err(LedgerError::Overdrawn { used: 0, .. })));
    }
    ledger.charge(0).unwrap();
    ledger.release(0).unwrap();
    assert_eq!((ledger.used(), ledger.granted()), (0, 0));
}

#[test]
fn giving_more_than_is_used_changes_nothing() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_chunk(8 * UNIT)).unwrap();
    ledger.charge(5 * UNIT).unwrap();
    let granted = ledger.granted();
    match ledger.release(5 * UNIT + 1) {
        Err(LedgerError::Overdrawn { released, used }) => {
            assert_eq!((released, used), (1281, 1280))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((ledger.used(), ledger.granted()), (5 * UNIT, granted));
}

#[test]
fn the_unused_grant_of_an_idle_opener_is_taken_back() {
    let directory = TestDirectory::new();
    let idle = Ledger::open(directory.config(100).with_chunk(40 * UNIT)).unwrap();
    let busy = directory.open(100);
    idle.charge(UNIT).unwrap();
    assert_eq!(idle.granted(), 40 * UNIT);
    assert_eq!(available(busy.charge(100 * UNIT)), 99 * UNIT);
    busy.charge(99 * UNIT).expect("only one unit is in use");
    assert_eq!((idle.used(), idle.granted()), (UNIT, 0));
    assert_eq!(available(idle.charge(UNIT)), 0);
    idle.release(UNIT).unwrap();
    assert_eq!(idle.granted(), 0, "a full ledger leaves no grants");
    busy.charge(UNIT).unwrap();
}

#[test]
fn grants_shrink_as_the_ledger_fills_and_return_when_it_empties() {
    let directory = TestDirectory::new();
    let open = || Ledger::open(directory.config(1000).with_chunk(64 * UNIT)).unwrap();
    let (first, second) = (open(), open());
    first.charge(UNIT).unwrap();
    assert_eq!(first.granted(), 64 * UNIT);
    second.charge(900 * UNIT).unwrap();
    assert_eq!(second.granted(), (1000 - 65 - 900) / 4 * UNIT);
    assert_eq!(available(first.charge(200 * UNIT)), 99 * UNIT);
    assert!(first.snapshot().unwrap().pressure);
    assert_eq!(second.granted(), 0);
    second.release(900 * UNIT).unwrap();
    assert_eq!(second.granted(), 0, "handed back under pressure");
    second.charge(100 * UNIT).unwrap();
    assert!(!first.snapshot().unwrap().pressure);
    assert_eq!(second.granted(), 64 * UNIT);
    assert_eq!(second.return_grant().unwrap(), 64 * UNIT);
    assert_eq!(second.granted(), 0);
}

#[test]
fn a_grant_above_two_chunks_is_handed_back() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(10_000).with_chunk(64 * UNIT)).unwrap();
    ledger.charge(500 * UNIT).unwrap();
    ledger.release(64 * UNIT).unwrap();
    assert_eq!(ledger.granted(), 128 * UNIT);
    ledger.release(436 * UNIT).unwrap();
    assert_eq!(ledger.granted(), 64 * UNIT);
    assert_eq!(ledger.snapshot().unwrap().free, (10_000 - 64) * UNIT);
}

#[test]
fn the_limit_of_the_file_rules_until_it_is_set() {
    let directory = TestDirectory::new();
    let first = directory.open(100);
    let second = Ledger::open(directory.config(5000).with_chunk(20 * UNIT)).unwrap();
    assert_eq!(second.limit().unwrap(), 100 * UNIT);
    second.set_limit(200 * UNIT + 5).unwrap();
    assert_eq!(first.limit().unwrap(), 200 * UNIT);
    first.charge(150 * UNIT).unwrap();
    second.charge(UNIT).unwrap();
    assert!(second.granted() > 0);
    for bad in [0, UNIT - 1, u64::MAX] {
        let error = second.set_limit(bad);
        assert!(matches!(error, Err(LedgerError::Config { setting: "limit", .. })), "{error:?}");
    }
    assert_eq!(first.limit().unwrap(), 200 * UNIT);
}

#[test]
fn a_limit_lowered_below_the_use_refuses_until_enough_is_given() {
    let directory = TestDirectory::new();
    let open = || Ledger::open(directory.config(1000).with_chunk(64 * UNIT)).unwrap();
    let (first, second) = (open(), open());
    first.charge(300 * UNIT).unwrap();
    second.charge(300 * UNIT).unwrap();
    second.set_limit(400 * UNIT).unwrap();
    assert_eq!((first.granted(), second.granted()), (0, 0), "no way around the new limit");
    assert_eq!(available(first.charge(1)), 0);
    first.release(100 * UNIT).unwrap();
    assert_eq!(available(first.charge(1)), 0, "what is given is not kept");
    second.release(200 * UNIT).unwrap();
    assert_eq!(available(second.charge(101 * UNIT)), 100 * UNIT);
    second.charge(100 * UNIT).unwrap();
}

/// Several openers against the simplest model: a request succeeds exactly if the sum of what is used allows it.
#[test]
fn any_history_agrees_with_a_plain_sum() {
    let mut random = Random::new(seed("any_history_agrees_with_a_plain_sum"));
    for _ in 0..40 {
        let directory = TestDirectory::new();
        let mut limit = 50 + random.below_u64(2000);
        let openers = 1 + random.below_u64(4) as usize;
        let open = |random: &mut Random, limit: u64| {
            let chunk = random.below_u64(200) * UNIT;
            Ledger::open(directory.config(limit).with_chunk(chunk)).unwrap()
        };
        let mut ledgers: Vec<Ledger> = (0..openers).map(|_| open(&mut random, limit)).collect();
        let mut held: Vec<Vec<u64>> = vec![Vec::new(); openers];
        for _ in 0..400 {
            let who = random.below_u64(openers as u64) as usize;
            let used: u64 = held.iter().flatten().map(|bytes| bytes.div_ceil(UNIT)).sum();
            let free = limit.saturating_sub(used);
            match random.below_u64(20) {
                0..=9 => {
                    let bytes = 1 + random.below_u64(limit * UNIT / 3);
                    let result = ledgers[who].charge(bytes);
                    if bytes.div_ceil(UNIT) <= free {
                        result.expect("it fits");
                        held[who].push(bytes);
                    } else {
                        assert_eq!(available(result), free * UNIT);
                    }
                }
                10..=17 if !held[who].is_empty() => {
                    let index = random.below_u64(held[who].len() as u64) as usize;
                    ledgers[who].release(held[who].swap_remove(index)).unwrap();
                }
                18 => {
                    limit = 50 + random.below_u64(2000);
                    ledgers[who].set_limit(limit * UNIT).unwrap();
                }
                19 => {
                    // The old one goes first, and everything it used with it.
                    drop(ledgers.remove(who));
                    ledgers.insert(who, open(&mut random, limit));
                    held[who].clear();
                }
                _ => {}
            }
            for (ledger, held) in ledgers.iter().zip(&held) {
                let units: u64 = held.iter().map(|bytes| bytes.div_ceil(UNIT)).sum();
                assert_eq!(ledger.used(), units * UNIT);
            }
            let shown = ledgers[who].snapshot().unwrap();
            let used: u64 = held.iter().flatten().map(|bytes| bytes.div_ceil(UNIT)).sum();
            assert_eq!(shown.used(), used * UNIT);
            assert!(shown.used() + shown.granted() <= shown.limit.max(shown.used()));
        }
    }
}
