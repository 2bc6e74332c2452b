//! Every byte is counted, once, from allocation until its free has completed.

use xlog_base::Random;
use xlog_cuda::device_runtime::{BlockId, BlockState, DeviceMemoryResource, MIN_ALIGN, StreamId};

use crate::fixture::{Fixture, Refusal, Stop, TAG, ensure, twin};

pub(crate) fn every_byte_is_counted(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    fixture.outstanding(0, "on a new resource")?;
    let mut blocks = Vec::new();
    let mut due = 0;
    for requested in [1, 256, 257, 4096, 100_000, 1 << 20] {
        let block = fixture.allocate(requested, stream.id())?;
        let before = due;
        due += fixture.resource.charge_for(requested, MIN_ALIGN);
        ensure(due - before >= block.bytes, || {
            format!("{requested} bytes are charged {}, the block has {}", due - before, block.bytes)
        })?;
        fixture.outstanding(due, "after an allocation")?;
        blocks.push((block, due - before));
    }
    while let Some((block, charged)) = blocks.pop() {
        fixture.resource.deallocate(block)?;
        fixture.resource.reap_pending()?;
        due -= charged;
        fixture.outstanding(due, "after a free and a reap")?;
    }
    Ok(())
}

pub(crate) fn retired_bytes_are_counted_until_reaped(fixture: &Fixture) -> Result<(), Stop> {
    fixture.only_where_tracked()?;
    let [stream] = fixture.leases()?;
    let gate = fixture.hold(&stream)?;
    let block = fixture.allocate(5000, stream.id())?;
    let id = BlockId::from_block(&block);
    let due = fixture.resource.bytes_outstanding();
    fixture.resource.deallocate(block)?;
    fixture.resource.reap_completed()?;
    // A resource that reuses memory in the order of its stream may report the block as freed at once, and then does not count it.
    if fixture.resource.block_state(id) == BlockState::Freed {
        fixture.outstanding(0, "of a block that is gone")?;
    } else {
        fixture.outstanding(due, "while the free is behind a gate")?;
        fixture.state(id, BlockState::Retired, "while its free is behind a gate")?;
    }
    gate.release()?;
    stream.synchronize()?;
    fixture.resource.reap_completed()?;
    fixture.outstanding(0, "once the free has completed and was reaped without waiting")?;
    fixture.state(id, BlockState::Freed, "once its free has completed")
}

pub(crate) fn refusals_count_nothing(fixture: &Fixture) -> Result<(), Stop> {
    let block = fixture.allocate(4096, StreamId::DEFAULT)?;
    let due = fixture.resource.bytes_outstanding();
    let refused = fixture.resource.allocate(1 << 50, StreamId::DEFAULT, TAG);
    Refusal::OutOfMemory.expect(refused, "an allocation of 1 PiB")?;
    let mut forged = twin(&block);
    forged.ptr += 256;
    Refusal::UseAfterFree.expect(fixture.resource.deallocate(forged), "a forged pointer")?;
    fixture.outstanding(due, "after refusals")?;
    let mut forged = twin(&block);
    forged.bytes = 1;
    fixture.resource.deallocate(forged)?;
    fixture.drain()?;
    let refused = fixture.resource.deallocate(block);
    Refusal::UseAfterFree.expect(refused, "a second free")?;
    fixture.outstanding(0, "after a second free")
}

pub(crate) fn threads_lose_no_byte(fixture: &Fixture) -> Result<(), Stop> {
    let kept = fixture.allocate(12_345, StreamId::DEFAULT)?;
    let due = fixture.resource.bytes_outstanding();
    let leases = fixture.leases::<4>()?;
    let body = |thread: usize| {
        let stream = leases[thread].id();
        move || {
            let mut random = Random::new(thread as u64);
            let mut blocks = Vec::new();
            for _ in 0..60 {
                if blocks.len() < 8 && random.below(3) != 0 {
                    blocks.push(fixture.allocate(1 + random.below(20_000), stream)?);
                } else if !blocks.is_empty() {
                    let at = random.below(blocks.len());
                    fixture.resource.deallocate(blocks.swap_remove(at))?;
                }
                if random.below(10) == 0 {
                    fixture.resource.reap_completed()?;
                }
                let now = fixture.resource.bytes_outstanding();
                ensure(now >= due, || format!("{now} bytes outstanding, {due} are kept"))?;
            }
            fixture.free(blocks)
        }
    };
    let bodies = (0..4).map(|thread| Box::new(body(thread)) as Box<_>);
    fixture.threads(bodies.collect())?;
    fixture.resource.reap_pending()?;
    fixture.outstanding(due, "when the threads have freed all they had")?;
    Ok(fixture.resource.deallocate(kept)?)
}
