//! The account of this process on one device: the process's limit, and its slot in the device's ledger.
//!
//! A charge precedes the driver call, and a release follows it. All amounts are multiples of the ledger's unit, so a release need not have
//! the portions of the charges.
//!
//! If the ledger's lock is not free in time, the request is refused and the process stays in the ledger, because its bytes must stay
//! visible to others. If the ledger is damaged or removed, the process leaves it and continues under its own limit.
//!
//! The limit of the process is its quota in the ledger, where an administrator may change it. Without a ledger, or in one of version 1, the
//! limit is kept here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlog_base::Mutex;
use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerError, Quota, UNIT};

use crate::driver::Driver;
use crate::messages::{Kind, say_once};
use crate::settings::{LedgerSetting, Settings, Whole};

/// The bytes that a new ledger reserves for contexts and displays, like a runtime's.
const RESERVE: u64 = 1 << 30;
/// The time limit for asking other processes for memory before a refusal.
const PRESSURE_LIMIT: Duration = Duration::from_secs(1);
/// The tolerated error of a library's published bytes: 1 MiB, or this part of them. A publication costs more than a charge.
const SHOWN_STEP: u64 = 1 << 20;
const SHOWN_PART: u64 = 64;
/// The kinds of refusals, in logs.
const PROCESS_LIMIT: &str = "process_limit";
const LEDGER_LIMIT: &str = "ledger_limit";
const LEDGER_BUSY: &str = "ledger_busy";

pub(crate) struct Account {
    /// The limit at the start, used if the ledger does not keep one.
    start_limit: Option<u64>,
    /// True if the ledger keeps the limit.
    has_quota: bool,
    used: AtomicU64,
    ledger: Option<Arc<Ledger>>,
    has_left: AtomicBool,
    holders: Mutex<Vec<Holder>>,
}

/// The live bytes that a library requested.
struct Holder {
    library: &'static str,
    bytes: u64,
    /// The bytes published for viewers.
    shown: u64,
}

impl Holder {
    /// True if the published bytes are too inexact. A library's first and last bytes are published at once.
    fn is_due(&self) -> bool {
        let off = self.bytes.abs_diff(self.shown);
        let is_none = self.shown == 0 || self.bytes == 0;
        off >= SHOWN_STEP.max(self.shown / SHOWN_PART) || (is_none && off > 0)
    }
}

/// The reason why a charge is refused.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: &'static str,
    pub(crate) reason: String,
}

impl Refusal {
    /// True if the ledger's lock was not free in time. The request has already waited, and no memory that this process returns helps.
    pub(crate) fn is_busy(&self) -> bool {
        self.kind == LEDGER_BUSY
    }
}

impl Account {
    /// Opens the account of a device and joins its ledger.
    pub(crate) fn open(driver: &Driver, settings: &Settings, device: u32) -> Self {
        let total = driver.total(device);
        let of_device = total.unwrap_or(u64::MAX);
        let mut start_limit = settings.limit(Whole { device: of_device, ledger: of_device });
        let mut has_quota = false;
        let ledger = match join(driver, &settings.ledger, device, total) {
            Ok(Some(ledger)) => {
                let whole = ledger.limit().unwrap_or(of_device);
                start_limit = settings.limit(Whole { device: of_device, ledger: whole });
                has_quota = set_quota(&ledger, settings, device, start_limit, total.unwrap_or(0));
                Some(ledger)
            }
            Ok(None) => None,
            Err(reason) => {
                let text = format!("device {device} is not counted in a ledger: {reason}");
                say_once(Kind::Ledger, &text);
                None
            }
        };
        Self {
            start_limit,
            has_quota,
            used: AtomicU64::new(0),
            ledger,
            has_left: AtomicBool::new(false),
            holders: Mutex::default(),
        }
    }

    /// Charges `bytes` by `try_once`. If memory is short, `reclaim` first returns this process's unused memory once; then other processes
    /// are asked for their cached memory.
    pub(crate) fn admit<T>(
        &self,
        bytes: u64,
        reclaim: impl FnOnce(),
        mut try_once: impl FnMut() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        match try_once() {
            Err(refusal) if !refusal.is_busy() => reclaim(),
            outcome => return outcome,
        }
        let mut deadline = None;
        loop {
            match try_once() {
                // Another process may take the returned bytes, so the charge is retried until the deadline.
                Err(refusal) if self.request_room(bytes, &refusal, &mut deadline) => {}
                outcome => return outcome,
            }
        }
    }

    /// Asks the other processes for cached memory, if the refusal is one that this can help. Returns true if `bytes` may fit now. The
    /// first call sets the deadline.
    fn request_room(&self, bytes: u64, refusal: &Refusal, deadline: &mut Option<Instant>) -> bool {
        let deadline = deadline.get_or_insert_with(|| Instant::now() + PRESSURE_LIMIT);
        let left = deadline.saturating_duration_since(Instant::now());
        refusal.kind == LEDGER_LIMIT
            && !left.is_zero()
            && self.ledger().is_some_and(|ledger| ledger.request_cached(bytes, left))
    }

    /// Charges `bytes`, rounded by [`rounded`], if they fit now. The local limit counts them only after the ledger granted them, so bytes for which another thread
    /// still waits there refuse no request.
    pub(crate) fn try_charge(&self, bytes: u64) -> Result<(), Refusal> {
        // The ledger checks its own quota.
        let limit = self.start_limit.filter(|_| self.quotas().is_none()).unwrap_or(u64::MAX);
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        let beyond = |used: u64| Refusal {
            kind: PROCESS_LIMIT,
            reason: format!(
                "{bytes} bytes do not fit: the limit of this process is {limit}, {used} are used"
            ),
        };
        let used = self.used.load(Ordering::Acquire);
        if fits(used).is_none() {
            return Err(beyond(used));
        }
        let refuse = |kind, error: LedgerError| Err(Refusal { kind, reason: error.to_string() });
        match self.ledger().map_or(Ok(()), |ledger| ledger.charge(bytes)) {
            Ok(()) => {}
            Err(error @ LedgerError::OverQuota { .. }) => return refuse(PROCESS_LIMIT, error),
            Err(error @ LedgerError::Full { .. }) => return refuse(LEDGER_LIMIT, error),
            Err(error @ LedgerError::Busy { .. }) => return refuse(LEDGER_BUSY, error),
            Err(error) => self.leave(&error),
        }
        let counted = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits);
        counted.map(|_| ()).map_err(|used| {
            self.return_to_ledger(bytes);
            beyond(used)
        })
    }

    /// Releases `bytes` in the ledger.
    fn return_to_ledger(&self, bytes: u64) {
        if let Some(Err(error)) = self.ledger().map(|ledger| ledger.release(bytes)) {
            self.leave(&error);
        }
    }

    /// Releases `bytes` that were charged.
    pub(crate) fn release(&self, bytes: u64) {
        let _ = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            Some(used.saturating_sub(bytes))
        });
        self.return_to_ledger(bytes);
    }

    /// The smaller of the process's limit and the ledger's.
    pub(crate) fn limit(&self) -> Option<u64> {
        let shared = self.ledger().and_then(|ledger| ledger.limit().ok());
        [self.process_limit(), shared].into_iter().flatten().min()
    }

    /// The current limit of the process.
    fn process_limit(&self) -> Option<u64> {
        match self.quotas() {
            Some(ledger) => ledger.quota_limit().ok().flatten(),
            None => self.start_limit,
        }
    }

    /// The ledger, if it keeps the limit of the process.
    fn quotas(&self) -> Option<&Arc<Ledger>> {
        self.ledger().filter(|_| self.has_quota)
    }

    /// The bytes that may still be charged.
    pub(crate) fn available(&self) -> Option<u64> {
        let used = self.used.load(Ordering::Acquire);
        let own = self.process_limit().map(|limit| limit.saturating_sub(used));
        let shared = self.ledger().and_then(|ledger| {
            let snapshot = ledger.snapshot().ok()?;
            // Unused grants of others and bytes of dead processes can be reclaimed. Guaranteed shares cannot.
            let living = snapshot.slots.iter().filter(|slot| slot.alive);
            let reserved = living.map(|slot| match slot.index == ledger.slot() {
                true => slot.used,
                false => slot.used.max(slot.quota.guaranteed),
            });
            Some(snapshot.limit.saturating_sub(reserved.sum()))
        });
        [own, shared].into_iter().flatten().min()
    }

    /// Counts bytes that a library allocated, for viewers.
    pub(crate) fn note_held(&self, library: &'static str, bytes: u64) {
        self.change(library, |held| held.saturating_add(bytes));
    }

    /// Counts bytes that a library freed.
    pub(crate) fn note_freed(&self, library: &'static str, bytes: u64) {
        self.change(library, |held| held.saturating_sub(bytes));
    }

    /// Publishes a change once a library's published bytes are too inexact, even without a viewer, because a program may make no driver
    /// call for hours. It makes no system call.
    fn change(&self, library: &'static str, change: impl FnOnce(u64) -> u64) {
        let Some(ledger) = self.ledger() else { return };
        let mut holders = self.holders.lock();
        let known = holders.iter().position(|holder| holder.library == library);
        let at = known.unwrap_or_else(|| {
            holders.push(Holder { library, bytes: 0, shown: 0 });
            holders.len() - 1
        });
        let holder = &mut holders[at];
        holder.bytes = change(holder.bytes);
        if !holder.is_due() {
            return;
        }
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders.iter_mut().for_each(|holder| holder.shown = holder.bytes);
        let shown = holders.iter().filter(|holder| holder.shown > 0);
        ledger.publish_tags(shown.map(|holder| (holder.library, holder.shown)));
    }

    fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.as_ref().filter(|_| !self.has_left.load(Ordering::Acquire))
    }

    #[cold]
    fn leave(&self, error: &LedgerError) {
        if !self.has_left.swap(true, Ordering::AcqRel) {
            if let Some(ledger) = &self.ledger {
                ledger.leave();
            }
            // At the end of the process the slot is already closed.
            if !matches!(error, LedgerError::Closed { .. }) {
                say_once(Kind::Ledger, &format!("no longer counted in the ledger: {error}"));
            }
        }
    }
}

/// Rounds bytes to the unit in which they are charged.
pub(crate) fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX - u64::MAX % UNIT)
}

fn join(
    driver: &Driver,
    setting: &LedgerSetting,
    device: u32,
    total: Option<u64>,
) -> Result<Option<Arc<Ledger>>, String> {
    if *setting == LedgerSetting::Off {
        return Ok(None);
    }
    let total = total.ok_or("the driver does not tell the memory of the device")?;
    let own_key = || {
        let uuid =
            driver.uuid(device).ok_or("the driver does not tell the identity of the device")?;
        DeviceKey::new(uuid_text(&uuid)).map_err(|error| error.to_string())
    };
    let config = match setting {
        LedgerSetting::File(path) => {
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
            let key = DeviceKey::new(name).map_err(|error| error.to_string())?;
            LedgerConfig::new(key).with_directory(path.parent().unwrap_or(path))
        }
        LedgerSetting::Directory(directory) => {
            LedgerConfig::new(own_key()?).with_directory(directory)
        }
        LedgerSetting::On | LedgerSetting::Off => LedgerConfig::new(own_key()?),
    };
    let usable = total.saturating_sub(RESERVE.min(total / 16));
    let ledger =
        Arc::new(Ledger::open(config.with_limit(usable)).map_err(|error| error.to_string())?);
    ledger.leave_at_exit();
    Ok(Some(ledger))
}

/// Sets the initial quota of the process. Returns true if the ledger keeps its limit. A guarantee that cannot be given is reported.
fn set_quota(
    ledger: &Ledger,
    settings: &Settings,
    device: u32,
    limit: Option<u64>,
    total: u64,
) -> bool {
    let whole = Whole { device: total, ledger: ledger.limit().unwrap_or(total) };
    let mut quota = Quota::default();
    quota.limit = limit;
    quota.name = settings.name.clone();
    let share = settings.guarantee.map_or(0, |share| share.of(whole));
    quota.guaranteed = share.min(limit.unwrap_or(u64::MAX));
    if quota.is_empty() {
        return ledger.has_quotas();
    }
    let outcome = match ledger.set_quota(&quota) {
        Err(error @ LedgerError::Guarantee { .. }) => {
            say_once(Kind::Ledger, &format!("device {device}: {error}"));
            ledger.set_quota(&quota.with_guaranteed(0))
        }
        outcome => outcome,
    };
    match outcome {
        Ok(()) => true,
        Err(LedgerError::NoQuotas { .. }) => false,
        Err(error) => {
            say_once(Kind::Ledger, &format!("device {device} has no quota in the ledger: {error}"));
            false
        }
    }
}

/// The text of a device's UUID, which is the key of its ledger.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
