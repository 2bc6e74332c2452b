//! The report of the doctor, as it appears in JSON.
//!
//! Field names are public: fields may be added, but none changes its name or meaning without a new `schema` number.
//! Every field is always present; an unknown value is `null`.

use serde::Serialize;

use super::{LedgerState, Limit};
use xlog_cuda::driver::cuda;
use xlog_cuda::driver::{DriverError, DriverResult};
use xlog_cuda::{CudaDevice, Result};

const SCHEMA: u32 = 1;

#[derive(Serialize, Debug, Default)]
pub(super) struct Report {
    /// The version of this format.
    pub(super) schema: u32,
    /// Whether the selected device was opened and passed its check.
    pub(super) ok: bool,
    /// The reason why not, in one line.
    pub(super) error: Option<String>,
    pub(super) xlog_version: &'static str,
    pub(super) selection: Selection,
    pub(super) cuda: Cuda,
    /// The selected device, if it was opened.
    pub(super) device: Option<Device>,
    /// The limit of a shared runtime on it, if the device was opened and the environment is valid.
    pub(super) limit: Option<Limit>,
    /// The ledger that such a runtime would join, under the same conditions.
    pub(super) ledger: Option<LedgerState>,
    /// The live check, if the device was opened.
    pub(super) check: Option<Check>,
    /// Missing parts that would enable more features.
    pub(super) missing: Vec<Missing>,
}

/// The device, and why it was selected.
#[derive(Serialize, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) spec: String,
    pub(crate) source: Source,
    pub(crate) reason: String,
}

#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    Flag,
    Environment,
    Gpu,
    #[default]
    Fallback,
}

/// The CUDA installation of this machine, independent of the selected device.
#[derive(Serialize, Debug, Default)]
pub(crate) struct Cuda {
    /// The path of the driver library.
    pub(super) library: Option<String>,
    /// The CUDA version of the driver, such as "13.0".
    pub(super) driver_api_version: Option<String>,
    /// The minimum version.
    pub(super) minimum_driver_api_version: String,
    /// The version of the NVIDIA kernel module.
    pub(super) kernel_module_version: Option<String>,
    /// The number of GPUs visible to this process.
    pub(super) gpu_count: Option<usize>,
    /// The reason why the driver could not be queried.
    pub(super) error: Option<String>,
    #[serde(skip)]
    unavailable: Option<Missing>,
}

#[derive(Serialize, Debug)]
pub(super) struct Device {
    pub(super) kind: String,
    pub(super) ordinal: u32,
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) memory_total_bytes: u64,
    pub(super) memory_free_bytes: u64,
    pub(super) compute_capability: String,
    pub(super) multiprocessors: u32,
    pub(super) async_pools: bool,
    pub(super) virtual_memory: bool,
    pub(super) granularity_bytes: usize,
    pub(super) allocation_alignment_bytes: usize,
    pub(super) least_priority: i32,
    pub(super) greatest_priority: i32,
}

/// The result of the live check.
#[derive(Serialize, Debug)]
pub(super) struct Check {
    pub(super) ok: bool,
    /// The bytes copied to the device and back.
    pub(super) bytes: usize,
    pub(super) microseconds: u64,
    pub(super) error: Option<String>,
}

/// A missing part, and how to get it.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Missing {
    pub(super) what: String,
    pub(super) remedy: String,
}

impl Report {
    pub(super) fn new(selection: Selection, cuda: Cuda) -> Self {
        Self {
            schema: SCHEMA,
            xlog_version: env!("CARGO_PKG_VERSION"),
            selection,
            cuda,
            ..Self::default()
        }
    }

    pub(super) fn note_missing(&mut self) {
        let mut missing = Vec::new();
        if let Some(unavailable) = &self.cuda.unavailable {
            missing.push(unavailable.clone());
        } else if self.cuda.gpu_count == Some(0) {
            missing.push(Missing {
                what: "the driver shows no GPU to this process".to_owned(),
                remedy: "check nvidia-smi, and that CUDA_VISIBLE_DEVICES hides none".to_owned(),
            });
        }
        if let Some(device) = &self.device {
            if !device.async_pools {
                missing.push(Missing {
                    what: "stream-ordered memory pools".to_owned(),
                    remedy: "update the driver; until then memory is taken by plain allocation"
                        .to_owned(),
                });
            }
            if !device.virtual_memory {
                missing.push(Missing {
                    what: "virtual memory management".to_owned(),
                    remedy: "use a GPU and driver that offer it; until then pools cannot return \
                             parts of a segment"
                        .to_owned(),
                });
            }
        }
        missing.extend(self.ledger.as_ref().and_then(LedgerState::missing));
        self.missing = missing;
    }
}

impl Cuda {
    /// Queries the driver without opening a device.
    pub(crate) fn find() -> Self {
        let version = cuda::driver_version();
        let count = cuda::device_count();
        let failure = version.as_ref().err().or(count.as_ref().err());
        Self {
            library: cuda::library_path().map(|path| path.display().to_string()),
            driver_api_version: version.as_ref().ok().map(|version| dotted(*version)),
            minimum_driver_api_version: dotted(cuda::MINIMUM_DRIVER_VERSION),
            kernel_module_version: kernel_module_version(),
            error: failure.map(DriverError::to_string),
            unavailable: failure.map(Missing::from_error),
            gpu_count: known(count),
        }
    }

    /// Returns why there is no GPU, in a few words.
    pub(super) fn absence(&self) -> &str {
        self.unavailable.as_ref().map_or("the driver shows none", |missing| &missing.what)
    }
}

/// Returns zero GPUs for an absent driver and `None` for one that fails otherwise.
fn known(count: DriverResult<usize>) -> Option<usize> {
    match count {
        Ok(count) => Some(count),
        Err(DriverError::Unavailable { .. }) => Some(0),
        Err(_) => None,
    }
}

impl Missing {
    fn from_error(error: &DriverError) -> Self {
        match error {
            DriverError::Unavailable { what, remedy } => {
                Self { what: what.clone(), remedy: remedy.clone() }
            }
            other => Self {
                what: format!("an answer of the CUDA driver: {other}"),
                remedy: "check nvidia-smi and the kernel log".to_owned(),
            },
        }
    }
}

impl Device {
    pub(super) fn describe(device: &CudaDevice) -> Result<Self> {
        let memory = device.memory_info()?;
        let properties = device.properties();
        let (major, minor) = properties.compute_capability;
        Ok(Self {
            kind: properties.kind.to_string(),
            ordinal: properties.ordinal,
            name: properties.name.clone(),
            uuid: properties.uuid.to_string(),
            memory_total_bytes: memory.total,
            memory_free_bytes: memory.free,
            compute_capability: format!("{major}.{minor}"),
            multiprocessors: properties.multiprocessors,
            async_pools: properties.async_pools,
            virtual_memory: properties.virtual_memory,
            granularity_bytes: properties.granularity,
            allocation_alignment_bytes: properties.allocation_alignment,
            least_priority: properties.least_priority,
            greatest_priority: properties.greatest_priority,
        })
    }
}

/// Formats 13000 as "13.0" and 12040 as "12.4".
fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn kernel_module_version() -> Option<String> {
    module_version(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// Returns the first word of the first line that has the form of a version.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_version_is_found_in_both_wordings_and_in_nothing_else() {
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun 6\nGCC 12.3";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release";
        assert_eq!(module_version(closed).as_deref(), Some("535.54.03"));
        assert_eq!(module_version(open).as_deref(), Some("580.65.06"));
        assert_eq!(module_version("no version here.\nGCC 12.3"), None);
        assert_eq!(module_version(""), None);
    }

    #[test]
    fn driver_versions_are_printed_as_people_say_them() {
        assert_eq!((dotted(13000), dotted(12040)), ("13.0".to_owned(), "12.4".to_owned()));
    }
}
