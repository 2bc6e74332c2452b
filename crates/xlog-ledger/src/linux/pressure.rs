//! Pressure between processes: one that is about to be refused asks the others for the memory that they have cached.
//!
//! Each process with memory has a *listener*, a thread that waits on a word of the shared mapping ([`AskListener`]). An asking process
//! counts its ask and wakes all listeners. A listener returns what its process has cached, then stores the number of the ask in the
//! header: its answer. The asking process ([`Ledger::press`]) waits until the bytes fit, all have answered, or its deadline.
//!
//! Invariants:
//! - A listener stores its answer after it has returned memory, so an asking process that sees all answers sees all returns.
//! - Only slots that publish their memory are waited for. A process that ends without a word is found by its liveness lock.
//! - No process waits for another one without a deadline, and no decision about the limit depends on what is stored here.

use std::ops::Deref;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::ledger::Ledger;
use super::mapping::{AnswerCell, is_locked, wait_on, wake};
use crate::format::{UNIT, slot_offset, units_of};
use crate::word::Word;

/// The numbers of asks, which go round.
const NUMBERS: u32 = u32::MAX >> 1;
/// The longest wait between two checks whether a process has died.
const SLICE: Duration = Duration::from_millis(10);
/// The first pause before processes with pending memory are asked again; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The reason why a listener woke up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Heard {
    /// Another process asks for memory: return what is cached, then [`AskListener::answer`].
    Ask,
    /// The time is up, a viewer has come, or [`Ledger::wake_listeners`] was called.
    Nothing,
    /// The process has left the ledger.
    Closed,
}

/// The state of an ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answers {
    /// A living process has not answered.
    Missing,
    /// All have answered, and some will return more once work has completed.
    MoreToCome,
    /// All have answered.
    All,
}

/// Hears the asks of other processes, on a thread of its own. `L` is a reference to the [`Ledger`], counted or not.
#[derive(Debug)]
pub struct AskListener<L> {
    ledger: L,
    /// The last ask that was answered.
    answered: u32,
    /// The ask that was heard last.
    heard: u32,
    /// Whether the last answer promised more memory.
    more: bool,
}

impl<L: Deref<Target = Ledger>> AskListener<L> {
    /// Begins to listen. Asks before this are not heard; later ones are, also those before the first [`AskListener::wait`].
    pub fn new(ledger: L) -> Self {
        let answered = ledger.mapping.header().asks.load(Ordering::SeqCst);
        let mut listener = Self { ledger, answered, heard: answered, more: false };
        listener.answer(false);
        listener
    }

    /// Waits for an ask, at most `timeout`. `is_over` is checked before the wait, and a wake after the check is not missed.
    pub fn wait(&mut self, timeout: Duration, is_over: impl Fn() -> bool) -> Heard {
        let bell = self.ledger.mapping.header().bell.load(Ordering::SeqCst);
        if let Some(heard) = self.hear() {
            return heard;
        }
        if !is_over() {
            wait_on(&self.ledger.mapping.header().bell, bell, timeout);
        }
        self.hear().unwrap_or(Heard::Nothing)
    }

    fn hear(&mut self) -> Option<Heard> {
        if self.ledger.check_process().is_err() {
            return Some(Heard::Closed);
        }
        let asks = self.ledger.mapping.header().asks.load(Ordering::SeqCst);
        self.heard = asks;
        if asks == self.answered {
            return None;
        }
        // The own ask comes from a process that has returned its caches before. Others may still wait for what it promised.
        let is_own = asks == self.ledger.own_ask.load(Ordering::SeqCst)
            && asks == self.answered.wrapping_add(1);
        if is_own {
            self.answer(self.more);
            return None;
        }
        self.ledger.is_answering.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // The process may have left meanwhile, and no longer waits for an answer.
        if self.ledger.check_process().is_err() {
            self.ledger.is_answering.store(false, Ordering::SeqCst);
            return Some(Heard::Closed);
        }
        Some(Heard::Ask)
    }

    /// Answers the ask that was heard, after the memory was returned. `more` if memory waits for work on streams: the asking process
    /// then asks again.
    pub fn answer(&mut self, more: bool) {
        (self.answered, self.more) = (self.heard, more);
        self.ledger.is_answering.store(false, Ordering::SeqCst);
        if let Some(cell) = self.ledger.answer_cell() {
            cell.answered.store(self.heard << 1 | u32::from(more), Ordering::SeqCst);
        }
        self.ledger.announce_return();
    }
}

impl Ledger {
    /// Publishes how many of the bytes in use are cached, and how many belong to freed blocks that wait for work on streams.
    ///
    /// From then on asking processes wait for an answer of this one, so it must have an [`AskListener`]. Makes no system call.
    pub fn publish_memory(&self, cached: u64, pending: u64) {
        let Ok(slot) = self.check_process().and_then(|()| self.slot_cell()) else { return };
        if let Some(cell) = self.answer_cell() {
            cell.pending.store(units_of(pending).unwrap_or(u32::MAX), Ordering::Relaxed);
        }
        let cached = units_of(cached).unwrap_or(u32::MAX).saturating_add(1);
        let word = u64::from(cached) << 32 | u64::from(self.opener);
        slot.pid.store(word, Ordering::SeqCst);
        // A process that has left meanwhile has no listener: other processes would wait for it.
        if self.check_process().is_err() {
            slot.pid.store(u64::from(self.opener), Ordering::SeqCst);
        }
    }

    /// Ends what [`Ledger::publish_memory`] began: this process has no listener any more.
    pub fn withdraw_memory(&self) {
        let Ok(slot) = self.check_process().and_then(|()| self.slot_cell()) else { return };
        slot.pid.store(u64::from(self.opener), Ordering::SeqCst);
        self.announce_return();
    }

    /// Makes the listeners of all processes look. Those that find nothing new go on waiting.
    pub fn wake_listeners(&self) {
        let header = self.mapping.header();
        header.bell.fetch_add(1, Ordering::SeqCst);
        wake(&header.bell);
    }

    /// Asks the other processes to return cached memory until `bytes` would fit, and waits at most `limit` for that.
    ///
    /// Returns whether they would fit at some instant of the call: another process may take them first. Gives up early if all living
    /// processes have answered and none has more to return.
    pub fn press(&self, bytes: u64, limit: Duration) -> bool {
        let Some(units) = units_of(bytes) else { return false };
        let quota = self.quota_units().unwrap_or(0);
        let limit_units = self.limit_units().map_or(0, |limit| u64::from(limit.min(quota)));
        if self.used() / UNIT + u64::from(units) > limit_units {
            // However much the others return.
            return false;
        }
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            if self.check_process().is_err() {
                return false;
            }
            let header = self.mapping.header();
            let number = header.asks.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
            self.own_ask.store(number, Ordering::SeqCst);
            self.wake_listeners();
            loop {
                let seen = header.returns.load(Ordering::SeqCst);
                let answers = self.answers_to(number);
                // Read after the answers: what they announce is counted.
                if self.would_fit(units) {
                    return true;
                }
                let left = limit.saturating_sub(began.elapsed());
                if left.is_zero() || answers == Answers::All {
                    return false;
                }
                if answers == Answers::MoreToCome {
                    if self.fits_within(units, pause.min(left)) {
                        return true;
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    break;
                }
                wait_on(&header.returns, seen, SLICE.min(left));
            }
        }
    }

    /// Returns whether this opener has emptied the slot of a dead process within `time`. The driver may still be taking back its memory.
    pub fn has_reclaimed_within(&self, time: Duration) -> bool {
        self.reclaimed_at.lock().is_some_and(|at| at.elapsed() < time)
    }

    /// Wakes asking processes after bytes were returned.
    #[cold]
    pub(super) fn announce_return(&self) {
        let returns = &self.mapping.header().returns;
        returns.fetch_add(1, Ordering::SeqCst);
        wake(returns);
    }

    fn answer_cell(&self) -> Option<&AnswerCell> {
        self.mapping.header().answers.get(self.own)
    }

    fn answers_to(&self, number: u32) -> Answers {
        let mut answers = Answers::All;
        for (index, slot) in self.mapping.slots().iter().enumerate() {
            let is_publishing = slot.pid.load(Ordering::SeqCst) >> 32 != 0;
            let Some(cell) = self.mapping.header().answers.get(index) else { break };
            if index == self.own || !is_publishing || !self.is_alive(index) {
                continue;
            }
            let answered = cell.answered.load(Ordering::SeqCst);
            // A later ask of another process is answered as well: the counter only grows.
            let ahead = (answered >> 1).wrapping_sub(number) & NUMBERS;
            let is_answered = ahead <= NUMBERS / 2;
            match (is_answered, answered & 1) {
                (false, _) => return Answers::Missing,
                (true, 1) => answers = Answers::MoreToCome,
                _ => {}
            }
        }
        answers
    }

    /// Whether `units` more would fit at some instant of the next `time`. Waits until then in any case else: two processes that press
    /// each other do not ask more often than their pauses allow.
    fn fits_within(&self, units: u32, time: Duration) -> bool {
        let began = Instant::now();
        let returns = &self.mapping.header().returns;
        loop {
            let seen = returns.load(Ordering::SeqCst);
            if self.would_fit(units) {
                return true;
            }
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            wait_on(returns, seen, left);
        }
    }

    /// Whether `units` more would fit beside the living, if every unused grant was taken back.
    fn would_fit(&self, units: u32) -> bool {
        let Ok(limit) = self.limit_units() else { return false };
        let mut used = u64::from(units);
        for (index, slot) in self.mapping.slots().iter().enumerate() {
            let own = u64::from(Word::unpack(slot.word.load(Ordering::SeqCst)).used);
            if index == self.own {
                used += own;
                continue;
            }
            let is_empty = own == 0 && slot.pid.load(Ordering::Relaxed) == 0;
            let reserved = if is_empty { 0 } else { self.reserved_by(index, own) };
            if reserved != 0 && self.is_alive(index) {
                used += reserved;
            }
        }
        used <= u64::from(limit)
    }

    /// If the kernel does not answer, no process is declared dead.
    fn is_alive(&self, index: usize) -> bool {
        is_locked(&self.file, slot_offset(index)).unwrap_or(true)
    }
}
