//! Opens and closes uses under the lock of their block, which it inflates and deflates.
//!
//! Invariants: while a block is live and inflated, the stamps of its own stream are in its [`Uses`], otherwise in its
//! metadata. While its uses hold anything else, it is inflated. Nothing here calls the driver.

use crate::device_runtime::ordering::block::block_meta::{BlockMeta, generation_bits};
use crate::device_runtime::ordering::block::uses::{NamedUse, Needed, Uses};
use crate::device_runtime::resource::{Access, Generation};
use crate::device_runtime::stream_pool::StreamPool;
use crate::stream::RawStream;

/// The outcome of opening a use under the lock of its block.
#[derive(Debug)]
pub(crate) enum BeginUse {
    /// The use is open; its stream must still wait for the needed stamps. Its clock made `elided` waits superfluous.
    Opened { elided: u64 },
    /// The use is open without the lock, and has no dependencies.
    OpenedUnlocked,
    /// The generation is not that of the live block.
    Stale,
}

/// The outcome of closing a use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EndUse {
    /// The use is closed; nothing else changes.
    Live,
    /// The use was the last one of a returned block: the caller frees the block now.
    FreeNow,
    /// The slot now holds another block.
    Stale,
    /// No such use is open.
    Missing,
}

/// Inflates a block whose lock is held. Returns false if it is not the live block.
#[inline(always)]
pub(crate) fn inflate(meta: &BlockMeta, uses: &mut Uses, bits: u32) -> bool {
    // Usually it is inflated already.
    meta.state.is_live_and_inflated(bits) || inflate_cold(meta, uses, bits)
}

#[cold]
fn inflate_cold(meta: &BlockMeta, uses: &mut Uses, bits: u32) -> bool {
    let live = meta.state.inflate(bits);
    if live {
        uses.load_stamps(meta);
    }
    live
}

/// Opens a use under the lock of the block, and adds the waits that it still needs to `needed`.
#[inline(always)]
pub(crate) fn open<'a>(
    meta: &BlockMeta,
    uses: &mut Uses,
    bits: u32,
    streams: &'a StreamPool,
    raw: &RawStream,
    opened: NamedUse,
    needed: &mut Needed<'a>,
) -> BeginUse {
    if !inflate(meta, uses, bits) {
        return BeginUse::Stale;
    }
    // A use without the lock closes only under this id and on this slot: ids are issued again after 2^32 leases.
    let is_own = meta.stream_id() == opened.stream.0 && meta.owner() == raw.clock().slot();
    if is_own && uses.is_own_stream_only() && deflate(meta, uses, opened.access) {
        return BeginUse::OpenedUnlocked;
    }
    let elided = uses.open(meta.owner(), streams, raw, opened, needed);
    BeginUse::Opened { elided }
}

/// Closes a use of the stream in `slot`, whose work finished at `stamp`, under the lock of the block.
#[inline(always)]
pub(crate) fn close(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    finished: NamedUse,
    slot: u32,
    stamp: u64,
) -> EndUse {
    // Checked under the lock, so that a stale identity closes no use of another block.
    if meta.generation() != generation {
        return EndUse::Stale;
    }
    let writes = finished.access.writes();
    // Only under this id and on this stream are uses opened without the lock.
    if meta.stream_id() == finished.stream.0
        && slot == meta.owner()
        && !meta.state.is_inflated_and_uncounted(writes)
        && let Some(closed) = close_counted(meta, uses, generation, writes, stamp)
    {
        return closed;
    }
    let ordered_after = uses.close(finished);
    if ordered_after.is_none() {
        return EndUse::Missing;
    }
    // The block stays inflated even if only its own stream is left: usually the next use comes from another stream.
    // Otherwise the next prepare deflates it.
    uses.finished(meta.owner(), slot, stamp, writes, ordered_after);
    free_if_last(meta, uses)
}

/// Closes a use of the own stream that was opened without the lock; the caller holds the lock. `None` if there is none.
#[inline(never)]
fn close_counted(
    meta: &BlockMeta,
    uses: &mut Uses,
    generation: Generation,
    writes: bool,
    stamp: u64,
) -> Option<EndUse> {
    let bits = generation_bits(generation);
    meta.state.revoke_bias();
    if !meta.state.is_inflated() && meta.state.has_counted(bits, writes) {
        // The block was biased to another thread, and is not inflated. Once no use is counted, another thread may free
        // the block without the lock and reuse its slot, so the count goes last.
        meta.state.stamp_counted(writes, stamp, &meta.stamps);
        // A concurrent call may have closed this use.
        return match meta.state.close_counted(bits, writes) {
            true => Some(EndUse::Live),
            false => Some(EndUse::Missing),
        };
    }
    if !meta.state.close_counted(bits, writes) {
        return None;
    }
    // Uses opened without the lock are the oldest, and supersede nothing.
    let owner = meta.owner();
    uses.finished(owner, owner, stamp, writes, None);
    Some(free_if_last(meta, uses))
}

/// Deflates the block if only its own stream is left. Returns whether to free it.
#[inline]
pub(crate) fn deflate_if_quiet(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    if !uses.free_on_close && uses.is_own_stream_only() {
        uses.store_stamps(meta);
        meta.state.deflate();
    }
    free_if_last(meta, uses)
}

/// Returns whether to free the block after a use was closed.
#[inline(always)]
fn free_if_last(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    if uses.free_on_close { free_after_last(meta, uses) } else { EndUse::Live }
}

#[cold]
fn free_after_last(meta: &BlockMeta, uses: &mut Uses) -> EndUse {
    uses.store_stamps(meta);
    if uses.has_open() || meta.state.has_open() {
        return EndUse::Live;
    }
    uses.free_on_close = false;
    EndUse::FreeNow
}

/// Opens a use of the own stream without the lock, and deflates the block.
#[cold]
fn deflate(meta: &BlockMeta, uses: &mut Uses, access: Access) -> bool {
    uses.store_stamps(meta);
    let left = meta.state.deflate_and_open(access.writes());
    if !left {
        // The count of open uses is full: the block stays inflated, with its stamps behind the lock.
        uses.load_stamps(meta);
    }
    left
}

#[cfg(all(test, feature = "sim"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::CudaDevice;
    use crate::device_runtime::resource::StreamId;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    /// A live block of the first of three streams, which announced a write at stamp 5.
    struct Fixture {
        streams: StreamPool,
        ids: [StreamId; 3],
        slots: [u32; 3],
        meta: BlockMeta,
        generation: Generation,
    }

    impl Fixture {
        fn new() -> Self {
            let device = Arc::new(CudaDevice::open("sim").unwrap());
            let streams = StreamPool::with_defaults(device);
            let ids = [(); 3].map(|()| streams.acquire().unwrap());
            let slots = ids.map(|id| streams.raw(id).unwrap().clock().slot());
            let (meta, generation) = BlockMeta::begun(ids[0], slots[0], 5);
            meta.with_uses(|uses| {
                assert!(inflate(&meta, uses, generation_bits(generation)));
                uses.finished(slots[0], slots[0], 5, true, None);
            });
            Self { streams, ids, slots, meta, generation }
        }

        /// Opens a use of a stream; returns the number of waits that it needs.
        fn open(&self, stream: usize, access: Access) -> usize {
            let raw = self.streams.raw(self.ids[stream]).unwrap();
            let named = NamedUse { stream: self.ids[stream], access };
            let owner = self.slots[0];
            let mut needed = Needed::default();
            let open = |uses: &mut Uses| uses.open(owner, &self.streams, raw, named, &mut needed);
            self.meta.with_uses(open);
            needed.len()
        }

        fn close(&self, stream: usize, access: Access, stamp: u64) -> EndUse {
            self.close_of(self.generation, stream, access, stamp)
        }

        fn close_of(&self, of: Generation, stream: usize, access: Access, stamp: u64) -> EndUse {
            let named = NamedUse { stream: self.ids[stream], access };
            let slot = self.slots[stream];
            self.meta.with_uses(|uses| close(&self.meta, uses, of, named, slot, stamp))
        }

        /// All outstanding uses, by stream and stamp.
        fn outstanding(&self) -> BTreeSet<(usize, u64)> {
            let index = |slot: u32| self.slots.iter().position(|at| *at == slot).unwrap();
            self.meta.with_uses(|uses| {
                let own = uses.own_stamps();
                let own = [own.0, own.1].into_iter().filter(|stamp| *stamp != 0);
                let others = uses.copy_outstanding();
                let others = others.iter().map(|entry| (index(entry.slot), entry.stamp));
                others.chain(own.map(|stamp| (0, stamp))).collect()
            })
        }
    }

    #[test]
    fn a_write_waits_for_the_last_writer_and_takes_its_place() {
        let block = Fixture::new();
        for turn in 0..4 {
            assert_eq!(block.open(1, Access::Write), 1);
            assert_eq!(block.close(1, Access::Write, 10 + turn), EndUse::Live);
            assert_eq!(block.outstanding(), BTreeSet::from([(1, 10 + turn)]));
            assert_eq!(block.open(0, Access::Write), 1);
            assert_eq!(block.close(0, Access::Write, 20 + turn), EndUse::Live);
            assert_eq!(block.outstanding(), BTreeSet::from([(0, 20 + turn)]));
        }
    }

    #[test]
    fn an_open_write_is_visible_and_supersedes_only_what_it_waited_for() {
        let block = Fixture::new();
        block.open(1, Access::Write);
        let named = |access| NamedUse { stream: block.ids[1], access };
        block.meta.with_uses(|uses| {
            assert!(uses.has_open());
            assert_eq!(uses.find_open(named(Access::ReadWrite)), Some(block.slots[1]));
            assert_eq!(uses.find_open(named(Access::Read)), None);
            // A third stream finishes a write meanwhile: it stays.
            uses.finished(block.slots[0], block.slots[2], 30, true, None);
        });
        assert_eq!(block.close(1, Access::Write, 11), EndUse::Live);
        assert_eq!(block.outstanding(), BTreeSet::from([(2, 30), (1, 11)]));
    }

    #[test]
    fn a_read_does_not_replace_the_last_writer() {
        let block = Fixture::new();
        assert_eq!(block.open(1, Access::Read), 1);
        assert_eq!(block.close(1, Access::Write, 11), EndUse::Missing, "no write is open");
        assert_eq!(block.close(1, Access::Read, 11), EndUse::Live);
        assert_eq!(block.outstanding(), BTreeSet::from([(0, 5), (1, 11)]));
    }

    #[test]
    fn a_failed_wait_keeps_the_last_writer_and_a_stale_claim_closes_nothing() {
        let block = Fixture::new();
        block.open(1, Access::Write);
        let stale = Generation(block.generation.0 ^ 1 << 40);
        assert_eq!(block.close_of(stale, 1, Access::Write, 11), EndUse::Stale);
        block.meta.with_uses(|uses| {
            assert!(uses.has_open());
            uses.cancel(NamedUse { stream: block.ids[1], access: Access::Write });
            assert!(!uses.has_open());
        });
        assert_eq!(block.outstanding(), BTreeSet::from([(0, 5)]));
    }

    #[test]
    fn a_failed_wait_beside_a_use_alike_of_another_thread_leaves_no_use_open() {
        let block = Fixture::new();
        block.open(1, Access::Write);
        block.open(1, Access::Write);
        // The other thread closes the older one; the wait of this thread fails then.
        assert_eq!(block.close(1, Access::Write, 11), EndUse::Live);
        block.meta.with_uses(|uses| {
            uses.cancel(NamedUse { stream: block.ids[1], access: Access::Write });
            assert!(!uses.has_open());
        });
    }

    #[test]
    fn a_stream_under_a_reissued_id_is_not_the_own_stream_of_a_block() {
        let block = Fixture::new();
        let other = block.streams.raw(block.ids[1]).unwrap();
        // Of another stream than the block, under the id that the block's own had.
        let reissued = NamedUse { stream: block.ids[0], access: Access::Write };
        let bits = generation_bits(block.generation);
        let mut needed = Needed::default();
        let begun = block.meta.with_uses(|uses| {
            open(&block.meta, uses, bits, &block.streams, other, reissued, &mut needed)
        });
        assert!(matches!(begun, BeginUse::Opened { .. }), "{begun:?}");
        assert_eq!(needed.len(), 1, "it waits for the own stream's write");
    }
}
