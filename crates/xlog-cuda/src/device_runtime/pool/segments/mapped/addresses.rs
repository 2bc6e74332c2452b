//! The addresses of a pool: reservations, and what of them is not mapped.
//!
//! The lowest free range that is long enough is taken, so memory that is mapped one after the other is contiguous as long as
//! nothing is given back. The last unit of each reservation is never used: ranges of two reservations are never adjacent.

use std::collections::BTreeMap;

use xlog_driver::{DriverError, DriverResult, VirtualMemory};

use super::super::{Span, round_up, to_usize};

/// The alignment that a block can ask for.
const ALIGN: u64 = 2 << 20;
/// Addresses cost nothing, and running out of them means a hole between two reservations.
const MIN_RESERVATION: u64 = 1 << 40;
const TIMES_THE_DEVICE: u64 = 8;

pub(super) struct Addresses {
    granularity: u64,
    /// The size of the next reservation, while the driver gives as much.
    next: u64,
    reservations: Vec<Span>,
    /// Free ranges: start and size. No two are adjacent.
    gaps: BTreeMap<u64, u64>,
}

impl Addresses {
    pub(super) fn new(granularity: u64, device_bytes: u64) -> Self {
        let wanted = device_bytes.saturating_mul(TIMES_THE_DEVICE).max(MIN_RESERVATION);
        let next = wanted.checked_next_power_of_two().unwrap_or(MIN_RESERVATION);
        Self { granularity, next, reservations: Vec::new(), gaps: BTreeMap::new() }
    }

    /// Takes a free range, reserving more where there is none. `bytes` is a multiple of the granularity.
    pub(super) fn allocate(&mut self, memory: &dyn VirtualMemory, bytes: u64) -> DriverResult<u64> {
        if let Some(start) = self.first_fit(bytes) {
            return Ok(start);
        }
        self.reserve(memory, bytes)?;
        let none = DriverError::OutOfMemory { call: "reserve", requested: bytes };
        self.first_fit(bytes).ok_or(none)
    }

    /// Gives a range back that [`take`](Self::take) gave out, or a part of one.
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

    /// Gives up every reservation of which nothing is taken.
    pub(super) fn release(&mut self, memory: &dyn VirtualMemory) {
        let Self { granularity, reservations, gaps, .. } = self;
        reservations.retain(|reservation| {
            let usable = reservation.bytes - *granularity;
            if gaps.get(&reservation.ptr) != Some(&usable) {
                return true;
            }
            #[allow(unsafe_code)]
            // SAFETY: it is a whole reservation, and every address in it is free, so nothing is mapped there.
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

    /// Reserves as much as the driver gives, at least enough for `bytes`.
    fn reserve(&mut self, memory: &dyn VirtualMemory, bytes: u64) -> DriverResult<()> {
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
