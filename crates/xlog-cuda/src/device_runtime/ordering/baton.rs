//! What the lock of a block guards: its uses, or, while it goes from hand to hand, no more than who had it last.
//!
//! A block that is written by one stream after another has one finished write outstanding, which the next use follows and takes the
//! place of. That much is a [`Baton`]: two words instead of lists. Whoever needs more asks for [`Shared::all`], which unfolds it.
//!
//! Invariants: while there is a baton the block is live and slow and its lists are empty; a use that is open then followed the baton, is
//! the one that the record names as opened, and is the only one that was opened through the lock.

use super::record::{Far, Record, tag_of};
use super::uses::Uses;

/// The one finished write that is outstanding.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Baton {
    /// 0 when there is no baton.
    pub(crate) stamp: u64,
    /// The stream, by its place in the pool.
    pub(crate) place: u32,
    /// The place of the stream whose use is open, if one is.
    pub(crate) by: u32,
}

/// Behind the lock of a block's record.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    baton: Baton,
    /// Made at the first use that needs it, and kept for later blocks.
    uses: Option<Box<Uses>>,
}

impl Shared {
    /// All uses, in full.
    #[inline(always)]
    pub(crate) fn all(&mut self, record: &Record) -> &mut Uses {
        if self.baton.stamp != 0 {
            self.unfold(record);
        }
        self.uses.get_or_insert_default()
    }

    #[inline(never)]
    fn unfold(&mut self, record: &Record) {
        let baton = std::mem::take(&mut self.baton);
        let uses = self.uses.get_or_insert_default();
        uses.unfold(record.home(), baton, record.opened());
    }

    /// The baton of a block, if there is one and no use is open: the next use may take it.
    #[inline(always)]
    pub(crate) fn lying(&mut self, far: &Far) -> Option<&mut Baton> {
        (self.baton.stamp != 0 && far.has_none_opened()).then_some(&mut self.baton)
    }

    /// The baton of a block, if there is one and a use of this name is open.
    #[inline(always)]
    pub(crate) fn carried(&mut self, far: &Far, name: u64) -> Option<&mut Baton> {
        (self.baton.stamp != 0 && far.has_opened(name)).then_some(&mut self.baton)
    }

    /// After a use was closed: folds the uses into a baton, if there is nothing else.
    #[inline(never)]
    pub(crate) fn fold(&mut self, record: &Record) {
        if let Some(uses) = &mut self.uses
            && record.gate.is_live_and_slow(tag_of(record.generation()))
            && let Some((place, stamp)) = uses.fold(record.home())
        {
            self.baton = Baton { stamp, place, by: 0 };
            record.far().set_none_opened();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_runtime::ordering::gate::Attempt;
    use crate::device_runtime::ordering::locked::{Closed, close_own, pass_on};
    use crate::device_runtime::ordering::record::use_name;
    use crate::device_runtime::resource::{Access, Generation, StreamId};
    use std::collections::BTreeSet;

    const HOME: u32 = 3;
    const OTHER: u32 = 4;

    /// A live block of stream 1 at place 3 that has gone slow, and whose own stream announced a write at stamp 5.
    fn record() -> (Record, Generation) {
        let (record, generation) = Record::begun(StreamId(1), HOME, 5);
        record.with_uses(|uses| {
            assert!(record.gate.enter_slow(tag_of(generation)));
            uses.take_stamps(&record);
            uses.finished(HOME, HOME, 5, true, None);
        });
        (record, generation)
    }

    /// What is outstanding, by place and stamp.
    fn outstanding(record: &Record) -> BTreeSet<(u32, u64)> {
        record.with_uses(|uses| {
            let own = uses.own_stamps();
            let own = [own.0, own.1].into_iter().filter(|stamp| *stamp != 0);
            let others = uses.copy_outstanding();
            others.iter().map(|at| (at.place, at.stamp)).chain(own.map(|at| (HOME, at))).collect()
        })
    }

    /// Opens a use as a handover does; false where there is no baton to take.
    fn take(record: &Record, id: StreamId, by: u32, writes: bool) -> bool {
        record.shared().with(|shared| match shared.lying(record.far()) {
            Some(baton) => {
                baton.by = by;
                record.far().set_opened(use_name(id, writes));
                true
            }
            None => false,
        })
    }

    fn fold(record: &Record) -> bool {
        record.shared().with(|shared| {
            shared.fold(record);
            shared.lying(record.far()).is_some()
        })
    }

    #[test]
    fn a_baton_is_what_its_last_writer_left_whoever_looks() {
        let (record, generation) = record();
        let other = StreamId(2);
        assert!(fold(&record));
        for turn in 0..4 {
            assert!(take(&record, other, OTHER, true));
            let of = (other, OTHER, 10 + turn);
            let close = |shared: &mut Shared| {
                pass_on((&record, record.far()), shared, generation, of, Access::Write)
            };
            assert_eq!(record.shared().with(close), Closed::Open);
            if turn % 2 == 0 {
                assert_eq!(outstanding(&record), BTreeSet::from([(OTHER, 10 + turn)]));
                assert!(fold(&record));
            }
            assert!(take(&record, StreamId(1), HOME, true));
            let of = (StreamId(1), 20 + turn);
            let close = |shared: &mut Shared| {
                close_own((&record, record.far()), shared, generation, of, Access::Write)
            };
            assert_eq!(record.shared().with(close), Closed::Open);
        }
        assert_eq!(outstanding(&record), BTreeSet::from([(HOME, 23)]));
    }

    #[test]
    fn a_use_that_carries_the_baton_is_open_to_whoever_looks_and_supersedes_no_more_than_that() {
        let (record, generation) = record();
        let (other, third) = (StreamId(2), StreamId(9));
        assert!(fold(&record) && take(&record, other, OTHER, true));
        assert!(record.with_uses(|uses| uses.has_open()));
        assert_eq!(record.with_uses(|uses| uses.find_open(other, Access::ReadWrite)), Some(OTHER));
        assert_eq!(record.with_uses(|uses| uses.find_open(other, Access::Read)), None);
        // A third stream finishes a write meanwhile: it stays.
        record.with_uses(|uses| uses.finished(HOME, 7, 30, true, None));
        let of = (other, OTHER, 11);
        let close = |shared: &mut Shared| {
            pass_on((&record, record.far()), shared, generation, of, Access::Write)
        };
        assert_eq!(record.shared().with(close), Closed::Open);
        assert_eq!(outstanding(&record), BTreeSet::from([(7, 30), (OTHER, 11)]));
        assert!(!fold(&record), "two are outstanding");
        assert!(!take(&record, third, 8, true));
    }

    #[test]
    fn a_read_does_not_take_the_baton_away() {
        let (record, generation) = record();
        let other = StreamId(2);
        assert!(fold(&record) && take(&record, other, OTHER, false));
        let of = (other, OTHER, 11);
        let close = |shared: &mut Shared| {
            pass_on((&record, record.far()), shared, generation, of, Access::Write)
        };
        assert_eq!(record.shared().with(close), Closed::Missing, "no write is open");
        let close = |shared: &mut Shared| {
            pass_on((&record, record.far()), shared, generation, of, Access::Read)
        };
        assert_eq!(record.shared().with(close), Closed::Open);
        assert_eq!(outstanding(&record), BTreeSet::from([(HOME, 5), (OTHER, 11)]));
    }

    #[test]
    fn a_use_that_could_not_wait_leaves_the_baton_and_a_stale_claim_closes_nothing() {
        let (record, generation) = record();
        let other = StreamId(2);
        assert!(fold(&record) && take(&record, other, OTHER, true));
        let stale = Generation(generation.0 ^ 1 << 40);
        let of = (other, OTHER, 11);
        let close = |shared: &mut Shared| {
            pass_on((&record, record.far()), shared, stale, of, Access::Write)
        };
        assert_eq!(record.shared().with(close), Closed::Stale);
        record.with_uses(|uses| uses.cancel_newest(other, Access::Write));
        assert!(!record.with_uses(|uses| uses.has_open()));
        assert_eq!(outstanding(&record), BTreeSet::from([(HOME, 5)]));
    }

    #[test]
    fn a_block_that_is_not_slow_or_not_live_gets_no_baton() {
        let (record, generation) = Record::begun(StreamId(1), HOME, 5);
        record.with_uses(|uses| uses.take_stamps(&record));
        assert!(!fold(&record), "it is not slow");
        assert_ne!(record.gate.open(tag_of(generation), true), Attempt::Stale);
        record.with_uses(|_| assert!(record.gate.retire(tag_of(generation))));
        assert!(!fold(&record), "it is not live");
        assert_eq!(outstanding(&record), BTreeSet::from([(HOME, 5)]));
    }
}
