//! The uses of a block that its gate alone cannot hold: those of other streams, and those open while they are there.

use std::sync::Arc;

use xlog_driver::Access;

use super::clock::Seen;
use super::gate::BlockGate;
use crate::DeviceStream;
use crate::device_runtime::resource::StreamId;
use crate::stream::RawStream;

/// Finished work of one stream that later work may have to follow.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) stream: Arc<RawStream>,
    pub(crate) stamp: u64,
}

/// A use between prepare and finish.
#[derive(Debug)]
struct Open {
    number: u64,
    /// The id it was opened under: it closes under the same one, also when the stream was given back meanwhile.
    id: StreamId,
    stream: Arc<RawStream>,
    access: Access,
    /// What the stream had seen when it was prepared: a write supersedes what that covers.
    snapshot: Option<Seen>,
}

impl Open {
    /// What is written is closed as written: whether it was also read makes no difference to order.
    fn matches(&self, id: StreamId, access: Access) -> bool {
        self.id == id && self.access.writes() == access.writes()
    }
}

/// Behind the lock of a block's record.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// The stream the block was allocated on; it lives as long as the block does.
    pub(crate) home: Option<Arc<DeviceStream>>,
    writes: Vec<Outstanding>,
    reads: Vec<Outstanding>,
    open: Vec<Open>,
    opened: u64,
    /// The block was returned while a use was open: the last one to close frees it.
    pub(crate) free_on_close: bool,
}

impl Uses {
    pub(crate) fn begin(&mut self, home: Option<Arc<DeviceStream>>) {
        self.home = home;
        self.writes.clear();
        self.reads.clear();
        self.open.clear();
        self.free_on_close = false;
    }

    /// Forgets what the host knows to have completed.
    fn prune(&mut self) {
        self.writes.retain(|entry| !entry.stream.clock().is_complete(entry.stamp));
        self.reads.retain(|entry| !entry.stream.clock().is_complete(entry.stamp));
    }

    /// True when only the own stream is involved: its uses need no lock.
    pub(crate) fn is_quiet(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty() && self.open.is_empty()
    }

    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Opens a use of `stream`, and adds to `needed` what it must still wait for; returns how many waits were implied, and
    /// the number of the use.
    pub(crate) fn open(
        &mut self,
        gate: &BlockGate,
        of: &DeviceStream,
        access: Access,
        needed: &mut Vec<Outstanding>,
    ) -> (u64, u64) {
        self.prune();
        let stream = of.raw();
        let key = stream.clock().key();
        let mut implied = 0;
        let mut follow = |stream_of: &Arc<RawStream>, stamp: u64| {
            if stamp == 0 || stream_of.clock().key() == key {
                return;
            }
            let known = stream_of.clock();
            if known.is_complete(stamp) || stream.clock().covers(known.key(), stamp) {
                implied += 1;
            } else {
                needed.push(Outstanding { stream: Arc::clone(stream_of), stamp });
            }
        };
        if let Some(home) = &self.home {
            let own_read = if access.writes() { gate.own_read() } else { 0 };
            follow(home.raw(), gate.own_write().max(own_read));
        }
        let reads = if access.writes() { self.reads.as_slice() } else { &[] };
        for entry in self.writes.iter().chain(reads) {
            follow(&entry.stream, entry.stamp);
        }
        self.opened += 1;
        let (number, stream) = (self.opened, Arc::clone(stream));
        self.open.push(Open { number, id: of.id(), stream, access, snapshot: None });
        (implied, self.opened)
    }

    /// After the waits of a write were queued: what its stream has seen then.
    pub(crate) fn prepared(&mut self, number: u64, snapshot: Seen) {
        if let Some(open) = self.open.iter_mut().find(|open| open.number == number) {
            open.snapshot = Some(snapshot);
        }
    }

    /// The waits could not be queued: as if it had never been opened.
    pub(crate) fn cancel(&mut self, number: u64) {
        self.open.retain(|open| open.number != number);
    }

    /// The stream of an open use of this id and access, if there is one.
    pub(crate) fn find_open(&self, id: StreamId, access: Access) -> Option<Arc<RawStream>> {
        let open = self.open.iter().find(|open| open.matches(id, access))?;
        Some(Arc::clone(&open.stream))
    }

    /// Closes the oldest such use; `Some` with its snapshot when there was one.
    pub(crate) fn close(&mut self, id: StreamId, access: Access) -> Option<Option<Seen>> {
        let at = self.open.iter().position(|open| open.matches(id, access))?;
        Some(self.open.remove(at).snapshot)
    }

    /// Finished work joins the outstanding; a write takes the place of what its snapshot covers.
    pub(crate) fn finished(
        &mut self,
        gate: &BlockGate,
        stream: &Arc<RawStream>,
        stamp: u64,
        writes: bool,
        snapshot: Option<&Seen>,
    ) {
        let key = stream.clock().key();
        if writes && let Some(seen) = snapshot {
            let kept = |entry: &Outstanding| {
                let of = entry.stream.clock().key();
                // Work of its own stream is covered by its stamp; another thread may have finished later.
                if of == key { entry.stamp > stamp } else { seen.get(of) < entry.stamp }
            };
            self.writes.retain(kept);
            self.reads.retain(kept);
            if let Some(home) = &self.home {
                let home = home.raw().clock().key();
                if home != key {
                    gate.supersede_own(seen.get(home));
                }
            }
        }
        let own = self.home.as_ref().is_some_and(|home| home.raw().clock().key() == key);
        if own {
            gate.stamp(writes, stamp);
            return;
        }
        let list = if writes { &mut self.writes } else { &mut self.reads };
        match list.iter_mut().find(|entry| entry.stream.clock().key() == key) {
            Some(entry) => entry.stamp = entry.stamp.max(stamp),
            None => list.push(Outstanding { stream: Arc::clone(stream), stamp }),
        }
    }

    /// True when whatever is queued on `stream` now comes after everything outstanding, without a wait.
    pub(crate) fn is_followed_by(&self, stream: &RawStream) -> bool {
        self.writes.iter().chain(&self.reads).all(|entry| {
            let of = entry.stream.clock();
            of.is_complete(entry.stamp)
                || of.key() == stream.clock().key()
                || stream.clock().covers(of.key(), entry.stamp)
        })
    }

    /// True when everything outstanding is known to have completed, or no event could tell.
    pub(crate) fn is_complete(&self) -> bool {
        self.writes
            .iter()
            .chain(&self.reads)
            .all(|entry| entry.stream.poll(entry.stamp) != Some(false))
    }

    /// Everything a free must follow.
    pub(crate) fn take_outstanding(&mut self) -> Vec<Outstanding> {
        self.prune();
        let mut all = std::mem::take(&mut self.writes);
        all.append(&mut self.reads);
        all
    }

    /// The free could not be queued: it must still follow these.
    pub(crate) fn put_back(&mut self, outstanding: Vec<Outstanding>) {
        self.writes.extend(outstanding);
    }
}
