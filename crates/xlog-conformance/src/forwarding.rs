//! The methods that a decorator must forward to the resource below it.
//!
//! Each check covers one method of the trait. The decorator wraps a [probe](crate::probe) over a budget and the async resource. A method is
//! forwarded if its call reaches the probe and the decorator returns the probe's result. A decorator may use another form of a call, such
//! as several single finishes for a batch.
use std::sync::Arc;
use std::time::Instant;

use xlog_cuda::device_runtime::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, BudgetHandle, DeviceMemoryResource,
    MIN_ALIGN, PhysicalCap, PhysicalMeter, ResourceError, ResourceResult, SegmentRange,
    SegmentWatcher, StreamId,
};

use crate::fixture::{Fixture, Stop, TAG, ensure};
use crate::lives;
use crate::probe::{CACHED_BYTES, Calls, FREE_SPACE, LIMIT, PHYSICAL_BYTES};

const BYTES: usize = 1000;

/// The parts of the probe that the checks read.
pub(crate) struct Below {
    pub(crate) calls: Arc<Calls>,
    pub(crate) budget: BudgetHandle,
}

/// A meter and watcher that does nothing.
struct Unread;

impl PhysicalMeter for Unread {
    fn charge(&self, _bytes: usize) -> ResourceResult<()> {
        Ok(())
    }
    fn release(&self, _bytes: usize) {}
}

impl SegmentWatcher for Unread {
    fn taken(&self, _segment: SegmentRange) {}
    fn returned(&self, _segment: SegmentRange, _ticket: u64) {}
}

fn below(fixture: &Fixture) -> Result<&Below, Stop> {
    let skipped = || Stop::Skipped("not built by Suite::of_decorator".to_owned());
    fixture.below.as_ref().ok_or_else(skipped)
}

fn lost(method: &str, what: &str) -> Stop {
    Stop::Failed(format!(
        "{method} is not forwarded: {what}; implement inner_resource, or forward {method}"
    ))
}

/// Fails unless `call` reaches one of `methods` of the resource below.
fn reaches<T>(
    fixture: &Fixture,
    methods: &[&'static str],
    call: impl FnOnce() -> Result<T, Stop>,
) -> Result<T, Stop> {
    let calls = &below(fixture)?.calls;
    let before = calls.of(methods);
    let method = methods.first().copied().unwrap_or_default();
    let answer = call();
    if calls.of(methods) == before {
        return Err(lost(method, "the resource below was not called"));
    }
    answer
}

pub(crate) fn says_what_is_below(fixture: &Fixture) -> Result<(), Stop> {
    match fixture.resource.reserve_budget(0) {
        Err(error @ ResourceError::Unsupported { .. }) => Err(Stop::Failed(error.to_string())),
        _ => Ok(()),
    }
}

pub(crate) fn reap_pending(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["reap_pending"], || Ok(fixture.resource.reap_pending()?))
}

pub(crate) fn reap_completed(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["reap_completed"], || Ok(fixture.resource.reap_completed()?))
}

pub(crate) fn supports_block_use_tracking(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match fixture.tracks() {
        true => Ok(()),
        false => Err(lost("supports_block_use_tracking", "the resource below tracks uses")),
    }
}

pub(crate) fn record_block_use(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let [own, other] = fixture.leases()?;
    let block = fixture.allocate(BYTES, own.id())?;
    reaches(fixture, &["record_block_use"], || {
        Ok(fixture.resource.record_block_use(&block, other.id())?)
    })?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn prepare_and_finish_block_use(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let [own, other] = fixture.leases()?;
    let block = fixture.allocate(BYTES, own.id())?;
    let id = BlockId::from_block(&block);
    reaches(fixture, &["prepare_block_use"], || {
        Ok(fixture.resource.prepare_block_use(id, other.id(), Access::Read)?)
    })?;
    reaches(fixture, &["finish_block_use"], || {
        Ok(fixture.resource.finish_block_use(id, other.id(), Access::Read)?)
    })?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn finish_block_uses(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let [own, other] = fixture.leases()?;
    let block = fixture.allocate(BYTES, own.id())?;
    let id = BlockId::from_block(&block);
    fixture.resource.prepare_block_use(id, other.id(), Access::Read)?;
    reaches(fixture, &["finish_block_uses", "finish_block_use"], || {
        Ok(fixture.resource.finish_block_uses(&[(id, Access::Read)], other.id())?)
    })?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn block_state(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let [own, other] = fixture.leases()?;
    let block = fixture.allocate(BYTES, own.id())?;
    let id = BlockId::from_block(&block);
    if fixture.resource.block_state(id) != BlockState::Live {
        return Err(lost("block_state", "the block is live below"));
    }
    fixture.resource.prepare_block_use(id, other.id(), Access::Read)?;
    let state = fixture.resource.deallocate_with_state(&block)?;
    if state != BlockState::Retired || fixture.resource.block_state(id) != state {
        return Err(lost("deallocate_with_state", "the block is retired below"));
    }
    Ok(fixture.resource.finish_block_use(id, other.id(), Access::Read)?)
}

/// A decorator that keeps the block itself need not forward the call.
pub(crate) fn while_live(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match lives::a_free_inside_work_completes_after_it(fixture) {
        Err(Stop::Failed(text)) => Err(lost("while_live", &text)),
        kept => kept,
    }
}

/// Fails if the decorator counts less than is charged, as one that counts only in `allocate` does.
fn counts_what_is_charged(fixture: &Fixture, method: &str) -> Result<(), Stop> {
    let charged = below(fixture)?.budget.reserved_bytes();
    let counted = fixture.resource.bytes_outstanding();
    ensure(counted >= charged && charged > 0, || {
        format!("{method}: {counted} bytes outstanding, the budget below charges {charged}")
    })
}

pub(crate) fn allocate_request(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let [own] = fixture.leases()?;
    let request = AllocRequest::new(BYTES, own.id(), TAG).aligned(512);
    let block = reaches(fixture, &["allocate_request", "allocate"], || {
        Ok(fixture.resource.allocate_request(request, None)?)
    })?;
    ensure(block.align >= 512, || format!("allocate_request gave {block:?} for alignment 512"))?;
    counts_what_is_charged(fixture, "allocate_request")?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn charge_for(fixture: &Fixture) -> Result<(), Stop> {
    for align in [MIN_ALIGN, 512] {
        let call = || Ok(fixture.resource.charge_for(BYTES, align));
        let charge = reaches(fixture, &["charge_for"], call)?;
        ensure(charge >= BYTES, || format!("charge_for({BYTES}, {align}) is {charge}"))?;
    }
    Ok(())
}

pub(crate) fn home(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    let home = fixture.resource.home();
    let home = home.ok_or_else(|| lost("home", "the resource below names its device"))?;
    let streams = home.streams.is_some_and(|streams| Arc::ptr_eq(&streams, &fixture.pool));
    match streams && Arc::ptr_eq(home.device.driver(), fixture.device.driver()) {
        true => Ok(()),
        false => Err(lost("home", "the resource below names another device or stream pool")),
    }
}

pub(crate) fn statistics(fixture: &Fixture) -> Result<(), Stop> {
    let [own] = fixture.leases()?;
    let block = fixture.allocate(BYTES, own.id())?;
    let counted = reaches(fixture, &["statistics"], || Ok(fixture.resource.statistics()))?;
    ensure(counted.allocations > 0 && counted.live_blocks > 0, || {
        format!("statistics is not forwarded: {counted:?} with one block")
    })?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn trim(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["trim"], || Ok(fixture.resource.trim()?)).map(drop)
}

pub(crate) fn trim_under_pressure(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["trim_under_pressure"], || Ok(fixture.resource.trim_under_pressure()?))
        .map(drop)
}

pub(crate) fn return_idle(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["return_idle"], || Ok(fixture.resource.return_idle(Instant::now())?))
        .map(drop)
}

pub(crate) fn on_growth(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["on_growth"], || Ok(fixture.resource.on_growth(Arc::new(|_| true))))
        .map(drop)
}

pub(crate) fn memory_use(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match fixture.resource.memory_use() {
        Some(found) if (found.physical(), found.cached) == (PHYSICAL_BYTES, CACHED_BYTES) => Ok(()),
        other => {
            let text = format!("{other:?} is not {CACHED_BYTES} bytes cached of {PHYSICAL_BYTES}");
            Err(lost("memory_use", &text))
        }
    }
}

pub(crate) fn meter_physical(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["meter_physical"], || {
        Ok(fixture.resource.meter_physical(Arc::new(Unread))?)
    })
}

pub(crate) fn cap_physical(fixture: &Fixture) -> Result<(), Stop> {
    reaches(fixture, &["cap_physical"], || {
        Ok(fixture.resource.cap_physical(Arc::new(PhysicalCap::new(usize::MAX)))?)
    })
}

pub(crate) fn watch_segments(fixture: &Fixture) -> Result<(), Stop> {
    let watcher: Arc<dyn SegmentWatcher> = Arc::new(Unread);
    reaches(fixture, &["watch_segments"], || {
        Ok(fixture.resource.watch_segments(&Arc::downgrade(&watcher)))
    })
    .map(drop)
}

pub(crate) fn physical_bytes(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match fixture.resource.physical_bytes() {
        Some(PHYSICAL_BYTES) => Ok(()),
        other => Err(lost("physical_bytes", &format!("{other:?} is not {PHYSICAL_BYTES}"))),
    }
}

pub(crate) fn free_space(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match fixture.resource.free_space() {
        Some(FREE_SPACE) => Ok(()),
        other => Err(lost("free_space", &format!("{other:?} is not {FREE_SPACE:?}"))),
    }
}

pub(crate) fn places_blocks(fixture: &Fixture) -> Result<(), Stop> {
    below(fixture)?;
    match fixture.resource.places_blocks() {
        true => Ok(()),
        false => Err(lost("places_blocks", "the resource below does")),
    }
}

pub(crate) fn reserve_budget(fixture: &Fixture) -> Result<(), Stop> {
    let budget = &below(fixture)?.budget;
    let refused = fixture.resource.reserve_budget(LIMIT + 1);
    if !matches!(refused, Err(ResourceError::OutOfBudget { .. })) {
        let text = format!("{} bytes of a budget of {LIMIT} gave {refused:?}", LIMIT + 1);
        return Err(lost("reserve_budget", &text));
    }
    let before = budget.reserved_bytes();
    let reservation =
        reaches(fixture, &["reserve_budget"], || Ok(fixture.resource.reserve_budget(BYTES)?))?;
    let held = budget.reserved_bytes() - before;
    drop(reservation);
    match held {
        BYTES => Ok(()),
        _ => Err(lost("reserve_budget", &format!("{held} bytes were set aside of {BYTES}"))),
    }
}

pub(crate) fn log_refusal(fixture: &Fixture) -> Result<(), Stop> {
    let request = AllocRequest::new(BYTES, StreamId::DEFAULT, AllocTag("refused"));
    let error = ResourceError::OutOfBudget { requested: BYTES, remaining: 0 };
    reaches(fixture, &["log_refusal"], || {
        fixture.resource.log_refusal(request, &error);
        Ok(())
    })
}

pub(crate) fn allocate_request_reserved(fixture: &Fixture) -> Result<(), Stop> {
    let budget = &below(fixture)?.budget;
    let [own] = fixture.leases()?;
    let set_aside = 16 * fixture.resource.charge_for(BYTES, 512);
    let reservation = fixture.resource.reserve_budget(set_aside)?;
    let Some(mut reservation) = reservation else {
        return Err(lost("reserve_budget", "nothing was set aside"));
    };
    let before = budget.reserved_bytes();
    let request = AllocRequest::new(BYTES, own.id(), TAG).aligned(512);
    let block = reaches(fixture, &["allocate_request"], || {
        Ok(fixture.resource.allocate_request(request, Some(&mut reservation))?)
    })?;
    let charged = budget.reserved_bytes() - before;
    ensure(charged == 0, || {
        format!("allocate_request charged {charged} bytes beyond the reservation")
    })?;
    drop(reservation);
    counts_what_is_charged(fixture, "allocate_request")?;
    Ok(fixture.resource.deallocate(block)?)
}
