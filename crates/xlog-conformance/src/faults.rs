//! The contract under driver failures, which only simulated devices can inject.
use xlog_cuda::device_runtime::{Access, BlockId, BlockState, DeviceMemoryResource};
use xlog_cuda::sim::{Call, Fault};

use crate::bytes;
use crate::fixture::{Fixture, Refusal, Stop};

const BYTES: usize = 1000;

/// The driver calls that closing a use may need, even if it completes a free.
const CALLS: [Call; 12] = [
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::StreamQuery,
    Call::StreamIsIdle,
    Call::FreeAsync,
    Call::Synchronize,
    Call::Memset,
    Call::Launch,
    Call::Alloc,
    Call::Unmap,
];

pub(crate) fn a_finish_that_fails_closes_the_use(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let Some(sim) = fixture.device.sim() else {
        return Err(Stop::Skipped("a GPU does not fail on request".to_owned()));
    };
    let faults = sim.faults();
    for fault in [Fault::OutOfMemory, Fault::Code(999), Fault::Unsupported] {
        for call in CALLS {
            for is_freed in [false, true] {
                // These streams have recorded nothing, so an event has to be created.
                let [own, user] = fixture.leases()?;
                let block = fixture.allocate(BYTES, own.id())?;
                let id = BlockId::from_block(&block);
                fixture.resource.prepare_block_use(id, user.id(), Access::Write)?;
                bytes::fill(&user, id, 1, BYTES)?;
                let kept = match is_freed {
                    true => {
                        fixture.resource.deallocate(block)?;
                        None
                    }
                    false => Some(block),
                };
                faults.fail_nth(call, 1, fault);
                // The failure may appear in the finish, in a later call, or not at all.
                let finished = fixture.resource.finish_block_use(id, user.id(), Access::Write);
                faults.clear();
                let what = format!(
                    "a second finish after one that gave {finished:?} as {} failed",
                    call.name()
                );
                let again = fixture.resource.finish_block_use(id, user.id(), Access::Write);
                Refusal::Any.expect(again, &what)?;
                if let Some(block) = kept {
                    fixture.resource.deallocate(block)?;
                }
                fixture.resource.reap_pending()?;
                let when = format!(
                    "after a finish that gave {finished:?} as {} failed, a free and a reap",
                    call.name()
                );
                fixture.state(id, BlockState::Freed, &when)?;
                fixture.outstanding(0, &when)?;
            }
        }
    }
    Ok(())
}
