//! The clock and simulated time of a stream at its last analysed operation.

use std::sync::Arc;

use crate::clock::{Epoch, VectorClock};
use crate::op::Known;

pub(crate) struct Timeline {
    pub(crate) slot: u32,
    pub(crate) clock: VectorClock,
    /// Simulated time at which everything analysed has run.
    pub(crate) time: u64,
    /// The clock after the last join, which differs from the current one only in the stream's own slot.
    snapshot: Option<Arc<VectorClock>>,
    /// The last joined clock of the host.
    host: Arc<VectorClock>,
}

impl Timeline {
    /// Starts a new owner of `slot` after `count` earlier operations, all of which the host has seen complete.
    pub(crate) fn new(slot: u32, count: u64, host: &Arc<VectorClock>) -> Self {
        let mut clock = VectorClock::clone(host);
        clock.set(slot, count);
        Self { slot, clock, time: 0, snapshot: None, host: Arc::clone(host) }
    }

    pub(crate) fn join(&mut self, clock: &VectorClock, time: u64) {
        self.clock.join(clock);
        self.snapshot = None;
        self.time = self.time.max(time);
    }

    pub(crate) fn join_host(&mut self, host: &Arc<VectorClock>) {
        if !Arc::ptr_eq(host, &self.host) {
            self.clock.join(host);
            self.snapshot = None;
            self.host = Arc::clone(host);
        }
    }

    /// Counts the next operation of the stream.
    pub(crate) fn tick(&mut self) -> Epoch {
        self.clock.tick(self.slot)
    }

    /// The clock of an operation of this stream, including itself.
    pub(crate) fn known(&mut self, epoch: Epoch) -> Known {
        let snapshot = self.snapshot.get_or_insert_with(|| Arc::new(self.clock.clone()));
        Known { others: Arc::clone(snapshot), epoch, time: self.time }
    }
}
