//! Charges the physical memory of a resource to the ledger that processes share.
//!
//! The ledger counts in units of 256 bytes and rounds each charge up. A resource may release other amounts than it charged, so
//! [`LedgerMeter`] keeps the exact sum of bytes, holds the units that the sum needs, and moves the difference. No lock is held
//! over a call of the ledger, which may wait for its file lock.
//!
//! Invariant: the ledger counts at least the charged bytes. The meter neither joins a ledger nor sees memory that bypasses its
//! resource.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use xlog_driver::sync::Mutex;
use xlog_ledger::{Ledger, LedgerError, UNIT};

use super::budget::{NAMED, OtherProcess, OtherUse};
use super::resource::{PhysicalMeter, ResourceError, ResourceResult};
use super::runtime::Listener;

/// The maximum time in which the driver frees the memory of a killed process.
const TEARDOWN: Duration = Duration::from_secs(5);
const TEARDOWN_PAUSE: Duration = Duration::from_millis(5);

/// Meters physical memory by the ledger that processes share. Install it by [`meter_physical`] of the lowest resource.
///
/// ```
/// use std::sync::Arc;
/// use xlog_cuda::CudaDevice;
/// use xlog_cuda::device_runtime::{
///     AllocTag, DeviceMemoryResource, DirectCudaResource, LedgerMeter, StreamId,
/// };
/// use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
///
/// # let directory = std::env::temp_dir().join(format!("xlog-meter-example-{}", std::process::id()));
/// # std::fs::create_dir(&directory)?;
/// let config = LedgerConfig::new(DeviceKey::new("sim-0")?).with_limit(1 << 30).with_directory(&directory);
/// let meter = Arc::new(LedgerMeter::new(Arc::new(Ledger::open(config)?)));
/// let direct = DirectCudaResource::new(Arc::new(CudaDevice::open("sim")?), 0);
/// direct.meter_physical(meter.clone())?;
/// let block = direct.allocate(1 << 20, StreamId::DEFAULT, AllocTag("rows"))?;
/// assert!(meter.bytes() >= 1 << 20); // charged before the device was asked
/// direct.deallocate(block)?;
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`meter_physical`]: super::DeviceMemoryResource::meter_physical
#[derive(Debug)]
pub struct LedgerMeter {
    ledger: Arc<Ledger>,
    state: Mutex<MeterState>,
    failed_releases: AtomicU64,
    /// Started once memory is charged.
    listener: OnceLock<Arc<Listener>>,
}

#[derive(Debug, Default)]
struct MeterState {
    bytes: u64,
    /// Units that the ledger counts for the bytes.
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
    /// Creates a meter that charges `ledger`.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>) -> Self {
        Self {
            ledger,
            state: Mutex::new(MeterState::default()),
            failed_releases: AtomicU64::new(0),
            listener: OnceLock::new(),
        }
    }

    /// Starts `listener` once memory is charged.
    pub(super) fn start_with_memory(&self, listener: &Arc<Listener>) {
        let _ = self.listener.set(listener.clone());
        if self.bytes() > 0 {
            listener.start();
        }
    }

    /// Returns the ledger.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Returns the charged bytes.
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Returns the number of releases that the ledger could not record. The first one is reported on standard error.
    pub fn failed_releases(&self) -> u64 {
        self.failed_releases.load(Ordering::Relaxed)
    }

    fn report_failure(&self, problem: &dyn std::fmt::Display) {
        if self.failed_releases.fetch_add(1, Ordering::Relaxed) == 0 {
            super::runtime::print_line(format_args!(
                "memory was returned that the ledger {} could not record: {problem}",
                self.ledger.path().display()
            ));
        }
    }

    fn release_units(&self, units: u64) {
        if units > 0
            && let Err(error) = self.ledger.release(units * UNIT)
        {
            self.report_failure(&error);
        }
    }
}

impl PhysicalMeter for LedgerMeter {
    fn charge(&self, bytes: usize) -> ResourceResult<()> {
        let wanted = bytes as u64;
        // Units that the ledger granted to this call, not yet counted.
        let mut granted = 0;
        loop {
            let (short, slack) = {
                let mut state = self.state.lock();
                let Some(sum) = state.bytes.checked_add(wanted) else {
                    return Err(ResourceError::invalid(
                        format!("{bytes} bytes of physical memory"),
                        "less than any device has",
                    ));
                };
                let short = sum.div_ceil(UNIT).saturating_sub(state.units + granted);
                if short == 0 {
                    state.bytes = sum;
                    state.units += granted;
                    let surplus = state.surplus();
                    drop(state);
                    self.release_units(surplus);
                    if let Some(listener) = self.listener.get() {
                        listener.start();
                    }
                    return Ok(());
                }
                (short, state.slack() + granted * UNIT)
            };
            // Another thread may use these units first; the loop then charges more.
            if let Err(error) = self.ledger.charge(short.saturating_mul(UNIT)) {
                self.release_units(granted);
                return Err(refused(error, bytes, slack));
            }
            granted += short;
        }
    }

    fn release(&self, bytes: usize) {
        let mut state = self.state.lock();
        let Some(left) = state.bytes.checked_sub(bytes as u64) else {
            let counted = state.bytes;
            drop(state);
            return self
                .report_failure(&format_args!("{bytes} bytes released of {counted} charged"));
        };
        state.bytes = left;
        let surplus = state.surplus();
        drop(state);
        self.release_units(surplus);
    }

    fn request_cached(&self, error: &ResourceError, limit: Duration) -> bool {
        match error {
            ResourceError::OutOfBudget { requested, .. } => {
                self.ledger.request_cached(*requested as u64, limit)
            }
            // The kernel releases the locks of a killed process before the driver has freed all of its memory.
            ResourceError::OutOfMemory { .. } if self.ledger.has_reclaimed_within(TEARDOWN) => {
                std::thread::sleep(TEARDOWN_PAUSE.min(limit));
                true
            }
            _ => false,
        }
    }
}

/// Converts a refusal of the ledger to an error of a resource.
fn refused(error: LedgerError, requested: usize, slack: u64) -> ResourceError {
    match error {
        LedgerError::Full { available, .. } | LedgerError::OverQuota { available, .. } => {
            ResourceError::OutOfBudget {
                requested,
                remaining: usize::try_from(available.saturating_add(slack)).unwrap_or(usize::MAX),
            }
        }
        other => ResourceError::Ledger(other.to_string()),
    }
}

/// Returns the use of the other processes of a ledger, and the largest of them; `None` if it cannot be read.
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
            others.push(OtherProcess {
                pid: slot.pid,
                name: slot.name,
                bytes,
                cached: slot.memory.map(|memory| size(memory.cached)),
                pending: slot.memory.map(|memory| size(memory.pending)),
                has_answered: slot.memory.is_none_or(|memory| memory.has_answered),
            });
        }
    }
    others.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.pid.cmp(&b.pid)));
    others.truncate(NAMED);
    Some((sum, others))
}
