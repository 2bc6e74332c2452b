//! Device memory that allocators reserve, in use or not: their segments at a point of a log.
//!
//! One return may cover part of a segment, or several segments. A new segment replaces the ranges it overlaps, whose
//! return the log lacks. Memory grows with the segments, up to a limit.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::action::Action;
use crate::record::Record;

/// The maximum number of ranges tracked; further segments are not counted.
pub const MAX_RESERVED_RANGES: usize = 1 << 20;

/// A range of a device that an allocator reserves, or did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReservedRange {
    /// The process of the allocator.
    pub process: u32,
    /// The device.
    pub device: u32,
    /// The first address.
    pub start: u64,
    /// The size.
    pub bytes: u64,
    /// When it was reserved, as a record's time.
    pub since_nanos: u64,
}

/// Counts and bytes of reserved memory.
#[derive(Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReservedUsage {
    /// Records of reserved segments.
    pub takes: u64,
    /// Records of returned segments.
    pub returns: u64,
    /// The maximum reserved bytes.
    pub peak_bytes: u64,
    /// Bytes reserved when the allocated bytes peaked.
    pub at_peak_bytes: u64,
    /// Bytes reserved at the end.
    pub end_bytes: u64,
}

impl ReservedUsage {
    pub(crate) fn add(&mut self, record: &Record, held: u64) {
        match record.action() {
            Action::SegmentTake => self.takes += 1,
            _ => self.returns += 1,
        }
        self.peak_bytes = self.peak_bytes.max(held);
        self.end_bytes = held;
    }
}

#[derive(Clone, Copy, Debug)]
struct Held {
    end: u64,
    since: u64,
}

/// Tracks the segments of a log, record by record.
///
/// ```
/// use xlog_trace::{Action, Record, Reserved};
///
/// let mut reserved = Reserved::default();
/// let segment = Record::new(Action::SegmentTake, 0, 1, 0).with_ptr(2 << 20).with_bytes(32 << 20);
/// assert!(reserved.apply(&segment, |_| {}));
/// assert_eq!(reserved.bytes(), 32 << 20);
/// ```
#[derive(Debug, Default)]
pub struct Reserved {
    /// Keyed by process, device and first address. Ranges of one device do not overlap.
    ranges: BTreeMap<(u32, u32, u64), Held>,
    bytes: u64,
}

impl Reserved {
    /// Returns the reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the reserved ranges by process, device and address.
    pub fn ranges(&self) -> impl Iterator<Item = ReservedRange> {
        self.ranges.iter().map(|(&(process, device, start), held)| ReservedRange {
            process,
            device,
            start,
            bytes: held.end - start,
            since_nanos: held.since,
        })
    }

    /// Applies a record and passes the ranges that are no longer reserved to `gone`. Returns whether it is a record of a segment.
    pub fn apply(&mut self, record: &Record, mut gone: impl FnMut(ReservedRange)) -> bool {
        let is_taken = match record.action() {
            Action::SegmentTake => true,
            Action::SegmentReturn => false,
            _ => return false,
        };
        let bytes = record.bytes().unwrap_or(0);
        match (record.ptr(), is_taken) {
            _ if record.is_failure() => {}
            (None, true) => self.bytes = self.bytes.saturating_add(bytes),
            (None, false) => self.bytes = self.bytes.saturating_sub(bytes),
            (Some(start), _) => {
                let end = start.saturating_add(bytes);
                self.remove(record, start, end, &mut gone);
                if is_taken && end > start && self.ranges.len() < MAX_RESERVED_RANGES {
                    let held = Held { end, since: record.time_nanos() };
                    self.ranges.insert((record.process(), record.device(), start), held);
                    self.bytes = self.bytes.saturating_add(end - start);
                }
            }
        }
        true
    }

    fn remove(
        &mut self,
        record: &Record,
        start: u64,
        end: u64,
        gone: &mut impl FnMut(ReservedRange),
    ) {
        let (process, device) = (record.process(), record.device());
        while let Some((&key, &held)) = self
            .ranges
            .range((process, device, 0)..(process, device, end))
            .next_back()
            .filter(|(_, held)| held.end > start)
        {
            self.ranges.remove(&key);
            let (from, to) = (key.2.max(start), held.end.min(end));
            if key.2 < from {
                self.ranges.insert(key, Held { end: from, ..held });
            }
            if to < held.end {
                self.ranges.insert((process, device, to), held);
            }
            self.bytes = self.bytes.saturating_sub(to - from);
            let since_nanos = held.since;
            gone(ReservedRange { process, device, start: from, bytes: to - from, since_nanos });
        }
    }
}

#[cfg(test)]
mod tests {
    use xlog_base::Random;

    use super::*;

    fn record(action: Action, time: u64, start: u64, bytes: u64) -> Record {
        Record::new(action, 0, time, time).with_ptr(start).with_bytes(bytes)
    }

    #[test]
    fn parts_and_several_segments_at_once_are_returned() {
        let mut reserved = Reserved::default();
        let mut gone = Vec::new();
        let mut apply =
            |record| reserved.apply(&record, |range| gone.push((range.start, range.bytes)));
        assert!(apply(record(Action::SegmentTake, 0, 100, 50)));
        assert!(apply(record(Action::SegmentTake, 1, 150, 50)));
        assert!(apply(record(Action::SegmentReturn, 2, 120, 10)));
        assert!(apply(record(Action::SegmentReturn, 3, 140, 40)));
        assert!(!apply(record(Action::Deallocate, 4, 100, 50)));
        assert_eq!(gone, [(120, 10), (150, 30), (140, 10)]);
        let held: Vec<_> = reserved.ranges().map(|range| (range.start, range.bytes)).collect();
        assert_eq!((held, reserved.bytes()), (vec![(100, 20), (130, 10), (180, 20)], 50));
    }

    #[test]
    fn any_order_of_ranges_is_counted_as_a_set_of_addresses() {
        let mut random = Random::new(9);
        let mut reserved = Reserved::default();
        let mut model = [false; 64];
        for time in 0..4000 {
            let (start, bytes) = (random.below_u64(56), random.below_u64(9));
            let taken = random.below_u64(2) == 0;
            let action = if taken { Action::SegmentTake } else { Action::SegmentReturn };
            let mut left = 0;
            let before = model.iter().filter(|held| **held).count() as u64;
            reserved.apply(&record(action, time, start, bytes), |range| left += range.bytes);
            for held in &mut model[start as usize..(start + bytes) as usize] {
                *held = taken;
            }
            let after = model.iter().filter(|held| **held).count() as u64;
            assert_eq!(reserved.bytes(), after, "step {time}");
            assert_eq!(before - left + if taken { bytes } else { 0 }, after, "step {time}");
        }
        assert!(reserved.bytes() > 0);
    }

    #[test]
    fn bytes_without_an_address_are_counted() {
        let mut reserved = Reserved::default();
        let record = |action| Record::new(action, 0, 0, 0).with_bytes(7);
        assert!(reserved.apply(&record(Action::SegmentTake), |_| {}));
        assert_eq!((reserved.bytes(), reserved.ranges().count()), (7, 0));
        assert!(reserved.apply(&record(Action::SegmentReturn), |_| {}));
        assert_eq!(reserved.bytes(), 0);
    }
}
