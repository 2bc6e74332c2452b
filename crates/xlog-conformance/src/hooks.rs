//! The hooks: what they accept and refuse.
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, Generation, ResourceError,
    ResourceResult, StreamId, StreamPool,
};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop, ensure, twin};

const ALL: [Access; 3] = [Access::Read, Access::Write, Access::ReadWrite];

fn unsupported(result: ResourceResult<()>, hook: &str) -> Result<(), Stop> {
    match result {
        Err(ResourceError::StreamMisuse(text)) => ensure(text.contains("unsupported"), || {
            format!("{hook} does not say \"unsupported\" but {text:?}")
        }),
        other => Err(Stop::Failed(format!("{hook} tracks nothing and gave {other:?}"))),
    }
}

pub(crate) fn refuse_where_nothing_is_tracked(fixture: &Fixture) -> Result<(), Stop> {
    if fixture.tracks() {
        return Err(Stop::Skipped("the resource tracks uses".to_owned()));
    }
    let [stream] = fixture.leases()?;
    let block = fixture.allocate(1024, stream.id())?;
    let id = BlockId::from_block(&block);
    let resource = &fixture.resource;
    unsupported(resource.record_block_use(&block, stream.id()), "record_block_use")?;
    for access in ALL {
        let prepared = resource.prepare_block_use(id, stream.id(), access);
        unsupported(prepared, "prepare_block_use")?;
        let finished = resource.finish_block_use(id, stream.id(), access);
        unsupported(finished, "finish_block_use")?;
        let finished = resource.finish_block_uses(&[(id, access)], stream.id());
        unsupported(finished, "finish_block_uses")?;
    }
    Ok(resource.deallocate(block)?)
}

pub(crate) fn accept_own_and_foreign_streams(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let default = fixture.pool.default_stream()?;
    let block = fixture.allocate(1024, own.id())?;
    let id = BlockId::from_block(&block);
    for (value, access) in ALL.into_iter().enumerate() {
        for stream in [own.stream(), foreign.stream(), &default] {
            fixture.work(id, stream, access, || match access.writes() {
                true => bytes::fill(stream, id, value as u8, 1024),
                false => bytes::read(stream, id, 0, 1).map(|_| ()),
            })?;
            fixture.state(id, BlockState::Live, "after a use")?;
        }
    }
    // The caller orders work of unknown access itself, here by a host-side wait.
    for stream in [own.stream(), foreign.stream(), &default] {
        fixture.device.synchronize()?;
        bytes::fill(stream, id, 9, 1024)?;
        fixture.resource.record_block_use(&block, stream.id())?;
    }
    fixture.work(id, &foreign, Access::Read, || bytes::expect(&foreign, id, 0, 9, 1024))?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn refuse_unknown_streams(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let block = fixture.allocate(1024, StreamId::DEFAULT)?;
    let id = BlockId::from_block(&block);
    let given_back = fixture.pool.lease()?.id();
    let stranger = StreamPool::with_defaults(fixture.device.clone());
    let foreign = stranger.lease()?;
    for stream in [StreamId(u32::MAX), given_back, foreign.id()] {
        let recorded = fixture.resource.record_block_use(&block, stream);
        Refusal::StreamMisuse.expect(recorded, "record_block_use on an unknown stream")?;
        for access in ALL {
            let prepared = fixture.resource.prepare_block_use(id, stream, access);
            Refusal::StreamMisuse.expect(prepared, "prepare_block_use on an unknown stream")?;
        }
    }
    // If one of them had opened a use, the free would wait for it forever.
    fixture.resource.deallocate(block)?;
    fixture.resource.reap_pending()?;
    fixture.state(id, BlockState::Freed, "after refused uses, a free and a reap")
}

pub(crate) fn refuse_claims_that_are_not_the_live_block(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [stream] = fixture.leases()?;
    let block = fixture.allocate(1024, stream.id())?;
    let id = BlockId::from_block(&block);
    let claims = [
        (BlockId { ptr: id.ptr + 256, ..id }, Refusal::UseAfterFree),
        (BlockId { ptr: 0, ..id }, Refusal::UseAfterFree),
        (BlockId { generation: Generation::next(), ..id }, Refusal::UseAfterFree),
        (BlockId { generation: Generation(id.generation.0 + 1), ..id }, Refusal::UseAfterFree),
        (BlockId { device_ordinal: id.device_ordinal + 1, ..id }, Refusal::Driver),
        (BlockId { device_ordinal: id.device_ordinal + 1, ptr: 0, ..id }, Refusal::Driver),
    ];
    for (claim, refusal) in claims {
        let prepared = fixture.resource.prepare_block_use(claim, stream.id(), Access::Read);
        refusal.expect(prepared, "prepare_block_use of a forged block")?;
        let finished = fixture.resource.finish_block_use(claim, stream.id(), Access::Read);
        refusal.expect(finished, "finish_block_use of a forged block")?;
        let forged = DeviceBlock {
            ptr: claim.ptr,
            generation: claim.generation,
            device_ordinal: claim.device_ordinal,
            ..twin(&block)
        };
        let recorded = fixture.resource.record_block_use(&forged, stream.id());
        refusal.expect(recorded, "record_block_use of a forged block")?;
        let state = fixture.resource.block_state(claim);
        ensure(state == BlockState::Freed, || format!("a forged block is {state:?}"))?;
    }
    // The allocation stream is not part of a block's identity.
    let claim = BlockId { alloc_stream: StreamId(u32::MAX), ..id };
    fixture.resource.prepare_block_use(claim, stream.id(), Access::Write)?;
    fixture.resource.finish_block_use(id, stream.id(), Access::Write)?;
    fixture.state(claim, BlockState::Live, "under a forged allocation stream")?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn finish_without_prepare_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(1024, own.id())?;
    let id = BlockId::from_block(&block);
    for access in ALL {
        for stream in [own.id(), foreign.id()] {
            let finished = fixture.resource.finish_block_use(id, stream, access);
            Refusal::Any.expect(finished, "finish without prepare")?;
        }
    }
    fixture.resource.prepare_block_use(id, own.id(), Access::Write)?;
    let finished = fixture.resource.finish_block_use(id, foreign.id(), Access::Write);
    Refusal::Any.expect(finished, "finish on another stream than prepare")?;
    fixture.resource.finish_block_use(id, own.id(), Access::Write)?;
    fixture.state(id, BlockState::Live, "after refused finishes")?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_use_is_closed_once(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(1024, own.id())?;
    let id = BlockId::from_block(&block);
    for access in ALL {
        for stream in [own.id(), foreign.id()] {
            fixture.resource.prepare_block_use(id, stream, access)?;
            fixture.resource.prepare_block_use(id, stream, access)?;
            fixture.resource.finish_block_use(id, stream, access)?;
            fixture.resource.finish_block_use(id, stream, access)?;
            let finished = fixture.resource.finish_block_use(id, stream, access);
            Refusal::Any.expect(finished, "a third finish of two uses")?;
        }
    }
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn many_uses_may_be_open(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let leases = fixture.leases::<8>()?;
    let block = fixture.allocate(8 * 1024, leases[0].id())?;
    let id = BlockId::from_block(&block);
    for lease in &leases {
        for access in ALL {
            fixture.resource.prepare_block_use(id, lease.id(), access)?;
        }
    }
    for (n, lease) in leases.iter().enumerate() {
        // Each stream writes its own part, so that no order is needed.
        bytes::fill_at(lease, id, n * 1024, n as u8 + 1, 1024)?;
    }
    for lease in leases.iter().rev() {
        for access in ALL {
            fixture.resource.finish_block_use(id, lease.id(), access)?;
        }
    }
    let reader = &leases[3];
    fixture.work(id, reader, Access::Read, || {
        (0..8).try_for_each(|n| bytes::expect(reader, id, n * 1024, n as u8 + 1, 1024))
    })?;
    Ok(fixture.resource.deallocate(block)?)
}
