//! A held stream must stall only its own work.
use xlog_cuda::device_runtime::{Access, BlockId, BlockState, DeviceMemoryResource};

use crate::bytes;
use crate::fixture::{Fixture, Stop, ensure};

pub(crate) fn calls_on_a_held_stream_return(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [held, foreign] = fixture.leases()?;
    let gate = fixture.hold(&held)?;
    for value in 0..20 {
        let block = fixture.allocate(4096, held.id())?;
        let id = BlockId::from_block(&block);
        for stream in [&held, &foreign, &held] {
            fixture.work(id, stream, Access::Write, || bytes::fill(stream, id, value, 4096))?;
        }
        fixture.resource.deallocate(block)?;
        let block = fixture.allocate(4096, foreign.id())?;
        let id = BlockId::from_block(&block);
        fixture.work(id, &held, Access::Write, || bytes::fill(&held, id, value, 4096))?;
        fixture.resource.deallocate(block)?;
        fixture.resource.reap_completed()?;
    }
    ensure(!held.query()?, || "work ran through a held gate".to_owned())?;
    gate.release()
}

pub(crate) fn reap_completed_does_not_wait(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [held, free] = fixture.leases()?;
    let gate = fixture.hold(&held)?;
    let stuck = fixture.allocate(3000, held.id())?;
    let stuck_id = BlockId::from_block(&stuck);
    let stuck_bytes = fixture.resource.bytes_outstanding();
    let done = fixture.allocate(5000, free.id())?;
    let done_id = BlockId::from_block(&done);
    fixture.resource.deallocate(stuck)?;
    fixture.resource.deallocate(done)?;
    free.synchronize()?;
    fixture.resource.reap_completed()?;
    if fixture.resource.block_state(stuck_id) == BlockState::Freed {
        // Its memory is reusable on its own stream; see `retired_bytes_are_counted_until_reaped`.
        fixture.outstanding(0, "of blocks that are gone")?;
    } else {
        fixture.outstanding(stuck_bytes, "after a reap while one of two frees is held")?;
        fixture.state(stuck_id, BlockState::Retired, "while its stream is held")?;
    }
    fixture.state(done_id, BlockState::Freed, "once its free has completed and was reaped")?;
    gate.release()
}

pub(crate) fn reap_pending_waits_for_queued_frees(fixture: &Fixture) -> Result<(), Stop> {
    let leases = fixture.leases::<4>()?;
    for (n, lease) in leases.iter().enumerate() {
        let block = fixture.allocate(1000 * (n + 1), lease.id())?;
        let id = BlockId::from_block(&block);
        let next = &leases[(n + 1) % leases.len()];
        fixture.work(id, next, Access::Write, || bytes::fill(next, id, 1, 1000))?;
        if !fixture.tracks() {
            next.synchronize()?;
        }
        fixture.resource.deallocate(block)?;
    }
    fixture.resource.reap_pending()?;
    fixture.outstanding(0, "after a reap that waits")
}
