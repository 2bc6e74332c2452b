//! `xlogmem ledger --process`: the quota of a process while it runs.
//!
//! A process has a slot in the ledger of each device that it uses; its quota changes in all ledgers of the location. A
//! share is relative to each ledger's limit.

use xlog_cuda::ByteSize;
use xlog_cuda::ledger::{
    DeviceKey, Ledger, LedgerConfig, LedgerError, LedgerView, Quota, SlotSnapshot, list,
};

use super::{LedgerArguments, LedgerLocation};
use crate::cli::Refusal;

/// The requested change of a quota.
pub(super) struct Change {
    process: u32,
    limit: Option<Setting>,
    guarantee: Option<Setting>,
    name: Option<String>,
}

/// A size, or `none`.
#[derive(Clone, Copy)]
enum Setting {
    None,
    Size(ByteSize),
}

impl Setting {
    fn parse(option: &str, text: &str) -> Result<Self, Refusal> {
        match text {
            "none" => Ok(Self::None),
            _ => text
                .parse()
                .map(Self::Size)
                .map_err(|error| Refusal::Line(format!("{option}: {error}; or none"))),
        }
    }

    fn of(self, limit: u64) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Size(size) => Some(size.of(limit)),
        }
    }
}

impl Change {
    /// Returns the requested change, if the arguments name a process.
    pub(super) fn of(arguments: &LedgerArguments) -> Result<Option<Self>, Refusal> {
        let Some(process) = arguments.process else { return Ok(None) };
        let setting = |option: &str, text: &Option<String>| {
            text.as_deref().map(|text| Setting::parse(option, text)).transpose()
        };
        let change = Self {
            process,
            limit: setting("--quota", &arguments.quota)?,
            guarantee: setting("--guarantee", &arguments.guarantee)?,
            name: arguments.quota_name.clone(),
        };
        if change.limit.is_none() && change.guarantee.is_none() && change.name.is_none() {
            return Err(Refusal::Line(
                "--process needs --quota, --guarantee or --quota-name".to_owned(),
            ));
        }
        Ok(Some(change))
    }

    /// Changes the quota in every ledger of the location that the process has joined.
    pub(super) fn apply(&self, place: &LedgerLocation) -> Result<(), Refusal> {
        let refuse = |error: LedgerError| Refusal::Line(error.to_string());
        let files = match place {
            LedgerLocation::Directory(directory) => list(directory).map_err(refuse)?,
            LedgerLocation::File { directory, key, .. } => {
                let mut files = list(directory).map_err(refuse)?;
                files.retain(|file| file.key == *key);
                files
            }
        };
        let mut changed = false;
        for file in files {
            // The report shows ledgers that cannot be read.
            let Ok(shown) = LedgerView::open(&file.path).and_then(|view| view.snapshot()) else {
                continue;
            };
            let is_it = |slot: &&SlotSnapshot| slot.alive && slot.pid == self.process;
            let slots: Vec<&SlotSnapshot> = shown.slots.iter().filter(is_it).collect();
            if slots.is_empty() {
                continue;
            }
            let ledger = open(&file.key, &file.path).map_err(refuse)?;
            for slot in slots {
                ledger
                    .set_quota_of(slot, &self.applied_to(&slot.quota, shown.limit))
                    .map_err(refuse)?;
                changed = true;
            }
        }
        match changed {
            true => Ok(()),
            false => {
                let process = self.process;
                Err(Refusal::Line(format!(
                    "--process {process}: no living process of that id is on a ledger there"
                )))
            }
        }
    }

    fn applied_to(&self, before: &Quota, limit: u64) -> Quota {
        let mut quota = before.clone();
        if let Some(setting) = self.limit {
            quota.limit = setting.of(limit);
        }
        if let Some(setting) = self.guarantee {
            quota.guaranteed = setting.of(limit).unwrap_or(0);
        }
        if let Some(name) = &self.name {
            quota.name = Some(name.clone());
        }
        quota
    }
}

fn open(key: &DeviceKey, path: &std::path::Path) -> Result<Ledger, LedgerError> {
    let directory = path.parent().unwrap_or(path);
    Ledger::open(LedgerConfig::new(key.clone()).with_directory(directory).with_name("xlogmem"))
}
