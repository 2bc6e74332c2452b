//! The ledger of the physical bytes of one GPU, shared by all processes that use it.
//!
//! A memory-mapped file per device, one slot per opener, one 64-bit word per slot. A request that the
//! process's own grant serves takes no lock and makes no system call; the others are decided under a
//! file lock that is tried with a deadline. The kernel distinguishes dead from living processes: a byte-range lock per slot ends
//! with its process. There is no daemon and no counter that a killed process could leave wrong.
//!
//! The ledger counts what its users charge; it does not stop a program that takes memory without it.
//! `docs/ledger-format.md` has the file format, for clients in other languages.
//!
//! ```no_run
//! use xlog_ledger::{DeviceKey, Ledger, LedgerConfig};
//!
//! let key = DeviceKey::new("GPU-5a1b0c3e-0000-1111-2222-333344445555")?;
//! let ledger = Ledger::open(LedgerConfig::new(key).with_limit(64 << 30))?;
//! ledger.take(32 << 20)?; // before the memory is taken from the device
//! ledger.give(32 << 20)?; // after it was returned
//! # Ok::<(), xlog_ledger::LedgerError>(())
//! ```

// Where there is no ledger, what only its file needs is compiled and not used.
#![cfg_attr(
    not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")),
    allow(dead_code)
)]

mod config;
mod error;
mod format;
mod key;
mod snapshot;
mod tags;
mod word;

#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
#[path = "linux/mod.rs"]
mod platform;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
#[path = "unsupported.rs"]
mod platform;

pub use config::{LedgerConfig, Sharing};
pub use error::{LedgerError, LedgerResult, LockHolder};
pub use format::{MAX_LIMIT, MAX_SLOTS, UNIT};
pub use key::DeviceKey;
#[doc(hidden)]
pub use platform::FileLockGuard;
pub use platform::{Ledger, LedgerView, list};
pub use snapshot::{LedgerFile, Reclaimed, SlotSnapshot, Snapshot};
pub use tags::{SlotTags, TagUse};
