//! State behind the lock of a block: its uses in full, or only its last writer.
//!
//! A block that is written by one stream after another has one outstanding write, which the next use waits for and
//! supersedes. A [`LastWriter`] is that write in two words. [`UseState::uses`] inflates it to lists when more is
//! needed.
//!
//! Invariants: while there is a last writer, the block is live and inflated and its lists are empty. A use that is open
//! then was ordered after the last writer, is the one that the metadata names as opened, and is the only one opened
//! under the lock.

use super::block_meta::{BlockMeta, SharedState, generation_bits};
use super::uses::Uses;

/// The one outstanding write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastWriter {
    /// 0 if there is no last writer.
    pub(crate) stamp: u64,
    /// The slot of its stream.
    pub(crate) slot: u32,
    /// The slot of the stream whose use is open, if one is.
    pub(crate) user: u32,
}

/// The state behind the lock of a block.
#[derive(Debug, Default)]
pub(crate) struct UseState {
    last_writer: LastWriter,
    /// Allocated at the first use that needs it, and kept for later blocks.
    uses: Option<Box<Uses>>,
}

impl UseState {
    /// All uses, inflated.
    #[inline(always)]
    pub(crate) fn uses(&mut self, meta: &BlockMeta) -> &mut Uses {
        if self.last_writer.stamp != 0 {
            self.inflate(meta);
        }
        self.uses.get_or_insert_default()
    }

    #[inline(never)]
    fn inflate(&mut self, meta: &BlockMeta) {
        let last_writer = std::mem::take(&mut self.last_writer);
        let uses = self.uses.get_or_insert_default();
        uses.inflate(meta.owner(), last_writer, meta.opened());
    }

    /// The last writer, if there is one and no use is open: the next use may take over.
    #[inline(always)]
    pub(crate) fn idle(&mut self, shared_state: &SharedState) -> Option<&mut LastWriter> {
        (self.last_writer.stamp != 0 && shared_state.has_none_opened())
            .then_some(&mut self.last_writer)
    }

    /// The last writer, if there is one and a use of this name is open.
    #[inline(always)]
    pub(crate) fn held_by(
        &mut self,
        shared_state: &SharedState,
        name: u64,
    ) -> Option<&mut LastWriter> {
        (self.last_writer.stamp != 0 && shared_state.has_opened(name))
            .then_some(&mut self.last_writer)
    }

    /// Deflates the uses to a last writer after a use was closed, if there is nothing else.
    #[inline(never)]
    pub(crate) fn deflate(&mut self, meta: &BlockMeta) {
        if let Some(uses) = &mut self.uses
            && meta.state.is_live_and_inflated(generation_bits(meta.generation()))
            && let Some((slot, stamp)) = uses.deflate(meta.owner())
        {
            self.last_writer = LastWriter { stamp, slot, user: 0 };
            meta.shared_state().set_none_opened();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_runtime::ordering::block::block_meta::use_name;
    use crate::device_runtime::ordering::block::state_word::Attempt;
    use crate::device_runtime::ordering::block::uses::NamedUse;
    use crate::device_runtime::ordering::tracking::use_slow_path::{
        EndUse, close_foreign_fast, close_own,
    };
    use crate::device_runtime::resource::{Access, Generation, StreamId};
    use std::collections::BTreeSet;

    const OWNER: u32 = 3;
    const OTHER: u32 = 4;

    /// A live, inflated block of stream 1 in slot 3, whose own stream announced a write at stamp 5.
    fn inflated_block() -> (BlockMeta, Generation) {
        let (meta, generation) = BlockMeta::begun(StreamId(1), OWNER, 5);
        meta.with_uses(|uses| {
            assert!(meta.state.inflate(generation_bits(generation)));
            uses.load_stamps(&meta);
            uses.finished(OWNER, OWNER, 5, true, None);
        });
        (meta, generation)
    }

    /// Everything outstanding, by slot and stamp.
    fn outstanding(meta: &BlockMeta) -> BTreeSet<(u32, u64)> {
        meta.with_uses(|uses| {
            let own = uses.own_stamps();
            let own = [own.0, own.1].into_iter().filter(|stamp| *stamp != 0);
            let others = uses.copy_outstanding();
            others.iter().map(|at| (at.slot, at.stamp)).chain(own.map(|at| (OWNER, at))).collect()
        })
    }

    /// Opens a use as the fast path does; false if there is no last writer to take over from.
    fn take(meta: &BlockMeta, id: StreamId, user: u32, writes: bool) -> bool {
        meta.use_state().with(|use_state| match use_state.idle(meta.shared_state()) {
            Some(last_writer) => {
                last_writer.user = user;
                meta.shared_state().set_opened(use_name(id, writes));
                true
            }
            None => false,
        })
    }

    /// Closes the use of the other stream, whose work finished at `stamp`.
    fn close_other(meta: &BlockMeta, generation: Generation, access: Access, stamp: u64) -> EndUse {
        let finished = NamedUse { stream: StreamId(2), access };
        let shared_state = meta.shared_state();
        let close = |use_state: &mut UseState| {
            close_foreign_fast(meta, shared_state, use_state, generation, finished, OTHER, stamp)
        };
        meta.use_state().with(close)
    }

    fn deflate(meta: &BlockMeta) -> bool {
        meta.use_state().with(|use_state| {
            use_state.deflate(meta);
            use_state.idle(meta.shared_state()).is_some()
        })
    }

    #[test]
    fn the_last_writer_is_what_every_look_at_the_uses_finds() {
        let (meta, generation) = inflated_block();
        let other = StreamId(2);
        assert!(deflate(&meta));
        for turn in 0..4 {
            assert!(take(&meta, other, OTHER, true));
            let closed = close_other(&meta, generation, Access::Write, 10 + turn);
            assert_eq!(closed, EndUse::Live);
            if turn % 2 == 0 {
                assert_eq!(outstanding(&meta), BTreeSet::from([(OTHER, 10 + turn)]));
                assert!(deflate(&meta));
            }
            assert!(take(&meta, StreamId(1), OWNER, true));
            let finished = NamedUse { stream: StreamId(1), access: Access::Write };
            let close = |use_state: &mut UseState| {
                let shared_state = meta.shared_state();
                close_own(&meta, shared_state, use_state, generation, finished, 20 + turn)
            };
            assert_eq!(meta.use_state().with(close), EndUse::Live);
        }
        assert_eq!(outstanding(&meta), BTreeSet::from([(OWNER, 23)]));
    }

    #[test]
    fn an_open_use_after_the_last_writer_is_visible_and_supersedes_only_that_write() {
        let (meta, generation) = inflated_block();
        let (other, third) = (StreamId(2), StreamId(9));
        assert!(deflate(&meta) && take(&meta, other, OTHER, true));
        assert!(meta.with_uses(|uses| uses.has_open()));
        assert_eq!(meta.with_uses(|uses| uses.find_open(other, Access::ReadWrite)), Some(OTHER));
        assert_eq!(meta.with_uses(|uses| uses.find_open(other, Access::Read)), None);
        // A third stream finishes a write meanwhile: it stays.
        meta.with_uses(|uses| uses.finished(OWNER, 7, 30, true, None));
        let closed = close_other(&meta, generation, Access::Write, 11);
        assert_eq!(closed, EndUse::Live);
        assert_eq!(outstanding(&meta), BTreeSet::from([(7, 30), (OTHER, 11)]));
        assert!(!deflate(&meta), "two are outstanding");
        assert!(!take(&meta, third, 8, true));
    }

    #[test]
    fn a_read_does_not_replace_the_last_writer() {
        let (meta, generation) = inflated_block();
        let other = StreamId(2);
        assert!(deflate(&meta) && take(&meta, other, OTHER, false));
        let closed = close_other(&meta, generation, Access::Write, 11);
        assert_eq!(closed, EndUse::Missing, "no write is open");
        let closed = close_other(&meta, generation, Access::Read, 11);
        assert_eq!(closed, EndUse::Live);
        assert_eq!(outstanding(&meta), BTreeSet::from([(OWNER, 5), (OTHER, 11)]));
    }

    #[test]
    fn a_failed_wait_keeps_the_last_writer_and_a_stale_claim_closes_nothing() {
        let (meta, generation) = inflated_block();
        let other = StreamId(2);
        assert!(deflate(&meta) && take(&meta, other, OTHER, true));
        let stale = Generation(generation.0 ^ 1 << 40);
        let closed = close_other(&meta, stale, Access::Write, 11);
        assert_eq!(closed, EndUse::Stale);
        meta.with_uses(|uses| uses.cancel_newest(other, Access::Write));
        assert!(!meta.with_uses(|uses| uses.has_open()));
        assert_eq!(outstanding(&meta), BTreeSet::from([(OWNER, 5)]));
    }

    #[test]
    fn only_a_live_inflated_block_is_deflated_to_its_last_writer() {
        let (meta, generation) = BlockMeta::begun(StreamId(1), OWNER, 5);
        meta.with_uses(|uses| uses.load_stamps(&meta));
        assert!(!deflate(&meta), "it is not slow");
        assert_ne!(meta.state.open(generation_bits(generation), true), Attempt::Stale);
        meta.with_uses(|_| assert!(meta.state.retire(generation_bits(generation))));
        assert!(!deflate(&meta), "it is not live");
        assert_eq!(outstanding(&meta), BTreeSet::from([(OWNER, 5)]));
    }
}
