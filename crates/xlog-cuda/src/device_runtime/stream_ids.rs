//! Stream ids, issued once for the whole process.
//!
//! One counter serves all pools, so no two pools have an equal id at the same time. An id is live as long as any handle of
//! its stream, even after the stream was released. A live id is never issued again, even when the counter has wrapped. 0 and
//! `u32::MAX` are never issued.

use std::collections::BTreeSet;

use xlog_base::{Mutex, MutexGuard};

use super::StreamId;

/// A standard mutex: all devices of the process share it, and a seeded schedule must not depend on other devices. No call
/// is made while it is held.
static SOURCE: Mutex<IdSource> = Mutex::new(IdSource { next: 1, live: BTreeSet::new() });

fn source() -> MutexGuard<'static, IdSource> {
    SOURCE.lock()
}

struct IdSource {
    next: u32,
    live: BTreeSet<u32>,
}

impl IdSource {
    /// Terminates because live ids are few: each has a driver stream or a handle behind it.
    fn issue(&mut self) -> u32 {
        loop {
            let id = self.next;
            self.next = self.next.wrapping_add(1);
            if id != StreamId::DEFAULT.0 && id != u32::MAX && self.live.insert(id) {
                return id;
            }
        }
    }
}

/// An id that is live until it is dropped.
#[derive(Debug)]
pub(crate) struct IssuedId(StreamId);

impl IssuedId {
    /// The id of the default stream of every pool. It is shared, so it is not counted as live.
    pub(crate) const DEFAULT: Self = Self(StreamId::DEFAULT);

    pub(crate) fn issue() -> Self {
        Self(StreamId(source().issue()))
    }

    pub(crate) fn id(&self) -> StreamId {
        self.0
    }
}

impl Drop for IssuedId {
    fn drop(&mut self) {
        if self.0 != StreamId::DEFAULT {
            source().live.remove(&self.0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrap_around_skips_zero_the_last_number_and_live_ids() {
        let mut source = IdSource { next: u32::MAX - 2, live: BTreeSet::from([1, 2]) };
        let issued: Vec<u32> = (0..4).map(|_| source.issue()).collect();
        assert_eq!(issued, [u32::MAX - 2, u32::MAX - 1, 3, 4]);
    }

    #[test]
    fn a_dropped_id_may_be_issued_after_wrap_around_and_a_live_one_may_not() {
        let mut source = IdSource { next: 5, live: BTreeSet::new() };
        assert_eq!((source.issue(), source.issue()), (5, 6));
        source.live.remove(&5);
        source.next = 5;
        assert_eq!((source.issue(), source.issue()), (5, 7));
    }

    #[test]
    fn an_issued_id_is_live_until_it_is_dropped() {
        let id = IssuedId::issue();
        let number = id.id().0;
        assert!(source().live.contains(&number));
        drop(id);
        assert!(!source().live.contains(&number));
    }

    /// A block outlives the lease of its stream, the counter wraps around, and another stream gets the id.
    #[cfg(feature = "sim")]
    #[test]
    #[allow(unsafe_code, clippy::unwrap_used)]
    fn a_use_by_a_stream_under_a_reissued_id_is_ordered_as_one_of_another_stream() {
        use crate::CudaDevice;
        use crate::device_runtime::{
            Access, AllocTag, AsyncCudaResource, BlockId, DeviceMemoryResource, StreamPool,
        };
        use std::sync::Arc;

        let device = Arc::new(CudaDevice::open("sim:7").unwrap());
        let streams = Arc::new(StreamPool::with_defaults(device.clone()));
        let resource = AsyncCudaResource::new(device.clone(), 0, streams.clone());
        let former = streams.lease().unwrap();
        let (id, slot) = (former.id(), former.raw().clock().slot());
        let block = resource.allocate(1024, id, AllocTag("rows")).unwrap();
        let named = BlockId::from_block(&block);
        former.synchronize().unwrap();
        drop(former);
        let own = streams.lease().unwrap();
        assert_eq!(own.raw().clock().slot(), slot, "the stream is leased again");
        let other = loop {
            source().next = id.0;
            // Another test may have taken it.
            let lease = streams.lease().unwrap();
            if lease.id() == id {
                break lease;
            }
        };
        let gate = other.hold().unwrap();
        resource.prepare_block_use(named, id, Access::Write).unwrap();
        // SAFETY: the block is live, and its free follows the use.
        unsafe { other.memset(block.ptr, 1, 1024).unwrap() };
        resource.finish_block_use(named, id, Access::Write).unwrap();
        resource.deallocate(block).unwrap();
        let next = resource.allocate(1024, own.id(), AllocTag("next")).unwrap();
        // SAFETY: the block is live, and this is its own stream.
        unsafe { own.memset(next.ptr, 2, 1024).unwrap() };
        gate.release();
        resource.deallocate(next).unwrap();
        resource.reap_pending().unwrap();
        assert!(device.races().is_empty(), "{:#?}", device.races());
    }
}
