//! Joining the ledger of a device, and what becomes of a runtime that cannot.
//!
//! A ledger that was asked for is there or the runtime is not. The automatic one of a GPU is given up only where this machine
//! has no place for it: no ledgers on this platform, or a directory that is missing, not permitted, read-only or full. A file that is damaged,
//! foreign, read-only or of a newer version is always an error: others may be counting in it.

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use xlog_driver::sync::Mutex;
use xlog_ledger::{Ledger, LedgerError, Snapshot};

use super::config::LEDGER_VARIABLE;
use super::limits::Capacity;
use super::{LedgerSetting, RuntimeConfig};
use crate::device_runtime::budget::EffectiveLimit;
use crate::{CudaDevice, Result, XlogError};

/// How a runtime stands to the ledger of its device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LedgerStatus {
    /// There is none, as configured.
    Off,
    /// There should have been one, but this machine has no place for it. Physical bytes are not shared with other processes.
    Unavailable {
        /// Why.
        reason: String,
    },
    /// Physical bytes are counted in it.
    Joined(Arc<Ledger>),
}

impl LedgerStatus {
    /// The ledger, if one was joined.
    #[must_use]
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

/// Joins the ledger that is configured for a device, creating it if there is none.
pub(super) fn join(
    device: &CudaDevice,
    config: &RuntimeConfig,
    capacity: &Capacity,
) -> Result<LedgerStatus> {
    let opened = match config.ledger.config_for(device) {
        Ok(None) => return Ok(LedgerStatus::Off),
        Ok(Some(wanted)) => Ledger::open(wanted.with_limit(capacity.of_new_ledger(config))),
        Err(error) => Err(error),
    };
    match opened {
        Ok(ledger) => {
            claim(&ledger, device, &config.ledger)?;
            Ok(LedgerStatus::Joined(Arc::new(ledger)))
        }
        Err(error) if !config.ledger.is_demanded() && has_no_place(&error) => {
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

/// True where nobody can have a ledger there, so that none is passed by.
fn has_no_place(error: &LedgerError) -> bool {
    match error {
        LedgerError::Unsupported { .. } => true,
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

/// One file named for two devices of a process would add up bytes of two cards.
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

/// What a runtime would find, as far as can be seen without creating anything.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LimitSurvey {
    /// The limit it would have.
    pub limit: EffectiveLimit,
    /// The ledger it would join.
    pub ledger: LedgerOutlook,
}

/// The ledger that a runtime would join.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LedgerOutlook {
    /// None, as configured.
    Off,
    /// It does not exist yet.
    Absent {
        /// Where it would be created.
        path: PathBuf,
        /// With which limit, in bytes.
        limit: u64,
    },
    /// It exists and can be joined.
    Present(Snapshot),
    /// It would be given up, and the runtime works without.
    Unavailable {
        /// Why.
        reason: String,
    },
    /// The runtime would be refused.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
}

/// Looks at the limits of a runtime on `device` that is built by `config`. An existing ledger is joined for a moment.
pub(super) fn survey(device: &CudaDevice, config: &RuntimeConfig) -> Result<LimitSurvey> {
    let capacity = Capacity::of(device, config)?;
    let opened = match config.ledger.config_for(device) {
        Ok(None) => {
            return Ok(LimitSurvey {
                limit: capacity.with_ledger(None),
                ledger: LedgerOutlook::Off,
            });
        }
        Ok(Some(wanted)) => Ledger::open(wanted).and_then(|ledger| {
            let mut snapshot = ledger.snapshot()?;
            snapshot.slots.retain(|slot| slot.index != ledger.slot());
            Ok(snapshot)
        }),
        Err(error) => Err(error),
    };
    let (limit, ledger) = match opened {
        Ok(snapshot) => (Some(snapshot.limit), LedgerOutlook::Present(snapshot)),
        Err(LedgerError::Missing { path }) => {
            let limit = capacity.of_new_ledger(config);
            (Some(limit), LedgerOutlook::Absent { path, limit })
        }
        Err(error) if !config.ledger.is_demanded() && has_no_place(&error) => {
            (None, LedgerOutlook::Unavailable { reason: error.to_string() })
        }
        Err(error) => (None, LedgerOutlook::Refused { reason: failure(&error).to_string() }),
    };
    Ok(LimitSurvey { limit: capacity.with_ledger(limit), ledger })
}
