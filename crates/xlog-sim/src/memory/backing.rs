//! The bytes behind simulated memory.
//!
//! A backing is zeroed host memory that only the engine touches. If the simulated program has a race, two operations may reach the same
//! bytes. The engine starts no operation that conflicts with a running one, so the simulator itself has no data race. That rule makes the
//! slices below sound. The program also has the address of page-locked host memory: it promises not to touch bytes that queued work uses.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// From this size on memory is mapped. The system allocator would reuse freed memory up to 32 MiB, and commit it by clearing it.
#[cfg(target_os = "linux")]
const MAPPED: usize = 1 << 20;

/// One piece of simulated physical memory.
pub(crate) struct Backing {
    id: u64,
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned by this value, and every access goes through `BackingRange`, whose callers exclude each other.
unsafe impl Send for Backing {}
// SAFETY: as above; the id and layout are plain data.
unsafe impl Sync for Backing {}

impl Backing {
    /// Allocates zeroed memory; `None` if the host has none. Pages are committed on first write.
    pub(crate) fn new(bytes: usize) -> Option<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // 16 is the alignment at which the system allocator hands out untouched zero pages.
        let layout = Layout::from_size_align(bytes.max(1), 16).ok()?;
        let start = allocate(layout)?;
        #[cfg(target_os = "linux")]
        take_huge_pages(start, bytes);
        Some(Arc::new(Self { id: NEXT.fetch_add(1, Ordering::Relaxed), start, layout }))
    }

    /// The first address that is a multiple of `align`, and its offset; `None` if it lies outside.
    pub(crate) fn first_multiple_of(&self, align: usize) -> Option<(NonNull<u8>, usize)> {
        let offset = self.start.as_ptr().align_offset(align);
        // SAFETY: the offset is less than the size, so the address lies in the allocation.
        (offset < self.layout.size()).then(|| (unsafe { self.start.add(offset) }, offset))
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

/// Requests huge pages for large memory, so that the first touch of 2 MiB costs one fault instead of 512.
#[cfg(target_os = "linux")]
fn take_huge_pages(start: NonNull<u8>, bytes: usize) {
    const HUGE: usize = 2 << 20;
    let before = start.as_ptr().align_offset(HUGE);
    let inner = bytes.saturating_sub(before) / HUGE * HUGE;
    if inner >= 2 * HUGE {
        // SAFETY: the range lies in the allocation, and huge pages change none of its bytes. A system without them refuses harmlessly.
        let _ = unsafe {
            rustix::mm::madvise(
                start.add(before).as_ptr().cast(),
                inner,
                rustix::mm::Advice::LinuxHugepage,
            )
        };
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and no range of it exists any more.
        unsafe { release(self.start, self.layout) }
    }
}

/// Allocates zeroed memory without committing it, for a layout of at least one byte.
fn allocate(layout: Layout) -> Option<NonNull<u8>> {
    #[cfg(target_os = "linux")]
    if layout.size() >= MAPPED {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), layout.size(), access, MapFlags::PRIVATE)
        };
        return NonNull::new(start.ok()?.cast());
    }
    // SAFETY: the layout has a size of at least one.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// Releases what [`allocate`] returned.
///
/// # Safety
///
/// - `start` is from [`allocate`] with this layout, and is released once.
/// - Nothing accesses it any more.
unsafe fn release(start: NonNull<u8>, layout: Layout) {
    #[cfg(target_os = "linux")]
    if layout.size() >= MAPPED {
        // SAFETY: the caller promises that the mapping is whole and unused. Unmapping a whole mapping does not fail.
        let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), layout.size()) };
        return;
    }
    // SAFETY: the caller promises that it was allocated with this layout and is unused.
    unsafe { dealloc(start.as_ptr(), layout) }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backing({}, {} bytes)", self.id, self.layout.size())
    }
}

/// A range of one backing, and the device address through which it was reached.
#[derive(Clone, Debug)]
pub(crate) struct BackingRange {
    backing: Arc<Backing>,
    offset: usize,
    bytes: usize,
    /// The device address of the first byte.
    pub(crate) address: u64,
}

impl BackingRange {
    /// The range, or `None` when it does not lie inside the backing.
    pub(crate) fn new(
        backing: &Arc<Backing>,
        offset: usize,
        bytes: usize,
        address: u64,
    ) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= backing.layout.size()).then(|| Self {
            backing: Arc::clone(backing),
            offset,
            bytes,
            address,
        })
    }

    pub(crate) fn backing_id(&self) -> u64 {
        self.backing.id
    }

    /// The address that offset 0 of the backing would have: equal for all pieces of one mapping.
    pub(crate) fn base(&self) -> u64 {
        self.address.wrapping_sub(self.offset as u64)
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// True if both have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.backing.id == other.backing.id
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }

    /// The bytes, to read.
    ///
    /// # Safety
    /// Until the slice is gone, no operation that writes any of these bytes runs.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: `new` checked the range against the backing, which this piece keeps alive and which is initialised;
        // the caller excludes writers.
        unsafe {
            std::slice::from_raw_parts(self.backing.start.as_ptr().add(self.offset), self.bytes)
        }
    }

    /// The bytes, to write.
    ///
    /// # Safety
    /// Until the slice is gone, no other operation or slice touches any of these bytes.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the caller excludes all other accesses.
        unsafe {
            std::slice::from_raw_parts_mut(self.backing.start.as_ptr().add(self.offset), self.bytes)
        }
    }
}
