//! Converts errors of the runtime to the exceptions of `xlogmem._errors`, with their fields.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use xlog_cuda::device_runtime::{OomReport, ResourceError, StreamPoolError};
use xlog_cuda::{Result, XlogError};

use crate::value::from_json;

/// An exception of `xlogmem._errors` under construction.
struct Exception<'py> {
    class: &'static str,
    text: String,
    fields: Bound<'py, PyDict>,
}

impl<'py> Exception<'py> {
    fn new(py: Python<'py>, class: &'static str, text: String) -> Self {
        Self { class, text, fields: PyDict::new(py) }
    }

    fn field(self, name: &str, value: impl IntoPyObject<'py>) -> PyResult<Self> {
        self.fields.set_item(name, value)?;
        Ok(self)
    }

    fn build(self) -> PyResult<PyErr> {
        let class = self.fields.py().import("xlogmem._errors")?.getattr(self.class)?;
        Ok(PyErr::from_value(class.call((self.text,), Some(&self.fields))?))
    }
}

/// Returns the exception of a runtime error.
pub(crate) fn exception(py: Python<'_>, error: &XlogError) -> PyErr {
    convert(py, error).unwrap_or_else(|failure| failure)
}

/// Runs `work` without the GIL. Its error becomes an exception.
pub(crate) fn without_gil<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| exception(py, &error))
}

/// Returns the exception of a resource error.
pub(crate) fn resource_exception(py: Python<'_>, error: ResourceError) -> PyErr {
    exception(py, &XlogError::Resource(error))
}

/// Returns the exception of an invalid value.
pub(crate) fn invalid(py: Python<'_>, value: String, accepted: &str) -> PyErr {
    resource_exception(py, ResourceError::InvalidRequest { value, accepted: accepted.to_owned() })
}

fn convert(py: Python<'_>, error: &XlogError) -> PyResult<PyErr> {
    let text = error.to_string();
    let of = |class| Exception::new(py, class, text.clone());
    match error {
        XlogError::BadDeviceSpec { spec, reason, .. } => {
            of("BadDeviceSpec").field("spec", spec)?.field("reason", reason)?.build()
        }
        XlogError::Open { spec, .. } => of("DeviceUnavailable").field("spec", spec)?.build(),
        XlogError::BadSetting { name, value, reason, accepted } => of("BadSetting")
            .field("name", name)?
            .field("value", value)?
            .field("reason", reason)?
            .field("accepted", accepted)?
            .build(),
        XlogError::LogInUse { path } => of("LogInUse").field("path", path)?.build(),
        XlogError::StreamPool(StreamPoolError::Capacity { max }) => {
            of("StreamCapacity").field("max", max)?.build()
        }
        XlogError::Driver(_) => of("DriverError").build(),
        XlogError::Resource(error) => resource(py, error, text),
        _ => match std::error::Error::source(error).and_then(|cause| cause.downcast_ref()) {
            // The cause determines the class, but the message is that of the whole error.
            Some(XlogError::Open { spec, .. }) => {
                of("DeviceUnavailable").field("spec", spec)?.build()
            }
            _ => of("XlogError").build(),
        },
    }
}

fn resource(py: Python<'_>, error: &ResourceError, text: String) -> PyResult<PyErr> {
    let of = |class| Exception::new(py, class, text.clone());
    let report = || match error.report() {
        Some(report) => report_value(py, &report),
        None => Ok(py.None()),
    };
    match error {
        ResourceError::OutOfBudget { requested, remaining } => of("OutOfBudget")
            .field("requested", requested)?
            .field("remaining", remaining)?
            .field("report", report()?)?
            .build(),
        ResourceError::OutOfMemory { requested, detail } => of("OutOfMemory")
            .field("requested", requested)?
            .field("detail", detail)?
            .field("report", report()?)?
            .build(),
        ResourceError::InvalidRequest { value, accepted } => {
            of("InvalidRequest").field("value", value)?.field("accepted", accepted)?.build()
        }
        ResourceError::UseAfterFree { generation } => {
            of("UseAfterFree").field("generation", generation.0)?.build()
        }
        ResourceError::OutOfBounds { generation } => {
            of("OutOfBounds").field("generation", generation.0)?.build()
        }
        ResourceError::StreamMisuse(_) => of("StreamMisuse").build(),
        ResourceError::Ledger(_) => of("LedgerError").build(),
        ResourceError::Driver(_) => of("DriverError").build(),
        _ => of("XlogError").build(),
    }
}

/// Converts the report of a refusal to a dict.
pub(crate) fn report_value(py: Python<'_>, report: &OomReport) -> PyResult<Py<PyAny>> {
    let object = from_json(py, &report.to_json())?.into_bound(py);
    object.set_item("text", report.to_string())?;
    Ok(object.unbind())
}
