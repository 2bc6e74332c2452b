//! Two devices of one machine: events order across them, a copy reaches across, everything else stays at home.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
use std::sync::Arc;

use crate::support::{memset, read};
use xlog_driver::{
    Access, AsyncPools, Driver, DriverError, DriverResult, MapAccess, PoolOptions, VirtualMemory,
};
use xlog_sim::{SimConfig, SimDevice, SimKernel};

fn pairs() -> Vec<(Arc<SimDevice>, Arc<SimDevice>)> {
    [None, Some(1), Some(2), Some(3)]
        .into_iter()
        .map(|seed| {
            let mut config = SimConfig::default().with_ordinals(2);
            config.seed = seed;
            let machine = xlog_sim::SimMachine::new(config).unwrap();
            (machine.device(0).unwrap(), machine.device(1).unwrap())
        })
        .collect()
}

#[test]
fn streams_of_two_devices_order_each_other_by_events() {
    for ordered in [false, true] {
        for (first, second) in pairs() {
            let (a, b) = (first.stream_create(0).unwrap(), second.stream_create(0).unwrap());
            let block = first.alloc(64).unwrap();
            memset(&first, block, 9, 64, a);
            let event = first.event_create().unwrap();
            first.event_record(event, a).unwrap();
            if ordered {
                second.stream_wait_event(b, event).unwrap();
            }
            let copy = second.alloc(64).unwrap();
            // SAFETY: both blocks are live; a copy reaches across devices.
            unsafe { second.copy_dtod(copy, block, 64, b) }.unwrap();
            assert_eq!(first.races().is_empty(), ordered);
            if ordered {
                assert_eq!(read(&second, copy, 64, b), [9; 64]);
            }
            let wrong = second.stream_synchronize(a);
            assert!(matches!(wrong, Err(DriverError::Invalid { .. })), "{wrong:?}");
        }
    }
}

/// Refused with the names of both devices.
fn refuses<T: Debug>(outcome: DriverResult<T>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, DriverError::Invalid { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("device 0") && text.contains("device 1"), "{text}");
}

#[test]
fn memory_of_the_other_device_is_refused_by_all_but_a_copy_between_the_two() {
    for (home, away) in pairs() {
        let stream = home.stream_create(0).unwrap();
        let pool = away.pool_create(&PoolOptions::default()).unwrap();
        let far_stream = away.stream_create(0).unwrap();
        let unit = away.granularity();
        let range = away.reserve(unit, 0).unwrap();
        let memory = away.create(unit).unwrap();
        let near_memory = home.create(unit).unwrap();
        let near_range = home.reserve(unit, 0).unwrap();
        // SAFETY: a fresh reservation.
        unsafe { away.map(range, unit, memory) }.unwrap();
        // SAFETY: just mapped.
        unsafe { away.set_access(range, unit, MapAccess::ReadWrite) }.unwrap();
        let pooled = away.alloc_async(64, pool, far_stream).unwrap();
        for foreign in [away.alloc(64).unwrap(), pooled, range] {
            let kernel = SimKernel::new("reach", |_| {}).arg(foreign, 64, Access::Read);
            refuses(home.launch(stream, kernel));
            refuses(home.begin_range(foreign, 64, stream, "reach"));
            refuses(home.end_range(foreign, 64, stream));
            // SAFETY: refused.
            unsafe {
                refuses(home.memset(foreign, 1, 64, stream));
                refuses(home.copy_htod(foreign, &[1; 64], stream));
                refuses(home.copy_dtoh(&mut [0; 64], foreign, stream));
                refuses(home.free(foreign));
            }
        }
        // SAFETY: refused.
        unsafe {
            refuses(home.free_async(pooled, stream));
            refuses(home.map(range, unit, near_memory));
            refuses(home.map(near_range, unit, memory));
            refuses(home.unmap(range, unit));
            refuses(home.set_access(range, unit, MapAccess::None));
            refuses(home.release(range, unit));
        }
        // SAFETY: the simulated device looks the handle up, and refuses one that is not its own.
        refuses(unsafe { home.destroy(memory) });
        away.synchronize().unwrap();
        assert!(home.races().is_empty(), "a refused call must leave no trace");
    }
}
