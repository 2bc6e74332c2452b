//! A pool with its streams.

use std::sync::Arc;

use super::rig::{TAG, sub_allocating};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    DeviceBlock, DeviceMemoryResource, PoolConfig, PoolResource, StreamLease, StreamPool,
};

pub const MIB: usize = 1 << 20;

pub struct Rig {
    pub streams: Arc<StreamPool>,
    pub pool: PoolResource,
}

pub fn rig(device: &Arc<CudaDevice>, config: PoolConfig) -> Rig {
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let pool = sub_allocating(device, &streams, config);
    Rig { streams, pool }
}

/// A pool that cannot grow beyond `bytes`.
pub fn scarce(bytes: usize) -> PoolConfig {
    PoolConfig::default().with_growth(2 * MIB).with_maximum(bytes)
}

impl Rig {
    pub fn leases<const N: usize>(&self) -> [StreamLease; N] {
        std::array::from_fn(|_| self.streams.lease().unwrap())
    }

    pub fn allocate(&self, bytes: usize, stream: &StreamLease) -> DeviceBlock {
        self.pool.allocate(bytes, stream.id(), TAG).unwrap()
    }

    pub fn empty(&self) {
        self.pool.reap_pending().unwrap();
        assert_eq!(self.pool.bytes_outstanding(), 0);
        self.pool.trim().unwrap();
        let snapshot = self.pool.snapshot();
        assert_eq!((snapshot.reserved_bytes, snapshot.free_bytes()), (0, 0), "{snapshot:?}");
    }
}
