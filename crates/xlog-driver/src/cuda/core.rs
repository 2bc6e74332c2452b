//! What all opens of one device share, and in which order it goes away.
//!
//! The driver handle and every gate own a share. So a gate may outlive the driver handle, and tear-down, which waits for
//! the device, runs only when no gate is left that could hold it up.
//!
//! Invariant: pinned memory is freed after all streams were synchronised, and the context is given back last.
//! It does not destroy streams, events, pools or blocks: their owners hold the driver until they have.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, PoisonError, Weak};

use super::capture::Relaxed;
use super::context::Context;
use super::gates::Gates;
use super::host_fn;
use super::staging::Staging;
use super::streams::Streams;
use crate::{DeviceProperties, DriverResult};

/// One open device.
pub(super) struct Core {
    parts: ManuallyDrop<Parts>,
}

/// The fields of [`Core`], as one value that can be torn down on another thread.
pub(super) struct Parts {
    pub(super) properties: DeviceProperties,
    pub(super) staging: Staging,
    pub(super) gates: Gates,
    pub(super) streams: Streams,
    /// Last, so that it is given back after everything above.
    pub(super) context: Context,
}

impl Core {
    pub(super) fn new(properties: DeviceProperties, context: Context) -> Self {
        let gates = Gates::new(&context.api);
        let (staging, streams) = (Staging::default(), Streams::default());
        Self { parts: ManuallyDrop::new(Parts { properties, staging, gates, streams, context }) }
    }
}

impl Deref for Core {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: this is the only place that takes the value, it runs once, and nothing reads it afterwards.
        let parts = unsafe { ManuallyDrop::take(&mut self.parts) };
        if host_fn::on_callback_thread() {
            // The last share went in a host function, where the driver refuses every call. Without a thread to do it,
            // the calls fail and the memory stays with the context.
            let _ = std::thread::Builder::new()
                .name("xlog-driver-close".to_owned())
                .spawn(move || drop(parts));
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind_lost_or_not() else {
            return;
        };
        let _relaxed = Relaxed::enter(&self.context.api);
        // On a lost device this fails at once, and no transfer or wait is left that could touch the memory.
        let _ = self.streams.synchronize(&self.context);
        self.streams.tear_down();
        self.staging.tear_down(&self.context);
        self.gates.tear_down(&self.context);
    }
}

/// The devices this process has open.
pub(super) struct Registry {
    open: std::sync::Mutex<Vec<(usize, Weak<Core>)>>,
}

impl Registry {
    pub(super) const fn new() -> Self {
        Self { open: std::sync::Mutex::new(Vec::new()) }
    }

    /// The device that is open as `ordinal`, or the one that `open` opens.
    ///
    /// Shared, because one primary context stands behind all of them: closing one of two would otherwise wait for a
    /// stream that the other holds.
    pub(super) fn share(
        &self,
        ordinal: usize,
        open: impl FnOnce() -> DriverResult<Core>,
    ) -> DriverResult<Arc<Core>> {
        let mut entries = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|(_, core)| core.strong_count() > 0);
        let found =
            entries.iter().find(|(of, _)| *of == ordinal).and_then(|(_, core)| core.upgrade());
        if let Some(core) = found {
            return Ok(core);
        }
        let core = Arc::new(open()?);
        entries.push((ordinal, Arc::downgrade(&core)));
        Ok(core)
    }
}
