//! Page-locked host memory beside a runtime in a ledger: it is not memory of the card, and the ledger counts none of it.

use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, GpuMemoryManager, LedgerMeter, PinnedHostResource, StreamId,
};

use crate::support::{KINDS, MIB, TestDirectory};

#[test]
fn page_locked_memory_is_no_bytes_of_the_ledger() {
    for kind in KINDS.into_iter().filter(|kind| kind.to_string() != "direct") {
        let directory = TestDirectory::new();
        let runtime = Arc::new(directory.runtime(kind, 64 * MIB));
        let ledger = runtime.ledger().ledger().unwrap();
        let manager = GpuMemoryManager::with_runtime(runtime.clone());
        let mut column = manager.alloc::<u64>(MIB as usize / 8).unwrap();
        let (used, free) = (ledger.used(), runtime.device().memory_info().unwrap().free);
        assert!(used >= MIB, "{used}");

        let (device, streams) = (runtime.device().clone(), runtime.stream_pool().clone());
        let pinned = Arc::new(PinnedHostResource::new(device, 0, streams));
        let meter = LedgerMeter::new(Arc::new(directory.ledger(64 * MIB)));
        let refused = pinned.meter_physical(Arc::new(meter)).unwrap_err();
        assert!(refused.to_string().contains("unsupported"), "{refused}");
        // More than the limit of the card.
        pinned.reserve(100 * MIB as usize).unwrap();
        let mut staging =
            pinned.alloc::<u64>(column.len(), StreamId::DEFAULT, AllocTag("staging")).unwrap();
        staging.as_mut_slice().unwrap().fill(7);
        staging.copy_to(&mut column, StreamId::DEFAULT).unwrap();
        staging.copy_from(&column, StreamId::DEFAULT).unwrap();
        assert!(staging.as_slice().unwrap().iter().all(|value| *value == 7));
        assert!(pinned.bytes_held() as u64 >= 100 * MIB);
        assert_eq!((ledger.used(), runtime.device().memory_info().unwrap().free), (used, free));
    }
}
