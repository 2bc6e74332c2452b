//! The ledger's units and a resource's portions: nothing is lost by rounding, nothing is counted twice, refusals have numbers.

use std::sync::Arc;

use xlog_cuda::device_runtime::{LedgerMeter, PhysicalMeter, ResourceError};
use xlog_cuda::ledger::UNIT;

use crate::support::{Random, TestDirectory, seed};

fn meter(directory: &TestDirectory, units: u64) -> LedgerMeter {
    LedgerMeter::new(Arc::new(directory.ledger(units * UNIT)))
}

#[test]
fn what_is_taken_in_one_portion_and_given_in_many_comes_back_whole() {
    let directory = TestDirectory::new();
    let meter = meter(&directory, 100);
    meter.charge(1000).unwrap();
    assert_eq!((meter.bytes(), meter.ledger().used()), (1000, 4 * UNIT));
    for _ in 0..1000 {
        meter.release(1);
    }
    assert_eq!((meter.bytes(), meter.ledger().used(), meter.failed_releases()), (0, 0, 0));
    for _ in 0..1000 {
        meter.charge(1).unwrap();
    }
    assert_eq!(meter.ledger().used(), 4 * UNIT, "a thousand bytes are four units, not a thousand");
    meter.release(1000);
    assert_eq!((meter.bytes(), meter.ledger().used(), meter.failed_releases()), (0, 0, 0));
}

#[test]
fn a_refusal_has_exact_numbers_and_counts_nothing() {
    let directory = TestDirectory::new();
    let meter = meter(&directory, 10);
    let other = directory.ledger(UNIT);
    other.charge(3 * UNIT).unwrap();
    meter.charge(100).unwrap();
    // Six units are free, and 156 bytes of the one that is taken.
    let left = 6 * UNIT as usize + 156;
    let refused = ResourceError::OutOfBudget { requested: left + 1, remaining: left };
    assert_eq!(meter.charge(left + 1), Err(refused));
    assert_eq!((meter.bytes(), meter.ledger().used()), (100, UNIT));
    meter.charge(left).unwrap();
    assert_eq!(meter.charge(1), Err(ResourceError::OutOfBudget { requested: 1, remaining: 0 }));
    meter.release(left + 100);
    assert_eq!((meter.bytes(), meter.ledger().used()), (0, 0));
    let refused = meter.charge(usize::MAX).unwrap_err();
    assert!(matches!(refused, ResourceError::OutOfBudget { requested: usize::MAX, .. }));
}

#[test]
fn a_ledger_that_cannot_be_asked_is_an_error_that_says_why() {
    let directory = TestDirectory::new();
    let meter = meter(&directory, 10);
    let (path, copy) = (meter.ledger().path(), directory.path().join("copy"));
    std::fs::copy(path, &copy).unwrap();
    std::fs::rename(&copy, path).unwrap();
    match meter.charge(1) {
        Err(error @ ResourceError::Ledger(_)) => {
            let said = error.to_string();
            assert!(said.contains("test.ledger") && said.contains("replaced"), "{said}");
            assert_eq!(error.kind(), "ledger");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(meter.bytes(), 0);
}

#[test]
fn giving_what_was_not_taken_is_counted_and_changes_nothing() {
    let directory = TestDirectory::new();
    let meter = meter(&directory, 10);
    meter.charge(300).unwrap();
    meter.release(301);
    meter.release(usize::MAX);
    assert_eq!((meter.failed_releases(), meter.bytes()), (2, 300));
    meter.release(300);
    assert_eq!((meter.bytes(), meter.ledger().used()), (0, 0));
}

/// Random portions against a plain sum: the ledger counts exactly the units that the sum needs.
#[test]
fn random_portions_are_counted_as_their_sum() {
    let seed = seed("random_portions_are_counted_as_their_sum");
    let mut random = Random::new(seed);
    let directory = TestDirectory::new();
    let meter = meter(&directory, 50);
    let (limit, mut sum) = (50 * UNIT, 0);
    for step in 0..20_000 {
        let bytes = random.below_u64(3 * UNIT) as usize;
        if random.below_u64(2) == 0 {
            let fits = sum + bytes as u64 <= limit;
            assert_eq!(meter.charge(bytes).is_ok(), fits, "step {step}: {sum} + {bytes}");
            sum += if fits { bytes as u64 } else { 0 };
        } else {
            let bytes = (bytes as u64).min(sum);
            meter.release(bytes as usize);
            sum -= bytes;
        }
        assert_eq!(meter.bytes(), sum, "step {step}");
        assert_eq!(meter.ledger().used(), sum.div_ceil(UNIT) * UNIT, "step {step}");
    }
    assert_eq!(meter.failed_releases(), 0);
}

/// Threads that lean on the same half-filled unit: the ledger never counts less than they hold, and nothing stays.
#[test]
fn threads_that_share_a_unit_never_hold_more_than_is_counted() {
    let directory = TestDirectory::new();
    let meter = meter(&directory, 8);
    let seed = seed("threads_that_share_a_unit_never_hold_more_than_is_counted");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let meter = &meter;
            scope.spawn(move || {
                let mut random = Random::new(seed ^ thread);
                let mut held = 0_u64;
                for _ in 0..10_000 {
                    let bytes = 1 + random.below_u64(500);
                    if meter.charge(bytes as usize).is_ok() {
                        held += bytes;
                        assert!(meter.ledger().used() >= held, "{held} held by one thread alone");
                    }
                    if random.below_u64(2) == 0 || held > 1500 {
                        // In other portions than it was taken.
                        let part = random.below_u64(held + 1);
                        meter.release(part as usize);
                        meter.release((held - part) as usize);
                        held = 0;
                    }
                }
                meter.release(held as usize);
            });
        }
    });
    assert_eq!((meter.bytes(), meter.ledger().used(), meter.failed_releases()), (0, 0, 0));
}
