//! The limit on what a resource holds of its device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::ResourceError;

/// The maximum of physical bytes that a resource may hold of its device, cached or not.
///
/// A budget hands its limit down by it ([`cap_physical`]), and changes it with the limit. A resource reads it before it takes memory
/// from the device, and rounds it up to the granules in which it takes memory.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::device_runtime::PhysicalCap;
///
/// let (inner, outer) = (PhysicalCap::new(8 << 20), Arc::new(PhysicalCap::new(3 << 20)));
/// inner.join(outer.clone());
/// assert_eq!((inner.bytes(), inner.in_granules(2 << 20)), (3 << 20, 4 << 20));
/// outer.set(usize::MAX);
/// assert_eq!(inner.bytes(), 8 << 20);
/// ```
///
/// [`cap_physical`]: super::DeviceMemoryResource::cap_physical
#[derive(Debug)]
pub struct PhysicalCap {
    bytes: AtomicUsize,
    outer: OnceLock<Arc<PhysicalCap>>,
}

impl PhysicalCap {
    /// At most `bytes`.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { bytes: AtomicUsize::new(bytes), outer: OnceLock::new() }
    }

    /// Another maximum. What is held above it stays; nothing more is taken.
    pub fn set(&self, bytes: usize) {
        self.bytes.store(bytes, Ordering::Release);
    }

    /// The maximum: the least of this one and those it was joined with.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> usize {
        let own = self.bytes.load(Ordering::Acquire);
        self.outer.get().map_or(own, |outer| own.min(outer.bytes()))
    }

    /// [`bytes`](Self::bytes), rounded up to whole granules.
    #[must_use]
    pub fn in_granules(&self, granule: u64) -> u64 {
        let bytes = self.bytes() as u64;
        bytes.checked_next_multiple_of(granule.max(1)).unwrap_or(u64::MAX)
    }

    /// Lets `outer` hold as well: two budgets over one resource.
    pub fn join(&self, outer: Arc<Self>) {
        if std::ptr::eq(self, &*outer) {
            return;
        }
        if let Err(outer) = self.outer.set(outer)
            && let Some(first) = self.outer.get()
        {
            first.join(outer);
        }
    }
}

/// The place of a cap in a resource: none, or the one that all caps were joined into.
#[derive(Debug, Default)]
pub(crate) struct CapSlot(OnceLock<Arc<PhysicalCap>>);

impl CapSlot {
    #[inline]
    pub(crate) fn get(&self) -> Option<&PhysicalCap> {
        self.0.get().map(|cap| &**cap)
    }

    pub(crate) fn add(&self, cap: Arc<PhysicalCap>) {
        if let Err(cap) = self.0.set(cap)
            && let Some(first) = self.0.get()
        {
            first.join(cap);
        }
    }
}

/// The refusal of `requested` bytes by a cap of `allowed` bytes.
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
