//! More streams than a clock remembers: what is forgotten is waited for again, and neither waits nor memory grow with the number of
//! streams.

#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Arc;

use crate::support::rig::{Rig, TAG};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, BlockId, DeviceMemoryResource, PoolConfig, PoolResource, StreamLease, StreamPool,
};
use xlog_testing::{IdleDriver, for_each_sim};

fn leases(pool: &StreamPool, count: usize) -> Vec<StreamLease> {
    (0..count).map(|_| pool.lease().unwrap()).collect()
}

#[test]
fn streams_in_turn_wait_once_a_turn_however_many_there_are() {
    for_each_sim(|device, _| {
        for count in [2, 3, 8, 16, 17, 40] {
            let rig = Rig::with_streams(device, count);
            let streams = leases(&rig.pool, count);
            let block = rig.allocate(64, &streams[0]);
            let id = BlockId::from_block(&block);
            let turns = 6 * count as u64;
            let before = rig.resource.statistics();
            for stream in (0..6).flat_map(|_| &streams) {
                rig.write(id, stream, 1, 64);
            }
            let after = rig.resource.statistics();
            let waits = after.waits_inserted - before.waits_inserted;
            // The first turn is on the block's own stream.
            assert_eq!(waits, turns - 1, "{count} streams");
            assert!(after.events_recorded - before.events_recorded <= turns, "{count} streams");
            rig.free(block);
            rig.settle();
        }
    });
}

/// One stream reads a block of each of the others, and then of each again.
#[test]
fn a_stream_that_was_forgotten_is_waited_for_again_and_one_that_was_not_is_not() {
    for_each_sim(|device, sim| {
        for (others, is_forgotten) in [(12, false), (60, true)] {
            let rig = Rig::with_streams(device, others + 1);
            let reader = rig.pool.lease().unwrap();
            let owners = leases(&rig.pool, others);
            let blocks: Vec<_> = owners.iter().map(|owner| rig.allocate(64, owner)).collect();
            let target = rig.allocate(64, &reader);
            let read_all = || {
                let before = rig.resource.statistics().waits_inserted;
                for block in &blocks {
                    rig.copy_to(BlockId::from_block(&target), block.into(), &reader, 64);
                }
                rig.resource.statistics().waits_inserted - before
            };
            for (block, owner) in blocks.iter().zip(&owners) {
                rig.write(block.into(), owner, 7, 64);
            }
            assert_eq!(read_all(), others as u64, "each is waited for once");
            let again = read_all();
            assert_eq!(again > 0, is_forgotten, "{again} waits of {others} were added");
            blocks.into_iter().chain([target]).for_each(|block| rig.free(block));
            rig.settle();
            assert!(sim.races().is_empty());
        }
    });
}

/// Set in the process that the test below starts.
const CHILD: &str = "XLOG_TEST_MANY_STREAMS";
/// The MiB that the clocks of these streams may take.
const LIMIT: usize = 16;

#[test]
fn a_ring_of_a_thousand_streams_takes_little_host_memory() {
    let test = "many_streams::child_hands_a_block_around_a_ring_of_a_thousand_streams";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "--nocapture", test]).env(CHILD, "1");
    let output = child.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    assert!(printed.contains("1 passed"), "no test is called {test}:\n{printed}");
}

/// Resident bytes of the process.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
}

/// In a process of its own, because the memory of the process is counted; on a driver that takes none.
#[test]
#[ignore = "run by the test above in a process of its own"]
fn child_hands_a_block_around_a_ring_of_a_thousand_streams() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let device = Arc::new(CudaDevice::from_driver(Arc::new(IdleDriver::new())));
    let pool = Arc::new(StreamPool::new(device.clone(), 1000));
    let config = PoolConfig::default();
    let resource = PoolResource::new(device, 0, pool.clone(), config).unwrap();
    let streams = leases(&pool, 1000);
    let block = resource.allocate(64, streams[0].id(), TAG).unwrap();
    let id = BlockId::from_block(&block);
    let before = resident();
    // More rounds than there are events before a clock asks which of them have completed.
    for stream in (0..100).flat_map(|_| &streams) {
        resource.prepare_block_use(id, stream.id(), Access::Write).unwrap();
        resource.finish_block_use(id, stream.id(), Access::Write).unwrap();
    }
    let grown = resident().saturating_sub(before) >> 20;
    println!("the process has grown by {grown} MiB");
    assert!(grown <= LIMIT, "the process has grown by {grown} MiB");
    resource.deallocate(block).unwrap();
    resource.reap_pending().unwrap();
}
