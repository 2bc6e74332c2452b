//! A runtime: a device, its streams, its memory and its limit.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::{Value, json};
use xlog_cuda::device_runtime::statistics::Usage;
use xlog_cuda::device_runtime::{
    AllocTag, BudgetHandle, OomReport, RuntimeConfig, StatisticsSnapshot, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceSpec, GpuMemoryManager, XlogError};

use crate::buffer::{Buffer, Memory};
use crate::config::{Size, apply};
use crate::dlpack::{Dtype, Layout};
use crate::errors::{exception, invalid, report_value, resource_exception, without_gil};
use crate::idle::By;
use crate::import;
use crate::log_switch::LogSwitch;
use crate::scope::{Scope, current_tag, limits};
use crate::stream::Stream;
use crate::value::object;

/// A device, its streams, its memory and its limit.
#[pyclass(frozen, weakref, module = "xlogmem")]
pub(crate) struct Runtime {
    manager: GpuMemoryManager,
    /// `None` for a shared runtime, whose configuration sets the log.
    log: Option<Arc<LogSwitch>>,
}

/// Opens a device and builds a runtime on it.
#[pyfunction]
#[pyo3(signature = (device = None, **options))]
pub(crate) fn open(
    py: Python<'_>,
    device: Option<&str>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Runtime> {
    let failed = |error| exception(py, &error);
    let spec = match device {
        Some(device) => device.parse::<DeviceSpec>(),
        None => CudaDevice::default_spec(),
    };
    let log = Arc::new(LogSwitch::default());
    let config = RuntimeConfig::default().with_device(spec.map_err(failed)?);
    let config = config.with_quota_from_environment().map_err(failed)?;
    let config = log.layer(apply(config, options)?);
    let runtime = py.detach(|| config.open()).map_err(failed)?;
    Ok(Runtime { manager: GpuMemoryManager::with_runtime(runtime), log: Some(log) })
}

/// Returns the runtime of a device that the whole process shares, including the frameworks.
#[pyfunction]
#[pyo3(signature = (device = 0))]
pub(crate) fn shared(py: Python<'_>, device: u32) -> PyResult<Runtime> {
    let runtime = without_gil(py, || XlogDeviceRuntime::try_get_arc(device))?;
    Ok(Runtime::over(runtime))
}

/// Sets the configuration of a device's shared runtime, before its first use.
#[pyfunction]
#[pyo3(signature = (device = 0, **options))]
pub(crate) fn configure(
    py: Python<'_>,
    device: u32,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let failed = |error| exception(py, &error);
    let config = RuntimeConfig::from_environment().map_err(failed)?;
    let config = apply(config, options)?;
    XlogDeviceRuntime::configure(device, config).map_err(failed)
}

/// Updates the limits of all runtimes of this process after a change of its quota; returns the number of runtimes.
#[pyfunction]
pub(crate) fn refresh_limits(py: Python<'_>) -> usize {
    py.detach(XlogDeviceRuntime::refresh_all_limits)
}

/// Returns the report of this thread's last refusal, by any runtime.
#[pyfunction]
pub(crate) fn last_oom(py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
    OomReport::last_of_thread().map(|report| report_value(py, &report)).transpose()
}

impl Runtime {
    /// Wraps a runtime whose configuration sets the log.
    pub(crate) fn over(runtime: Arc<XlogDeviceRuntime>) -> Self {
        Self { manager: GpuMemoryManager::with_runtime(runtime), log: None }
    }

    fn runtime(&self) -> &Arc<XlogDeviceRuntime> {
        self.manager.runtime()
    }

    fn budget(&self, py: Python<'_>) -> PyResult<&BudgetHandle> {
        self.runtime().budget().ok_or_else(|| {
            exception(py, &XlogError::Kernel("the runtime has no budget".to_owned()))
        })
    }

    fn whole(&self) -> u64 {
        self.runtime().device().properties().total_bytes
    }

    fn counts(&self) -> Option<Value> {
        Some(statistics_value(&self.runtime().usage()?.snapshot()))
    }
}

#[pymethods]
impl Runtime {
    /// The opened device, such as `cuda:0` or `sim`.
    #[getter]
    fn device(&self) -> &str {
        self.runtime().device().spec()
    }

    #[getter]
    fn ordinal(&self) -> u32 {
        self.runtime().device_ordinal()
    }

    /// Allocates untyped bytes.
    #[pyo3(signature = (nbytes, *, stream = None, tag = None))]
    fn allocate(
        &self,
        py: Python<'_>,
        nbytes: i64,
        stream: Option<&Stream>,
        tag: Option<&str>,
    ) -> PyResult<Buffer> {
        self.empty(py, vec![nbytes], "uint8", stream, tag)
    }

    /// Allocates an array, whose contents are unspecified.
    #[pyo3(signature = (shape, dtype = "uint8", *, stream = None, tag = None))]
    fn empty(
        &self,
        py: Python<'_>,
        shape: Vec<i64>,
        dtype: &str,
        stream: Option<&Stream>,
        tag: Option<&str>,
    ) -> PyResult<Buffer> {
        let layout = Layout::new(shape, Dtype::named(dtype)?)?;
        let tag = tag.map_or_else(current_tag, AllocTag::intern);
        let manager = match stream {
            None => self.manager.clone(),
            Some(stream) if Arc::ptr_eq(&stream.runtime, self.runtime()) => {
                self.manager.on_stream(stream.stream_id())
            }
            Some(_) => {
                return Err(invalid(
                    py,
                    "a stream of another runtime".to_owned(),
                    "a stream of this runtime",
                ));
            }
        };
        let allocate = || manager.alloc_tagged::<u8>(layout.bytes(), tag);
        let slice = without_gil(py, || By::Python.with_room(self.runtime(), allocate))?;
        Ok(Buffer::new(Memory::new(self.runtime(), slice, None), layout))
    }

    /// Creates a buffer over an array of another library, by DLPack or the CUDA array interface.
    #[pyo3(name = "from_array")]
    fn import_array(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        import::import(py, &self.manager, array)
    }

    /// Leases a stream.
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        Stream::leased(py, self.runtime())
    }

    #[getter]
    fn default_stream(&self, py: Python<'_>) -> PyResult<Stream> {
        Stream::default_of(py, self.runtime())
    }

    /// Creates a scope of the budget: at most `hard` bytes, of which `soft` are guaranteed.
    #[pyo3(signature = (name, hard, soft = None))]
    fn scope(&self, py: Python<'_>, name: &str, hard: Size, soft: Option<Size>) -> PyResult<Scope> {
        let whole = self.whole();
        let [soft, hard] = limits(soft, hard, whole);
        let scope = self.budget(py)?.scope(name, soft, hard);
        Ok(Scope::new(scope.map_err(|error| resource_exception(py, error))?, whole))
    }

    /// Creates a scope with only a limit.
    #[pyo3(name = "budget", signature = (limit, name = "budget"))]
    fn budget_scope(&self, py: Python<'_>, limit: Size, name: &str) -> PyResult<Scope> {
        self.scope(py, name, limit, None)
    }

    #[getter]
    fn limit(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.budget(py)?.limit())
    }

    #[setter]
    fn set_limit(&self, py: Python<'_>, limit: Size) -> PyResult<()> {
        let [_, bytes] = limits(None, limit, self.whole());
        self.budget(py)?.set_limit(bytes);
        Ok(())
    }

    #[getter]
    fn remaining(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.budget(py)?.remaining())
    }

    /// Bytes of live blocks, and of freed ones with pending work.
    #[getter]
    fn bytes_outstanding(&self) -> usize {
        self.runtime().bytes_outstanding()
    }

    /// Bytes that the runtime reserves on the device, cached or not.
    #[getter]
    fn physical_bytes(&self) -> Option<usize> {
        self.runtime().physical_bytes()
    }

    /// Returns counts of all blocks, and by tag, stream and kind of failure.
    fn statistics(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.counts().map(|counts| Ok(object(py, &counts)?.unbind())).transpose()
    }

    /// Returns the current state: limit, statistics, live blocks, scopes.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let runtime = self.runtime();
        let blocks = runtime.usage().map(|usage| usage.live_blocks()).unwrap_or_default();
        let blocks: Vec<_> = blocks
            .iter()
            .map(|block| {
                json!({
                    "ptr": block.ptr,
                    "bytes": block.bytes,
                    "generation": block.generation.0,
                    "tag": block.tag.0,
                    "stream": block.stream.map(|stream| stream.0),
                    "query": block.query_id,
                    "age_seconds": block.age.as_secs_f64(),
                })
            })
            .collect();
        let budget = runtime.budget();
        let limit = runtime.effective_limit();
        let free = runtime.resource().free_space();
        let value = json!({
            "device": runtime.device().spec(),
            "ordinal": runtime.device_ordinal(),
            "limit": budget.map(BudgetHandle::limit),
            "limit_source": limit.map(|limit| limit.ruled_by().to_string()),
            "reserved": budget.map(BudgetHandle::reserved_bytes),
            "remaining": budget.map(BudgetHandle::remaining),
            "physical_bytes": runtime.physical_bytes(),
            "memory_use": runtime.memory_use(),
            "free_space": free.map(|free| json!({ "bytes": free.bytes, "largest": free.largest })),
            "scopes": budget.map(BudgetHandle::usage_by_scope),
            "tags": budget.map(BudgetHandle::usage_by_tag),
            "statistics": self.counts(),
            "blocks": blocks,
        });
        Ok(object(py, &value)?.unbind())
    }

    /// Returns the report of the last refusal; `None` if nothing was refused.
    fn last_oom(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let report = self.runtime().budget().and_then(BudgetHandle::last_oom);
        report.map(|report| report_value(py, &report)).transpose()
    }

    /// Logs every following operation to a file, whose name ends in `.xtrace` or `.csv`.
    fn log_on(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let log = self.log(py)?;
        without_gil(py, || log.turn_on(&path, self.runtime().device_ordinal()))
    }

    /// Flushes and closes the log.
    fn log_off(&self, py: Python<'_>) -> PyResult<()> {
        let log = self.log(py)?;
        without_gil(py, || log.turn_off())
    }

    /// Returns cached memory to the device; returns its bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<usize> {
        without_gil(py, || Ok(self.runtime().trim()?))
    }

    /// Waits for every queued free.
    fn reap(&self, py: Python<'_>) -> PyResult<()> {
        let reap = || {
            let swept = By::Python.sweep(self.runtime());
            // This succeeds even during a capture, which makes the sweep fail.
            self.runtime().reap_pending()?;
            swept.map(drop)
        };
        without_gil(py, reap)
    }

    /// Waits for everything queued on the device.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        without_gil(py, || By::Python.wait(self.runtime()))
    }

    /// Returns the findings of the simulated device's race detector; always empty on a GPU.
    fn races<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let races = self.runtime().device().races();
        PyList::new(py, races.iter().map(ToString::to_string))
    }

    /// Queues an unannounced fill, as another library would; for tests on the simulated device.
    fn _queue_fill(
        &self,
        py: Python<'_>,
        stream: &Stream,
        buffer: &Buffer,
        value: u8,
    ) -> PyResult<()> {
        let memory = buffer.memory();
        self._queue_fill_at(py, stream, memory.ptr(), memory.bytes(), value)
    }

    /// Does [`Runtime::_queue_fill`] at an address.
    fn _queue_fill_at(
        &self,
        py: Python<'_>,
        stream: &Stream,
        ptr: u64,
        nbytes: usize,
        value: u8,
    ) -> PyResult<()> {
        let queued = import::queue_unannounced(stream, ptr, nbytes, value);
        queued.map_err(|error| exception(py, &error))
    }

    /// Makes the simulated device report a stream as captured, for tests.
    fn _set_capturing(&self, py: Python<'_>, stream: &Stream, is_captured: bool) -> PyResult<()> {
        import::set_capturing(stream, is_captured).map_err(|error| exception(py, &error))
    }

    /// Makes the next wait for the simulated device fail, as an open capture does; for tests.
    fn _fail_next_wait(&self, py: Python<'_>) -> PyResult<()> {
        import::fail_next_wait(self.runtime().device()).map_err(|error| exception(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("<xlogmem.Runtime on {}>", self.device())
    }
}

impl Runtime {
    fn log(&self, py: Python<'_>) -> PyResult<&Arc<LogSwitch>> {
        self.log.as_ref().ok_or_else(|| {
            let text = "the log of a shared runtime is set before its first use: xlogmem.configure(log=...) or XLOG_DEVICE_LOG";
            exception(py, &XlogError::Kernel(text.to_owned()))
        })
    }
}

fn usage_value(usage: &Usage) -> Value {
    json!({
        "current_bytes": usage.current_bytes,
        "peak_bytes": usage.peak_bytes,
        "total_bytes": usage.total_bytes,
        "freed_bytes": usage.freed_bytes,
        "current_blocks": usage.current_blocks,
        "peak_blocks": usage.peak_blocks,
        "allocations": usage.allocations,
        "deallocations": usage.deallocations,
        "failures": usage.failures,
    })
}

fn statistics_value(counts: &StatisticsSnapshot) -> Value {
    let mut value = usage_value(&counts.total);
    let by_tag: serde_json::Map<_, _> =
        counts.by_tag.iter().map(|(tag, usage)| (tag.0.to_owned(), usage_value(usage))).collect();
    let by_stream: serde_json::Map<_, _> = counts
        .by_stream
        .iter()
        .map(|(stream, usage)| (stream.0.to_string(), usage_value(usage)))
        .collect();
    value["requested_bytes"] = counts.requested_bytes.into();
    value["by_tag"] = by_tag.into();
    value["by_stream"] = by_stream.into();
    value["failures_by_kind"] = counts
        .failures
        .iter()
        .map(|(kind, count)| ((*kind).to_owned(), Value::from(*count)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    value
}
