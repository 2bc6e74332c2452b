//! A ledger of the physical bytes of one GPU, shared by all processes that use it.
//!
//! The ledger is a memory-mapped file per device with one slot per opener and one 64-bit word per slot. A request that the process's own
//! grant serves takes no lock and makes no system call. Other requests are decided under a file lock with a deadline. Each living process
//! holds a byte-range lock on its slot, which the kernel drops when the process dies. So there is no daemon, and a killed process leaves no
//! wrong counter.
//!
//! The ledger counts what its users charge; it cannot stop a program that allocates memory without it. `docs/ledger-format.md` specifies
//! the file format for clients in other languages.
//!
//! ```
//! use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerView};
//!
//! # let directory = std::env::temp_dir().join(format!("xlog-ledger-example-{}", std::process::id()));
//! # std::fs::create_dir(&directory)?;
//! let key = DeviceKey::new("GPU-5a1b0c3e-0000-1111-2222-333344445555")?;
//! // Without a directory: the one that all processes of the user share.
//! let config = LedgerConfig::new(key).with_limit(64 << 30).with_directory(&directory);
//! let ledger = Ledger::open(config)?;
//! ledger.charge(32 << 20)?; // before the memory is taken from the device
//! let view = LedgerView::open(ledger.path())?; // any process may look
//! assert_eq!(view.snapshot()?.slots.len(), 1);
//! ledger.release(32 << 20)?; // after it was returned
//! assert_eq!(ledger.used(), 0);
//! # drop((ledger, view));
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("the ledger needs 64-bit little-endian Linux; build xlog-cuda without `ledger`");

mod config;
mod error;
mod format;
mod key;
mod linux;
mod quota;
mod snapshot;
mod tags;
mod word;

pub use config::{LedgerConfig, Sharing};
pub use error::{LedgerError, LedgerResult, LockHolder};
pub use format::{MAX_LIMIT, MAX_SLOTS, UNIT};
pub use key::DeviceKey;
#[doc(hidden)]
pub use linux::FileLockGuard;
pub use linux::{AskListener, Heard, Ledger, LedgerView, list};
pub use quota::Quota;
pub use snapshot::{LedgerFile, Reclaimed, SlotMemory, SlotSnapshot, Snapshot};
pub use tags::{SlotTags, TagUse};
