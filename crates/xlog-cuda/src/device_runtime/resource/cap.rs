//! The limit on the physical memory of a resource.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use xlog_base::Mutex;

use super::ResourceError;

/// The maximum number of physical bytes that a resource may hold, cached or not.
///
/// A budget passes its limit to the resource below with it ([`cap_physical`]). A resource reads the cap before it takes memory from the
/// device, rounded up to its granules. The cap ends with its last `Arc`, so a resource keeps a [`Weak`] reference.
///
/// [`cap_physical`]: super::DeviceMemoryResource::cap_physical
#[derive(Debug)]
pub struct PhysicalCap {
    bytes: AtomicUsize,
}

impl PhysicalCap {
    /// Creates a cap of `bytes`.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { bytes: AtomicUsize::new(bytes) }
    }

    /// Changes the maximum. Memory held above it stays; the resource takes no more.
    pub fn set(&self, bytes: usize) {
        self.bytes.store(bytes, Ordering::Release);
    }

    /// Returns the maximum.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// Returns [`bytes`](Self::bytes), rounded up to whole granules.
    #[must_use]
    pub fn in_granules(&self, granule: u64) -> u64 {
        in_granules(self.bytes(), granule)
    }
}

fn in_granules(bytes: usize, granule: u64) -> u64 {
    (bytes as u64).checked_next_multiple_of(granule.max(1)).unwrap_or(u64::MAX)
}

/// The caps of a resource; the smallest live one applies.
#[derive(Debug, Default)]
pub(crate) struct CapSlot {
    /// Whether there ever was a cap. Without one, no call takes the lock.
    any: AtomicBool,
    caps: Mutex<Vec<Weak<PhysicalCap>>>,
}

impl CapSlot {
    /// The maximum; `usize::MAX` when all caps have ended, and `None` when there never was one.
    #[inline]
    pub(crate) fn bytes(&self) -> Option<usize> {
        self.any.load(Ordering::Acquire).then(|| self.least())
    }

    /// [`bytes`](Self::bytes), rounded up to whole granules; `u64::MAX` without a cap.
    #[inline]
    pub(crate) fn in_granules(&self, granule: u64) -> u64 {
        self.bytes().map_or(u64::MAX, |bytes| in_granules(bytes, granule))
    }

    fn least(&self) -> usize {
        let mut least = usize::MAX;
        let mut caps = self.caps.lock();
        caps.retain(|cap| {
            let cap = cap.upgrade();
            least = cap.as_ref().map_or(least, |cap| least.min(cap.bytes()));
            cap.is_some()
        });
        least
    }

    /// Adds a cap, which applies until its last `Arc` is dropped.
    pub(crate) fn add(&self, cap: &Arc<PhysicalCap>) {
        let mut caps = self.caps.lock();
        caps.retain(|other| other.strong_count() > 0 && other.as_ptr() != Arc::as_ptr(cap));
        caps.push(Arc::downgrade(cap));
        self.any.store(true, Ordering::Release);
    }
}

#[cold]
pub(crate) fn refused_by_cap(
    requested: usize,
    allowed: u64,
    granule: u64,
    held: u64,
) -> ResourceError {
    ResourceError::OutOfMemory {
        requested,
        detail: format!(
            "{held} bytes of the card are held, and the budget allows {allowed}, in granules of {granule}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_keeps_no_cap_that_has_ended() {
        let slot = CapSlot::default();
        assert_eq!((slot.bytes(), slot.in_granules(8)), (None, u64::MAX));
        let (first, second) = (Arc::new(PhysicalCap::new(100)), Arc::new(PhysicalCap::new(90)));
        slot.add(&first);
        slot.add(&second);
        slot.add(&second);
        assert_eq!((slot.bytes(), slot.in_granules(64)), (Some(90), 128));
        second.set(110);
        assert_eq!(slot.bytes(), Some(100));
        drop(first);
        assert_eq!(slot.bytes(), Some(110));
        for bytes in 0..1000 {
            slot.add(&Arc::new(PhysicalCap::new(bytes)));
        }
        drop(second);
        assert_eq!(slot.bytes(), Some(usize::MAX));
        assert!(slot.caps.lock().is_empty());
    }
}
