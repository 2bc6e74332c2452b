//! Allocations with an alignment, finishes of several uses, and the counters.
use xlog_cuda::device_runtime::{
    Access, AllocRequest, BlockId, BlockState, DeviceMemoryResource, Generation, ResourceError,
    StreamId,
};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop, TAG, ensure};

pub(crate) fn aligned(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    for align in [1, 16, 256, 512, 4096, 1 << 16, 1 << 21] {
        fixture.drain()?;
        let block = match fixture
            .resource
            .allocate_request(AllocRequest::new(1000, stream.id(), TAG).aligned(align), None)
        {
            Ok(block) => block,
            // A resource may limit the alignment, but not below the one that every block has.
            Err(ResourceError::InvalidRequest { .. }) if align > 256 => {
                fixture.drain()?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        ensure(block.ptr.is_multiple_of(align as u64) && block.align >= align, || {
            format!("alignment {align} gave {block:?}")
        })?;
        let id = BlockId::from_block(&block);
        bytes::fill(&stream, id, 1, 1000)?;
        bytes::expect(&stream, id, 0, 1, 1000)?;
        fixture.resource.deallocate(block)?;
    }
    Ok(())
}

pub(crate) fn bad_alignment_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    for align in [0, 3, 257, usize::MAX] {
        let given = fixture
            .resource
            .allocate_request(AllocRequest::new(1000, StreamId::DEFAULT, TAG).aligned(align), None);
        Refusal::Any.expect(given, &format!("alignment {align}"))?;
    }
    let given = fixture
        .resource
        .allocate_request(AllocRequest::new(0, StreamId::DEFAULT, TAG).aligned(256), None);
    Refusal::Any.expect(given, "0 aligned bytes")?;
    fixture.outstanding(0, "after refused alignments")
}

pub(crate) fn batched_finishes(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    for stream in [&own, &foreign] {
        let blocks = fixture.allocate_all(&[512; 10], own.id())?;
        let mut uses = Vec::new();
        for (n, block) in blocks.iter().enumerate() {
            let id = BlockId::from_block(block);
            let access = if n % 2 == 0 { Access::Write } else { Access::ReadWrite };
            fixture.resource.prepare_block_use(id, stream.id(), access)?;
            uses.push((id, access));
        }
        let gate = fixture.hold(stream)?;
        for &(id, _) in &uses {
            bytes::fill(stream, id, 0x11, 512)?;
        }
        fixture.resource.finish_block_uses(&uses, stream.id())?;
        let again = fixture.resource.finish_block_uses(&uses, stream.id());
        Refusal::Any.expect(again, "a second finish of a batch")?;
        fixture.resource.finish_block_uses(&[], stream.id())?;
        fixture.free(blocks)?;
        for &(id, _) in &uses {
            // A use on the own stream need not keep the block, because reuse on that stream is ordered after it.
            if stream.id() == foreign.id() || fixture.resource.block_state(id) != BlockState::Freed
            {
                fixture.state(id, BlockState::Retired, "freed behind a held use")?;
            }
        }
        gate.release()?;
        fixture.resource.reap_pending()?;
        for &(id, _) in &uses {
            fixture.state(id, BlockState::Freed, "after a reap")?;
        }
    }
    Ok(())
}

pub(crate) fn a_failing_finish_does_not_stop_the_others(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let blocks = fixture.allocate_all(&[512; 4], own.id())?;
    let ids: Vec<_> = blocks.iter().map(BlockId::from_block).collect();
    let mut uses = Vec::new();
    for (n, &id) in ids.iter().enumerate() {
        fixture.resource.prepare_block_use(id, foreign.id(), Access::Read)?;
        uses.push((id, Access::Read));
        if n % 2 == 0 {
            uses.push((BlockId { generation: Generation::next(), ..id }, Access::Read));
        }
    }
    let finished = fixture.resource.finish_block_uses(&uses, foreign.id());
    Refusal::UseAfterFree.expect(finished, "a batch of finishes with a stale block")?;
    // If a use had stayed open, its block would stay retired.
    fixture.free(blocks)?;
    fixture.resource.reap_pending()?;
    for id in ids {
        fixture.state(id, BlockState::Freed, "after its use was closed beside a failing one")?;
    }
    Ok(())
}

pub(crate) fn counters_agree(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    let blocks = fixture.allocate_all(&[1000, 2000, 3000], stream.id())?;
    let counted = fixture.resource.statistics();
    fixture.outstanding(counted.bytes_outstanding, "by its own statistics")?;
    ensure([0, 3].contains(&counted.live_blocks), || format!("three live blocks: {counted:?}"))?;
    ensure([0, 3].contains(&counted.allocations), || format!("three allocations: {counted:?}"))?;
    fixture.free(blocks)?;
    fixture.resource.reap_pending()?;
    let counted = fixture.resource.statistics();
    ensure(counted.bytes_outstanding == 0, || format!("nothing is left: {counted:?}"))?;
    ensure(counted.live_blocks == 0 && counted.retired_blocks == 0, || {
        format!("no block is left: {counted:?}")
    })?;
    ensure([0, 3].contains(&counted.deallocations), || format!("three frees: {counted:?}"))
}
