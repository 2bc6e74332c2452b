//! What can only be shown with a hand on an arena.

use std::sync::Arc;

use super::*;

const MIB: usize = 1 << 20;

fn devices() -> [Arc<CudaDevice>; 2] {
    let plain = xlog_sim::SimDevice::open(Default::default()).unwrap();
    [CudaDevice::open("sim").unwrap(), CudaDevice::from_driver(plain)].map(Arc::new)
}

#[test]
fn two_streams_allocate_while_a_third_ones_memory_is_held() {
    // Also pools that would rather wait for another stream than grow.
    for (device, eager) in
        devices().into_iter().flat_map(|device| [(device.clone(), usize::MAX), (device, 0)])
    {
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let config = PoolConfig::default().with_eager_growth(eager);
        let pool = PoolResource::new(device, 0, streams.clone(), config).unwrap();
        let [first, second, third] = [(); 3].map(|()| streams.lease().unwrap());
        let own = pool.allocate(MIB, third.id(), AllocTag("own")).unwrap();
        pool.deallocate(own).unwrap();
        let owner = pool.tracker.stream(third.id()).unwrap();
        pool.arena(owner.clock().slot()).unwrap().with(|_| {
            std::thread::scope(|scope| {
                for stream in [&first, &second] {
                    let pool = &pool;
                    scope.spawn(move || {
                        for size in [1000, MIB, 40 * MIB] {
                            let block = pool.allocate(size, stream.id(), AllocTag("other"));
                            pool.deallocate(block.unwrap()).unwrap();
                        }
                    });
                }
            });
        });
        pool.reap_pending().unwrap();
        assert_eq!(pool.bytes_outstanding(), 0);
    }
}
