//! The state word: tracks uses of a block on its own stream without a lock.
//!
//! The word holds bits of the generation, the state, and the number of open uses. Every change of state changes this
//! word, so validation and change are one step.
//!
//! | state | writer of the word |
//! |---|---|
//! | `UNSHARED` | the holder of the arena of its stream, by plain stores; other threads publish the block first, with that arena held |
//! | `BIASED` | the owner thread, by plain stores; other threads revoke the bias first, under the block's lock |
//! | `INFLATED` | every thread, under the block's lock: another stream is involved |
//! | none of these | every thread, by compare-and-swap |
//!
//! A published block never becomes unshared again.

use super::primitive::{AtomicU32, AtomicU64, Bias, BiasedSection, Lazy, Ordering, thread_index};

const READ: u64 = 1;
const READS: u64 = (1 << 10) - 1;
const WRITE: u64 = 1 << 10;
const WRITES: u64 = READS << 10;
const LIVE: u64 = 1 << 20;
const INFLATED: u64 = 1 << 21;
const BIASED: u64 = 1 << 22;
const UNSHARED: u64 = 1 << 23;
/// Whether a use was announced. Set by the change that closes the use, so it belongs to this block and to a closed use.
const ANNOUNCED: u64 = 1 << 24;
const GENERATION_SHIFT: u32 = 32;

/// Consecutive uses by one thread after which the block is biased to it.
const BIAS_THRESHOLD: u32 = 16;
/// Replaces the count after a revocation: the block is not biased again.
const REVOKED: u32 = u32::MAX;

/// The outcome of an attempt without the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    Done,
    /// Done; [`StateWord::bias_to_current`] would make the next uses cheaper.
    DoneBiasable,
    /// The caller must take the lock.
    NeedsLock,
    /// The generation is not that of the live block.
    Stale,
}

/// Stamps of finished work on the own stream. 0 precedes all work.
#[derive(Debug, Default)]
pub(crate) struct OwnStamps {
    write: AtomicU64,
    read: AtomicU64,
}

impl OwnStamps {
    /// Begins a block, whose allocation is the first write of its stream.
    #[inline(always)]
    pub(crate) fn begin(&self, stamp: u64) {
        self.write.store(stamp, Ordering::Relaxed);
        self.read.store(0, Ordering::Relaxed);
    }

    /// Raises the stamp to that of a finished use.
    #[inline]
    pub(crate) fn stamp(&self, writes: bool, stamp: u64) {
        let slot = if writes { &self.write } else { &self.read };
        // The stamp of a stream moves only when an event is begun, so usually nothing is stored.
        if slot.load(Ordering::Acquire) < stamp {
            slot.fetch_max(stamp, Ordering::AcqRel);
        }
    }

    /// The stamp of the last write; of a returned block that of its free.
    pub(crate) fn last_write(&self) -> u64 {
        self.write.load(Ordering::Acquire)
    }

    /// Removes the stamps of writes and of reads. The block's lock is held and the block is inflated.
    pub(crate) fn swap_out(&self) -> (u64, u64) {
        (self.write.swap(0, Ordering::AcqRel), self.read.swap(0, Ordering::AcqRel))
    }
}

/// The state word of a block, with its shared part.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct StateWord<S = ()> {
    word: AtomicU64,
    shared_part: Lazy<SharedPart<S>>,
}

/// State of a shared block, and the `S` that its resource adds, on cache lines of their own because every use writes them.
/// An unshared block never accesses them.
#[derive(Debug, Default)]
#[repr(align(64))]
struct SharedPart<S> {
    /// The last thread and the number of its consecutive uses. Only a heuristic.
    consecutive: AtomicU32,
    bias: Bias,
    shared: S,
}

fn generation_bits(word: u64) -> u32 {
    (word >> GENERATION_SHIFT) as u32
}

/// Stamps a use before it is closed. The first announced use covers all unannounced work that was queued before it,
/// writes included.
#[inline(always)]
fn stamp_use(word: u64, writes: bool, stamp: u64, stamps: &OwnStamps) {
    if word & ANNOUNCED == 0 {
        stamps.stamp(true, stamp);
    }
    stamps.stamp(writes, stamp);
}

impl<S: Default> StateWord<S> {
    /// Returns the state that the resource adds, if it is allocated.
    #[inline(always)]
    pub(crate) fn shared(&self) -> Option<&S> {
        self.shared_part.get().map(|shared_part| &shared_part.shared)
    }

    /// Returns the state that the resource adds, and allocates it at the first call.
    #[inline(always)]
    pub(crate) fn shared_or_make(&self) -> &S {
        &self.shared_part.get_or_make().shared
    }

    fn forget_consecutive_uses(&self) {
        if let Some(shared_part) = self.shared_part.get() {
            shared_part.consecutive.store(0, Ordering::Relaxed);
        }
    }

    /// Begins a block; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin(&self, bits: u32) {
        self.forget_consecutive_uses();
        self.word.store(u64::from(bits) << GENERATION_SHIFT | LIVE, Ordering::Release);
    }

    /// Begins an unshared block; its stamps have begun.
    #[inline(always)]
    pub(crate) fn begin_unshared(&self, bits: u32) {
        self.word.store(u64::from(bits) << GENERATION_SHIFT | LIVE | UNSHARED, Ordering::Release);
    }

    /// Whether the block is live and unshared, and so never used. The caller holds the arena of its stream until it has
    /// acted on the result.
    #[inline(always)]
    pub(crate) fn is_live_and_unshared(&self, bits: u32) -> bool {
        self.word.load(Ordering::Relaxed) == u64::from(bits) << GENERATION_SHIFT | LIVE | UNSHARED
    }

    /// Whether only the holder of the arena may change the word.
    #[inline]
    pub(crate) fn is_unshared(&self) -> bool {
        self.word.load(Ordering::Acquire) & UNSHARED != 0
    }

    /// Publishes the block: every thread may now change the word. The caller holds the arena of its stream.
    pub(crate) fn publish(&self) {
        self.forget_consecutive_uses();
        self.word.fetch_and(!UNSHARED, Ordering::AcqRel);
    }

    #[inline(always)]
    pub(crate) fn end(&self) {
        self.word.store(0, Ordering::Release);
    }

    pub(crate) fn is_live(&self, bits: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & LIVE != 0
    }

    /// Whether every thread must take the lock; only a hint without the lock.
    #[inline]
    pub(crate) fn is_inflated(&self) -> bool {
        self.word.load(Ordering::Acquire) & INFLATED != 0
    }

    /// Whether it is the live block and inflated. The lock is held.
    #[inline(always)]
    pub(crate) fn is_live_and_inflated(&self, bits: u32) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & (LIVE | INFLATED) == LIVE | INFLATED
    }

    /// Whether the block is biased; the owner thread never misses its bias.
    #[inline(always)]
    pub(crate) fn is_biased(&self) -> bool {
        self.word.load(Ordering::Relaxed) & BIASED != 0
    }

    #[inline(always)]
    fn enter_biased(&self) -> Option<BiasedSection<'_>> {
        self.shared_part.get()?.bias.enter()
    }

    /// Opens a use on the own stream, if the block is biased to this thread. Returns false with nothing changed if the
    /// fast path does not apply.
    #[inline]
    pub(crate) fn open_biased(&self, bits: u32, writes: bool) -> bool {
        let Some(_held) = self.enter_biased() else { return false };
        let word = self.word.load(Ordering::Relaxed);
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        // A biased block is live and not inflated; only the identity may be stale.
        let opened = generation_bits(word) == bits && word & all != all;
        if opened {
            self.word.store(word + one, Ordering::Release);
        }
        opened
    }

    /// Closes a use, if the block is biased to this thread. Returns false with nothing changed if the fast path does
    /// not apply.
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

    /// Counts a use by this thread; returns true at the bias threshold.
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
            // A returned block needs the lock: the last use to close completes the free.
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

    /// Retires the block, if only its own stream was involved and no use is open.
    #[inline(always)]
    pub(crate) fn retire_own_stream_only(&self, bits: u32) -> Attempt {
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

    // All methods below need the block's lock.

    /// Biases the block to this thread, if it is live and not inflated.
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

    /// Revokes the bias. Open uses stay open.
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

    /// Inflates the block: every thread must take the lock. Returns false if it is not the live block.
    pub(crate) fn inflate(&self, bits: u32) -> bool {
        self.change(|word| {
            (generation_bits(word) == bits && word & LIVE != 0).then_some(word | INFLATED)
        })
    }

    /// Whether a use of the own stream was announced, or [`StateWord::announce`] was called. Stable under the lock while the
    /// block is inflated.
    pub(crate) fn is_announced(&self) -> bool {
        self.word.load(Ordering::Acquire) & ANNOUNCED != 0
    }

    /// Notes an announced use of an inflated block.
    pub(crate) fn announce(&self) {
        self.word.fetch_or(ANNOUNCED, Ordering::AcqRel);
    }

    /// Stamps a use that was opened without the lock, before [`StateWord::close_counted`] closes it.
    pub(crate) fn stamp_counted(&self, writes: bool, stamp: u64, stamps: &OwnStamps) {
        stamp_use(self.word.load(Ordering::Acquire), writes, stamp, stamps);
    }

    /// Deflates the block: its own stream works without the lock.
    #[inline]
    pub(crate) fn deflate(&self) {
        if self.word.load(Ordering::Acquire) & INFLATED == 0 {
            return;
        }
        self.change(|word| Some(word & !INFLATED));
    }

    /// [`StateWord::deflate`], with a use of the own stream opened. False with nothing changed if too many are open.
    pub(crate) fn deflate_and_open(&self, writes: bool) -> bool {
        let (one, all) = if writes { (WRITE, WRITES) } else { (READ, READS) };
        self.change(|word| (word & all != all).then(|| (word & !INFLATED) + one))
    }

    /// Retires the block. Returns false if another thread has retired it.
    pub(crate) fn retire(&self, bits: u32) -> bool {
        self.change(|word| {
            (generation_bits(word) == bits && word & LIVE != 0).then_some(word & !LIVE | INFLATED)
        })
    }

    /// Closes a use that was opened without the lock. False if this block has none; uses of the next block in its slot
    /// are not counted.
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

    /// Whether the block is inflated, and no use of this kind that was opened without the lock is open. An inflated block is
    /// not biased.
    #[inline(always)]
    pub(crate) fn is_inflated_and_uncounted(&self, writes: bool) -> bool {
        let counted = if writes { WRITES } else { READS };
        self.word.load(Ordering::Acquire) & (INFLATED | counted) == INFLATED
    }

    /// Whether a use of this block and kind that was opened without the lock is still open. Requires
    /// [`StateWord::revoke_bias`].
    #[inline]
    pub(crate) fn has_counted(&self, bits: u32, writes: bool) -> bool {
        let word = self.word.load(Ordering::Acquire);
        generation_bits(word) == bits && word & if writes { WRITES } else { READS } != 0
    }

    /// Whether a use that was opened without the lock is still open. Requires [`StateWord::revoke_bias`].
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
