//! The word by which a block is used on its own stream without a lock.
//!
//! Opening and closing such a use changes a word that holds the block's tag, its state and the number of open uses: whoever frees
//! or recycles the block changes the same word, so validation and change are one step. A thread that keeps using a block gets it
//! `BIASED`: it changes the word by plain stores, and everybody else takes the bias away first, under the block's lock. Otherwise
//! a change is a compare-and-swap. As soon as another stream comes in, the word says `SLOW`, and all go through the block's lock.
//!
//! A block that nobody has used yet may be at `HOME`: its word is changed only by who holds the memory of its stream, by plain
//! stores. Whoever else comes takes it from there first, while holding that memory; it does not come back.

use super::primitive::{AtomicU32, AtomicU64, Bias, Held, Lazy, Ordering, thread_name};

const READ: u64 = 1;
const READS: u64 = (1 << 10) - 1;
const WRITE: u64 = 1 << 10;
const WRITES: u64 = READS << 10;
const LIVE: u64 = 1 << 20;
const SLOW: u64 = 1 << 21;
const BIASED: u64 = 1 << 22;
const HOME: u64 = 1 << 23;
/// A use was announced: set by the same change of the word that closes the use, so that it belongs to this block and to a use that is
/// closed.
const ANNOUNCED: u64 = 1 << 24;
const TAG_SHIFT: u32 = 32;

/// Uses in a row by one thread that make the block its own.
const ROW: u32 = 16;
/// In the place of a row: this block was taken from its owner once, and is not given to one again.
const SHARED: u32 = u32::MAX;

/// What became of an attempt without the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    Done,
    /// Done; and [`BlockGate::grant`] would make the next ones cheaper.
    Again,
    /// Take the lock and try there.
    Slow,
    /// Not the live block.
    Stale,
}

/// The stamps of finished work on the own stream. 0 is before everything.
#[derive(Debug, Default)]
pub(crate) struct OwnStamps {
    write: AtomicU64,
    read: AtomicU64,
}

impl OwnStamps {
    /// A new block, whose allocation is the first write of its stream.
    #[inline(always)]
    pub(crate) fn begin(&self, stamp: u64) {
        self.write.store(stamp, Ordering::Relaxed);
        self.read.store(0, Ordering::Relaxed);
    }

    /// A use finished at `stamp`.
    #[inline]
    pub(crate) fn stamp(&self, writes: bool, stamp: u64) {
        let slot = if writes { &self.write } else { &self.read };
        // Stamps move only when an event is recorded, so mostly there is nothing to store.
        if slot.load(Ordering::Acquire) < stamp {
            slot.fetch_max(stamp, Ordering::AcqRel);
        }
    }

    /// Those of writes and of reads, which are nowhere then. Called with the block's lock held, after it became slow.
    pub(crate) fn take(&self) -> (u64, u64) {
        (self.write.swap(0, Ordering::AcqRel), self.read.swap(0, Ordering::AcqRel))
    }
}

/// The state of a block as its own stream sees it.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct BlockGate<Rest = ()> {
    word: AtomicU64,
    far: Lazy<Used<Rest>>,
}

/// What only a block has that is used, and the `Rest` that its owner keeps for such a block, on cache lines of its own: it is changed
/// with every use. A block that stays at home has none of it, and touches none that an earlier one left.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Used<Rest> {
    /// Who used it last, and how often in a row. A guess: nothing depends on it.
    row: AtomicU32,
    bias: Bias<2>,
    rest: Rest,
}

fn tag_of(word: u64) -> u32 {
    (word >> TAG_SHIFT) as u32
}

/// Before a use of a block with this word is closed that finished at `stamp`. The first announced use stands for all that was queued
/// before it without a hook, writes included.
#[inline(always)]
fn stamp_use(word: u64, writes: bool, stamp: u64, stamps: &OwnStamps) {
    if word & ANNOUNCED == 0 {
        stamps.stamp(true, stamp);
    }
    stamps.stamp(writes, stamp);
}

impl<Rest: Default> BlockGate<Rest> {
    /// What the owner keeps for a block that is used, if there is anything.
    #[inline(always)]
    pub(crate) fn rest(&self) -> Option<&Rest> {
        self.far.get().map(|far| &far.rest)
    }

    /// The same, made if there is not.
    #[inline(always)]
    pub(crate) fn make_rest(&self) -> &Rest {
        &self.far.get_or_make().rest
    }

    fn forget_row(&self) {
        if let Some(far) = self.far.get() {
            far.row.store(0, Ordering::Relaxed);
        }
    }

    /// A new block; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin(&self, tag: u32) {
        self.forget_row();
        self.word.store(u64::from(tag) << TAG_SHIFT | LIVE, Ordering::Release);
    }

    /// A new block that belongs to who holds the memory of its stream; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin_at_home(&self, tag: u32) {
        self.word.store(u64::from(tag) << TAG_SHIFT | LIVE | HOME, Ordering::Release);
    }

    /// True when the block is live and at home: then nobody has used it. Called, as what follows from it is done, by who holds the
    /// memory of its stream.
    #[inline(always)]
    pub(crate) fn is_live_at_home(&self, tag: u32) -> bool {
        self.word.load(Ordering::Relaxed) == u64::from(tag) << TAG_SHIFT | LIVE | HOME
    }

    /// True when the word may only be changed by who holds the memory of the stream.
    #[inline]
    pub(crate) fn is_at_home(&self) -> bool {
        self.word.load(Ordering::Acquire) & HOME != 0
    }

    /// From now on anybody may change the word. Called by who holds the memory of the stream.
    pub(crate) fn leave_home(&self) {
        self.forget_row();
        self.word.fetch_and(!HOME, Ordering::AcqRel);
    }

    /// The block is gone.
    #[inline(always)]
    pub(crate) fn end(&self) {
        self.word.store(0, Ordering::Release);
    }

    pub(crate) fn is_live(&self, tag: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        tag_of(word) == tag && word & LIVE != 0
    }

    /// True when everybody goes through the lock. Only a guess unless the lock is held.
    #[inline]
    pub(crate) fn is_slow(&self) -> bool {
        self.word.load(Ordering::Acquire) & SLOW != 0
    }

    /// True when it is the live block and everybody goes through the lock, which is held.
    #[inline(always)]
    pub(crate) fn is_live_and_slow(&self, tag: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        tag_of(word) == tag && word & (LIVE | SLOW) == LIVE | SLOW
    }

    /// True when the block belongs to a thread, as far as can be seen. That thread sees it.
    #[inline(always)]
    pub(crate) fn is_biased(&self) -> bool {
        self.word.load(Ordering::Relaxed) & BIASED != 0
    }

    #[inline(always)]
    fn enter_mine(&self) -> Option<Held<'_>> {
        self.far.get()?.bias.enter()
    }

    /// Opens a use on the own stream, if the block belongs to this thread. False says nothing.
    #[inline]
    pub(crate) fn open_mine(&self, tag: u32, writes: bool) -> bool {
        let Some(_held) = self.enter_mine() else { return false };
        let word = self.word.load(Ordering::Relaxed);
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        // Biased means live and not slow; only the claim may be wrong.
        let opened = tag_of(word) == tag && word & all != all;
        if opened {
            self.word.store(word + one, Ordering::Release);
        }
        opened
    }

    /// Closes one, if the block belongs to this thread. False says nothing.
    #[inline]
    pub(crate) fn close_mine(
        &self,
        tag: u32,
        writes: bool,
        stamp: u64,
        stamps: &OwnStamps,
    ) -> bool {
        let Some(_held) = self.enter_mine() else { return false };
        let word = self.word.load(Ordering::Relaxed);
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let closed = tag_of(word) == tag && word & all != 0;
        if closed {
            stamp_use(word, writes, stamp, stamps);
            self.word.store((word - one) | ANNOUNCED, Ordering::Release);
        }
        closed
    }

    /// Opens a use on the own stream.
    pub(crate) fn open(&self, tag: u32, writes: bool) -> Attempt {
        if self.open_mine(tag, writes) {
            return Attempt::Done;
        }
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.open_shared(tag, one, all)
    }

    fn open_shared(&self, tag: u32, one: u64, all: u64) -> Attempt {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if tag_of(word) != tag || word & LIVE == 0 {
                return Attempt::Stale;
            }
            if word & (SLOW | BIASED | HOME) != 0 || word & all == all {
                return Attempt::Slow;
            }
            match self.word.compare_exchange_weak(
                word,
                word + one,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) if self.lengthen_row() => return Attempt::Again,
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    /// One more use by this thread; true when there have been enough in a row.
    fn lengthen_row(&self) -> bool {
        let known = &self.far.get_or_make().row;
        let row = known.load(Ordering::Relaxed);
        if row == SHARED {
            return false;
        }
        let me = thread_name() << 8;
        let length = if row & !0xff == me { (row & 0xff) + 1 } else { 1 };
        known.store(me | length.min(0xfe), Ordering::Relaxed);
        length == ROW
    }

    /// Closes a use on the own stream whose work finished at `stamp`.
    pub(crate) fn close(&self, tag: u32, writes: bool, stamp: u64, stamps: &OwnStamps) -> Attempt {
        if self.close_mine(tag, writes, stamp, stamps) {
            return Attempt::Done;
        }
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if tag_of(word) != tag {
                return Attempt::Stale;
            }
            // A block that is being freed needs the lock: the last use that closes completes the free.
            if word & (SLOW | BIASED) != 0 || word & LIVE == 0 || word & all == 0 {
                return Attempt::Slow;
            }
            stamp_use(word, writes, stamp, stamps);
            match self.word.compare_exchange_weak(
                word,
                (word - one) | ANNOUNCED,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    /// Takes the block from its user, if only its own stream ever had to do with it and no use is open.
    #[inline(always)]
    pub(crate) fn retire_quiet(&self, tag: u32) -> Attempt {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if tag_of(word) != tag || word & LIVE == 0 {
                return Attempt::Stale;
            }
            if word & (SLOW | BIASED | HOME | READS | WRITES) != 0 {
                return Attempt::Slow;
            }
            let next = word & !LIVE | SLOW;
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    // What follows is called with the block's lock held.

    /// Makes the block this thread's own, if it is live and only its own stream has to do with it.
    pub(crate) fn grant(&self, tag: u32) {
        let bias = &self.far.get_or_make().bias;
        if bias.is_owned() || !bias.claim() {
            return;
        }
        let quiet = LIVE | SLOW;
        let granted = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            (tag_of(word) == tag && word & quiet == LIVE).then_some(word | BIASED)
        });
        if granted.is_err() {
            bias.revoke();
        }
    }

    /// Takes the block from the thread it belongs to. What is open stays open.
    #[inline]
    pub(crate) fn share(&self) {
        if let Some(far) = self.far.get()
            && far.bias.is_owned()
        {
            self.take_away(far);
        }
    }

    #[cold]
    fn take_away(&self, far: &Used<Rest>) {
        if !far.bias.is_mine() {
            far.row.store(SHARED, Ordering::Relaxed);
        }
        far.bias.revoke();
        self.word.fetch_and(!BIASED, Ordering::AcqRel);
    }

    /// Sends everybody through the lock. False when it is not the live block.
    pub(crate) fn enter_slow(&self, tag: u32) -> bool {
        self.change(|word| (tag_of(word) == tag && word & LIVE != 0).then_some(word | SLOW))
    }

    /// True when a use of the own stream was announced, or [`BlockGate::announce`] was called. Changes only under the lock while the block
    /// is slow.
    pub(crate) fn is_announced(&self) -> bool {
        self.word.load(Ordering::Acquire) & ANNOUNCED != 0
    }

    /// A use of a slow block was announced through the lock.
    pub(crate) fn announce(&self) {
        self.word.fetch_or(ANNOUNCED, Ordering::AcqRel);
    }

    /// Stamps a use that was opened without the lock, before [`BlockGate::close_counted`] closes it.
    pub(crate) fn stamp_counted(&self, writes: bool, stamp: u64, stamps: &OwnStamps) {
        stamp_use(self.word.load(Ordering::Acquire), writes, stamp, stamps);
    }

    /// Lets the own stream go without the lock again.
    #[inline]
    pub(crate) fn leave_slow(&self) {
        if self.word.load(Ordering::Acquire) & SLOW == 0 {
            return;
        }
        self.change(|word| Some(word & !SLOW));
    }

    /// The same, with a use of the own stream opened. False, and nothing done, when there are too many.
    pub(crate) fn leave_slow_open(&self, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| (word & all != all).then(|| (word & !SLOW) + one))
    }

    /// Takes the block from its user. False when it is not live: somebody else was first.
    pub(crate) fn retire(&self, tag: u32) -> bool {
        self.change(|word| (tag_of(word) == tag && word & LIVE != 0).then_some(word & !LIVE | SLOW))
    }

    /// Closes a use that was opened without the lock. False when this block has none: uses of the next one at its place are not its.
    #[inline]
    pub(crate) fn close_counted(&self, tag: u32, writes: bool) -> bool {
        self.share();
        self.has_counted(tag, writes) && self.uncount(tag, writes)
    }

    #[cold]
    fn uncount(&self, tag: u32, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| {
            (tag_of(word) == tag && word & all != 0).then(|| (word - one) | ANNOUNCED)
        })
    }

    /// True when everybody goes through the lock and no use of this kind that was opened without it is open. Nobody owns a slow
    /// block, so nothing is to be taken away first.
    #[inline(always)]
    pub(crate) fn is_slow_and_uncounted(&self, writes: bool) -> bool {
        let counted = if writes { WRITES } else { READS };
        self.word.load(Ordering::Acquire) & (SLOW | counted) == SLOW
    }

    /// True when a use of this block and kind that was opened without the lock is still open. After [`BlockGate::share`].
    #[inline]
    pub(crate) fn has_counted(&self, tag: u32, writes: bool) -> bool {
        let word = self.word.load(Ordering::Acquire);
        tag_of(word) == tag && word & if writes { WRITES } else { READS } != 0
    }

    /// True when a use that was opened without the lock is still open. After [`BlockGate::share`].
    #[inline]
    pub(crate) fn has_open(&self) -> bool {
        self.word.load(Ordering::Acquire) & (READS | WRITES) != 0
    }

    #[inline]
    fn change(&self, next: impl Fn(u64) -> Option<u64>) -> bool {
        self.share();
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}
