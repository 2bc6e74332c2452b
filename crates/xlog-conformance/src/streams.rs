//! Streams that a resource does not know, and streams that were returned to the pool.
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, StreamId, StreamPool,
};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop, TAG};

/// Skips a resource that does not know its stream pool, because it cannot refuse a stream.
fn refuse_stream(fixture: &Fixture, stream: StreamId, what: &str) -> Result<(), Stop> {
    let allocated = fixture.resource.allocate(1024, stream, TAG);
    if let (Ok(_), false) = (&allocated, fixture.tracks()) {
        fixture.resource.deallocate(allocated?)?;
        return Err(Stop::Skipped("the resource knows no streams".to_owned()));
    }
    Refusal::StreamMisuse.expect(allocated, what)?;
    fixture.outstanding(0, &format!("after the refusal of {what}"))
}

pub(crate) fn unknown_streams_are_refused(fixture: &Fixture) -> Result<(), Stop> {
    let given_back = fixture.pool.lease()?.id();
    refuse_stream(fixture, StreamId(u32::MAX), "a stream that is never issued")?;
    refuse_stream(fixture, given_back, "a stream that was given back")
}

pub(crate) fn anothers_pool_is_unknown(fixture: &Fixture) -> Result<(), Stop> {
    let stranger = StreamPool::with_defaults(fixture.device.clone());
    let lease = stranger.lease()?;
    refuse_stream(fixture, lease.id(), "a stream of another pool")
}

pub(crate) fn a_block_outlives_its_allocation_stream(fixture: &Fixture) -> Result<(), Stop> {
    let mut blocks = Vec::new();
    for n in 0..8_u8 {
        let lease = fixture.pool.lease()?;
        let block = fixture.allocate(4096, lease.id())?;
        let id = BlockId::from_block(&block);
        fixture.work(id, &lease, Access::Write, || bytes::fill(&lease, id, n, 4096))?;
        if !fixture.tracks() {
            lease.synchronize()?;
        }
        blocks.push(block);
    }
    let [reader] = fixture.leases()?;
    for (n, block) in blocks.into_iter().enumerate() {
        let id = BlockId::from_block(&block);
        if fixture.tracks() {
            fixture
                .work(id, &reader, Access::Read, || bytes::expect(&reader, id, 0, n as u8, 4096))?;
        } else {
            bytes::expect(&reader, id, 0, n as u8, 4096)?;
        }
        fixture.resource.deallocate(block)?;
        fixture.resource.reap_pending()?;
        fixture.state(id, BlockState::Freed, "freed after its stream was given back")?;
    }
    Ok(())
}

pub(crate) fn a_use_outlives_its_stream(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own] = fixture.leases()?;
    let block = fixture.allocate(4096, own.id())?;
    let id = BlockId::from_block(&block);
    let open = fixture.pool.lease()?;
    let gone = open.id();
    fixture.resource.prepare_block_use(id, gone, Access::Write)?;
    bytes::fill(&open, id, 1, 4096)?;
    let held = open.stream().clone();
    drop(open);
    let refused = fixture.resource.prepare_block_use(id, gone, Access::Read);
    Refusal::StreamMisuse.expect(refused, "a new use on a stream that was given back")?;
    // The open use can still be closed, and its work is waited for.
    fixture.resource.finish_block_use(id, gone, Access::Write)?;
    drop(held);
    fixture.work(id, &own, Access::Read, || bytes::expect(&own, id, 0, 1, 4096))?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn more_streams_than_the_pool_has(fixture: &Fixture) -> Result<(), Stop> {
    let mut blocks: Vec<(DeviceBlock, u8)> = Vec::new();
    for n in 0..100_u8 {
        let lease = fixture.pool.lease()?;
        let block = fixture.allocate(512, lease.id())?;
        let id = BlockId::from_block(&block);
        fixture.work(id, &lease, Access::Write, || bytes::fill(&lease, id, n, 512))?;
        if !fixture.tracks() {
            lease.synchronize()?;
        }
        blocks.push((block, n));
        if n % 3 == 2 {
            let (block, value) = blocks.swap_remove(usize::from(n) % blocks.len());
            let id = BlockId::from_block(&block);
            if fixture.tracks() {
                fixture
                    .work(id, &lease, Access::Read, || bytes::expect(&lease, id, 0, value, 512))?;
            }
            fixture.resource.deallocate(block)?;
        }
    }
    fixture.free(blocks.into_iter().map(|(block, _)| block).collect())
}
