//! The word by which a block is used on its own stream without a lock.
//!
//! Opening and closing such a use is one compare-and-swap on a word that holds the block's tag, its state and the number of
//! open uses: whoever frees or recycles the block changes the word, so validation and change are one step. As soon as
//! another stream comes in, the word says `SLOW`, and everybody goes through the block's lock.

use super::primitive::{AtomicU64, Ordering};

const READ: u64 = 1;
const READS: u64 = (1 << 10) - 1;
const WRITE: u64 = 1 << 10;
const WRITES: u64 = READS << 10;
const LIVE: u64 = 1 << 20;
const SLOW: u64 = 1 << 21;
const TAG_SHIFT: u32 = 32;

/// What became of an attempt without the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    Done,
    /// Take the lock and try there.
    Slow,
    /// Not the live block.
    Stale,
}

/// The state of a block as its own stream sees it.
#[derive(Debug, Default)]
pub(crate) struct BlockGate {
    word: AtomicU64,
    own_write: AtomicU64,
    own_read: AtomicU64,
}

fn tag_of(word: u64) -> u32 {
    (word >> TAG_SHIFT) as u32
}

impl BlockGate {
    /// A new block, whose allocation is the first write of its stream.
    pub(crate) fn begin(&self, tag: u32, stamp: u64) {
        self.own_write.store(stamp, Ordering::Relaxed);
        self.own_read.store(0, Ordering::Relaxed);
        self.word.store(u64::from(tag) << TAG_SHIFT | LIVE, Ordering::Release);
    }

    /// The block is gone.
    pub(crate) fn end(&self) {
        self.word.store(0, Ordering::Release);
    }

    pub(crate) fn is_live(&self, tag: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        tag_of(word) == tag && word & LIVE != 0
    }

    /// Opens a use on the own stream.
    #[inline]
    pub(crate) fn open(&self, tag: u32, writes: bool) -> Attempt {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if tag_of(word) != tag || word & LIVE == 0 {
                return Attempt::Stale;
            }
            if word & SLOW != 0 || word & all == all {
                return Attempt::Slow;
            }
            match self.word.compare_exchange_weak(
                word,
                word + one,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    /// Closes a use on the own stream whose work finished at `stamp`.
    #[inline]
    pub(crate) fn close(&self, tag: u32, writes: bool, stamp: u64) -> Attempt {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if tag_of(word) != tag {
                return Attempt::Stale;
            }
            // A block that is being freed needs the lock: the last use that closes completes the free.
            if word & SLOW != 0 || word & LIVE == 0 || word & all == 0 {
                return Attempt::Slow;
            }
            self.stamp(writes, stamp);
            match self.word.compare_exchange_weak(
                word,
                word - one,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    // What follows is called with the block's lock held.

    /// Sends everybody through the lock. False when it is not the live block.
    pub(crate) fn enter_slow(&self, tag: u32) -> bool {
        self.change(|word| (tag_of(word) == tag && word & LIVE != 0).then_some(word | SLOW))
    }

    /// Lets the own stream go without the lock again.
    pub(crate) fn leave_slow(&self) {
        self.change(|word| Some(word & !SLOW));
    }

    /// Takes the block from its owner. False when it is not live: somebody else was first.
    pub(crate) fn retire(&self, tag: u32) -> bool {
        self.change(|word| (tag_of(word) == tag && word & LIVE != 0).then_some(word & !LIVE | SLOW))
    }

    /// Closes a use that was opened without the lock. False when there is none.
    pub(crate) fn close_counted(&self, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| (word & all != 0).then(|| word - one))
    }

    /// True when a use of this kind that was opened without the lock is still open.
    pub(crate) fn has_counted(&self, writes: bool) -> bool {
        self.word.load(Ordering::Acquire) & if writes { WRITES } else { READS } != 0
    }

    /// True when a use that was opened without the lock is still open.
    pub(crate) fn has_open(&self) -> bool {
        self.word.load(Ordering::Acquire) & (READS | WRITES) != 0
    }

    fn change(&self, next: impl Fn(u64) -> Option<u64>) -> bool {
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }

    // The stamps of finished work on the own stream. 0 is before everything.

    #[inline]
    pub(crate) fn stamp(&self, writes: bool, stamp: u64) {
        let slot = if writes { &self.own_write } else { &self.own_read };
        // Stamps move only when an event is recorded, so mostly there is nothing to store.
        if slot.load(Ordering::Acquire) < stamp {
            slot.fetch_max(stamp, Ordering::AcqRel);
        }
    }

    pub(crate) fn own_write(&self) -> u64 {
        self.own_write.load(Ordering::Acquire)
    }

    pub(crate) fn own_read(&self) -> u64 {
        self.own_read.load(Ordering::Acquire)
    }

    /// Forgets own stamps that a write on another stream was ordered after; a newer one stays.
    pub(crate) fn supersede_own(&self, upto: u64) {
        for slot in [&self.own_write, &self.own_read] {
            let stamp = slot.load(Ordering::Acquire);
            if stamp <= upto {
                let _ = slot.compare_exchange(stamp, 0, Ordering::AcqRel, Ordering::Acquire);
            }
        }
    }
}
