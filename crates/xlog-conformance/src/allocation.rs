//! The blocks that `allocate` returns.
use xlog_cuda::device_runtime::resource::MIN_ALIGN;
use xlog_cuda::device_runtime::{
    Access, BlockId, BlockState, DeviceMemoryResource, ResourceError, StreamId,
};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop, TAG, ensure};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

pub(crate) fn zero_bytes_are_refused(fixture: &Fixture) -> Result<(), Stop> {
    let refused = fixture.resource.allocate(0, StreamId::DEFAULT, TAG);
    Refusal::Any.expect(refused, "an allocation of 0 bytes")?;
    fixture.outstanding(0, "after a refusal of 0 bytes")
}

pub(crate) fn blocks_say_what_they_are(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    let ordinal = fixture.resource.device_ordinal();
    ensure(ordinal == fixture.device.ordinal(), || format!("the resource says device {ordinal}"))?;
    for id in [StreamId::DEFAULT, stream.id()] {
        for requested in [1, 4, 255, 256, 257, 4 * KIB + 1, MIB] {
            let block = fixture.allocate(requested, id)?;
            ensure(
                block.device_ordinal == ordinal
                    && block.alloc_stream == id
                    && block.tag == TAG
                    && block.state == BlockState::Live
                    && block.bytes >= requested
                    && block.align >= MIN_ALIGN
                    && block.align.is_power_of_two()
                    && block.ptr != 0
                    && block.ptr.is_multiple_of(block.align as u64),
                || format!("{requested} bytes on {id} gave {block:?}"),
            )?;
            fixture.resource.deallocate(block)?;
        }
    }
    Ok(())
}

pub(crate) fn blocks_hold_what_is_written(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    for (value, size) in [1, 3, 256, 1000, 64 * KIB + 1, MIB].into_iter().enumerate() {
        let block = fixture.allocate(size, stream.id())?;
        let id = BlockId::from_block(&block);
        let value = value as u8 + 1;
        // The block may be used on its stream at once, without a hook.
        bytes::fill(&stream, id, value, block.bytes)?;
        bytes::expect(&stream, id, 0, value, block.bytes)?;
        fixture.resource.deallocate(block)?;
    }
    Ok(())
}

pub(crate) fn blocks_do_not_overlap(fixture: &Fixture) -> Result<(), Stop> {
    let [a, b] = fixture.leases()?;
    let mut blocks = Vec::new();
    for (n, size) in [1, 256, 257, 5000, 64 * KIB, MIB].into_iter().cycle().take(60).enumerate() {
        let stream = if n % 2 == 0 { &a } else { &b };
        let block = fixture.allocate(size, stream.id())?;
        bytes::fill(stream, (&block).into(), n as u8 + 1, block.bytes)?;
        blocks.push(block);
    }
    for (n, block) in blocks.iter().enumerate() {
        let stream = if n % 2 == 0 { &a } else { &b };
        bytes::expect(stream, block.into(), 0, n as u8 + 1, block.bytes)?;
    }
    let mut ranges: Vec<_> =
        blocks.iter().map(|block| (block.ptr, block.ptr + block.bytes as u64)).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        ensure(pair[0].1 <= pair[1].0, || format!("two live blocks overlap: {pair:x?}"))?;
    }
    fixture.free(blocks)
}

pub(crate) fn one_gibibyte(fixture: &Fixture) -> Result<(), Stop> {
    const GIB: usize = 1 << 30;
    let [stream] = fixture.leases()?;
    let block = match fixture.resource.allocate(GIB, stream.id(), TAG) {
        Ok(block) => block,
        Err(error @ (ResourceError::OutOfMemory { .. } | ResourceError::OutOfBudget { .. })) => {
            fixture.outstanding(0, "after a refusal")?;
            return Err(Stop::Skipped(error.to_string()));
        }
        Err(error) => return Err(error.into()),
    };
    let id = BlockId::from_block(&block);
    for (value, offset) in [0, GIB / 2, GIB - KIB].into_iter().enumerate() {
        let value = value as u8 + 0x40;
        fixture
            .work(id, &stream, Access::Write, || bytes::fill_at(&stream, id, offset, value, KIB))?;
    }
    for (value, offset) in [0, GIB / 2, GIB - KIB].into_iter().enumerate() {
        bytes::expect(&stream, id, offset, value as u8 + 0x40, KIB)?;
    }
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn one_pebibyte_is_refused(fixture: &Fixture) -> Result<(), Stop> {
    let refused = fixture.resource.allocate(1 << 50, StreamId::DEFAULT, TAG);
    Refusal::OutOfMemory.expect(refused, "an allocation of 1 PiB")?;
    fixture.outstanding(0, "after a refusal of 1 PiB")?;
    let block = fixture.allocate(KIB, StreamId::DEFAULT)?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn generations_never_repeat(fixture: &Fixture) -> Result<(), Stop> {
    let mut last = None;
    for _ in 0..200 {
        let block = fixture.allocate(KIB, StreamId::DEFAULT)?;
        let generation = block.generation;
        fixture.resource.deallocate(block)?;
        ensure(last < Some(generation), || format!("{generation} came after {last:?}"))?;
        last = Some(generation);
    }
    Ok(())
}
