//! The ledger setting of a runtime, and its text form.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

#[cfg(feature = "ledger")]
use xlog_ledger::{DeviceKey, LedgerConfig, LedgerResult};

#[cfg(feature = "ledger")]
use crate::CudaDevice;
#[cfg(feature = "ledger")]
use crate::driver::DeviceKind;
use crate::{Result, XlogError};

const ACCEPTED: &str = "\"off\", \"on\", the absolute path of a directory, or that of a file whose name is a device \
                        key (letters, digits, '.', '_', '-') and ends in \".ledger\"";

const SUFFIX: &str = ".ledger";

/// The environment variable that names the ledger of `xlogmem exec`.
#[cfg(feature = "ledger")]
const EXEC_LEDGER: &str = "XLOG_EXEC_LEDGER";
/// The file name of the library that `xlogmem exec` preloads.
#[cfg(feature = "ledger")]
const EXEC_LIBRARY: &str = "libxlog_preload.so";

/// The ledger that a runtime joins.
///
/// ```
/// use xlog_cuda::device_runtime::LedgerSetting;
///
/// assert_eq!("off".parse(), Ok(LedgerSetting::Off));
/// assert_eq!("/run/xlog".parse(), Ok(LedgerSetting::Directory("/run/xlog".into())));
/// assert_eq!("/run/xlog/team.ledger".parse(), Ok(LedgerSetting::File("/run/xlog/team.ledger".into())));
/// assert!("run/xlog".parse::<LedgerSetting>().is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum LedgerSetting {
    /// A GPU's own ledger in the default directory; none for a simulated device. If that directory cannot be created or written, the
    /// runtime works without a ledger (`LedgerStatus::Unavailable`).
    #[default]
    Automatic,
    /// No ledger.
    Off,
    /// The device's own ledger in the default directory, for every kind of device, or an error.
    On,
    /// The device's own ledger in this directory, or an error.
    Directory(PathBuf),
    /// This file, or an error. A file serves one device: with several devices, name a directory.
    File(PathBuf),
}

impl LedgerSetting {
    /// Returns the ledger to open for a device; `None` for no ledger.
    #[cfg(feature = "ledger")]
    pub(in crate::device_runtime::runtime) fn config_for(
        &self,
        device: &CudaDevice,
    ) -> LedgerResult<Option<LedgerConfig>> {
        let own = || key_of(device).map(LedgerConfig::new);
        Ok(match self {
            Self::Off => None,
            _ if is_counted_by_exec(device.properties().kind, EXEC_LEDGER, is_loaded) => None,
            Self::Automatic if device.properties().kind != DeviceKind::Cuda => None,
            Self::Automatic | Self::On => Some(own()?),
            Self::Directory(directory) => Some(own()?.with_directory(directory)),
            Self::File(path) => {
                let key = DeviceKey::new(stem(path).unwrap_or_default())?;
                let directory = path.parent().unwrap_or(Path::new("/"));
                Some(LedgerConfig::new(key).with_directory(directory))
            }
        })
    }

    /// Returns whether a ledger is required: without it the runtime is not built.
    pub(in crate::device_runtime::runtime) fn is_demanded(&self) -> bool {
        matches!(self, Self::On | Self::Directory(_) | Self::File(_))
    }

    /// Returns whether the ledger was named.
    #[cfg(feature = "ledger")]
    pub(in crate::device_runtime::runtime) fn is_named(&self) -> bool {
        matches!(self, Self::Directory(_) | Self::File(_))
    }
}

/// Returns the key of a device's ledger: a GPU's UUID, or `sim-N`, since UUIDs of simulated devices have no meaning in other processes.
#[cfg(feature = "ledger")]
pub(in crate::device_runtime::runtime) fn key_of(device: &CudaDevice) -> LedgerResult<DeviceKey> {
    let properties = device.properties();
    DeviceKey::new(match properties.kind {
        DeviceKind::Cuda => properties.uuid.to_string(),
        _ => format!("sim-{}", properties.ordinal),
    })
}

/// Returns whether the library of `xlogmem exec` charges this process's memory to a ledger. The runtime must not charge it again.
#[cfg(feature = "ledger")]
fn is_counted_by_exec(kind: DeviceKind, variable: &str, is_loaded: fn() -> bool) -> bool {
    // Without the variable, the library joins the default ledger.
    let is_asked_for = || std::env::var_os(variable).is_none_or(|ledger| ledger != "off");
    kind == DeviceKind::Cuda && is_asked_for() && is_loaded()
}

/// Returns whether the library of `xlogmem exec` is loaded. The variable alone does not tell: a static program, or one that drops
/// LD_PRELOAD, inherits it without the library.
#[cfg(feature = "ledger")]
fn is_loaded() -> bool {
    std::fs::read_to_string("/proc/self/maps").map_or(true, |files| files.contains(EXEC_LIBRARY))
}

fn stem(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.strip_suffix(SUFFIX)
}

#[cfg(feature = "ledger")]
fn is_key(name: &str) -> bool {
    DeviceKey::new(name).is_ok()
}

/// A build without ledgers refuses every file when it joins.
#[cfg(not(feature = "ledger"))]
fn is_key(name: &str) -> bool {
    !name.is_empty()
}

impl FromStr for LedgerSetting {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason| Err(XlogError::bad_setting("the ledger", text, reason, ACCEPTED));
        let path = Path::new(text);
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "" => refuse("it is empty"),
            _ if text.contains('\0') => refuse("it has a zero character"),
            _ if !path.is_absolute() => {
                refuse("it is no absolute path, so it would be another ledger in each directory")
            }
            _ if !text.ends_with(SUFFIX) => Ok(Self::Directory(path.to_owned())),
            _ if stem(path).is_some_and(is_key) => Ok(Self::File(path.to_owned())),
            _ => refuse("the name of the file is no device key"),
        }
    }
}

impl fmt::Display for LedgerSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Automatic => f.write_str("automatic"),
            Self::Off => f.write_str("off"),
            Self::On => f.write_str("on"),
            Self::Directory(path) | Self::File(path) => path.display().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_name_no_ledger_are_refused_with_what_is_accepted() {
        for text in [
            "",
            "Off",
            "none",
            "here",
            "./here",
            "/tmp/.ledger",
            "/tmp/a b.ledger",
            "/tmp/ä.ledger",
            "/a\0b",
        ] {
            let said = text.parse::<LedgerSetting>().expect_err(text).to_string();
            assert!(said.contains(&format!("{text:?}")) && said.contains("\"off\""), "{said}");
        }
        for text in ["off", "on", "/tmp", "/tmp/gpu.ledger", "/tmp/ledger"] {
            assert_eq!(text.parse::<LedgerSetting>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn memory_that_exec_counts_is_not_charged_twice() {
        // Variables that are set in every process stand for the one of `exec`.
        assert!(is_counted_by_exec(DeviceKind::Cuda, "PATH", || true));
        assert!(!is_counted_by_exec(DeviceKind::Simulated, "PATH", || true));
        // A job's environment may preload the library and leave the ledger to the default.
        assert!(is_counted_by_exec(DeviceKind::Cuda, "XLOG_NO_SUCH_VARIABLE", || true));
        // The variable alone does not mean that the library is there: this process has not loaded it.
        assert!(!is_counted_by_exec(DeviceKind::Cuda, "PATH", is_loaded));
    }

    #[test]
    fn simulated_devices_take_part_only_where_a_ledger_is_asked_for() {
        let device = CudaDevice::open("sim:3").unwrap();
        let of = |setting: LedgerSetting| setting.config_for(&device).unwrap();
        assert!(of(LedgerSetting::Automatic).is_none() && of(LedgerSetting::Off).is_none());
        assert_eq!(of(LedgerSetting::On).unwrap().key.as_str(), "sim-0");
        let named = of(LedgerSetting::File("/x/team.ledger".into())).unwrap();
        assert_eq!((named.key.as_str(), named.directory), ("team", Some("/x".into())));
    }
}
