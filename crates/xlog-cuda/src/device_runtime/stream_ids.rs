//! Stream ids, issued once for the whole process.
//!
//! One counter for all pools makes an id carry its pool's identity: no two pools ever have the same id out. An id stays
//! live as long as any handle of its stream does, also after the stream was given back, and a live id is never issued
//! again, even when the counter has wrapped around. 0 and `u32::MAX` are never issued.

use std::collections::BTreeSet;

use xlog_base::{Mutex, MutexGuard};

use super::StreamId;

/// A standard mutex: all devices of the process share it, so a seeded scheduler that saw it would depend on strangers.
/// Nothing is called while it is held.
static SOURCE: Mutex<IdSource> = Mutex::new(IdSource { next: 1, live: BTreeSet::new() });

fn source() -> MutexGuard<'static, IdSource> {
    SOURCE.lock()
}

/// The counter and the ids that must not be issued again yet.
struct IdSource {
    next: u32,
    live: BTreeSet<u32>,
}

impl IdSource {
    /// Ends because live ids are few: each has a driver stream or a handle in memory behind it.
    fn issue(&mut self) -> u32 {
        loop {
            let id = self.next;
            self.next = self.next.wrapping_add(1);
            if id != StreamId::DEFAULT.0 && id != u32::MAX && self.live.insert(id) {
                return id;
            }
        }
    }
}

/// An id that is live until this is dropped.
#[derive(Debug)]
pub(crate) struct IssuedId(StreamId);

impl IssuedId {
    /// The id of the stream that every pool has. It is shared, so it is not counted as live.
    pub(crate) const DEFAULT: Self = Self(StreamId::DEFAULT);

    /// A new id.
    pub(crate) fn issue() -> Self {
        Self(StreamId(source().issue()))
    }

    pub(crate) fn id(&self) -> StreamId {
        self.0
    }
}

impl Drop for IssuedId {
    fn drop(&mut self) {
        if self.0 != StreamId::DEFAULT {
            source().live.remove(&self.0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrap_around_skips_zero_the_last_number_and_live_ids() {
        let mut source = IdSource { next: u32::MAX - 2, live: BTreeSet::from([1, 2]) };
        let issued: Vec<u32> = (0..4).map(|_| source.issue()).collect();
        assert_eq!(issued, [u32::MAX - 2, u32::MAX - 1, 3, 4]);
    }

    #[test]
    fn a_dropped_id_may_be_issued_after_wrap_around_and_a_live_one_may_not() {
        let mut source = IdSource { next: 5, live: BTreeSet::new() };
        assert_eq!((source.issue(), source.issue()), (5, 6));
        source.live.remove(&5);
        source.next = 5;
        assert_eq!((source.issue(), source.issue()), (5, 7));
    }

    #[test]
    fn an_issued_id_is_live_until_it_is_dropped() {
        let id = IssuedId::issue();
        let number = id.id().0;
        assert!(source().live.contains(&number));
        drop(id);
        assert!(!source().live.contains(&number));
    }
}
