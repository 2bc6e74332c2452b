//! Driver failures at one call after the other: no memory is lost, and the state stays consistent.

use xlog_sim::{Call, Fault};

use super::model::Model;
use super::*;

const FAULTS: [Fault; 2] = [Fault::OutOfMemory, Fault::Code(999)];

/// Runs every operation of segments; returns how many failed.
fn life(model: &mut Model<'_>, check: &dyn Fn(&Model<'_>)) -> usize {
    let mut failures = 0;
    let mut count = |failed: bool| failures += usize::from(failed);
    for bytes in [2, 2, 13, 2, 4] {
        count(model.grow(bytes * GRAIN).is_err());
        check(model);
    }
    for (index, span) in model.idle.spans().into_iter().enumerate() {
        // A block at the second unit pins one handle of several.
        let middle = Span { ptr: span.ptr + GRAIN, bytes: UNIT };
        if span.contains(middle) {
            model.lend(middle, index as u8);
        }
    }
    count(model.release(3 * GRAIN).is_err());
    check(model);
    for bytes in [12, 5] {
        count(model.defragment(bytes * GRAIN).is_err());
        check(model);
        // Free under pending work, so that the next remap maps it twice.
        if !model.live.is_empty() {
            model.free_pending(0);
        }
        count(model.defragment((bytes + 6) * GRAIN).is_err());
        check(model);
        model.synchronize();
        check(model);
    }
    count(model.grow(20 * GRAIN).is_err());
    check(model);
    count(model.release(u64::MAX).is_err());
    check(model);
    failures
}

#[test]
fn a_failure_of_any_call_loses_no_byte_of_mapped_segments() {
    let calls =
        [Call::Reserve, Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Destroy];
    let mut failed = 0;
    for call in calls {
        for (nth, fault) in (1..=12).flat_map(|nth| FAULTS.map(|fault| (nth, fault))) {
            failed += one_life(&[(call, nth, fault)]);
        }
    }
    assert!(failed > 60, "only {failed} steps failed");
}

#[test]
fn a_failure_whose_undo_fails_too_loses_no_byte_of_mapped_segments() {
    let first = [Call::Map, Call::SetAccess, Call::Unmap];
    let then = [Call::Map, Call::SetAccess, Call::Unmap, Call::Destroy];
    let fault = Fault::Code(1);
    let mut failed = 0;
    for (first, then) in first.iter().flat_map(|first| then.map(|then| (*first, then))) {
        for (nth, next) in (1..=14).flat_map(|nth| (1..=8).map(move |next| (nth, next))) {
            // Three in a row of the second kind, so that undoing and trying again meet them.
            let rest = [(then, next, fault), (then, next + 1, fault), (then, next + 2, fault)];
            failed += one_life(&[[(first, nth, fault)].as_slice(), &rest].concat());
        }
    }
    assert!(failed > 1000, "only {failed} steps failed");
}

fn one_life(plan: &[(Call, u64, Fault)]) -> usize {
    let device = device(None, 40 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    let meter = Meter::new(u64::MAX);
    segments.meter_physical(meter.clone()).unwrap();
    for &(call, nth, fault) in plan {
        sim(&device).faults().fail_nth(call, nth, fault);
    }
    let check = |model: &Model<'_>| {
        let held = segments.reserved();
        assert_eq!((held, held), (used(&device), meter.held()), "{plan:?}");
        assert_eq!(model.bytes() + segments.hidden_bytes(), held, "{plan:?}");
    };
    let mut model = Model::new(&segments, &device);
    let failures = life(&mut model, &check);
    sim(&device).faults().clear();
    model.finish();
    let left =
        (segments.reserved(), segments.hidden_bytes(), segments.segment_count(), meter.held());
    assert_eq!((left, used(&device)), ((0, 0, 0, 0), 0), "{plan:?}");
    assert!(device.races().is_empty(), "{plan:?}");
    let released = sim(&device).faults().calls(Call::Release);
    drop(segments);
    assert!(sim(&device).faults().calls(Call::Release) > released, "{plan:?}");
    failures
}

#[test]
fn a_refused_allocation_or_free_loses_no_byte_of_plain_segments() {
    for (call, nth) in [Call::Alloc, Call::Free].into_iter().flat_map(|c| [(c, 1), (c, 2)]) {
        for fault in FAULTS {
            let device = device(None, 32 * MIB);
            let segments = PlainSegments::new(Arc::clone(&device), u64::MAX);
            let meter = Meter::new(u64::MAX);
            segments.meter_physical(meter.clone()).unwrap();
            let mut model = Model::new(&segments, &device);
            sim(&device).faults().fail_nth(call, nth, fault);
            let mut failures = 0;
            for bytes in [3 * MIB, 6 * MIB, 100] {
                failures += usize::from(model.grow(bytes).is_err());
                assert_eq!((segments.reserved(), used(&device)), (meter.held(), meter.held()));
            }
            failures += usize::from(model.release(u64::MAX).is_err());
            assert_eq!((segments.reserved(), used(&device)), (meter.held(), meter.held()));
            assert_eq!(failures, 1);
            model.finish();
            assert_eq!((segments.reserved(), meter.held(), used(&device)), (0, 0, 0));
        }
    }
}

#[test]
fn a_lost_device_is_an_error_and_not_a_panic() {
    let device = device(None, 40 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    let span = segments.grow(9 * GRAIN, ON).unwrap();
    sim(&device).faults().lose_device();
    assert!(matches!(segments.grow(1, ON), Err(ResourceError::Driver(_))));
    let (gone, outcome) = segments.release(&[span], u64::MAX);
    assert!(gone.is_empty() && outcome.is_err());
    let (moved, gone, outcome) =
        segments.defragment(FreeMemory::idle(&[span]), request(10 * GRAIN), ON);
    assert!(moved.is_none() && gone.is_empty() && outcome.is_err());
    assert_eq!((segments.reserved(), segments.segment_count()), (9 * GRAIN, 2));
}
