//! When allocators reserved which ranges of the device, in use or not: the background of the address map.
use std::cmp::Reverse;

use xlog_trace::{Record, Reserved, ReservedRange};

/// The maximum number of ranges listed: those with the most bytes times time.
const LISTED: usize = 4096;

/// A range from its reservation to its return, in nanoseconds since the first record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RangeRow {
    pub(crate) process: u32,
    pub(crate) device: u32,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) from: u64,
    /// `None` if it was reserved at the end.
    pub(crate) to: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct ReservedRanges {
    held: Reserved,
    ended: Vec<RangeRow>,
    all: u64,
}

impl ReservedRanges {
    pub(crate) fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Applies a record at `time`. Returns whether it is a record of a segment.
    pub(crate) fn apply(&mut self, record: &Record, time: u64) -> bool {
        let (ended, all) = (&mut self.ended, &mut self.all);
        // The page's times start with the log and never decrease, unlike those of records.
        let record = record.with_time_nanos(time);
        let applied = self.held.apply(&record, |range| {
            *all += 1;
            ended.push(row(range, Some(time)));
        });
        if self.ended.len() >= 4 * LISTED {
            self.cut(time);
        }
        applied
    }

    fn cut(&mut self, time: u64) {
        let area = |row: &RangeRow| {
            let held = row.to.unwrap_or(time).saturating_sub(row.from);
            u128::from(row.bytes) * u128::from(held)
        };
        self.ended.sort_by_key(|row| (Reverse(area(row)), row.from, row.start));
        self.ended.truncate(LISTED);
    }

    /// Returns the ranges by address and time, and their total number.
    pub(crate) fn finish(mut self, time: u64) -> (Vec<RangeRow>, u64) {
        let held: Vec<_> = self.held.ranges().map(|range| row(range, None)).collect();
        let all = self.all + held.len() as u64;
        self.ended.extend(held);
        self.cut(time);
        self.ended.sort_by_key(|row| (row.process, row.device, row.start, row.from));
        (self.ended, all)
    }
}

fn row(range: ReservedRange, to: Option<u64>) -> RangeRow {
    let ReservedRange { process, device, start, bytes, since_nanos: from, .. } = range;
    RangeRow { process, device, start, bytes, from, to }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_trace::Action;

    fn record(action: Action, start: u64, bytes: u64) -> Record {
        Record::new(action, 0, 0, 0).with_ptr(start).with_bytes(bytes)
    }

    #[test]
    fn a_range_is_there_from_its_taking_to_its_return_in_parts() {
        let mut ranges = ReservedRanges::default();
        assert!(ranges.apply(&record(Action::SegmentTake, 100, 50), 10));
        assert!(ranges.apply(&record(Action::SegmentReturn, 130, 20), 20));
        assert!(!ranges.apply(&record(Action::Allocate, 100, 1), 30));
        assert_eq!(ranges.bytes(), 30);
        let (rows, all) = ranges.finish(40);
        let rows: Vec<_> = rows.iter().map(|r| (r.start, r.bytes, r.from, r.to)).collect();
        assert_eq!((rows, all), (vec![(100, 30, 10, None), (130, 20, 10, Some(20))], 2));
    }

    #[test]
    fn of_very_many_ranges_those_with_the_most_bytes_times_time_are_kept() {
        let mut ranges = ReservedRanges::default();
        for at in 0..30_000 {
            ranges.apply(&record(Action::SegmentTake, 1 << 30, 1 + at % 100), 2 * at);
            ranges.apply(&record(Action::SegmentReturn, 1 << 30, 1 + at % 100), 2 * at + 1);
        }
        let (rows, all) = ranges.finish(60_000);
        assert_eq!((rows.len(), all), (LISTED, 30_000));
        assert!(rows.iter().all(|row| row.bytes > 80), "{:?}", rows.first());
    }
}
