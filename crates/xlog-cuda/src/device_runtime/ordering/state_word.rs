//! The word by which a block is used on its own stream without a lock.
//!
//! Opening and closing such a use changes a word that holds the block's tag, its state and the number of open uses: whoever frees
//! or recycles the block changes the same word, so validation and change are one step. A thread that keeps using a block gets it
//! `BIASED`: it changes the word by plain stores, and everybody else takes the bias away first, under the block's lock. Otherwise
//! a change is a compare-and-swap. As soon as another stream comes in, the word says `INFLATED`, and all go through the block's lock.
//!
//! A block that nobody has used yet may be at `UNSHARED`: its word is changed only by who holds the memory of its stream, by plain
//! stores. Whoever else comes takes it from there first, while holding that memory; it does not come back.

use super::primitive::{AtomicU32, AtomicU64, Bias, BiasedSection, Lazy, Ordering, thread_index};

const READ: u64 = 1;
const READS: u64 = (1 << 10) - 1;
const WRITE: u64 = 1 << 10;
const WRITES: u64 = READS << 10;
const LIVE: u64 = 1 << 20;
const INFLATED: u64 = 1 << 21;
const BIASED: u64 = 1 << 22;
const UNSHARED: u64 = 1 << 23;
/// A use was announced: set by the same change of the word that closes the use, so that it belongs to this block and to a use that is
/// closed.
const ANNOUNCED: u64 = 1 << 24;
const GENERATION_SHIFT: u32 = 32;

/// Uses in a row by one thread that make the block its own.
const BIAS_THRESHOLD: u32 = 16;
/// In the place of a row: this block was taken from its owner once, and is not given to one again.
const REVOKED: u32 = u32::MAX;

/// What became of an attempt without the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    Done,
    /// Done; and [`StateWord::bias_to_current`] would make the next ones cheaper.
    DoneBiasable,
    /// Take the lock and try there.
    NeedsLock,
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
    pub(crate) fn swap_out(&self) -> (u64, u64) {
        (self.write.swap(0, Ordering::AcqRel), self.read.swap(0, Ordering::AcqRel))
    }
}

/// The state of a block as its own stream sees it.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct StateWord<S = ()> {
    word: AtomicU64,
    shared_part: Lazy<SharedPart<S>>,
}

/// What only a block has that is used, and the `S` that its owner keeps for such a block, on cache lines of its own: it is changed
/// with every use. A block that stays at home has none of it, and touches none that an earlier one left.
#[derive(Debug, Default)]
#[repr(align(64))]
struct SharedPart<S> {
    /// Who used it last, and how often in a row. A guess: nothing depends on it.
    consecutive: AtomicU32,
    bias: Bias,
    shared: S,
}

fn generation_bits(word: u64) -> u32 {
    (word >> GENERATION_SHIFT) as u32
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

impl<S: Default> StateWord<S> {
    /// What the owner keeps for a block that is used, if there is anything.
    #[inline(always)]
    pub(crate) fn shared(&self) -> Option<&S> {
        self.shared_part.get().map(|shared_part| &shared_part.shared)
    }

    /// The same, made if there is not.
    #[inline(always)]
    pub(crate) fn shared_or_make(&self) -> &S {
        &self.shared_part.get_or_make().shared
    }

    fn forget_consecutive_uses(&self) {
        if let Some(shared_part) = self.shared_part.get() {
            shared_part.consecutive.store(0, Ordering::Relaxed);
        }
    }

    /// A new block; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin(&self, bits: u32) {
        self.forget_consecutive_uses();
        self.word.store(u64::from(bits) << GENERATION_SHIFT | LIVE, Ordering::Release);
    }

    /// A new block that belongs to who holds the memory of its stream; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin_unshared(&self, bits: u32) {
        self.word.store(u64::from(bits) << GENERATION_SHIFT | LIVE | UNSHARED, Ordering::Release);
    }

    /// True when the block is live and at home: then nobody has used it. Called, as what follows from it is done, by who holds the
    /// memory of its stream.
    #[inline(always)]
    pub(crate) fn is_live_and_unshared(&self, bits: u32) -> bool {
        self.word.load(Ordering::Relaxed) == u64::from(bits) << GENERATION_SHIFT | LIVE | UNSHARED
    }

    /// True when the word may only be changed by who holds the memory of the stream.
    #[inline]
    pub(crate) fn is_unshared(&self) -> bool {
        self.word.load(Ordering::Acquire) & UNSHARED != 0
    }

    /// From now on anybody may change the word. Called by who holds the memory of the stream.
    pub(crate) fn publish(&self) {
        self.forget_consecutive_uses();
        self.word.fetch_and(!UNSHARED, Ordering::AcqRel);
    }

    /// The block is gone.
    #[inline(always)]
    pub(crate) fn end(&self) {
        self.word.store(0, Ordering::Release);
    }

    pub(crate) fn is_live(&self, bits: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & LIVE != 0
    }

    /// True when everybody goes through the lock. Only a guess unless the lock is held.
    #[inline]
    pub(crate) fn is_inflated(&self) -> bool {
        self.word.load(Ordering::Acquire) & INFLATED != 0
    }

    /// True when it is the live block and everybody goes through the lock, which is held.
    #[inline(always)]
    pub(crate) fn is_live_and_inflated(&self, bits: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & (LIVE | INFLATED) == LIVE | INFLATED
    }

    /// True when the block belongs to a thread, as far as can be seen. That thread sees it.
    #[inline(always)]
    pub(crate) fn is_biased(&self) -> bool {
        self.word.load(Ordering::Relaxed) & BIASED != 0
    }

    #[inline(always)]
    fn enter_biased(&self) -> Option<BiasedSection<'_>> {
        self.shared_part.get()?.bias.enter()
    }

    /// Opens a use on the own stream, if the block belongs to this thread. False says nothing.
    #[inline]
    pub(crate) fn open_biased(&self, bits: u32, writes: bool) -> bool {
        let Some(_held) = self.enter_biased() else { return false };
        let word = self.word.load(Ordering::Relaxed);
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        // Biased means live and not slow; only the claim may be wrong.
        let opened = generation_bits(word) == bits && word & all != all;
        if opened {
            self.word.store(word + one, Ordering::Release);
        }
        opened
    }

    /// Closes one, if the block belongs to this thread. False says nothing.
    #[inline]
    pub(crate) fn close_biased(
        &self,
        bits: u32,
        writes: bool,
        stamp: u64,
        stamps: &OwnStamps,
    ) -> bool {
        let Some(_held) = self.enter_biased() else { return false };
        let word = self.word.load(Ordering::Relaxed);
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let closed = generation_bits(word) == bits && word & all != 0;
        if closed {
            stamp_use(word, writes, stamp, stamps);
            self.word.store((word - one) | ANNOUNCED, Ordering::Release);
        }
        closed
    }

    /// Opens a use on the own stream.
    pub(crate) fn open(&self, bits: u32, writes: bool) -> Attempt {
        if self.open_biased(bits, writes) {
            return Attempt::Done;
        }
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.open_by_cas(bits, one, all)
    }

    fn open_by_cas(&self, bits: u32, one: u64, all: u64) -> Attempt {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if generation_bits(word) != bits || word & LIVE == 0 {
                return Attempt::Stale;
            }
            if word & (INFLATED | BIASED | UNSHARED) != 0 || word & all == all {
                return Attempt::NeedsLock;
            }
            match self.word.compare_exchange_weak(
                word,
                word + one,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) if self.note_consecutive_use() => return Attempt::DoneBiasable,
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    /// One more use by this thread; true when there have been enough in a row.
    fn note_consecutive_use(&self) -> bool {
        let known = &self.shared_part.get_or_make().consecutive;
        let consecutive = known.load(Ordering::Relaxed);
        if consecutive == REVOKED {
            return false;
        }
        let current = thread_index() << 8;
        let length = if consecutive & !0xff == current { (consecutive & 0xff) + 1 } else { 1 };
        known.store(current | length.min(0xfe), Ordering::Relaxed);
        length == BIAS_THRESHOLD
    }

    /// Closes a use on the own stream whose work finished at `stamp`.
    pub(crate) fn close(&self, bits: u32, writes: bool, stamp: u64, stamps: &OwnStamps) -> Attempt {
        if self.close_biased(bits, writes, stamp, stamps) {
            return Attempt::Done;
        }
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if generation_bits(word) != bits {
                return Attempt::Stale;
            }
            // A block that is being freed needs the lock: the last use that closes completes the free.
            if word & (INFLATED | BIASED) != 0 || word & LIVE == 0 || word & all == 0 {
                return Attempt::NeedsLock;
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
    pub(crate) fn retire_quiet(&self, bits: u32) -> Attempt {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if generation_bits(word) != bits || word & LIVE == 0 {
                return Attempt::Stale;
            }
            if word & (INFLATED | BIASED | UNSHARED | READS | WRITES) != 0 {
                return Attempt::NeedsLock;
            }
            let next = word & !LIVE | INFLATED;
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Attempt::Done,
                Err(now) => word = now,
            }
        }
    }

    // What follows is called with the block's lock held.

    /// Makes the block this thread's own, if it is live and only its own stream has to do with it.
    pub(crate) fn bias_to_current(&self, bits: u32) {
        let bias = &self.shared_part.get_or_make().bias;
        if bias.is_owned() || !bias.claim() {
            return;
        }
        let quiet = LIVE | INFLATED;
        let granted = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            (generation_bits(word) == bits && word & quiet == LIVE).then_some(word | BIASED)
        });
        if granted.is_err() {
            bias.revoke();
        }
    }

    /// Takes the block from the thread it belongs to. What is open stays open.
    #[inline]
    pub(crate) fn revoke_bias(&self) {
        if let Some(shared_part) = self.shared_part.get()
            && shared_part.bias.is_owned()
        {
            self.revoke_bias_cold(shared_part);
        }
    }

    #[cold]
    fn revoke_bias_cold(&self, shared_part: &SharedPart<S>) {
        if !shared_part.bias.is_mine() {
            shared_part.consecutive.store(REVOKED, Ordering::Relaxed);
        }
        shared_part.bias.revoke();
        self.word.fetch_and(!BIASED, Ordering::AcqRel);
    }

    /// Sends everybody through the lock. False when it is not the live block.
    pub(crate) fn inflate(&self, bits: u32) -> bool {
        self.change(|word| {
            (generation_bits(word) == bits && word & LIVE != 0).then_some(word | INFLATED)
        })
    }

    /// True when a use of the own stream was announced, or [`StateWord::announce`] was called. Changes only under the lock while the block
    /// is slow.
    pub(crate) fn is_announced(&self) -> bool {
        self.word.load(Ordering::Acquire) & ANNOUNCED != 0
    }

    /// A use of a slow block was announced through the lock.
    pub(crate) fn announce(&self) {
        self.word.fetch_or(ANNOUNCED, Ordering::AcqRel);
    }

    /// Stamps a use that was opened without the lock, before [`StateWord::close_counted`] closes it.
    pub(crate) fn stamp_counted(&self, writes: bool, stamp: u64, stamps: &OwnStamps) {
        stamp_use(self.word.load(Ordering::Acquire), writes, stamp, stamps);
    }

    /// Lets the own stream go without the lock again.
    #[inline]
    pub(crate) fn deflate(&self) {
        if self.word.load(Ordering::Acquire) & INFLATED == 0 {
            return;
        }
        self.change(|word| Some(word & !INFLATED));
    }

    /// The same, with a use of the own stream opened. False, and nothing done, when there are too many.
    pub(crate) fn deflate_and_open(&self, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| (word & all != all).then(|| (word & !INFLATED) + one))
    }

    /// Takes the block from its user. False when it is not live: somebody else was first.
    pub(crate) fn retire(&self, bits: u32) -> bool {
        self.change(|word| {
            (generation_bits(word) == bits && word & LIVE != 0).then_some(word & !LIVE | INFLATED)
        })
    }

    /// Closes a use that was opened without the lock. False when this block has none: uses of the next one at its place are not its.
    #[inline]
    pub(crate) fn close_counted(&self, bits: u32, writes: bool) -> bool {
        self.revoke_bias();
        self.has_counted(bits, writes) && self.uncount(bits, writes)
    }

    #[cold]
    fn uncount(&self, bits: u32, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| {
            (generation_bits(word) == bits && word & all != 0).then(|| (word - one) | ANNOUNCED)
        })
    }

    /// True when everybody goes through the lock and no use of this kind that was opened without it is open. Nobody owns a slow
    /// block, so nothing is to be taken away first.
    #[inline(always)]
    pub(crate) fn is_inflated_and_uncounted(&self, writes: bool) -> bool {
        let counted = if writes { WRITES } else { READS };
        self.word.load(Ordering::Acquire) & (INFLATED | counted) == INFLATED
    }

    /// True when a use of this block and kind that was opened without the lock is still open. After [`StateWord::revoke_bias`].
    #[inline]
    pub(crate) fn has_counted(&self, bits: u32, writes: bool) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & if writes { WRITES } else { READS } != 0
    }

    /// True when a use that was opened without the lock is still open. After [`StateWord::revoke_bias`].
    #[inline]
    pub(crate) fn has_open(&self) -> bool {
        self.word.load(Ordering::Acquire) & (READS | WRITES) != 0
    }

    #[inline]
    fn change(&self, next: impl Fn(u64) -> Option<u64>) -> bool {
        self.revoke_bias();
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}
