//! The ledger as a meter: charges the physical memory of a resource to the ledger that processes share.
//!
//! The ledger counts in units of 256 bytes and rounds each charge up. A resource may release other portions than it charged, so
//! [`LedgerMeter`] keeps the exact sum of bytes, holds the units that the sum needs, and moves the difference. No lock is held over
//! a call of the ledger, which may wait for its file lock.
//!
//! Invariant: the ledger counts at least the bytes that are charged. The meter does not join a ledger, and does not see memory that
//! bypasses its resource.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::Mutex;
use xlog_ledger::{Ledger, LedgerError, UNIT};

use super::budget::{NAMED, OtherProcess, OtherUse};
use super::resource::{PhysicalMeter, ResourceError, ResourceResult};

/// Meters physical memory by the ledger that processes share. Give it to [`meter_physical`] of the lowest resource.
///
/// [`meter_physical`]: super::DeviceMemoryResource::meter_physical
#[derive(Debug)]
pub struct LedgerMeter {
    ledger: Arc<Ledger>,
    state: Mutex<MeterState>,
    failed_releases: AtomicU64,
}

#[derive(Debug, Default)]
struct MeterState {
    /// Charged bytes.
    bytes: u64,
    /// Units that the ledger counts for them.
    units: u64,
}

impl MeterState {
    fn needed(&self) -> u64 {
        self.bytes.div_ceil(UNIT)
    }

    /// Removes and returns the units that the sum does not need.
    fn surplus(&mut self) -> u64 {
        let surplus = self.units.saturating_sub(self.needed());
        self.units -= surplus;
        surplus
    }

    /// Bytes that fit without another unit.
    fn slack(&self) -> u64 {
        (self.units * UNIT).saturating_sub(self.bytes)
    }
}

impl LedgerMeter {
    /// Makes a meter that charges `ledger`.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>) -> Self {
        Self {
            ledger,
            state: Mutex::new(MeterState::default()),
            failed_releases: AtomicU64::new(0),
        }
    }

    /// The ledger.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The charged bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// The number of releases that the ledger could not record. The first one is reported on standard error.
    #[must_use]
    pub fn failed_releases(&self) -> u64 {
        self.failed_releases.load(Ordering::Relaxed)
    }

    fn report_failure(&self, problem: &dyn std::fmt::Display) {
        if self.failed_releases.fetch_add(1, Ordering::Relaxed) == 0 {
            super::runtime::print_line(format_args!(
                "memory was returned that the ledger {} could not be told of: {problem}",
                self.ledger.path().display()
            ));
        }
    }

    fn release_units(&self, units: u64) {
        if units > 0
            && let Err(error) = self.ledger.give(units * UNIT)
        {
            self.report_failure(&error);
        }
    }
}

impl PhysicalMeter for LedgerMeter {
    fn take(&self, bytes: usize) -> ResourceResult<()> {
        let wanted = bytes as u64;
        // Units that the ledger granted to this call and that are not counted yet.
        let mut granted = 0;
        loop {
            let (short, slack) = {
                let mut state = self.state.lock();
                let Some(sum) = state.bytes.checked_add(wanted) else {
                    return Err(ResourceError::InvalidRequest {
                        value: format!("{bytes} bytes of physical memory"),
                        accepted: "less than any device has".to_owned(),
                    });
                };
                let short = sum.div_ceil(UNIT).saturating_sub(state.units + granted);
                if short == 0 {
                    state.bytes = sum;
                    state.units += granted;
                    let surplus = state.surplus();
                    drop(state);
                    self.release_units(surplus);
                    return Ok(());
                }
                (short, state.slack() + granted * UNIT)
            };
            // Another thread may use these units first; the loop then charges more.
            if let Err(error) = self.ledger.take(short.saturating_mul(UNIT)) {
                self.release_units(granted);
                return Err(refused(error, bytes, slack));
            }
            granted += short;
        }
    }

    fn give(&self, bytes: usize) {
        let mut state = self.state.lock();
        let Some(left) = state.bytes.checked_sub(bytes as u64) else {
            let counted = state.bytes;
            drop(state);
            return self
                .report_failure(&format_args!("{bytes} bytes given back of {counted} taken"));
        };
        state.bytes = left;
        let surplus = state.surplus();
        drop(state);
        self.release_units(surplus);
    }
}

/// Converts a refusal of the ledger to an error of a resource.
fn refused(error: LedgerError, requested: usize, slack: u64) -> ResourceError {
    match error {
        LedgerError::Full { available, .. } => ResourceError::OutOfBudget {
            requested,
            remaining: usize::try_from(available.saturating_add(slack)).unwrap_or(usize::MAX),
        },
        other => ResourceError::Ledger(other.to_string()),
    }
}

/// What the other processes of a ledger hold, and the largest of them; `None` if it cannot be read.
pub(crate) fn other_use(ledger: &Ledger) -> Option<(OtherUse, Vec<OtherProcess>)> {
    let snapshot = ledger.snapshot().ok()?;
    let own = ledger.slot();
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut sum = OtherUse::default();
    let mut others = Vec::new();
    for slot in snapshot.slots.into_iter().filter(|slot| slot.index != own) {
        let bytes = size(slot.used.saturating_add(slot.granted));
        sum.bytes = sum.bytes.saturating_add(bytes);
        sum.processes += usize::from(slot.alive);
        if slot.alive {
            others.push(OtherProcess { pid: slot.pid, name: slot.name, bytes });
        }
    }
    others.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.pid.cmp(&b.pid)));
    others.truncate(NAMED);
    Some((sum, others))
}
