//! The memory a driver gives: stream-ordered, virtual, and what it refuses.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used)]

use xlog_cuda::device_runtime::StreamPool;
use xlog_cuda::driver::{DriverError, MapAccess};
use xlog_cuda::{DeviceStream, XlogError};
use xlog_testing::{Buffer, for_each_device, for_each_sim, pattern};

const BYTES: usize = 1 << 20;

#[test]
fn the_memory_pool_allocates_and_frees_in_stream_order() {
    for_each_device(|device| {
        let Some(pools) = device.driver().async_pools() else {
            return;
        };
        let streams = StreamPool::with_defaults(device.clone());
        let stream = streams.lease().unwrap();
        let pool = device.memory_pool().unwrap();
        for round in 0..20 {
            let block = pools.alloc_async(BYTES, pool, stream.handle()).unwrap();
            let bytes = pattern(BYTES, round);
            let mut back = vec![0; BYTES];
            // SAFETY: all work on the block is queued on its own stream between its allocation and its free.
            unsafe {
                stream.copy_htod(block, &bytes).unwrap();
                stream.copy_dtoh(&mut back, block).unwrap();
                pools.free_async(block, stream.handle()).unwrap();
            }
            assert!(back == bytes, "round {round}");
        }
        stream.synchronize().unwrap();
        let usage = pools.pool_usage(pool).unwrap();
        assert_eq!(usage.used, 0, "{usage:?}");
        assert!(usage.reserved >= BYTES as u64, "the pool gave its cache back: {usage:?}");
        assert!(usage.used_peak >= BYTES as u64, "{usage:?}");
        pools.pool_trim(pool, 0).unwrap();
        assert_eq!(pools.pool_usage(pool).unwrap().reserved, 0);
    });
}

#[test]
fn a_block_freed_behind_a_gate_is_not_handed_to_another_stream_before_its_work() {
    for_each_device(|device| {
        let Some(pools) = device.driver().async_pools() else {
            return;
        };
        let streams = StreamPool::with_defaults(device.clone());
        let (held, other) = (streams.lease().unwrap(), streams.lease().unwrap());
        let pool = device.memory_pool().unwrap();
        let kept = Buffer::new(device, BYTES);
        let gate = held.hold().unwrap();
        let block = pools.alloc_async(BYTES, pool, held.handle()).unwrap();
        // SAFETY: all work on each block is queued on its own stream between its allocation and its free.
        unsafe {
            held.memset(block, 1, BYTES).unwrap();
            held.copy_dtod(kept.ptr(), block, BYTES).unwrap();
            pools.free_async(block, held.handle()).unwrap();
            let next = pools.alloc_async(BYTES, pool, other.handle()).unwrap();
            other.memset(next, 2, BYTES).unwrap();
            pools.free_async(next, other.handle()).unwrap();
        }
        gate.release();
        other.synchronize().unwrap();
        assert!(
            kept.read(&held).unwrap().iter().all(|byte| *byte == 1),
            "the block was overwritten"
        );
    });
}

#[test]
fn virtual_memory_maps_holds_bytes_and_unmaps() {
    for_each_device(|device| {
        let Some(virtual_memory) = device.driver().virtual_memory() else {
            return;
        };
        let streams = StreamPool::with_defaults(device.clone());
        let stream = streams.lease().unwrap();
        let unit = virtual_memory.granularity();
        assert_eq!(unit, device.properties().granularity);
        let base = virtual_memory.reserve(4 * unit, 0).unwrap();
        assert_eq!(base % unit as u64, 0);
        let pieces = [(); 2].map(|()| virtual_memory.create(unit).unwrap());
        let second = base + 2 * unit as u64;
        // SAFETY: the mapped pieces lie in the reservation and do not overlap; they are unmapped after the reads have
        // waited for all work, and the reservation is released when nothing is mapped in it.
        unsafe {
            for (at, memory) in [base, second].into_iter().zip(pieces) {
                virtual_memory.map(at, unit, memory).unwrap();
                virtual_memory.set_access(at, unit, MapAccess::ReadWrite).unwrap();
            }
            stream.memset(base, 1, unit).unwrap();
            stream.memset(second, 2, unit).unwrap();
            assert!(read(&stream, base, unit).iter().all(|byte| *byte == 1));
            assert!(read(&stream, second, unit).iter().all(|byte| *byte == 2));
            stream.synchronize().unwrap();
            // The same physical memory elsewhere holds the same bytes.
            virtual_memory.unmap(base, unit).unwrap();
            let third = base + 3 * unit as u64;
            virtual_memory.map(third, unit, pieces[0]).unwrap();
            virtual_memory.set_access(third, unit, MapAccess::ReadWrite).unwrap();
            assert!(read(&stream, third, unit).iter().all(|byte| *byte == 1));
            stream.synchronize().unwrap();
            virtual_memory.unmap(second, unit).unwrap();
            virtual_memory.unmap(third, unit).unwrap();
            for memory in pieces {
                virtual_memory.destroy(memory).unwrap();
            }
            virtual_memory.release(base, 4 * unit).unwrap();
        }
    });
}

/// # Safety
/// The range is live.
unsafe fn read(stream: &DeviceStream, ptr: u64, bytes: usize) -> Vec<u8> {
    let mut back = vec![0; bytes];
    // SAFETY: the caller's promise.
    unsafe { stream.copy_dtoh(&mut back, ptr).unwrap() };
    back
}

#[test]
fn an_allocation_of_zero_bytes_is_refused() {
    for_each_device(|device| {
        let error = device.driver().alloc(0).unwrap_err();
        assert!(matches!(error, DriverError::Invalid { .. }), "{error:?}");
    });
}

#[test]
fn more_memory_than_the_device_has_is_refused_as_out_of_memory() {
    for_each_device(|device| {
        let total = device.properties().total_bytes as usize;
        let error = device.driver().alloc(2 * total).unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
        let error = device.driver().alloc(usize::MAX).unwrap_err();
        assert!(
            error.is_out_of_memory() || matches!(error, DriverError::Invalid { .. }),
            "{error:?}"
        );
        let buffer = Buffer::new(device, BYTES);
        let streams = StreamPool::with_defaults(device.clone());
        buffer.fill(&streams.lease().unwrap(), 1).unwrap();
    });
}

#[test]
fn freed_pointers_and_ranges_past_the_block_are_refused_by_name_and_change_nothing() {
    for_each_sim(|device, _| {
        let streams = StreamPool::with_defaults(device.clone());
        let stream = streams.lease().unwrap();
        let live = Buffer::new(device, BYTES);
        live.fill(&stream, 7).unwrap();
        stream.synchronize().unwrap();
        let freed = device.driver().alloc(BYTES).unwrap();
        // SAFETY: the block is live and unused.
        unsafe { device.driver().free(freed).unwrap() };

        let past = live.ptr() + 1;
        for ptr in [freed, past, 0, u64::MAX - 4] {
            // SAFETY: the simulated device checks every range and refuses these.
            let refused = unsafe {
                [
                    stream.memset(ptr, 1, BYTES),
                    stream.copy_htod(ptr, &vec![1; BYTES]),
                    stream.copy_dtoh(&mut vec![0; BYTES], ptr),
                    stream.copy_dtod(ptr, live.ptr(), BYTES),
                    stream.copy_dtod(live.ptr(), ptr, BYTES),
                ]
            };
            for result in refused {
                let error = result.unwrap_err();
                let XlogError::Driver(DriverError::Invalid { .. }) = &error else {
                    panic!("{error:?}");
                };
                assert!(error.to_string().contains(&format!("{ptr:#x}")), "{error}: {ptr:#x}");
            }
        }
        // SAFETY: the simulated device refuses a second free.
        let error = unsafe { device.driver().free(freed) }.unwrap_err();
        assert!(matches!(error, DriverError::Invalid { .. }), "{error:?}");
        assert!(live.read(&stream).unwrap().iter().all(|byte| *byte == 7));
        assert!(device.races().is_empty());
    });
}

#[test]
fn a_lost_device_fails_every_later_call_and_drops_cleanly() {
    for_each_sim(|device, sim| {
        let streams = StreamPool::with_defaults(device.clone());
        let stream = streams.lease().unwrap();
        let buffer = Buffer::new(device, BYTES);
        sim.faults().lose_device();
        for result in [buffer.fill(&stream, 1), stream.synchronize(), device.synchronize()] {
            let error = result.unwrap_err();
            assert!(
                matches!(&error, XlogError::Driver(inner) if inner.is_device_lost()),
                "{error:?}"
            );
        }
        assert!(streams.lease().is_err());
    });
}
