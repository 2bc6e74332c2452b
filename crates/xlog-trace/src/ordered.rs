//! Merges the records of many threads into one history.
//!
//! A recorder writes each thread's records in order, but one thread after another. This adapter buffers a window of
//! records and returns them by `order`; the window bounds its memory. A record that arrives after one of higher order
//! was returned is returned out of order and counted as late.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::error::TraceError;
use crate::reader::{LogState, Source};
use crate::record::Record;

/// The default window in records: 52 MiB when full.
pub const DEFAULT_WINDOW: usize = 1 << 19;

/// A record, compared by its order, then by its arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ByOrder {
    order: u64,
    arrival: u64,
    record: Record,
}

/// A source that returns the records of another by `order`.
///
/// ```
/// use xlog_trace::{Ordered, Reader, Source, Strictness};
///
/// # fn main() -> Result<(), xlog_trace::TraceError> {
/// let csv = "action,pointer,bytes,order\nallocate,0x2000,8,2\nallocate,0x1000,8,1\n";
/// let mut log = Ordered::new(Reader::from_stream(csv.as_bytes(), Strictness::Strict)?);
/// assert_eq!(log.next_record()?.and_then(|record| record.ptr()), Some(0x1000));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Ordered<S> {
    inner: S,
    window: usize,
    /// Records that arrived in order: most do, and they need no heap.
    run: VecDeque<ByOrder>,
    /// Records that arrived after one of higher order.
    stray: BinaryHeap<Reverse<ByOrder>>,
    arrivals: u64,
    highest: u64,
    late: u64,
    ended: bool,
}

impl<S: Source> Ordered<S> {
    /// Orders `inner` with the default window.
    pub fn new(inner: S) -> Self {
        Self::with_window(inner, DEFAULT_WINDOW)
    }

    /// Orders `inner` with a window of at most `window` records (at least one).
    pub fn with_window(inner: S, window: usize) -> Self {
        Self {
            inner,
            window: window.max(1),
            run: VecDeque::new(),
            stray: BinaryHeap::new(),
            arrivals: 0,
            highest: 0,
            late: 0,
            ended: false,
        }
    }

    /// Returns the number of records that arrived too late for the window. If it is zero, the order is exact.
    pub fn late(&self) -> u64 {
        self.late
    }
}

impl<S: Source> Source for Ordered<S> {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while !self.ended && self.run.len() + self.stray.len() < self.window {
            match self.inner.next_record()? {
                Some(record) => {
                    self.arrivals += 1;
                    let (order, arrival) = (record.order, self.arrivals);
                    let record = ByOrder { order, arrival, record };
                    match self.run.back() {
                        Some(last) if *last > record => self.stray.push(Reverse(record)),
                        _ => self.run.push_back(record),
                    }
                }
                None => self.ended = true,
            }
        }
        let from_run = match (self.run.front(), self.stray.peek()) {
            (Some(first), Some(Reverse(stray))) => first < stray,
            (first, _) => first.is_some(),
        };
        let next = match from_run {
            true => self.run.pop_front(),
            false => self.stray.pop().map(|Reverse(stray)| stray),
        };
        let Some(ByOrder { record, .. }) = next else { return Ok(None) };
        if record.order < self.highest {
            self.late += 1;
        }
        self.highest = self.highest.max(record.order);
        Ok(Some(record))
    }

    fn state(&self) -> &LogState {
        self.inner.state()
    }
}

#[cfg(test)]
mod tests {
    use xlog_base::Random;

    use super::*;
    use crate::action::Action;

    struct Given(std::vec::IntoIter<Record>, LogState);

    impl Source for Given {
        fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
            Ok(self.0.next())
        }

        fn state(&self) -> &LogState {
            &self.1
        }
    }

    #[test]
    fn the_window_gives_its_least_whatever_the_arrival() {
        let mut random = Random::new(12_345);
        let mut draw = |below: u64| random.below_u64(below);
        for case in 0..200 {
            // From nearly sorted to random, including equal orders.
            let scatter = 1 + case % 40;
            let orders: Vec<u64> = (0..300).map(|at| at + draw(scatter)).collect();
            let window = 1 + draw(50) as usize;
            let record =
                |(at, order): (usize, &u64)| Record::new(Action::Allocate, 0, *order, at as u64);
            let records: Vec<Record> = orders.iter().enumerate().map(record).collect();
            let given = Given(records.clone().into_iter(), LogState::default());
            let mut ordered = Ordered::with_window(given, window);
            let (mut held, mut coming) = (Vec::new(), records.into_iter());
            let (mut highest, mut late) = (0, 0);
            loop {
                held.extend(coming.by_ref().take(window - held.len()));
                let least = held.iter().enumerate().min_by_key(|(_, r)| (r.order, r.time));
                let expected = least.map(|(at, _)| at).map(|at| held.remove(at));
                assert_eq!(ordered.next_record().unwrap(), expected, "case {case}");
                let Some(record) = expected else { break };
                late += u64::from(record.order < highest);
                highest = highest.max(record.order);
            }
            assert_eq!(ordered.late(), late, "case {case}");
        }
    }
}
