//! The limits of a shared runtime on the device, the effective one, and the state of its ledger.
use serde::Serialize;
use xlog_cuda::device_runtime::{
    LedgerPreview, LedgerSetting, LimitPreview, RuntimeConfig, XlogDeviceRuntime, check_log,
};
use xlog_cuda::{CudaDevice, Result, XlogError};
use xlog_report::text_report::{TextReport, size};

use super::report::{Missing, Report};

/// The limit and its source.
#[derive(Serialize, Debug)]
pub(super) struct Limit {
    effective_bytes: usize,
    /// Which of `limits` is effective.
    ruled_by: String,
    limits: Vec<OneLimit>,
}

#[derive(Serialize, Debug)]
struct OneLimit {
    source: String,
    bytes: usize,
}

#[derive(Serialize, Debug, Default)]
pub(super) struct LedgerState {
    /// `off`, `absent`, `present`, `unavailable` or `refused`.
    state: &'static str,
    path: Option<String>,
    /// Its limit; if it is absent, the limit it would be created with.
    limit_bytes: Option<u64>,
    used_bytes: Option<u64>,
    granted_bytes: Option<u64>,
    free_bytes: Option<u64>,
    processes: Option<usize>,
    /// Dead processes whose bytes were not reclaimed yet.
    dead: Option<usize>,
    /// The reason why there is no ledger.
    reason: Option<String>,
}

/// Fills in the limits that the environment sets and returns the configuration of a runtime that leaves nothing behind.
/// Returns an error if a runtime would be refused.
pub(super) fn find(report: &mut Report, device: &CudaDevice) -> Result<RuntimeConfig> {
    let mut config = RuntimeConfig::from_environment()?;
    // The device is already chosen, perhaps by the command line.
    config.device = None;
    let LimitPreview { limit, ledger, .. } = XlogDeviceRuntime::preview_limits(device, &config)?;
    report.limit = Some(Limit {
        effective_bytes: limit.bytes(),
        ruled_by: limit.ruled_by().to_string(),
        limits: limit
            .limits()
            .iter()
            .map(|(source, bytes)| OneLimit { source: source.to_string(), bytes: *bytes })
            .collect(),
    });
    let refusal = match &ledger {
        LedgerPreview::Refused { reason } => Some(reason.clone()),
        _ => None,
    };
    if !matches!(ledger, LedgerPreview::Present(_)) {
        config.ledger = LedgerSetting::Off;
    }
    report.ledger = Some(LedgerState::of(ledger));
    if let Some(reason) = refusal {
        return Err(XlogError::Kernel(reason));
    }
    if let Some(log) = config.log.take() {
        check_log(&log, device.ordinal())?;
    }
    Ok(config)
}

impl LedgerState {
    fn of(preview: LedgerPreview) -> Self {
        let mut state = Self { state: "off", ..Self::default() };
        match preview {
            LedgerPreview::Absent { path, limit } => {
                state.state = "absent";
                state.path = Some(path.display().to_string());
                state.limit_bytes = Some(limit);
            }
            LedgerPreview::Present(snapshot) => {
                let alive = snapshot.slots.iter().filter(|slot| slot.alive).count();
                state.state = "present";
                state.path = Some(snapshot.path.display().to_string());
                state.limit_bytes = Some(snapshot.limit);
                state.used_bytes = Some(snapshot.used());
                state.granted_bytes = Some(snapshot.granted());
                state.free_bytes = Some(snapshot.free);
                state.processes = Some(alive);
                state.dead = Some(snapshot.slots.len() - alive);
            }
            LedgerPreview::Unavailable { reason } => {
                state.state = "unavailable";
                state.reason = Some(reason);
            }
            LedgerPreview::Refused { reason } => {
                state.state = "refused";
                state.reason = Some(reason);
            }
            // Off, or a setting of a later version.
            _ => {}
        }
        state
    }

    /// Returns the feature that is missing without a ledger.
    pub(super) fn missing(&self) -> Option<Missing> {
        (self.state == "unavailable").then(|| Missing {
            what: format!(
                "a ledger of this GPU, so its limit holds for this process alone: {}",
                self.reason.as_deref().unwrap_or_default()
            ),
            remedy: "name a directory of this user's by XLOG_DEVICE_LEDGER".to_owned(),
        })
    }

    fn describe(&self) -> String {
        let bytes = |bytes: Option<u64>| size(bytes.unwrap_or(0));
        match self.state {
            "absent" => {
                format!(
                    "not there yet; created with a limit of {} at first use",
                    bytes(self.limit_bytes)
                )
            }
            "present" => format!(
                "{} of {} used by {} processes, {} granted, {} free{}",
                bytes(self.used_bytes),
                bytes(self.limit_bytes),
                self.processes.unwrap_or(0),
                bytes(self.granted_bytes),
                bytes(self.free_bytes),
                match self.dead {
                    Some(dead) if dead > 0 => format!("; {dead} dead processes left bytes"),
                    _ => String::new(),
                }
            ),
            "off" => "off: other processes are not counted".to_owned(),
            state => format!("{state}: {}", self.reason.as_deref().unwrap_or_default()),
        }
    }
}

pub(super) fn render(page: &mut TextReport, limit: Option<&Limit>, ledger: Option<&LedgerState>) {
    let Some(limit) = limit else { return };
    page.title("Limits of a shared runtime");
    page.line(
        "effective limit",
        &format!("{}, by {}", size(limit.effective_bytes as u64), limit.ruled_by),
    );
    for one in &limit.limits {
        page.line("", &format!("{}: {}", one.source, size(one.bytes as u64)));
    }
    if let Some(ledger) = ledger {
        page.line("ledger", ledger.path.as_deref().unwrap_or("none"));
        page.line("its state", &ledger.describe());
    }
}
