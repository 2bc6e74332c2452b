//! The state that all opens of one device share, and its tear-down order.
//!
//! The driver handle and every gate own a reference. So a gate may outlive the driver handle, and tear-down, which waits for the device,
//! runs only when no gate can block it.
//!
//! Invariant: pinned memory is freed after all streams were synchronised, and the context is released last. Tear-down does not destroy
//! streams, events, pools or blocks: their owners keep the driver open until they have done so.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::{CUevent, CUgraph, CUgraphExec, CUmemoryPool, CUstream};

use super::capture::Relaxed;
use super::context::Context;
use super::gates::Gates;
use super::host_fn;
use super::staging::Staging;
use super::streams::Streams;
use crate::{
    DeviceProperties, DriverError, DriverResult, EventHandle, GraphExecHandle, GraphHandle,
    PoolHandle, StreamHandle,
};

/// One open device.
pub(super) struct DriverCore {
    parts: ManuallyDrop<DriverParts>,
}

/// The fields of [`DriverCore`], as one value that can be torn down on another thread.
pub(super) struct DriverParts {
    pub(super) properties: DeviceProperties,
    pub(super) staging: Staging,
    pub(super) gates: Gates,
    pub(super) streams: Streams,
    /// The tag that the handles of this device carry.
    tag: u16,
    /// Last, so that it is released after everything above.
    pub(super) context: Context,
}

impl DriverCore {
    pub(super) fn new(properties: DeviceProperties, context: Context) -> Self {
        let gates = Gates::new(&context.api);
        let (staging, streams) = (Staging::default(), Streams::default());
        let tag = next_tag();
        let parts = DriverParts { properties, staging, gates, streams, tag, context };
        Self { parts: ManuallyDrop::new(parts) }
    }
}

/// A tag for the handles of a device that is being opened. A tag repeats after 65,535 opens; handles of a closed device may not be used.
fn next_tag() -> u16 {
    static OPENED: AtomicU32 = AtomicU32::new(0);
    let before = OPENED.fetch_add(1, Ordering::Relaxed) % u32::from(u16::MAX);
    // Tag 0 marks handles without a tag.
    before as u16 + 1
}

macro_rules! handles {
    ($( $make:ident, $raw:ident: $handle:ident is $pointer:ident, $accepted:literal; )*) => {
        impl DriverParts {
            $(
                /// Returns the tagged handle of an object that the driver has just made.
                pub(super) fn $make(&self, made: $pointer) -> DriverResult<$handle> {
                    let address = made.expose_provenance() as u64;
                    $handle::tagged(self.tag, address).ok_or_else(|| {
                        let value = format!("the address {address:#x}");
                        DriverError::invalid(stringify!($make), value, "an address of 48 bits")
                    })
                }

                /// Returns the driver's handle, unless another device made this one.
                #[inline]
                pub(super) fn $raw(
                    &self,
                    call: &'static str,
                    handle: $handle,
                ) -> DriverResult<$pointer> {
                    match handle.address(self.tag) {
                        Some(address) => Ok(ptr::with_exposed_provenance_mut(address as usize)),
                        None => Err(DriverError::invalid(call, handle, $accepted)),
                    }
                }
            )*
        }
    };
}

handles! {
    stream_handle, raw_stream: StreamHandle is CUstream, "a stream of this device's stream_create";
    event_handle, raw_event: EventHandle is CUevent, "an event of this device's event_create";
    pool_handle, raw_pool: PoolHandle is CUmemoryPool, "a pool of this device's pool_create";
    graph_handle, raw_graph: GraphHandle is CUgraph, "a graph of this device's end_capture or capture_info";
    exec_handle, raw_exec: GraphExecHandle is CUgraphExec, "an executable graph of this device's graph_instantiate";
}

impl Deref for DriverCore {
    type Target = DriverParts;

    fn deref(&self) -> &DriverParts {
        &self.parts
    }
}

impl Drop for DriverCore {
    fn drop(&mut self) {
        // SAFETY: this is the only place that takes the value, it runs once, and nothing reads it afterwards.
        let parts = unsafe { ManuallyDrop::take(&mut self.parts) };
        if host_fn::on_callback_thread() {
            // The last reference was dropped in a host function, where the driver refuses every call. If no thread can be started, the
            // calls fail and the memory stays with the context.
            let _ = std::thread::Builder::new()
                .name("xlog-driver-close".to_owned())
                .spawn(move || drop(parts));
        }
    }
}

impl Drop for DriverParts {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind_lost_or_not() else {
            return;
        };
        let _relaxed = Relaxed::enter(&self.context.api);
        // On a lost device this fails at once; then no transfer or wait can touch the memory any more.
        let _ = self.streams.synchronize(&self.context);
        self.streams.tear_down();
        self.staging.tear_down(&self.context);
        self.gates.tear_down(&self.context);
    }
}

/// The devices this process has open.
pub(super) struct Registry {
    open: xlog_base::Mutex<Vec<(usize, Weak<DriverCore>)>>,
}

impl Registry {
    pub(super) const fn new() -> Self {
        Self { open: xlog_base::Mutex::new(Vec::new()) }
    }

    /// The device that is open as `ordinal`, or the one that `open` opens.
    ///
    /// Opens are shared because they share one primary context: closing one of two would otherwise wait for a stream that the other holds.
    pub(super) fn share(
        &self,
        ordinal: usize,
        open: impl FnOnce() -> DriverResult<DriverCore>,
    ) -> DriverResult<Arc<DriverCore>> {
        let mut entries = self.open.lock();
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
