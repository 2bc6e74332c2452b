//! Decisions under the file lock: grants to processes from the free bytes.
//!
//! While the lock is held, no other slot's total (used + granted) can grow; it shrinks by its owner's releases and by recalls here. So a sum
//! that two readings agree on was true at one instant, and a refusal based on it without remaining grants is never spurious. A kill at any
//! point leaves each word either before or after a change. The sum never exceeds the limit, because bytes leave one word before they enter
//! another.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::file::failed;
use super::ledger::{Ledger, clear_display, drop_grant, note_peak, replace};
use super::mapping::{SlotCell, try_lock, unlock};
use super::quotas::clear_quota;
use crate::config::check_limit;
use crate::error::{LedgerError, LedgerResult};
use crate::format::{UNIT, pack_limit, slot_offset, units_of};
use crate::snapshot::Reclaimed;
use crate::word::{Word, slack};

/// The maximum number of readings of a sum that keeps shrinking.
const READINGS: usize = 64;

/// A request and its bounds, in units.
#[derive(Clone, Copy, Debug)]
struct Request {
    units: u32,
    /// The limit of the device.
    limit: u32,
    /// The limit of this opener's slot.
    quota: u32,
}

/// The other slots, in units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Others {
    /// Used and granted units, counting each slot as at least its guaranteed share.
    total: u64,
    /// Units granted and not used.
    granted: u64,
    /// The number of slots that hold units.
    openers: u64,
}

impl Ledger {
    /// Sets the device's limit in bytes, rounded down to [`UNIT`].
    ///
    /// A limit below current use recalls every unused grant and refuses requests until enough was released. The limit cannot be below the
    /// sum of the guaranteed shares.
    pub fn set_limit(&self, bytes: u64) -> LedgerResult<()> {
        let units = check_limit(bytes)?;
        let _lock = self.lock()?;
        self.reclaim()?;
        let guaranteed = self.guaranteed_to_others_of(usize::MAX);
        if guaranteed > u64::from(units) {
            return Err(LedgerError::BelowGuarantees {
                requested: bytes,
                guaranteed: guaranteed * UNIT,
                path: self.path.clone(),
            });
        }
        let header = self.mapping.header();
        let own = Word::unpack(self.slot_cell()?.word.load(Ordering::SeqCst)).total();
        // Summed before the limit changes: no total grows while the lock is held.
        let short = self.others().total + own > u64::from(units);
        if short {
            header.pressure.store(1, Ordering::SeqCst);
        }
        header.limit.store(pack_limit(units), Ordering::SeqCst);
        if short {
            self.mapping.slots().iter().for_each(|slot| {
                drop_grant(slot);
            });
        }
        Ok(())
    }

    /// Releases the slots of dead processes now. Every request that would be refused does this first.
    pub fn reclaim_dead(&self) -> LedgerResult<Reclaimed> {
        let _lock = self.lock()?;
        self.reclaim()
    }

    /// Serves a request that this opener's grant does not cover.
    #[cold]
    pub(super) fn charge_shared(&self, slot: &SlotCell, bytes: u64) -> LedgerResult<()> {
        let limit = self.limit_units()?;
        let quota = self.checked_quota_units()?;
        if let Some(refusal) = self.over_quota(slot, bytes, quota) {
            return Err(refusal);
        }
        let Some(units) = units_of(bytes).filter(|units| *units <= limit) else {
            return Err(self.full(slot, bytes, self.others(), limit));
        };
        let _lock = self.lock()?;
        // Read again under the lock, which guards their changes.
        let limit = self.limit_units()?;
        let quota = self.checked_quota_units()?;
        let request = Request { units, limit, quota };
        let header = self.mapping.header();
        if self.grow(slot, request, self.others()) {
            return Ok(());
        }
        self.reclaim()?;
        let mut others = self.others();
        if self.grow(slot, request, others) {
            return Ok(());
        }
        // Pressure on others cannot satisfy a quota.
        if let Some(refusal) = self.over_quota(slot, bytes, quota) {
            return Err(refusal);
        }
        // Set before the grants are read, see `yield_to_pressure`.
        header.pressure.store(1, Ordering::SeqCst);
        for _ in 0..READINGS {
            self.recall_grants();
            let now = self.others();
            if self.grow(slot, request, now) {
                return Ok(());
            }
            if now.total == others.total && now.granted == 0 {
                break;
            }
            others = now;
        }
        Err(self.full(slot, bytes, others, limit))
    }

    /// Charges `units` if they fit beside the others, and grants some slack. The caller holds the file lock.
    fn grow(&self, slot: &SlotCell, request: Request, others: Others) -> bool {
        let pressure = &self.mapping.header().pressure;
        let Request { units, quota, .. } = request;
        let limit = u64::from(request.limit);
        // With less than this free, a ledger under pressure stays under pressure.
        let relief = limit / 8;
        let pressed = pressure.load(Ordering::SeqCst) != 0;
        let granted = replace(slot, |word| {
            let free = limit.saturating_sub(others.total + word.total());
            word.refill(units, free, quota, |rest| {
                if pressed && rest < relief {
                    return 0;
                }
                slack(rest, self.keep.chunk, others.openers + 1)
            })
        });
        let Some(word) = granted else { return false };
        note_peak(slot, word);
        // Counts the guaranteed share as others do: pressure stays while others hold part of it.
        let own = self.reserved_by(self.own, u64::from(word.used));
        if pressed && limit.saturating_sub(others.total + own) >= relief {
            pressure.store(0, Ordering::SeqCst);
        }
        true
    }

    fn others(&self) -> Others {
        let mut others = Others { total: 0, granted: 0, openers: 0 };
        for (index, slot) in self.mapping.slots().iter().enumerate() {
            let word = Word::unpack(slot.word.load(Ordering::SeqCst));
            // A slot without an owner has no quota.
            let is_empty = word.total() == 0 && slot.pid.load(Ordering::Relaxed) == 0;
            if index != self.own && !is_empty {
                others.total += self.reserved_by(index, word.total());
                others.granted += u64::from(word.granted);
                others.openers += u64::from(word.total() != 0);
            }
        }
        others
    }

    /// Recalls the unused grants of the others. The caller holds the file lock.
    fn recall_grants(&self) {
        for (index, slot) in self.mapping.slots().iter().enumerate() {
            if index != self.own {
                drop_grant(slot);
            }
        }
    }

    /// Empties the slots of dead owners, whose liveness locks are free. The caller holds the file lock, so no slot is claimed meanwhile.
    pub(super) fn reclaim(&self) -> LedgerResult<Reclaimed> {
        let mut reclaimed = Reclaimed::default();
        for (index, slot) in self.mapping.slots().iter().enumerate() {
            let empty =
                slot.word.load(Ordering::SeqCst) == 0 && slot.pid.load(Ordering::Relaxed) == 0;
            if index == self.own || empty {
                continue;
            }
            let lock_failed = |error| failed(&self.path, "lock", error);
            if !try_lock(&self.file, slot_offset(index)).map_err(lock_failed)? {
                continue;
            }
            let left = Word::unpack(slot.word.swap(0, Ordering::SeqCst)).total();
            clear_quota(&self.mapping, index);
            clear_display(slot);
            unlock(&self.file, slot_offset(index)).map_err(lock_failed)?;
            reclaimed.slots += 1;
            reclaimed.bytes = reclaimed.bytes.saturating_add(left.saturating_mul(UNIT));
        }
        if reclaimed.bytes > 0 {
            *self.reclaimed_at.lock() = Some(Instant::now());
        }
        Ok(reclaimed)
    }

    fn full(&self, slot: &SlotCell, requested: u64, others: Others, limit: u32) -> LedgerError {
        let own = u64::from(Word::unpack(slot.word.load(Ordering::SeqCst)).used);
        let limit = u64::from(limit);
        LedgerError::Full {
            requested,
            available: limit.saturating_sub(others.total + own) * UNIT,
            limit: limit * UNIT,
            own: own * UNIT,
            others: others.total * UNIT,
            path: self.path.clone(),
        }
    }
}
