//! The ledger on Linux: a mapped file and open-file-description locks.
//!
//! `mapping`, `fork`, `exit` and `place` hold all `unsafe`. `access` and `file` decide which file is valid, and `claim` that it is the only
//! one. `lock` is the file lock with its deadline, `ledger` the fast path, and `grants` the decisions under the lock. `pressure` asks other
//! processes for cached memory, `quotas` limits single processes, `upgrade` upgrades version 1 files, and `view` reads without a slot.

mod access;
mod claim;
mod exit;
mod file;
mod fork;
mod grants;
mod ledger;
mod lock;
mod mapping;
mod place;
mod pressure;
mod quotas;
mod upgrade;
mod view;

pub use file::list;
pub use ledger::Ledger;
pub use lock::FileLockGuard;
pub use pressure::{AskListener, Heard};
pub use view::LedgerView;

/// The default directory of this user's ledgers.
pub(crate) fn default_directory() -> crate::LedgerResult<std::path::PathBuf> {
    Ok(place::default_directory())
}
