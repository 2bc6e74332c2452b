//! The ledger on Linux: a mapped file, open-file-description locks, and what is built on them.
//!
//! `mapping` is the only file with `unsafe`; `access` and `file` decide which file is believed; `lock` is the file
//! lock with its deadline; `ledger` is the fast path, `grants` what happens under the lock, `view` looks without a slot.

mod access;
mod file;
mod grants;
mod ledger;
mod lock;
mod mapping;
mod view;

pub use file::list;
pub use ledger::Ledger;
pub use lock::FileLockGuard;
pub use view::LedgerView;

/// The effective user, as the default directory names it.
pub(crate) fn user() -> crate::LedgerResult<u32> {
    Ok(mapping::effective_user())
}
