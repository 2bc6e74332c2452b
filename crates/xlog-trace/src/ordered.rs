//! Records of many threads, brought back into one history.
//!
//! A recorder writes each thread's records in order, but threads one after the other. This adapter
//! holds a window of records and gives them by `order`. The window bounds its memory; a record that
//! comes after one of higher order has been given is given all the same, and counted as late.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::error::TraceError;
use crate::header::Header;
use crate::names::Names;
use crate::reader::{ReadReport, Source};
use crate::record::Record;

/// Default window: 96 bytes a record, so 48 MiB when full.
pub const DEFAULT_WINDOW: usize = 1 << 19;

#[derive(Clone, Copy, Debug)]
struct ByOrder(Record, u64);

impl ByOrder {
    fn key(&self) -> (u64, u64) {
        (self.0.order, self.1)
    }
}

impl PartialEq for ByOrder {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ByOrder {}

impl PartialOrd for ByOrder {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByOrder {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// A source whose records come by `order`.
#[derive(Debug)]
pub struct Ordered<S> {
    inner: S,
    window: usize,
    held: BinaryHeap<Reverse<ByOrder>>,
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

    /// Orders `inner`, holding at most `window` records (at least one).
    pub fn with_window(inner: S, window: usize) -> Self {
        Self {
            inner,
            window: window.max(1),
            held: BinaryHeap::new(),
            arrivals: 0,
            highest: 0,
            late: 0,
            ended: false,
        }
    }

    /// Records that came too late for the window. Zero: the order is exact.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The source below.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: Source> Source for Ordered<S> {
    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while !self.ended && self.held.len() < self.window {
            match self.inner.next_record()? {
                Some(record) => {
                    self.arrivals += 1;
                    self.held.push(Reverse(ByOrder(record, self.arrivals)));
                }
                None => self.ended = true,
            }
        }
        let Some(Reverse(ByOrder(record, _))) = self.held.pop() else { return Ok(None) };
        if record.order < self.highest {
            self.late += 1;
        }
        self.highest = self.highest.max(record.order);
        Ok(Some(record))
    }

    fn header(&self) -> &Header {
        self.inner.header()
    }

    fn names(&self) -> &Names {
        self.inner.names()
    }

    fn report(&self) -> &ReadReport {
        self.inner.report()
    }
}
