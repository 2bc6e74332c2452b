//! Selects the device: the flag, the environment, the first GPU, the simulated device, in this order.

use xlog_cuda::{DEVICE_VARIABLE, DeviceSpec, Result};

use super::report::{Cuda, Selection, Source};

#[derive(Debug)]
pub(crate) struct Selected {
    pub(crate) spec: DeviceSpec,
    source: Source,
    reason: String,
}

/// Selects a device without opening it.
pub(crate) fn select(flag: Option<&str>, cuda: &Cuda) -> Result<Selected> {
    if let Some(spec) = flag {
        let reason = "asked for by --device".to_owned();
        return Ok(Selected { spec: spec.parse()?, source: Source::Flag, reason });
    }
    if let Some(spec) = DeviceSpec::from_environment()? {
        let reason = format!("asked for by the environment variable {DEVICE_VARIABLE}");
        return Ok(Selected { spec, source: Source::Environment, reason });
    }
    Ok(match cuda.gpu_count {
        Some(count) if count > 0 => Selected {
            spec: DeviceSpec::Cuda(0),
            source: Source::Gpu,
            reason: match count {
                1 => "the GPU of this machine".to_owned(),
                count => format!("the first of {count} GPUs"),
            },
        },
        _ => Selected {
            spec: DeviceSpec::Sim,
            source: Source::Fallback,
            reason: format!(
                "there is no GPU ({}), so this shows the simulated device; programs use it only \
                 when {DEVICE_VARIABLE}=sim or code asks for it",
                cuda.absence()
            ),
        },
    })
}

impl Selected {
    pub(crate) fn describe(&self) -> Selection {
        Selection { spec: self.spec.to_string(), source: self.source, reason: self.reason.clone() }
    }
}
