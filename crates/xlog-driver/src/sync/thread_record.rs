//! The record in which a thread announces the biases that it holds.
//!
//! A [`ThreadRecord`] belongs to at most one live thread at a time, see `threads`. Only that thread stores to its slots; a revoking thread
//! reads them. Each slot holds the address of one bias, like a hazard pointer.
//!
//! Invariants:
//! - an address is in at most one slot of a record;
//! - `nested` counts the used slots other than the first. While it is 0 and the first slot is free (the common case), the thread is inside
//!   no bias.

use super::barrier::{AtomicBool, AtomicU32, AtomicUsize, ENTRY_SLOTS, Ordering};

/// The id of the record that owns no bias.
pub(super) const NO_THREAD: u32 = u32::MAX;

/// One thread as an owner of biases. Aligned to its own cache lines, because its thread stores there on every entry.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct ThreadRecord {
    /// Identifies the record as an owner; never 0.
    pub(super) id: u32,
    /// Used only by the record's thread.
    pub(super) nested: AtomicU32,
    /// Addresses of the biases that the thread is inside of or about to enter; 0 in a free slot.
    pub(super) slots: [AtomicUsize; ENTRY_SLOTS],
    /// True while a thread uses the record.
    pub(super) is_live: AtomicBool,
}

/// Announces that the thread is inside a bias, until dropped. Not `Send`: it stays on its thread.
#[derive(Debug)]
#[must_use]
pub(super) struct Announced {
    record: &'static ThreadRecord,
    slot: &'static AtomicUsize,
}

impl ThreadRecord {
    /// A record that no thread uses yet.
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            nested: AtomicU32::new(0),
            slots: std::array::from_fn(|_| AtomicUsize::new(0)),
            is_live: AtomicBool::new(false),
        }
    }

    /// Announces that the record's thread is about to enter the bias at `address`. `None` if it is inside that bias already, or no slot is
    /// free.
    #[inline(always)]
    pub(super) fn announce(&'static self, address: usize) -> Option<Announced> {
        let slot = if self.is_outside() { &self.slots[0] } else { self.free_slot(address)? };
        // Release: a thread that revokes the slot's previous bias may read this value instead of the 0 before it.
        slot.store(address, Ordering::Release);
        Some(Announced { record: self, slot })
    }

    /// True if the thread is inside no bias. Called by the record's thread.
    #[inline(always)]
    pub(super) fn is_outside(&self) -> bool {
        self.slots[0].load(Ordering::Relaxed) == 0 && self.nested.load(Ordering::Relaxed) == 0
    }

    /// A slot for the bias at `address`, for a thread that is inside other biases.
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

    /// True if the record's thread is inside the bias at `address` or about to enter it.
    ///
    /// Acquire: sees what the thread did inside once it is out.
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
