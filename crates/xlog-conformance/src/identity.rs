//! A block's identity is (device, address, generation), checked in that order. All other fields of a claim are ignored.
use std::sync::atomic::{AtomicUsize, Ordering};

use xlog_cuda::device_runtime::{
    BlockId, DeviceBlock, DeviceMemoryResource, Generation, ResourceError, StreamId,
};

use crate::fixture::{Fixture, Refusal, Stop, TAG, ensure, twin};

fn refused(
    fixture: &Fixture,
    refusal: Refusal,
    forged: DeviceBlock,
    what: &str,
) -> Result<(), Stop> {
    let before = fixture.resource.bytes_outstanding();
    refusal.expect(fixture.resource.deallocate(forged), what)?;
    fixture.outstanding(before, &format!("after the refusal of {what}"))
}

pub(crate) fn a_stale_generation_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    let block = fixture.allocate(1024, StreamId::DEFAULT)?;
    for generation in [
        Generation(block.generation.0 - 1),
        Generation(block.generation.0 + 1),
        Generation(0),
        Generation(u64::MAX),
        Generation::next(),
    ] {
        let forged = DeviceBlock { generation, ..twin(&block) };
        match fixture.resource.deallocate(forged) {
            Err(ResourceError::UseAfterFree { generation: named }) => {
                ensure(named == generation, || format!("{generation} was refused as {named}"))?;
            }
            other => return Err(Stop::Failed(format!("a stale generation gave {other:?}"))),
        }
    }
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_double_free_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    let block = fixture.allocate(1024, StreamId::DEFAULT)?;
    let (second, third) = (twin(&block), twin(&block));
    fixture.resource.deallocate(block)?;
    refused(fixture, Refusal::UseAfterFree, second, "a second free")?;
    fixture.resource.reap_pending()?;
    refused(fixture, Refusal::UseAfterFree, third, "a second free after a reap")
}

pub(crate) fn a_forged_pointer_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    let block = fixture.allocate(4096, StreamId::DEFAULT)?;
    let other = fixture.allocate(4096, StreamId::DEFAULT)?;
    for ptr in [0, 1, block.ptr + 256, block.ptr.wrapping_sub(256), other.ptr, u64::MAX] {
        let forged = DeviceBlock { ptr, ..twin(&block) };
        refused(fixture, Refusal::UseAfterFree, forged, "a forged pointer")?;
    }
    fixture.resource.deallocate(other)?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_forged_ordinal_is_refused_first(fixture: &Fixture) -> Result<(), Stop> {
    let block = fixture.allocate(4096, StreamId::DEFAULT)?;
    for device_ordinal in [block.device_ordinal + 1, u32::MAX] {
        let forged = DeviceBlock { device_ordinal, ..twin(&block) };
        refused(fixture, Refusal::Driver, forged, "another device's block")?;
        let forged = DeviceBlock { device_ordinal, ptr: 0, ..twin(&block) };
        refused(fixture, Refusal::Driver, forged, "another device's block at no address")?;
        let generation = Generation::next();
        let forged = DeviceBlock { device_ordinal, generation, ..twin(&block) };
        refused(fixture, Refusal::Driver, forged, "another device's block that is stale")?;
    }
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn other_forged_fields_are_ignored(fixture: &Fixture) -> Result<(), Stop> {
    let [a, b] = fixture.leases()?;
    let kept = fixture.allocate(777, a.id())?;
    let due = fixture.resource.bytes_outstanding();
    for bytes in [0, 1, 1 << 40, usize::MAX] {
        let block = fixture.allocate(4096, a.id())?;
        let forged = DeviceBlock { bytes, align: 1, tag: TAG, ..block };
        fixture.resource.deallocate(forged)?;
        fixture.resource.reap_pending()?;
        fixture.outstanding(due, "after a free with a forged size")?;
    }
    for alloc_stream in [b.id(), StreamId::DEFAULT, StreamId(u32::MAX)] {
        let block = fixture.allocate(4096, a.id())?;
        fixture.resource.deallocate(DeviceBlock { alloc_stream, ..block })?;
        fixture.resource.reap_pending()?;
        fixture.outstanding(due, "after a free with a forged stream")?;
    }
    Ok(fixture.resource.deallocate(kept)?)
}

pub(crate) fn of_two_threads_freeing_twins_one_wins(fixture: &Fixture) -> Result<(), Stop> {
    let leases = fixture.leases::<2>()?;
    let kept = fixture.allocate(4096, leases[0].id())?;
    let due = fixture.resource.bytes_outstanding();
    for _ in 0..40 {
        let block = fixture.allocate(4096, leases[0].id())?;
        let freed = AtomicUsize::new(0);
        let body = |claim: DeviceBlock| {
            let freed = &freed;
            move || match fixture.resource.deallocate(claim) {
                Ok(()) => {
                    freed.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }
                Err(ResourceError::UseAfterFree { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            }
        };
        let twin = twin(&block);
        fixture.threads(vec![Box::new(body(block)), Box::new(body(twin))])?;
        let freed = freed.load(Ordering::Relaxed);
        ensure(freed == 1, || format!("{freed} of two frees of one block succeeded"))?;
        fixture.resource.reap_pending()?;
        fixture.outstanding(due, "after two frees of one block")?;
    }
    Ok(fixture.resource.deallocate(kept)?)
}

pub(crate) fn an_address_reused_does_not_revive_its_old_name(
    fixture: &Fixture,
) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    let mut reused = 0;
    for _ in 0..50 {
        let old = fixture.allocate(4096, stream.id())?;
        let claim = twin(&old);
        let again = twin(&old);
        fixture.resource.deallocate(old)?;
        let new = fixture.allocate(4096, stream.id())?;
        reused += usize::from(new.ptr == claim.ptr);
        refused(fixture, Refusal::UseAfterFree, claim, "a freed block at a reused address")?;
        if fixture.tracks() {
            let refusal = fixture.resource.record_block_use(&again, stream.id());
            Refusal::UseAfterFree.expect(refusal, "a use of a freed block at a reused address")?;
        }
        fixture.resource.deallocate(new)?;
        fixture.resource.reap_pending()?;
    }
    match reused {
        0 => Err(Stop::Skipped("the resource reused no address".to_owned())),
        _ => Ok(()),
    }
}

pub(crate) fn work_runs_only_on_the_live_block(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    let block = fixture.allocate(1024, stream.id())?;
    let id = BlockId::from_block(&block);
    let run = |id: BlockId| {
        let mut runs = 0;
        let answer = fixture.resource.while_live(id, &mut || runs += 1);
        (answer, runs)
    };
    let (answer, runs) = run(id);
    answer?;
    ensure(runs == 1, || format!("while_live ran the work {runs} times"))?;
    let ordinal = id.device_ordinal + 1;
    let claims = [
        (BlockId { generation: Generation::next(), ..id }, Refusal::UseAfterFree),
        (BlockId { ptr: id.ptr + 256, ..id }, Refusal::UseAfterFree),
        (BlockId { device_ordinal: ordinal, ..id }, Refusal::Any),
    ];
    for (claim, refusal) in claims {
        let (answer, runs) = run(claim);
        refusal.expect(answer, "while_live of a forged block")?;
        ensure(runs == 0, || format!("while_live ran the work of a forged block, {claim:?}"))?;
    }
    fixture.resource.deallocate(block)?;
    let (answer, runs) = run(id);
    Refusal::UseAfterFree.expect(answer, "while_live of a freed block")?;
    ensure(runs == 0, || "while_live ran the work of a freed block".to_owned())
}
