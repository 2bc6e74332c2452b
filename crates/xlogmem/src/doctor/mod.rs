//! `xlogmem doctor`: the selected device, the reason for the choice, its features, and whether it works.
//!
//! It measures first and judges afterwards. The findings are one [`Report`], printed as text or as JSON. It does what a
//! runtime does: joins the ledger, opens the log, allocates two blocks of at most 1 MiB. It leaves nothing behind.

mod check;
mod limits;
mod report;
mod select;
mod text;

use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{LedgerSetting, RuntimeConfig};

use crate::Output;
use crate::cli::{DoctorArguments, Refusal};
use limits::{LedgerState, Limit};
use report::{Check, Device, Report};
pub(crate) use report::{Cuda, Selection};
pub(crate) use select::{Selected, select};

/// Runs the command. It refuses only a bad device spec; any problem of the device is part of the output.
pub(crate) fn run(arguments: &DoctorArguments) -> Result<Output, Refusal> {
    let cuda = Cuda::find();
    let selection = select::select(arguments.device.as_deref(), &cuda)?;
    let mut report = Report::new(selection.describe(), cuda);
    match CudaDevice::open_spec(selection.spec) {
        Ok(device) => inspect(&mut report, device),
        Err(error) => report.error = Some(error.to_string()),
    }
    report.note_missing();
    let failure = report.error.clone();
    report.ok = failure.is_none();
    Ok(Output::of(&report, arguments.json, text::render, failure))
}

fn inspect(report: &mut Report, device: CudaDevice) {
    match Device::describe(&device) {
        Ok(found) => report.device = Some(found),
        Err(error) => {
            report.error = Some(format!("{}: {error}", device.spec()));
            return;
        }
    }
    let device = Arc::new(device);
    let config = limits::find(report, &device).unwrap_or_else(|error| {
        report.error = Some(format!("{}: {error}", device.spec()));
        // The device's properties are reported anyway.
        RuntimeConfig::default().with_ledger(LedgerSetting::Off)
    });
    let spec = &report.selection.spec;
    match check::run(device, &config) {
        Ok(check) => {
            if let Some(error) = &check.error {
                report.error.get_or_insert_with(|| {
                    format!("{spec} was opened but fails its check: {error}")
                });
            }
            report.check = Some(check);
        }
        Err(error) => {
            report.error.get_or_insert_with(|| format!("{spec}: {error}"));
        }
    }
}
