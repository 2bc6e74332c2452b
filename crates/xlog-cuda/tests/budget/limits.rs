//! The limit on one thread, in exact numbers, and what a block was charged.

#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{Counting, TAG, allocate, budget, refusal, twin};
use xlog_cuda::device_runtime::{
    AllocTag, BudgetHandle, BudgetReservation, BudgetScope, DeviceMemoryResource,
    GlobalDeviceBudget, OomPolicy, OomReport, Registration, ResourceError, StreamId,
};

#[test]
fn exactly_the_limit_succeeds_and_one_byte_more_is_refused() {
    for limit in [1, 255, 4096, 1 << 30] {
        let (budget, inner) = budget(limit);
        let all = allocate(&budget, limit).unwrap();
        assert_eq!(
            (budget.limit(), budget.reserved_bytes(), budget.remaining()),
            (limit, limit, 0)
        );
        assert_eq!(allocate(&budget, 1).err(), refusal(1, 0));
        budget.deallocate(all).unwrap();
        assert_eq!(allocate(&budget, limit + 1).err(), refusal(limit + 1, limit));
        let some = allocate(&budget, limit - limit / 3).unwrap();
        assert_eq!(allocate(&budget, limit / 3 + 1).err(), refusal(limit / 3 + 1, limit / 3));
        budget.deallocate(some).unwrap();
        assert_eq!((budget.reserved_bytes(), inner.used()), (0, 0));
        assert_eq!(inner.state.lock().unwrap().most, limit);
    }
}

#[test]
fn many_blocks_fill_the_limit_to_the_last_byte() {
    let (budget, _) = budget(100_000);
    let mut blocks: Vec<_> = (0..1000).map(|_| allocate(&budget, 100).unwrap()).collect();
    assert_eq!(allocate(&budget, 1).err(), refusal(1, 0));
    budget.deallocate(blocks.pop().unwrap()).unwrap();
    assert_eq!(allocate(&budget, 101).err(), refusal(101, 100));
    blocks.push(allocate(&budget, 100).unwrap());
    blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!(budget.remaining(), 100_000);
}

#[test]
fn zero_bytes_and_what_no_number_holds_are_refused_and_count_nothing() {
    let (budget, _) = budget(usize::MAX);
    assert!(matches!(allocate(&budget, 0), Err(ResourceError::InvalidRequest { .. })));
    let rows = allocate(&budget, 10).unwrap();
    let refused = allocate(&budget, usize::MAX).err();
    assert_eq!(refused, refusal(usize::MAX, usize::MAX - 10));
    budget.deallocate(rows).unwrap();
    assert_eq!(budget.reserved_bytes(), 0);
}

#[test]
fn a_lowered_limit_takes_nothing_away_and_tells_who_can_help() {
    let (budget, _) = budget(1000);
    let told = Arc::new(Mutex::new(Vec::new()));
    let registered = budget.on_pressure({
        let told = told.clone();
        move |pressure| told.lock().unwrap().push((pressure.needed, pressure.requested))
    });
    let (a, b) = (allocate(&budget, 600).unwrap(), allocate(&budget, 300).unwrap());
    budget.set_limit(500);
    assert_eq!(told.lock().unwrap().as_slice(), [(400, None)]);
    drop(registered);
    assert_eq!((budget.limit(), budget.reserved_bytes(), budget.remaining()), (500, 900, 0));
    assert_eq!(allocate(&budget, 1).err(), refusal(1, 0));
    // What comes back pays the debt first.
    budget.deallocate(b).unwrap();
    assert_eq!(allocate(&budget, 1).err(), refusal(1, 0));
    budget.deallocate(a).unwrap();
    assert_eq!(allocate(&budget, 501).err(), refusal(501, 500));
    let all = allocate(&budget, 500).unwrap();
    budget.set_limit(700);
    let more = allocate(&budget, 200).unwrap();
    assert_eq!(allocate(&budget, 1).err(), refusal(1, 0));
    [all, more].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!(budget.remaining(), 700);
}

#[test]
fn an_inner_failure_leaves_the_books_as_they_were() {
    let (budget, inner) = budget(1000);
    let kept = allocate(&budget, 300).unwrap();
    for error in [
        ResourceError::Driver("no".to_owned()),
        ResourceError::StreamMisuse("no".to_owned()),
        ResourceError::OutOfMemory { requested: 700, detail: "full".to_owned() },
    ] {
        inner.set(|state| (state.fail, state.fail_one_in) = (Some(error.clone()), 1));
        assert_eq!(allocate(&budget, 700).err(), Some(error));
        assert_eq!((budget.reserved_bytes(), budget.remaining()), (300, 700));
    }
    inner.set(|state| state.fail = None);
    let all = allocate(&budget, 700).unwrap();
    [kept, all].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!((budget.reserved_bytes(), inner.used()), (0, 0));
}

#[test]
fn a_free_that_failed_half_way_stays_charged_until_it_is_done_and_is_released_once() {
    for placed in [true, false] {
        let inner = Counting::new(placed);
        let budget = GlobalDeviceBudget::over(inner.clone(), 1000);
        let (rows, keys) = (allocate(&budget, 400).unwrap(), allocate(&budget, 300).unwrap());
        inner.set(|state| (state.fail_frees, state.reapable) = (true, false));
        let again = twin(&rows);
        assert!(matches!(budget.deallocate(rows), Err(ResourceError::Driver(_))));
        assert!(matches!(budget.deallocate(again), Err(ResourceError::UseAfterFree { .. })));
        assert_eq!(budget.reserved_bytes(), 700);
        budget.reap_completed().unwrap();
        assert_eq!((budget.reserved_bytes(), budget.pending_bytes()), (700, 400));
        inner.set(|state| (state.fail_frees, state.reapable) = (false, true));
        budget.reap_completed().unwrap();
        assert_eq!((budget.reserved_bytes(), budget.pending_bytes()), (300, 0));
        budget.deallocate(keys).unwrap();
        budget.reap_pending().unwrap();
        assert_eq!(budget.remaining(), 1000);
    }
}

#[test]
fn forged_stale_and_double_frees_release_nothing() {
    for placed in [true, false] {
        let inner = Counting::new(placed);
        let budget = GlobalDeviceBudget::over(inner.clone(), 1000);
        let rows = allocate(&budget, 400).unwrap();
        let other = allocate(&budget, 100).unwrap();
        for forge in 0..4 {
            let mut forged = twin(&rows);
            match forge {
                0 => forged.ptr += 256,
                1 => forged.generation.0 += 1 << 24,
                2 => forged.device_ordinal = 5,
                _ => forged.generation = other.generation,
            }
            budget.deallocate(forged).unwrap_err();
            assert_eq!((budget.reserved_bytes(), inner.used()), (500, 500));
        }
        // Whatever else it says, it is this block.
        let mut forged = twin(&rows);
        (forged.bytes, forged.tag) = (1 << 40, AllocTag("forged"));
        let double = twin(&rows);
        budget.deallocate(forged).unwrap();
        assert_eq!(budget.reserved_bytes(), 100);
        budget.deallocate(double).unwrap_err();
        budget.deallocate(rows).unwrap_err();
        assert_eq!(budget.reserved_bytes(), 100);
        budget.deallocate(other).unwrap();
        assert_eq!((budget.reserved_bytes(), inner.used()), (0, 0));
        assert!(budget.usage_by_tag().is_empty());
    }
}

#[test]
fn a_block_past_the_budget_is_not_its_business() {
    let (budget, inner) = budget(1000);
    let past = allocate(&*inner, 5000).unwrap();
    assert_eq!(budget.reserved_bytes(), 0);
    budget.deallocate(past).unwrap();
    assert_eq!((budget.reserved_bytes(), budget.remaining()), (0, 1000));
}

#[test]
fn a_block_larger_than_announced_is_charged_what_it_is_or_given_back() {
    let (budget, inner) = budget(1000);
    inner.set(|state| state.larger = 56);
    let rows = allocate(&budget, 400).unwrap();
    assert_eq!((rows.bytes, budget.reserved_bytes()), (456, 456));
    assert_eq!(allocate(&budget, 500).err(), refusal(556, 544));
    assert_eq!((budget.reserved_bytes(), inner.used()), (456, 456));
    assert!(format!("{budget:?}").contains("in_flight: 0"), "{budget:?}");
    let keys = allocate(&budget, 488).unwrap();
    assert_eq!(budget.remaining(), 0);
    [rows, keys].into_iter().for_each(|block| budget.deallocate(block).unwrap());
    let pair = [100, 200].map(|bytes| allocate(&budget, bytes).unwrap());
    assert_eq!(budget.reserved_bytes(), 412);
    pair.into_iter().for_each(|block| budget.deallocate(block).unwrap());
    assert_eq!((budget.reserved_bytes(), inner.used()), (0, 0));
}

#[test]
fn what_each_tag_holds_is_counted_by_its_text() {
    let (budget, _) = budget(1 << 20);
    let same: &'static str = String::from("rows").leak();
    let blocks = [(TAG, 100), (AllocTag(same), 50), (AllocTag("keys"), 500)]
        .map(|(tag, bytes)| budget.allocate(bytes, StreamId::DEFAULT, tag).unwrap());
    let held: Vec<_> = budget
        .usage_by_tag()
        .iter()
        .map(|usage| (usage.tag.0, usage.bytes, usage.blocks))
        .collect();
    assert_eq!(held, [("keys", 500, 1), ("rows", 150, 2)]);
    // Freed by another thread.
    std::thread::scope(|scope| {
        scope.spawn(|| blocks.into_iter().for_each(|block| budget.deallocate(block).unwrap()));
    });
    assert!(budget.usage_by_tag().is_empty());
}

#[test]
fn a_resource_that_panics_leaves_the_books_as_they_were() {
    let (budget, inner) = budget(1000);
    let kept = allocate(&budget, 300).unwrap();
    inner.set(|state| state.panics = true);
    let caught = |body: &dyn Fn()| catch_unwind(AssertUnwindSafe(body)).is_err();
    assert!(caught(&|| drop(allocate(&budget, 100))));
    assert!(caught(&|| drop(budget.deallocate(twin(&kept)))));
    inner.set(|state| state.panics = false);
    // Nothing is under way for ever: a refusal is decided at once, and not at the deadline.
    let patient = OomPolicy::default().with_deadline(Duration::from_secs(600));
    let begin = Instant::now();
    let refused = budget.allocate_with(701, StreamId::DEFAULT, TAG, &patient);
    assert_eq!(refused.err(), refusal(701, 700));
    assert!(begin.elapsed() < Duration::from_secs(300), "{:?}", begin.elapsed());
    budget.deallocate(kept).unwrap();
    assert_eq!((budget.reserved_bytes(), inner.used()), (0, 0));
}

#[test]
fn everything_may_go_to_other_threads() {
    fn check<T: Send + Sync>() {}
    check::<GlobalDeviceBudget>();
    check::<BudgetHandle>();
    check::<BudgetScope>();
    check::<BudgetReservation>();
    check::<OomReport>();
    check::<Registration>();
}

#[test]
fn credit_left_in_the_shard_of_a_thread_that_ended_is_found() {
    let (budget, _) = budget(1 << 20);
    for _ in 0..100 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let rows = allocate(&budget, 1000).unwrap();
                budget.deallocate(rows).unwrap();
            });
        });
    }
    let all = allocate(&budget, 1 << 20).unwrap();
    budget.deallocate(all).unwrap();
}
