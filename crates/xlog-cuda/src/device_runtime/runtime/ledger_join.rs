//! Joining the ledger of a device, and the preview of that.
//!
//! If a configured ledger cannot be joined, the runtime is not built. The automatic ledger of a GPU is optional if this machine cannot
//! have one: its directory is missing, not permitted, read-only or full.
//!
//! A file that is damaged, foreign, read-only or of a newer version is always an error: other processes may be counting in it.

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use xlog_driver::sync::Mutex;
use xlog_ledger::{Ledger, LedgerConfig, LedgerError, LedgerResult, Quota};

use super::config::LEDGER_VARIABLE;
use super::ledger_listener::Listener;
use super::limits::{Capacity, LedgerPreview, LimitPreview};
use super::{LedgerSetting, RuntimeConfig};
use crate::device_runtime::budget::BudgetHandle;
use crate::device_runtime::ledger::{LedgerMeter, other_use};
use crate::device_runtime::resource::DeviceMemoryResource;
use crate::device_runtime::statistics::Statistics;
use crate::{CudaDevice, Result, XlogError};

/// The state of a runtime's ledger.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LedgerStatus {
    /// No ledger is configured.
    Off,
    /// This machine cannot have the ledger. The limit holds for this process alone.
    Unavailable {
        /// The reason.
        reason: String,
    },
    /// Physical bytes are charged to it.
    Joined(Arc<Ledger>),
}

impl LedgerStatus {
    pub(super) fn limit(&self) -> Result<Option<u64>> {
        let limit = self.ledger().map(|ledger| ledger.limit()).transpose();
        limit.map_err(|error| XlogError::Kernel(error.to_string()))
    }

    /// The ledger, if one was joined.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        match self {
            Self::Joined(ledger) => Some(ledger),
            _ => None,
        }
    }
}

impl fmt::Display for LedgerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Unavailable { reason } => write!(f, "unavailable: {reason}"),
            Self::Joined(ledger) => write!(f, "joined {}", ledger.path().display()),
        }
    }
}

/// The membership of a runtime in a ledger: the meter of its physical bytes, and the listener for other processes.
#[derive(Debug)]
pub(super) struct Membership {
    status: LedgerStatus,
    meter: Option<Arc<LedgerMeter>>,
    listener: OnceLock<Arc<Listener>>,
}

impl Membership {
    /// Meters `resource` by the ledger, if one was joined.
    pub(super) fn begin(
        status: LedgerStatus,
        resource: &dyn DeviceMemoryResource,
        budget: &BudgetHandle,
    ) -> Result<Self> {
        let listener = OnceLock::new();
        let Some(ledger) = status.ledger() else {
            return Ok(Self { status, meter: None, listener });
        };
        let meter = Arc::new(LedgerMeter::new(ledger.clone()));
        resource.meter_physical(meter.clone())?;
        let asked = ledger.clone();
        budget.set_other_processes(move || other_use(&asked));
        Ok(Self { meter: Some(meter), listener, status })
    }

    /// Listens to the other processes of the ledger while `resource` holds memory.
    pub(super) fn listen(
        &self,
        resource: &Arc<dyn DeviceMemoryResource + Send + Sync>,
        budget: &BudgetHandle,
        statistics: &Statistics,
    ) {
        let (Some(meter), Some(ledger)) = (&self.meter, self.status.ledger()) else { return };
        let listener = self.listener.get_or_init(|| {
            let (ledger, budget) = (ledger.clone(), budget.clone());
            Arc::new(Listener::new(ledger, resource, budget, statistics.clone()))
        });
        meter.start_with_memory(listener);
    }

    /// Ends the listener.
    pub(super) fn end_listening(&self) {
        if let Some(listener) = self.listener.get() {
            listener.end();
        }
    }

    pub(super) fn status(&self) -> &LedgerStatus {
        &self.status
    }

    /// Returns whether physical bytes are charged to a ledger.
    pub(super) fn is_metered(&self) -> bool {
        self.meter.is_some()
    }

    pub(super) fn meter(&self) -> Option<&Arc<LedgerMeter>> {
        self.meter.as_ref()
    }

    /// Returns the current limit of the ledger for this process; `None` if it cannot be read. Such a ledger refuses every charge.
    pub(super) fn limit(&self) -> Option<u64> {
        self.status.ledger().and_then(|ledger| ledger.limit_here().ok())
    }
}

/// Joins the configured ledger of a device, and creates it if it is missing.
pub(super) fn join(
    device: &CudaDevice,
    config: &RuntimeConfig,
    capacity: &Capacity,
) -> Result<LedgerStatus> {
    let wanted = match config.ledger.config_for(device) {
        Ok(None) => return Ok(LedgerStatus::Off),
        Ok(Some(wanted)) => Ok(with_deadline(wanted, config)),
        Err(error) => Err(error),
    };
    let limit = capacity.of_new_ledger(config);
    let opened = wanted.and_then(|wanted| {
        let ledger = Ledger::open(wanted.with_limit(limit))?;
        let limit = config.quota.map(|quota| ledger.limit().map(|limit| quota.of(limit)));
        let mut quota = Quota::default();
        quota.limit = limit.transpose()?;
        quota.name = config.quota_name.clone();
        // A file of version 1 has no field for a name, and refuses a limit.
        let is_settable = quota.limit.is_some() || ledger.has_quotas();
        if !quota.is_empty() && is_settable {
            ledger.set_quota(&quota)?;
        }
        Ok(ledger)
    });
    let status = status_of(opened, config.ledger.is_demanded())?;
    match &status {
        LedgerStatus::Joined(ledger) => claim(ledger, device, &config.ledger)?,
        LedgerStatus::Unavailable { reason } => super::print_line(format_args!(
            "{} has no ledger, so its limit holds for this process alone: {reason}",
            device.spec()
        )),
        LedgerStatus::Off => {}
    }
    Ok(status)
}

fn with_deadline(mut wanted: LedgerConfig, config: &RuntimeConfig) -> LedgerConfig {
    wanted.lock_deadline = config.ledger_deadline.unwrap_or(wanted.lock_deadline);
    wanted
}

fn status_of(opened: LedgerResult<Ledger>, is_demanded: bool) -> Result<LedgerStatus> {
    match opened {
        Ok(ledger) => {
            let ledger = Arc::new(ledger);
            // A shared runtime, or one with leaked blocks, never drops its ledger.
            ledger.leave_at_exit();
            Ok(LedgerStatus::Joined(ledger))
        }
        Err(error) if !is_demanded && has_no_place(&error) => {
            Ok(LedgerStatus::Unavailable { reason: error.to_string() })
        }
        Err(error) => Err(failure(&error)),
    }
}

fn failure(error: &LedgerError) -> XlogError {
    XlogError::Kernel(format!(
        "the ledger cannot be joined: {error}; or work without one: {LEDGER_VARIABLE}=off, in code LedgerSetting::Off"
    ))
}

/// Returns whether no process can have a ledger there, so that a runtime without one bypasses no other process's limit.
fn has_no_place(error: &LedgerError) -> bool {
    match error {
        LedgerError::Io { source, .. } => matches!(
            source.kind(),
            ErrorKind::NotFound
                | ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::StorageFull
                | ErrorKind::QuotaExceeded
        ),
        _ => false,
    }
}

/// Refuses one file for two devices of a process: it would add the bytes of two cards.
fn claim(ledger: &Ledger, device: &CudaDevice, setting: &LedgerSetting) -> Result<()> {
    static FILES: Mutex<Vec<(PathBuf, u32)>> = Mutex::new(Vec::new());
    if !matches!(setting, LedgerSetting::File(_)) {
        return Ok(());
    }
    let mut files = FILES.lock();
    match files.iter().find(|(path, _)| path == ledger.path()) {
        Some((path, other)) if *other != device.ordinal() => Err(XlogError::Kernel(format!(
            "{} is already the ledger of device ordinal {other}, so it cannot be that of ordinal {}; name a directory instead",
            path.display(),
            device.ordinal()
        ))),
        Some(_) => Ok(()),
        None => {
            files.push((ledger.path().to_owned(), device.ordinal()));
            Ok(())
        }
    }
}

/// Previews the limits of a runtime that `config` would build on `device`. It joins an existing ledger for a moment, and rehearses the
/// creation of a missing one up to its final name.
pub(super) fn preview_limits(device: &CudaDevice, config: &RuntimeConfig) -> Result<LimitPreview> {
    let capacity = Capacity::of(device, config)?;
    let previewed = match config.ledger.config_for(device) {
        Ok(None) => {
            return Ok(LimitPreview {
                limit: capacity.with_ledger(None),
                ledger: LedgerPreview::Off,
            });
        }
        Ok(Some(wanted)) => {
            preview_ledger(with_deadline(wanted, config), capacity.of_new_ledger(config))
        }
        Err(error) => Err(error),
    };
    let (limit, ledger) = match previewed {
        Ok(LedgerPreview::Present(snapshot)) => {
            (Some(snapshot.limit), LedgerPreview::Present(snapshot))
        }
        Ok(preview) => (Some(capacity.of_new_ledger(config)), preview),
        Err(error) if !config.ledger.is_demanded() && has_no_place(&error) => {
            (None, LedgerPreview::Unavailable { reason: error.to_string() })
        }
        Err(error) => (None, LedgerPreview::Refused { reason: failure(&error).to_string() }),
    };
    Ok(LimitPreview { limit: capacity.with_ledger(limit), ledger })
}

/// Previews the existing ledger, or the one that would be created with `limit`.
fn preview_ledger(wanted: LedgerConfig, limit: u64) -> LedgerResult<LedgerPreview> {
    match Ledger::open(wanted.clone()) {
        Ok(ledger) => {
            let mut snapshot = ledger.snapshot()?;
            snapshot.slots.retain(|slot| slot.index != ledger.slot());
            Ok(LedgerPreview::Present(snapshot))
        }
        Err(LedgerError::Missing { path }) => {
            Ledger::rehearse_creation(&wanted.with_limit(limit))?;
            Ok(LedgerPreview::Absent { path, limit })
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use xlog_ledger::DeviceKey;

    use super::*;

    fn open(directory: &str) -> LedgerResult<Ledger> {
        let config = LedgerConfig::new(DeviceKey::new("k").unwrap()).with_limit(1 << 20);
        Ledger::open(config.with_directory(directory))
    }

    #[test]
    fn an_automatic_ledger_without_a_place_is_given_up_and_a_demanded_one_is_an_error() {
        let nowhere = || open("/nonexistent-place/of/ledgers");
        match status_of(nowhere(), false).unwrap() {
            LedgerStatus::Unavailable { reason } => {
                assert!(reason.contains("/nonexistent-place"), "{reason}");
            }
            other => panic!("{other}"),
        }
        let said = status_of(nowhere(), true).unwrap_err().to_string();
        assert!(said.contains("/nonexistent-place") && said.contains("XLOG_DEVICE_LEDGER=off"));
    }

    #[test]
    fn only_the_lack_of_a_place_gives_a_ledger_up() {
        let path = || PathBuf::from("/d/k.ledger");
        let io = |kind: ErrorKind| LedgerError::Io {
            path: path(),
            call: "create",
            source: io::Error::from(kind),
        };
        for kind in [
            ErrorKind::NotFound,
            ErrorKind::PermissionDenied,
            ErrorKind::ReadOnlyFilesystem,
            ErrorKind::StorageFull,
        ] {
            assert!(has_no_place(&io(kind)), "{kind}");
        }
        let others_may_count_in_it = [
            io(ErrorKind::Other),
            LedgerError::ReadOnly { path: path(), reason: "mode 0400".to_owned() },
            LedgerError::Damaged { path: path(), what: "zeros".to_owned() },
            LedgerError::Truncated { path: path(), size: 1, expected: 4096 },
            LedgerError::NewerVersion { path: path(), version: 9, supported: 2 },
            LedgerError::WrongOwner {
                path: path(),
                found: "user 1".to_owned(),
                expected: "user 2".to_owned(),
            },
        ];
        for error in others_may_count_in_it {
            assert!(!has_no_place(&error), "{error}");
        }
    }
}
