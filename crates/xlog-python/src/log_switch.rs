//! A log that can be turned on and off while a runtime is in use.
//!
//! A `LoggingResource` at the top of the stack emits to this sink, which discards records while no file is open.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use xlog_base::Mutex;
use xlog_cuda::Result;
use xlog_cuda::device_runtime::{
    LogRecord, LoggingResource, LoggingSink, RuntimeConfig, SinkError, open_log,
};

/// A sink that forwards to a log file while one is open.
#[derive(Default)]
pub(crate) struct LogSwitch {
    is_on: AtomicBool,
    file: Mutex<Option<Arc<dyn LoggingSink>>>,
}

impl LogSwitch {
    /// Adds a log to this switch on top of the stack of `config`.
    pub(crate) fn layer(self: &Arc<Self>, config: RuntimeConfig) -> RuntimeConfig {
        let switch = self.clone();
        config.with_layer(move |inner| Box::new(LoggingResource::new(inner, switch.clone())))
    }

    /// Opens `path` as the log of a device and closes the previous one.
    pub(crate) fn turn_on(&self, path: &Path, device_ordinal: u32) -> Result<()> {
        self.turn_off()?;
        *self.file.lock() = Some(open_log(path, device_ordinal)?);
        self.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Flushes and closes the file.
    pub(crate) fn turn_off(&self) -> Result<()> {
        self.is_on.store(false, Ordering::Relaxed);
        let file = self.file.lock().take();
        match file.map(|file| file.flush()) {
            Some(Err(error)) => Err(xlog_cuda::XlogError::Kernel(error.to_string())),
            _ => Ok(()),
        }
    }

    fn file(&self) -> Option<Arc<dyn LoggingSink>> {
        if !self.is_on.load(Ordering::Relaxed) {
            return None;
        }
        self.file.lock().clone()
    }
}

impl LoggingSink for LogSwitch {
    fn emit(&self, record: LogRecord) -> Result<(), SinkError> {
        self.file().map_or(Ok(()), |file| file.emit(record))
    }

    fn dropped_records(&self) -> u64 {
        self.file().map_or(0, |file| file.dropped_records())
    }

    fn flush(&self) -> Result<(), SinkError> {
        self.file().map_or(Ok(()), |file| file.flush())
    }
}
