//! Where a thread announces the biases that it is inside of.
//!
//! A [`ThreadRecord`] belongs to at most one live thread at a time, see `threads`. Only that thread stores to its slots; a thread that
//! revokes a bias reads them. Each slot holds the address of one bias, like a hazard pointer.
//!
//! Invariants:
//! - an address is in at most one slot of a record;
//! - `nested` is the number of slots in use without the first. While that is 0 and the first slot is free, which is the common case,
//!   the thread is inside of nothing.

use super::barrier::{AtomicBool, AtomicU32, AtomicUsize, ENTRY_SLOTS, Ordering};

/// Marks a record that no thread owns anything by.
pub(super) const NO_THREAD: u32 = u32::MAX;

/// One thread as the owner of biases. On cache lines of its own: its thread stores there with every entry.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct ThreadRecord {
    /// Names the record as an owner; never 0.
    pub(super) id: u32,
    /// Used by the record's thread only.
    pub(super) nested: AtomicU32,
    /// Addresses of the biases that the thread is inside of or about to enter; 0 in a free slot.
    pub(super) slots: [AtomicUsize; ENTRY_SLOTS],
    /// Whether a thread has the record.
    pub(super) is_live: AtomicBool,
}

/// The thread has announced that it is inside of a bias, until this is dropped. Stays on its thread.
#[derive(Debug)]
#[must_use]
pub(super) struct Announced {
    record: &'static ThreadRecord,
    slot: &'static AtomicUsize,
}

impl ThreadRecord {
    /// A record that no thread has yet.
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            nested: AtomicU32::new(0),
            slots: std::array::from_fn(|_| AtomicUsize::new(0)),
            is_live: AtomicBool::new(false),
        }
    }

    /// Announces that the thread is about to enter the bias at `address`. `None` if it is inside of that already, or of as many as
    /// there are slots. Called by the record's thread.
    #[inline(always)]
    pub(super) fn announce(&'static self, address: usize) -> Option<Announced> {
        let slot = if self.is_outside() { &self.slots[0] } else { self.free_slot(address)? };
        // Release: a thread that revokes the bias which the slot was used for before may read this instead of the 0 between them.
        slot.store(address, Ordering::Release);
        Some(Announced { record: self, slot })
    }

    /// True when the thread is inside of nothing. Called by the record's thread.
    #[inline(always)]
    pub(super) fn is_outside(&self) -> bool {
        self.slots[0].load(Ordering::Relaxed) == 0 && self.nested.load(Ordering::Relaxed) == 0
    }

    /// A slot for the bias at `address`, for a thread that is inside of others.
    #[cold]
    #[inline(never)]
    fn free_slot(&'static self, address: usize) -> Option<&'static AtomicUsize> {
        if self.announces(address) {
            return None;
        }
        let free = self.slots.iter().find(|slot| slot.load(Ordering::Relaxed) == 0)?;
        if !std::ptr::eq(free, &raw const self.slots[0]) {
            self.nested.store(self.nested.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        Some(free)
    }

    /// True when the record's thread is inside of the bias at `address`, or about to enter it.
    ///
    /// Acquire: what the thread did inside is seen once it is out.
    pub(super) fn announces(&self, address: usize) -> bool {
        self.slots.iter().any(|slot| slot.load(Ordering::Acquire) == address)
    }
}

impl Drop for Announced {
    #[inline(always)]
    fn drop(&mut self) {
        self.slot.store(0, Ordering::Release);
        if !std::ptr::eq(self.slot, &raw const self.record.slots[0]) {
            let nested = self.record.nested.load(Ordering::Relaxed);
            self.record.nested.store(nested.wrapping_sub(1), Ordering::Relaxed);
        }
    }
}
