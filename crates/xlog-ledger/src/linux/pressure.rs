//! Pressure between processes: a process that is about to be refused asks the others for their cached memory.
//!
//! Each process with memory has a *listener*, a thread that waits on a word of the shared mapping ([`AskListener`]). An asking process
//! increments the ask counter and wakes all listeners. A listener returns its process's cached memory and then answers by storing the ask's
//! number in the header. The asking process ([`Ledger::request_cached`]) waits until the bytes fit, all have answered, or its deadline passes.
//!
//! Invariants:
//! - A listener answers after it has returned memory, so an asking process that sees all answers sees all returns.
//! - Only slots that publish their memory are waited for. A process that died is detected by its liveness lock.
//! - No process waits for another without a deadline, and no decision about the limit depends on these words.

use std::ops::Deref;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::ledger::Ledger;
use super::mapping::{AnswerCell, is_locked, wait_on, wake};
use crate::format::{UNIT, slot_offset, units_of};
use crate::word::Word;

/// The bits of an ask's number, which wraps around.
const NUMBERS: u32 = u32::MAX >> 1;
/// The longest wait between two liveness checks.
const SLICE: Duration = Duration::from_millis(10);
/// The first pause before a repeated ask to processes with pending memory; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The event that ended a wait of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Heard {
    /// Another process asks for memory: return what is cached, then [`AskListener::answer`].
    Ask,
    /// The timeout passed, a viewer came, or [`Ledger::wake_listeners`] was called.
    Nothing,
    /// The process has left the ledger.
    Closed,
}

/// The state of an ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answers {
    /// A living process has not answered.
    Missing,
    /// All have answered, and some will return more once work completes.
    MoreToCome,
    /// All have answered.
    All,
}

/// Receives the asks of other processes, on its own thread. `L` is a reference or an `Arc` to the [`Ledger`].
#[derive(Debug)]
pub struct AskListener<L> {
    ledger: L,
    /// The latest ask that was answered.
    answered: u32,
    /// The latest ask received.
    heard: u32,
    /// True if the last answer announced more memory.
    more: bool,
}

impl<L: Deref<Target = Ledger>> AskListener<L> {
    /// Starts to listen. Earlier asks are not received; later ones are, even before the first [`AskListener::wait`].
    pub fn new(ledger: L) -> Self {
        let answered = ledger.mapping.header().asks.load(Ordering::SeqCst);
        let mut listener = Self { ledger, answered, heard: answered, more: false };
        listener.answer(false);
        listener
    }

    /// Waits for an ask for at most `timeout`. `is_over` is checked before the wait, and a wake-up after that check is not missed.
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
        // This process has already returned its caches for its own ask. Others may still wait for the memory it announced.
        let is_own = asks == self.ledger.own_ask.load(Ordering::SeqCst)
            && asks == self.answered.wrapping_add(1);
        if is_own {
            self.answer(self.more);
            return None;
        }
        self.ledger.is_answering.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // A process that has left meanwhile does not wait for the answer.
        if self.ledger.check_process().is_err() {
            self.ledger.is_answering.store(false, Ordering::SeqCst);
            return Some(Heard::Closed);
        }
        Some(Heard::Ask)
    }

    /// Answers the received ask, after memory was returned. `more` announces memory with pending work on streams, for which the asking
    /// process asks again.
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
    /// Publishes how many used bytes are cached, and how many belong to freed blocks with pending work on streams.
    ///
    /// From then on asking processes wait for this process's answers, so it must have an [`AskListener`]. Makes no system call.
    pub fn publish_memory(&self, cached: u64, pending: u64) {
        let Ok(slot) = self.check_process().and_then(|()| self.slot_cell()) else { return };
        if let Some(cell) = self.answer_cell() {
            cell.pending.store(units_of(pending).unwrap_or(u32::MAX), Ordering::Relaxed);
        }
        let cached = units_of(cached).unwrap_or(u32::MAX).saturating_add(1);
        let word = u64::from(cached) << 32 | u64::from(self.opener);
        slot.pid.store(word, Ordering::SeqCst);
        // A process that has left has no listener, so others must not wait for it.
        if self.check_process().is_err() {
            slot.pid.store(u64::from(self.opener), Ordering::SeqCst);
        }
    }

    /// Withdraws what [`Ledger::publish_memory`] published: this process has no listener any more.
    pub fn withdraw_memory(&self) {
        let Ok(slot) = self.check_process().and_then(|()| self.slot_cell()) else { return };
        slot.pid.store(u64::from(self.opener), Ordering::SeqCst);
        self.announce_return();
    }

    /// Wakes the listeners of all processes. Those without a new ask continue to wait.
    pub fn wake_listeners(&self) {
        let header = self.mapping.header();
        header.bell.fetch_add(1, Ordering::SeqCst);
        wake(&header.bell);
    }

    /// Asks the other processes to return cached memory until `bytes` would fit, and waits for at most `limit`.
    ///
    /// Returns true if they would fit at some instant of the call; another process may still take them first. Returns early if all living
    /// processes have answered and none will return more.
    pub fn request_cached(&self, bytes: u64, limit: Duration) -> bool {
        let Some(units) = units_of(bytes) else { return false };
        let quota = self.quota_units().unwrap_or(0);
        let limit_units = self.limit_units().map_or(0, |limit| u64::from(limit.min(quota)));
        if self.used() / UNIT + u64::from(units) > limit_units {
            // The own limit forbids it, whatever the others return.
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
                // Read after the answers, so that the announced returns are counted.
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

    /// Returns true if this opener emptied a dead process's slot within `time`. The driver may still be reclaiming its memory.
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
            // An answer to a later ask counts too, because the counter only grows.
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

    /// Returns true once `units` more would fit. Otherwise waits for all of `time`, so that two processes that press each other do not ask
    /// more often than their pauses allow.
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

    /// True if `units` more would fit beside the living processes if every unused grant were recalled.
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

    /// True if the slot's owner lives, or the kernel refuses the query.
    pub(super) fn is_alive(&self, index: usize) -> bool {
        is_locked(&self.file, slot_offset(index)).unwrap_or(true)
    }
}
