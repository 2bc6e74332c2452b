//! Addresses of a pool: reservations, and the unmapped ranges in them.
//!
//! First fit by address: handles that are mapped in sequence are contiguous until one is returned. The last unit of each
//! reservation is never used, so ranges of two reservations are never adjacent.

use std::collections::BTreeMap;

use xlog_driver::{DriverError, DriverResult, VirtualMemory};

use super::super::{Span, round_up, to_usize};

/// The largest alignment of a block.
const ALIGN: u64 = 2 << 20;
/// Reservations are large: addresses cost nothing, and a second reservation separates two spans.
const MIN_RESERVATION: u64 = 1 << 40;
const TIMES_THE_DEVICE: u64 = 8;

pub(super) struct Addresses {
    granularity: u64,
    /// The size of the next reservation, halved whenever the driver refuses it.
    next: u64,
    reservations: Vec<Span>,
    /// Sizes of the unmapped ranges, by address. No two are adjacent.
    gaps: BTreeMap<u64, u64>,
}

impl Addresses {
    pub(super) fn new(granularity: u64, device_bytes: u64) -> Self {
        let wanted = device_bytes.saturating_mul(TIMES_THE_DEVICE).max(MIN_RESERVATION);
        let next = wanted.checked_next_power_of_two().unwrap_or(MIN_RESERVATION);
        Self { granularity, next, reservations: Vec::new(), gaps: BTreeMap::new() }
    }

    /// Allocates an unmapped range; reserves more addresses if there is none. `bytes` is a multiple of the granularity.
    pub(super) fn allocate(&mut self, memory: &dyn VirtualMemory, bytes: u64) -> DriverResult<u64> {
        if let Some(start) = self.first_fit(bytes) {
            return Ok(start);
        }
        self.reserve(memory, bytes)?;
        let none = DriverError::OutOfMemory { call: "reserve", requested: bytes };
        self.first_fit(bytes).ok_or(none)
    }

    /// Allocates exactly these addresses; false if they are not free.
    pub(super) fn allocate_at(&mut self, ptr: u64, bytes: u64) -> bool {
        let found = self.gaps.range(..=ptr).next_back().map(|(&start, &size)| (start, size));
        let Some((start, size)) = found.filter(|(start, size)| start + size >= ptr + bytes) else {
            return false;
        };
        self.gaps.remove(&start);
        if start < ptr {
            self.gaps.insert(start, ptr - start);
        }
        if ptr + bytes < start + size {
            self.gaps.insert(ptr + bytes, start + size - ptr - bytes);
        }
        true
    }

    /// The unit of handles and of unmapped ranges.
    pub(super) fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Iterates over the unmapped ranges by address.
    pub(super) fn gaps(&self) -> impl Iterator<Item = Span> {
        self.gaps.iter().map(|(&ptr, &bytes)| Span { ptr, bytes })
    }

    /// Frees a range that [`allocate`](Self::allocate) returned, or a part of one.
    pub(super) fn free(&mut self, ptr: u64, bytes: u64) {
        let (mut start, mut end) = (ptr, ptr.saturating_add(bytes));
        if let Some((&before, &size)) = self.gaps.range(..start).next_back()
            && before + size == start
        {
            self.gaps.remove(&before);
            start = before;
        }
        if let Some(size) = self.gaps.remove(&end) {
            end += size;
        }
        self.gaps.insert(start, end - start);
    }

    /// Releases every reservation without allocated addresses.
    pub(super) fn release(&mut self, memory: &dyn VirtualMemory) {
        let Self { granularity, reservations, gaps, .. } = self;
        reservations.retain(|reservation| {
            let usable = reservation.bytes - *granularity;
            if gaps.get(&reservation.ptr) != Some(&usable) {
                return true;
            }
            #[allow(unsafe_code)]
            // SAFETY: a whole reservation with every address free, so nothing is mapped there.
            let released =
                unsafe { memory.release(reservation.ptr, to_usize(reservation.bytes)) }.is_ok();
            if released {
                gaps.remove(&reservation.ptr);
            }
            !released
        });
    }

    fn first_fit(&mut self, bytes: u64) -> Option<u64> {
        let (&start, &size) = self.gaps.iter().find(|&(_, &size)| size >= bytes)?;
        self.gaps.remove(&start);
        if size > bytes {
            self.gaps.insert(start + bytes, size - bytes);
        }
        Some(start)
    }

    /// Reserves as much as the driver allows, at least enough for `bytes`.
    pub(super) fn reserve(&mut self, memory: &dyn VirtualMemory, bytes: u64) -> DriverResult<()> {
        let none = DriverError::OutOfMemory { call: "reserve", requested: bytes };
        let Some(minimum) = bytes.checked_add(self.granularity) else { return Err(none) };
        let align = if self.granularity < ALIGN { to_usize(ALIGN) } else { 0 };
        let mut size = round_up(self.next.max(minimum), self.granularity).ok_or(none)?;
        loop {
            match memory.reserve(to_usize(size), align) {
                Ok(ptr) => {
                    self.next = size;
                    self.reservations.push(Span { ptr, bytes: size });
                    self.gaps.insert(ptr, size - self.granularity);
                    return Ok(());
                }
                Err(error) if size == minimum || error.is_device_lost() => return Err(error),
                Err(_) => {
                    let half = round_up(size / 2, self.granularity).unwrap_or(minimum);
                    size = if half < size { half.max(minimum) } else { minimum };
                }
            }
        }
    }
}
