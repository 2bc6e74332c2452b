//! The states of a block, as `block_state` reports them.
use xlog_cuda::DeviceStream;
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, StreamId,
};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop, ensure, twin};

pub(crate) fn state_at_each_step(fixture: &Fixture) -> Result<(), Stop> {
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(1024, own.id())?;
    let id = BlockId::from_block(&block);
    if !fixture.tracks() {
        let state = fixture.resource.block_state(id);
        fixture.resource.deallocate(block)?;
        fixture.resource.reap_pending()?;
        fixture.state(id, BlockState::Freed, "after its free and a reap")?;
        return match state {
            BlockState::Live => Ok(()),
            _ => Err(Stop::Skipped("the resource keeps no states".to_owned())),
        };
    }
    fixture.state(id, BlockState::Live, "after its allocation")?;
    fixture.resource.prepare_block_use(id, foreign.id(), Access::Write)?;
    fixture.state(id, BlockState::Live, "with an open use")?;
    fixture.resource.finish_block_use(id, foreign.id(), Access::Write)?;
    fixture.state(id, BlockState::Live, "after a use")?;
    let gate = fixture.hold(&foreign)?;
    fixture.work(id, &foreign, Access::Write, || bytes::fill(&foreign, id, 1, 1024))?;
    fixture.resource.deallocate(block)?;
    fixture.state(id, BlockState::Retired, "freed behind a held use")?;
    fixture.resource.reap_completed()?;
    fixture.state(id, BlockState::Retired, "freed behind a held use and reaped")?;
    gate.release()?;
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Freed, "after its free and a reap")?;
    let next = fixture.allocate(1024, own.id())?;
    fixture.state(id, BlockState::Freed, "when its address may be another block's")?;
    fixture.state((&next).into(), BlockState::Live, "after its allocation")?;
    Ok(fixture.resource.deallocate(next)?)
}

pub(crate) fn free_with_an_open_use(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    for stream in [&own, &foreign] {
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            let block = fixture.allocate(4096, own.id())?;
            let id = BlockId::from_block(&block);
            let due = fixture.resource.bytes_outstanding();
            fixture.resource.prepare_block_use(id, stream.id(), access)?;
            fixture.resource.deallocate(block)?;
            fixture.state(id, BlockState::Retired, "freed with a use open")?;
            // The work is queued after the call to free and before the free takes effect.
            match access.writes() {
                true => bytes::fill(stream, id, 7, 4096)?,
                false => _ = bytes::read(stream, id, 0, 16)?,
            }
            fixture.outstanding(due, "while a use is open")?;
            fixture.resource.finish_block_use(id, stream.id(), access)?;
            fixture.resource.reap_pending()?;
            fixture.state(id, BlockState::Freed, "when its last use was closed")?;
            fixture.outstanding(0, "when the last use was closed")?;
            let finished = fixture.resource.finish_block_use(id, stream.id(), access);
            Refusal::Any.expect(finished, "a second finish of a freed block's use")?;
        }
    }
    Ok(())
}

pub(crate) fn free_with_many_open_uses(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let leases = fixture.leases::<5>()?;
    let block = fixture.allocate(5 * 512, leases[0].id())?;
    let id = BlockId::from_block(&block);
    for lease in &leases {
        fixture.resource.prepare_block_use(id, lease.id(), Access::Write)?;
    }
    let again = twin(&block);
    fixture.resource.deallocate(block)?;
    let refused = fixture.resource.deallocate(again);
    Refusal::UseAfterFree.expect(refused, "a second free while uses are open")?;
    for (n, lease) in leases.iter().enumerate() {
        fixture.state(id, BlockState::Retired, "while a use is open")?;
        bytes::fill_at(lease, id, n * 512, 1, 512)?;
        fixture.resource.finish_block_use(id, lease.id(), Access::Write)?;
    }
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Freed, "when its last use was closed")
}

pub(crate) fn a_retired_block_refuses_new_uses(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(1024, own.id())?;
    let id = BlockId::from_block(&block);
    let claim = twin(&block);
    fixture.resource.prepare_block_use(id, foreign.id(), Access::Read)?;
    fixture.resource.deallocate(block)?;
    for stream in [own.id(), foreign.id()] {
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            let prepared = fixture.resource.prepare_block_use(id, stream, access);
            Refusal::UseAfterFree.expect(prepared, "a new use of a retired block")?;
        }
        let recorded = fixture.resource.record_block_use(&claim, stream);
        Refusal::UseAfterFree.expect(recorded, "a recorded use of a retired block")?;
    }
    fixture.state(id, BlockState::Retired, "after refused uses")?;
    fixture.resource.finish_block_use(id, foreign.id(), Access::Read)?;
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Freed, "when its last use was closed")
}

pub(crate) fn an_open_use_is_skipped_by_reaps(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(1024, own.id())?;
    let other = fixture.allocate(8192, own.id())?;
    let id = BlockId::from_block(&block);
    let both = fixture.resource.bytes_outstanding();
    fixture.resource.prepare_block_use(id, foreign.id(), Access::Read)?;
    fixture.resource.deallocate(block)?;
    fixture.resource.deallocate(other)?;
    fixture.resource.reap_completed()?;
    fixture.resource.reap_pending()?;
    let left = fixture.resource.bytes_outstanding();
    ensure(0 < left && left < both, || {
        format!("{left} of {both} bytes outstanding after a reap with a use of one of two open")
    })?;
    fixture.state(id, BlockState::Retired, "after a reap with its use open")?;
    fixture.resource.finish_block_use(id, foreign.id(), Access::Read)?;
    let default = fixture.allocate(16, StreamId::DEFAULT)?;
    Ok(fixture.resource.deallocate(default)?)
}

/// Copies of buffers rely on this: another thread may free the block while a copy is queued.
pub(crate) fn a_free_inside_work_completes_after_it(fixture: &Fixture) -> Result<(), Stop> {
    let [own] = fixture.leases()?;
    let block = fixture.allocate(4096, own.id())?;
    let (id, again) = (BlockId::from_block(&block), twin(&block));
    let (mut block, mut inside) = (Some(block), Ok(()));
    let ran = fixture.resource.while_live(id, &mut || {
        inside = block.take().map_or(Ok(()), |block| free_inside(fixture, block, &own));
    });
    inside?;
    ran?;
    Refusal::UseAfterFree.expect(fixture.resource.deallocate(again), "a second free after work")?;
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Freed, "when the work in which it was freed has ended")
}

/// Frees a block inside its work, which goes on to use it.
fn free_inside(fixture: &Fixture, block: DeviceBlock, own: &DeviceStream) -> Result<(), Stop> {
    let id = BlockId::from_block(&block);
    let due = fixture.resource.bytes_outstanding();
    fixture.resource.deallocate(block)?;
    if !fixture.tracks() && fixture.resource.block_state(id) == BlockState::Freed {
        let reason = "the resource tracks no uses, and frees the block of running work";
        return Err(Stop::Skipped(reason.to_owned()));
    }
    fixture.state(id, BlockState::Retired, "freed inside work")?;
    fixture.resource.reap_completed()?;
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Retired, "freed inside work and reaped")?;
    fixture.outstanding(due, "freed inside work and reaped")?;
    bytes::fill(own, id, 7, 4096)
}
