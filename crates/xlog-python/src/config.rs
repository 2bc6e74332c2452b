//! Converts the settings that Python passes to a configuration of the runtime.

use std::path::PathBuf;
use std::str::FromStr;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use xlog_cuda::device_runtime::RuntimeConfig;
use xlog_cuda::{ByteSize, XlogError};

use crate::errors::{exception, invalid};

/// A number of bytes, or a text such as `4GiB` or `50%`.
pub(crate) struct Size(pub(crate) ByteSize);

impl<'py> FromPyObject<'_, 'py> for Size {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if let Ok(bytes) = object.extract::<u64>() {
            return Ok(Self(ByteSize::from(bytes)));
        }
        let text: String = object.extract().map_err(|_| {
            invalid(
                py,
                format!("a size of {}", &*object),
                "bytes as an int that is not negative, or a text such as \"4GiB\" or \"50%\"",
            )
        })?;
        text.parse().map(Self).map_err(|error| exception(py, &error))
    }
}

/// Applies the settings of `open`, `configure` and the frameworks' `enable`. A missing setting, or `None`, changes nothing.
pub(crate) fn apply(
    config: RuntimeConfig,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<RuntimeConfig> {
    let mut config = config;
    for (name, value) in options.into_iter().flatten() {
        if !value.is_none() {
            config = with_option(config, name.extract()?, &value)?;
        }
    }
    Ok(config)
}

fn with_option(
    config: RuntimeConfig,
    name: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<RuntimeConfig> {
    let mut config = config;
    match name {
        "limit" => config = config.with_budget(value.extract::<Size>()?.0),
        "reserve" => config = config.with_reserve(value.extract::<Size>()?.0),
        "resource" => config.resource = parsed(value)?,
        "ledger" => config.ledger = parsed(value)?,
        "log" => config = config.with_log(value.extract::<PathBuf>()?),
        "stacks" => config = config.with_stacks(parsed(value)?),
        "guard" => config.guard = parsed(value)?,
        "max_streams" => config.max_streams = value.extract()?,
        _ => {
            return Err(PyTypeError::new_err(format!(
                "the setting {name:?} is not accepted; expected one of {ACCEPTED}"
            )));
        }
    }
    Ok(config)
}

const ACCEPTED: &str = "\"limit\", \"reserve\", \"resource\", \"ledger\", \"log\", \"stacks\", \"guard\", \"max_streams\"";

fn parsed<T: FromStr<Err = XlogError>>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    let text: &str = value.extract()?;
    text.parse().map_err(|error| exception(value.py(), &error))
}
