//! The ordering rules. Gates produce schedules in which a missing wait shows; the race detector finds it in any schedule.
use xlog_cuda::DeviceStream;
use xlog_cuda::device_runtime::{Access, BlockId, BlockState, DeviceMemoryResource, StreamLease};

use crate::bytes::{self, Target};
use crate::fixture::{Fixture, Stop, ensure};

const SIZE: usize = 64 << 10;

/// A block and memory to copy it to, for one stream.
struct Pair {
    block: BlockId,
    copy: Target,
}

fn queue_read(fixture: &Fixture, pair: &Pair, reader: &StreamLease) -> Result<(), Stop> {
    fixture.work(pair.block, reader, Access::Read, || pair.copy.copy_from(reader, pair.block, SIZE))
}

fn queue_write(
    fixture: &Fixture,
    block: BlockId,
    stream: &DeviceStream,
    value: u8,
) -> Result<(), Stop> {
    fixture.work(block, stream, Access::Write, || bytes::fill(stream, block, value, SIZE))
}

fn stands(stream: &DeviceStream, why: &str) -> Result<(), Stop> {
    let done = stream.query()?;
    ensure(!done, || format!("work ran past what it had to wait for: {why}"))
}

/// Runs `body` with a block of `own` and memory to copy it to, and frees both.
fn with_pair(
    fixture: &Fixture,
    own: &StreamLease,
    body: impl FnOnce(&Pair) -> Result<(), Stop>,
) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let block = fixture.allocate(SIZE, own.id())?;
    body(&Pair { block: (&block).into(), copy: Target::new(&fixture.device, SIZE)? })?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_first_use_elsewhere_waits_for_the_allocation(
    fixture: &Fixture,
) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let gate = fixture.hold(&own)?;
    let block = fixture.allocate(SIZE, own.id())?;
    let id = BlockId::from_block(&block);
    queue_write(fixture, id, &foreign, 5)?;
    stands(&foreign, "the block is not allocated yet")?;
    gate.release()?;
    fixture.work(id, &foreign, Access::Read, || bytes::expect(&foreign, id, 0, 5, SIZE))?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_read_waits_for_writes(fixture: &Fixture) -> Result<(), Stop> {
    let [own, writer, reader] = fixture.leases()?;
    with_pair(fixture, &own, |pair| {
        for (value, writer) in [(1, &own), (2, &writer), (3, &own)] {
            let gate = fixture.hold(writer)?;
            queue_write(fixture, pair.block, writer, value)?;
            queue_read(fixture, pair, &reader)?;
            stands(&reader, "a write is held")?;
            gate.release()?;
            pair.copy.expect(&reader, 0, value, SIZE)?;
        }
        Ok(())
    })
}

pub(crate) fn a_read_does_not_wait_for_reads(fixture: &Fixture) -> Result<(), Stop> {
    let [own, first, second] = fixture.leases()?;
    with_pair(fixture, &own, |pair| {
        queue_write(fixture, pair.block, &own, 6)?;
        let gate = fixture.hold(&first)?;
        queue_read(fixture, pair, &first)?;
        fixture.work(pair.block, &second, Access::Read, || {
            bytes::expect(&second, pair.block, 0, 6, SIZE)
        })?;
        stands(&first, "it is held")?;
        gate.release()?;
        pair.copy.expect(&first, 0, 6, SIZE)
    })
}

pub(crate) fn a_write_waits_for_reads_and_writes(fixture: &Fixture) -> Result<(), Stop> {
    let [own, reader, writer, other] = fixture.leases()?;
    with_pair(fixture, &own, |pair| {
        queue_write(fixture, pair.block, &own, 1)?;
        let gate = fixture.hold(&reader)?;
        queue_read(fixture, pair, &reader)?;
        queue_write(fixture, pair.block, &writer, 2)?;
        stands(&writer, "a read is held")?;
        queue_write(fixture, pair.block, &other, 3)?;
        stands(&other, "a read and a write are held")?;
        queue_write(fixture, pair.block, &own, 4)?;
        stands(&own, "a read and two writes are held")?;
        gate.release()?;
        pair.copy.expect(&reader, 0, 1, SIZE)?;
        fixture.work(pair.block, &other, Access::ReadWrite, || {
            bytes::expect(&other, pair.block, 0, 4, SIZE)
        })
    })
}

pub(crate) fn a_free_waits_for_every_use(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, a, b, c] = fixture.leases()?;
    for readers in [[&a, &b, &c], [&c, &a, &b]] {
        let block = fixture.allocate(SIZE, own.id())?;
        let id = BlockId::from_block(&block);
        queue_write(fixture, id, &own, 8)?;
        let mut kept = Vec::new();
        let mut gates = Vec::new();
        for reader in readers {
            let pair = Pair { block: id, copy: Target::new(&fixture.device, SIZE)? };
            gates.push(fixture.hold(reader)?);
            queue_read(fixture, &pair, reader)?;
            kept.push((pair.copy, reader));
        }
        fixture.resource.deallocate(block)?;
        // The next owner of this memory writes it at once.
        let next = fixture.allocate(SIZE, own.id())?;
        queue_write(fixture, (&next).into(), &own, 0xee)?;
        fixture.state(id, BlockState::Retired, "while its readers are held")?;
        for gate in gates {
            gate.release()?;
        }
        for (copy, reader) in kept {
            copy.expect(reader, 0, 8, SIZE)?;
        }
        fixture.resource.deallocate(next)?;
        fixture.drain()?;
    }
    Ok(())
}

pub(crate) fn a_free_waits_for_a_recorded_use(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign] = fixture.leases()?;
    let block = fixture.allocate(SIZE, own.id())?;
    let copy = Target::new(&fixture.device, SIZE)?;
    bytes::fill(&own, (&block).into(), 3, SIZE)?;
    foreign.wait_for(&own)?;
    let gate = fixture.hold(&foreign)?;
    copy.copy_from(&foreign, (&block).into(), SIZE)?;
    fixture.resource.record_block_use(&block, foreign.id())?;
    fixture.resource.deallocate(block)?;
    let next = fixture.allocate(SIZE, own.id())?;
    queue_write(fixture, (&next).into(), &own, 0xee)?;
    gate.release()?;
    copy.expect(&foreign, 0, 3, SIZE)?;
    Ok(fixture.resource.deallocate(next)?)
}

pub(crate) fn later_uses_wait_for_a_recorded_use(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, foreign, later] = fixture.leases()?;
    let block = fixture.allocate(SIZE, own.id())?;
    let id = BlockId::from_block(&block);
    for (value, access) in [(1, Access::Read), (2, Access::Write)] {
        fixture.device.synchronize()?;
        let gate = fixture.hold(&foreign)?;
        bytes::fill(&foreign, id, value, SIZE)?;
        fixture.resource.record_block_use(&block, foreign.id())?;
        fixture.work(id, &later, access, || match access.writes() {
            true => bytes::fill(&later, id, 0x55, SIZE),
            false => later.host_fn(|| {}).map_err(Stop::from),
        })?;
        stands(&later, "work of unknown access is held")?;
        gate.release()?;
        let due = if access.writes() { 0x55 } else { value };
        fixture.work(id, &later, Access::Read, || bytes::expect(&later, id, 0, due, SIZE))?;
    }
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn a_recorded_use_supersedes_nothing(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, reader, foreign] = fixture.leases()?;
    let block = fixture.allocate(SIZE, own.id())?;
    let pair = Pair { block: (&block).into(), copy: Target::new(&fixture.device, SIZE)? };
    queue_write(fixture, pair.block, &own, 4)?;
    let gate = fixture.hold(&reader)?;
    queue_read(fixture, &pair, &reader)?;
    // A use without work must not discard the read.
    fixture.resource.record_block_use(&block, foreign.id())?;
    queue_write(fixture, pair.block, &own, 5)?;
    stands(&own, "a read is held")?;
    gate.release()?;
    pair.copy.expect(&reader, 0, 4, SIZE)?;
    Ok(fixture.resource.deallocate(block)?)
}

pub(crate) fn two_open_writers_are_both_waited_for(fixture: &Fixture) -> Result<(), Stop> {
    let [own, a, b, reader] = fixture.leases()?;
    for order in [[&a, &b], [&b, &a]] {
        with_pair(fixture, &own, |pair| {
            let id = pair.block;
            fixture.resource.prepare_block_use(id, a.id(), Access::Write)?;
            fixture.resource.prepare_block_use(id, b.id(), Access::Write)?;
            let gates = [fixture.hold(&a)?, fixture.hold(&b)?];
            bytes::fill_at(&a, id, 0, 1, SIZE / 2)?;
            bytes::fill_at(&b, id, SIZE / 2, 2, SIZE / 2)?;
            for stream in order {
                fixture.resource.finish_block_use(id, stream.id(), Access::Write)?;
            }
            queue_read(fixture, pair, &reader)?;
            for gate in gates {
                stands(&reader, "one of two writes is held")?;
                gate.release()?;
            }
            pair.copy.expect(&reader, 0, 1, SIZE / 2)?;
            pair.copy.expect(&reader, SIZE / 2, 2, SIZE / 2)
        })?;
    }
    Ok(())
}

pub(crate) fn a_read_that_finishes_inside_a_write_is_kept(fixture: &Fixture) -> Result<(), Stop> {
    let [own, writer, reader, last] = fixture.leases()?;
    with_pair(fixture, &own, |pair| {
        let id = pair.block;
        fixture.resource.prepare_block_use(id, writer.id(), Access::Write)?;
        bytes::fill(&writer, id, 1, SIZE)?;
        // The caller orders the read after the write; the resource sees both only when they finish.
        reader.wait_for(&writer)?;
        let gate = fixture.hold(&reader)?;
        queue_read(fixture, pair, &reader)?;
        fixture.resource.finish_block_use(id, writer.id(), Access::Write)?;
        queue_write(fixture, id, &last, 2)?;
        stands(&last, "a read that finished inside a write is held")?;
        gate.release()?;
        pair.copy.expect(&reader, 0, 1, SIZE)
    })
}

pub(crate) fn a_write_that_finishes_inside_a_write_is_kept(fixture: &Fixture) -> Result<(), Stop> {
    let [own, outer, inner, reader] = fixture.leases()?;
    with_pair(fixture, &own, |pair| {
        let id = pair.block;
        fixture.resource.prepare_block_use(id, outer.id(), Access::Write)?;
        bytes::fill(&outer, id, 1, SIZE)?;
        inner.wait_for(&outer)?;
        let gate = fixture.hold(&inner)?;
        queue_write(fixture, id, &inner, 2)?;
        fixture.resource.finish_block_use(id, outer.id(), Access::Write)?;
        queue_read(fixture, pair, &reader)?;
        stands(&reader, "a write that finished inside a write is held")?;
        gate.release()?;
        pair.copy.expect(&reader, 0, 2, SIZE)
    })
}

pub(crate) fn unhooked_work_on_the_own_stream_precedes_the_free(
    fixture: &Fixture,
) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [own, other] = fixture.leases()?;
    let gate = fixture.hold(&own)?;
    for value in 0..8 {
        let block = fixture.allocate(SIZE, own.id())?;
        bytes::fill(&own, (&block).into(), value, SIZE)?;
        fixture.resource.deallocate(block)?;
        let next = fixture.allocate(SIZE, other.id())?;
        bytes::fill(&other, (&next).into(), 0xaa, SIZE)?;
        fixture.resource.deallocate(next)?;
    }
    gate.release()
}
