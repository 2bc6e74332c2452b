//! The quotas of slots: limits of single processes, and shares guaranteed to them.
//!
//! Invariants:
//! - A quota changes only under the file lock. An owner reads its limit before each charge, even one that its grant covers, so a lowered
//!   limit applies from the next call.
//! - The guaranteed shares of living slots add up to at most the limit of the device.
//! - A request leaves others' unused guaranteed bytes free. A share guaranteed while others hold its bytes fills as they return them.
//!
//! A version 1 file has no quotas.

use std::sync::atomic::Ordering;

use super::ledger::{Ledger, drop_grant};
use super::mapping::{Mapping, QuotaCell, SlotCell, store_bytes};
use crate::error::{LedgerError, LedgerResult};
use crate::format::{UNIT, unpack_quota};
use crate::quota::Quota;
use crate::snapshot::{SlotSnapshot, time_of};
use crate::word::Word;

impl Ledger {
    /// Returns the quota of this process; empty if it has none.
    pub fn quota(&self) -> LedgerResult<Quota> {
        let slots = self.snapshot()?.slots;
        self.checked_quota_units()?;
        let own = self.mapping.quotas().get(self.own);
        // Otherwise a caller that changes the limit alone would erase a damaged guarantee.
        if own.is_some_and(|cell| unpack_quota(cell.guaranteed.load(Ordering::SeqCst)).is_none()) {
            return Err(self.damaged_quota());
        }
        let own = slots.into_iter().find(|slot| slot.index == self.slot());
        Ok(own.map(|slot| slot.quota).unwrap_or_default())
    }

    /// Replaces the whole quota of this process.
    pub fn set_quota(&self, quota: &Quota) -> LedgerResult<()> {
        self.store_quota(self.own, quota, |_| true)
    }

    /// Replaces the quota of another process, given by its snapshot, from that process's next request on.
    ///
    /// Fails with [`LedgerError::NoProcess`] if the process has left meanwhile.
    pub fn set_quota_of(&self, process: &SlotSnapshot, quota: &Quota) -> LedgerResult<()> {
        let index = process.index as usize;
        self.store_quota(index, quota, |slot| {
            let pid = slot.pid.load(Ordering::SeqCst) & u64::from(u32::MAX);
            pid == u64::from(process.pid)
                && time_of(slot.started.load(Ordering::Relaxed)) == process.started
                && (index == self.own || self.is_alive(index))
        })
    }

    /// Returns the limit of this process in bytes; `None` if it has no quota limit.
    pub fn quota_limit(&self) -> LedgerResult<Option<u64>> {
        self.check_process()?;
        let units = self.checked_quota_units()?;
        Ok((units != u32::MAX).then_some(u64::from(units) * UNIT))
    }

    /// Returns the smaller of the device's and this process's limit in bytes.
    pub fn limit_here(&self) -> LedgerResult<u64> {
        let quota = self.quota_limit()?.unwrap_or(u64::MAX);
        Ok(self.limit()?.min(quota))
    }

    /// Returns true if the file has quotas; a version 1 file has none.
    pub fn has_quotas(&self) -> bool {
        !self.mapping.quotas().is_empty()
    }

    fn store_quota(
        &self,
        index: usize,
        quota: &Quota,
        is_it: impl Fn(&SlotCell) -> bool,
    ) -> LedgerResult<()> {
        let packed = quota.pack()?;
        let _lock = self.lock()?;
        let slot = self.mapping.slots().get(index).filter(|slot| is_it(slot));
        let Some(slot) = slot else {
            return Err(LedgerError::NoProcess { path: self.path.clone() });
        };
        let Some(cell) = self.mapping.quotas().get(index) else {
            return Err(LedgerError::NoQuotas { path: self.path.clone() });
        };
        if quota.guaranteed_units() > 0 {
            self.reclaim()?;
            let limit = u64::from(self.limit_units()?);
            let available = limit.saturating_sub(self.guaranteed_to_others_of(index));
            if quota.guaranteed_units() > available {
                return Err(LedgerError::Guarantee {
                    requested: quota.guaranteed,
                    available: available * UNIT,
                    limit: limit * UNIT,
                    path: self.path.clone(),
                });
            }
        }
        store_bytes(&cell.name, &quota.name_bytes());
        cell.guaranteed.store(packed.guaranteed, Ordering::SeqCst);
        cell.limit.store(packed.limit, Ordering::SeqCst);
        // An owner charges nothing from a grant above its limit, so the grant is returned for others at once.
        if packed.limit != 0 {
            drop_grant(slot);
        }
        if packed.guaranteed != 0 {
            self.make_room_for_shares()?;
        }
        Ok(())
    }

    /// Recalls the unused grants of all slots if the guaranteed shares need them, now and whenever bytes are returned. The caller holds the
    /// file lock.
    fn make_room_for_shares(&self) -> LedgerResult<()> {
        let slots = || self.mapping.slots().iter().enumerate();
        let total = |slot: &SlotCell| Word::unpack(slot.word.load(Ordering::SeqCst)).total();
        let reserved: u64 = slots().map(|(at, slot)| self.reserved_by(at, total(slot))).sum();
        if reserved > u64::from(self.limit_units()?) {
            self.mapping.header().pressure.store(1, Ordering::SeqCst);
            slots().for_each(|(_, slot)| {
                drop_grant(slot);
            });
        }
        Ok(())
    }

    /// The limit of this process in units; `None` if the stored value is damaged.
    #[inline]
    pub(super) fn quota_units(&self) -> Option<u32> {
        let Some(cell) = self.mapping.quotas().get(self.own) else { return Some(u32::MAX) };
        match cell.limit.load(Ordering::SeqCst) {
            0 => Some(u32::MAX),
            raw => unpack_quota(raw).flatten(),
        }
    }

    pub(super) fn checked_quota_units(&self) -> LedgerResult<u32> {
        self.quota_units().ok_or_else(|| self.damaged_quota())
    }

    fn damaged_quota(&self) -> LedgerError {
        LedgerError::Damaged {
            path: self.path.clone(),
            what: format!("the quota of slot {} is no quota", self.own),
        }
    }

    /// The units that a slot takes from the limit: what it holds, but at least its guaranteed share.
    pub(super) fn reserved_by(&self, index: usize, held: u64) -> u64 {
        held.max(self.mapping.quotas().get(index).map_or(0, guaranteed))
    }

    /// The sum of the guaranteed shares of all slots but `index`.
    pub(super) fn guaranteed_to_others_of(&self, index: usize) -> u64 {
        let quotas = self.mapping.quotas().iter().enumerate();
        quotas.filter(|(other, _)| *other != index).map(|(_, cell)| guaranteed(cell)).sum()
    }

    /// The error for a request beyond the quota; `None` if it fits.
    pub(super) fn over_quota(
        &self,
        slot: &SlotCell,
        bytes: u64,
        quota: u32,
    ) -> Option<LedgerError> {
        let used = u64::from(Word::unpack(slot.word.load(Ordering::SeqCst)).used);
        let available = u64::from(quota).saturating_sub(used);
        let units = bytes.div_ceil(UNIT);
        (quota != u32::MAX && units > available).then(|| LedgerError::OverQuota {
            requested: bytes,
            available: available * UNIT,
            quota: u64::from(quota) * UNIT,
            own: used * UNIT,
            path: self.path.clone(),
        })
    }
}

/// The guaranteed units, at most the slot's limit; 0 if damaged.
fn guaranteed(cell: &QuotaCell) -> u64 {
    let load =
        |word: &std::sync::atomic::AtomicU64| unpack_quota(word.load(Ordering::SeqCst)).flatten();
    let limit = load(&cell.limit).map_or(u64::MAX, u64::from);
    load(&cell.guaranteed).map_or(0, u64::from).min(limit)
}

/// Clears the quota of a slot. Called before the fields that show that the slot has an owner are cleared.
pub(super) fn clear_quota(mapping: &Mapping, index: usize) {
    if let Some(cell) = mapping.quotas().get(index) {
        cell.guaranteed.store(0, Ordering::SeqCst);
        cell.limit.store(0, Ordering::SeqCst);
        cell.name.iter().for_each(|part| part.store(0, Ordering::Relaxed));
    }
}
