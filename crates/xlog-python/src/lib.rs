//! The native part of the Python package `xlogmem`.
//!
//! `xlogmem._native` has the runtime, streams, buffers and scopes as Python objects, and exports the C functions of PyTorch's
//! pluggable allocator (`torch`). The package's Python files connect the frameworks.
//!
//! Invariants:
//! - No panic crosses into C or Python: PyO3 turns one into an exception, and the C functions catch it.
//! - No call holds the GIL while it waits for the device, and no C function takes it.

#![deny(unsafe_code)]

mod buffer;
mod config;
#[allow(unsafe_code)]
mod dlpack;
mod errors;
#[allow(unsafe_code)]
mod foreign;
mod framework;
mod idle;
#[allow(unsafe_code)]
mod import;
mod log_switch;
mod runtime;
mod scope;
mod stream;
#[allow(unsafe_code)]
mod torch;
mod value;

use pyo3::prelude::*;
use xlog_cuda::device_runtime::set_leak_handler;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<stream::Hold>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<scope::Scope>()?;
    module.add_class::<scope::Tag>()?;
    module.add_class::<framework::Allocator>()?;
    module.add_function(wrap_pyfunction!(runtime::open, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::shared, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::configure, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::last_oom, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::refresh_limits, module)?)?;
    // Objects are live at the end of a Python program; that is not a leak.
    set_leak_handler(|_| {});
    torch::add_to(module)
}
