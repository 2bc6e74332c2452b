//! `xlogmem doctor`: which device would be used and why, what it can do, and whether it works.
//!
//! It looks first and judges after: what was found is one [`Report`], printed as text or as JSON, so that both say the
//! same. It changes nothing on the machine; the live check allocates two blocks of a MiB and frees them.

mod check;
mod limits;
mod report;
mod select;
mod text;

use xlog_cuda::CudaDevice;

use crate::Output;
use crate::cli::{DoctorArguments, Refusal};
use limits::{LedgerState, Limit};
use report::{Check, Device, Report};
pub(crate) use report::{Cuda, Selection};
pub(crate) use select::{Selected, select};

/// Runs the command. Only a bad device spec is refused; whatever is wrong with the device is in the output.
pub(crate) fn run(arguments: &DoctorArguments) -> Result<Output, Refusal> {
    let cuda = Cuda::find();
    let selection = select::select(arguments.device.as_deref(), &cuda)
        .map_err(|error| Refusal::Line(error.to_string()))?;
    let mut report = Report::new(selection.describe(), cuda);
    match CudaDevice::open_spec(selection.spec) {
        Ok(device) => inspect(&mut report, device),
        Err(error) => report.error = Some(error.to_string()),
    }
    report.note_missing();
    let failure = report.error.clone();
    report.ok = failure.is_none();
    let text = if arguments.json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => json + "\n",
            Err(error) => {
                return Ok(Output { text: String::new(), failure: Some(error.to_string()) });
            }
        }
    } else {
        text::render(&report)
    };
    Ok(Output { text, failure })
}

fn inspect(report: &mut Report, device: CudaDevice) {
    match Device::describe(&device) {
        Ok(found) => report.device = Some(found),
        Err(error) => {
            report.error = Some(format!("{}: {error}", device.spec()));
            return;
        }
    }
    if let Err(error) = limits::find(report, &device) {
        report.error = Some(format!("{}: {error}", device.spec()));
    }
    let check = check::run(device);
    if let Some(error) = &check.error {
        report.error =
            Some(format!("{} was opened but fails its check: {error}", report.selection.spec));
    }
    report.check = Some(check);
}
