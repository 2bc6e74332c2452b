//! A driver pool under a meter: what it grew by without a grant goes again.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::meter::Nearly;
use crate::support::rig::{Rig, TAG, fill};
use xlog_cuda::device_runtime::ResourceError;
use xlog_testing::{WatchedGate, for_each_sim};

const MIB: usize = 1 << 20;
/// What a driver pool grows by.
const STEP: usize = 32 * MIB;

#[test]
fn memory_that_was_refused_behind_running_work_goes_with_the_next_reap() {
    for_each_sim(|device, _| {
        let rig = Rig::new(device);
        let meter = Arc::new(Nearly::new(STEP));
        rig.resource.meter_physical(meter.clone()).unwrap();
        let [stream] = rig.leases();
        // Two pieces are free, and neither is large enough.
        let [first, middle, last] =
            [12, 12, 8].map(|mebibytes| rig.allocate(mebibytes * MIB, &stream));
        assert_eq!(meter.left(), 0);
        rig.free(first);
        rig.free(last);
        rig.resource.reap_pending().unwrap();

        let gate = WatchedGate::new(stream.hold().unwrap());
        fill(&stream, middle.ptr, 1, MIB);
        let refused = rig.resource.allocate(16 * MIB, stream.id(), TAG).unwrap_err();
        assert!(matches!(refused, ResourceError::OutOfBudget { .. }), "{refused}");
        let held = || {
            let memory = device.memory_info().unwrap();
            (memory.total - memory.free) as usize
        };
        assert_eq!(held(), 2 * STEP, "it cannot go as long as the stream stands");
        gate.release();
        rig.resource.reap_pending().unwrap();
        rig.resource.trim().unwrap();
        assert_eq!((held(), meter.left()), (STEP, 0), "what was not granted is gone");
        rig.free(middle);
        rig.resource.reap_pending().unwrap();
        rig.resource.trim().unwrap();
        assert_eq!((held(), meter.left()), (0, STEP));
    });
}
