//! The device's primary context, and how one call makes it current.
//!
//! The primary context is shared with every other library in the process. This crate retains and releases it, and never resets it. A call
//! may come on any thread with any context current:
//!
//! - this context is current: nothing to do;
//! - none is current: this context is set and stays current, so the next call on this thread costs one query;
//! - another context is current: this context is pushed, and popped when the guard drops.
//!
//! Invariant: after the first sticky code every later call fails with that code without reaching the driver.

use std::ffi::c_uint;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUstream};

use super::abi::{self, code};
use super::api::Api;
use super::capture::Relaxed;
use super::errors::is_sticky;
use crate::DriverResult;

/// A reference to the primary context of one device.
pub(super) struct Context {
    pub(super) api: Arc<Api>,
    pub(super) device: CUdevice,
    raw: CUcontext,
    /// The first sticky code, or 0.
    lost: AtomicU32,
}

// SAFETY: a context handle is a name the driver accepts on every thread; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above; the one field that changes is atomic.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of `device`.
    pub(super) fn retain(api: Arc<Api>, device: CUdevice) -> DriverResult<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `device` came from `cuDeviceGet`, and the out pointer is valid for the call.
        let code = unsafe { (api.calls.primary_ctx_retain)(&raw mut raw, device) };
        api.check_open("cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { api, device, raw, lost: AtomicU32::new(0) })
    }

    /// Makes this context current until the guard drops. The error of a lost device names `call`.
    #[inline]
    pub(super) fn bind(&self, call: &'static str) -> DriverResult<Bound<'_>> {
        let lost = self.lost.load(Ordering::Relaxed);
        if lost != 0 {
            return Err(self.api.error(call, lost, 0));
        }
        self.bind_lost_or_not()
    }

    /// [`Context::bind`] for a call that would invalidate a capture on a stream of another thread.
    #[inline]
    pub(super) fn bind_relaxed(
        &self,
        call: &'static str,
    ) -> DriverResult<(Relaxed<'_>, Bound<'_>)> {
        let bound = self.bind(call)?;
        Ok((Relaxed::enter(&self.api), bound))
    }

    /// [`Context::bind`] for tear-down, which frees what it can even on a lost device.
    pub(super) fn bind_lost_or_not(&self) -> DriverResult<Bound<'_>> {
        let mut current = ptr::null_mut();
        // SAFETY: the out pointer is valid for the call.
        let code = unsafe { (self.api.calls.ctx_get_current)(&raw mut current) };
        self.check("cuCtxGetCurrent", code)?;
        if current == self.raw {
            return Ok(Bound::new(None));
        }
        if current.is_null() {
            // SAFETY: `raw` is retained, hence alive.
            let code = unsafe { (self.api.calls.ctx_set_current)(self.raw) };
            self.check("cuCtxSetCurrent", code)?;
            return Ok(Bound::new(None));
        }
        // SAFETY: `raw` is retained, hence alive.
        let code = unsafe { (self.api.calls.ctx_push_current)(self.raw) };
        self.check("cuCtxPushCurrent", code)?;
        Ok(Bound::new(Some(self)))
    }

    /// Returns `Ok` for success, else the error of `code`. Stores the first sticky code.
    #[inline]
    pub(super) fn check(&self, call: &'static str, code: u32) -> DriverResult<()> {
        self.check_allocation(call, code, 0)
    }

    /// [`Context::check`] for a call that asked for `requested` bytes.
    #[inline]
    pub(super) fn check_allocation(
        &self,
        call: &'static str,
        code: u32,
        requested: u64,
    ) -> DriverResult<()> {
        if code != code::SUCCESS {
            self.note(code);
        }
        self.api.check(call, code, requested)
    }

    /// Translates the code of a query: success is true, not ready is false.
    #[inline]
    pub(super) fn check_query(&self, call: &'static str, code: u32) -> DriverResult<bool> {
        if code == code::NOT_READY {
            return Ok(false);
        }
        self.check(call, code).map(|()| true)
    }

    /// Stores `code` if it is the first sticky one.
    #[cold]
    pub(super) fn note(&self, code: u32) {
        if is_sticky(code) {
            // Only the first code is kept: later codes are often consequences of the same fault.
            let _ = self.lost.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Creates an event. The context is current.
    pub(super) fn create_event(&self) -> DriverResult<CUevent> {
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: the out pointer is valid, and the caller has bound the context.
        let code =
            unsafe { (self.api.calls.event_create)(&raw mut event, abi::EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// Returns the capture status of a stream of this device, which is not destroyed meanwhile. The context is current.
    pub(super) fn capture_status(&self, stream: CUstream) -> DriverResult<c_uint> {
        let mut status = abi::CAPTURE_NONE;
        // SAFETY: the out pointer is valid, and the caller promises that the stream is alive.
        let code = unsafe { (self.api.calls.stream_is_capturing)(stream, &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status)
    }

    /// Waits for everything in the context, which must be current.
    pub(super) fn synchronize(&self) -> DriverResult<()> {
        // SAFETY: takes no arguments; the caller has bound the context.
        let code = unsafe { (self.api.calls.ctx_synchronize)() };
        self.check("cuCtxSynchronize", code)
    }

    /// Unsets this context on the calling thread if no reference keeps it alive.
    fn unset_if_dead(&self) {
        let calls = &self.api.calls;
        let (mut flags, mut active): (c_uint, i32) = (0, 1);
        // SAFETY: both out pointers are valid for the call.
        let code =
            unsafe { (calls.primary_ctx_get_state)(self.device, &raw mut flags, &raw mut active) };
        if code != code::SUCCESS || active != 0 {
            return;
        }
        let mut current = ptr::null_mut();
        // SAFETY: the out pointer is valid for the call.
        let code = unsafe { (calls.ctx_get_current)(&raw mut current) };
        if code == code::SUCCESS && current == self.raw {
            // SAFETY: null is the documented way to leave the thread without a context.
            unsafe { (calls.ctx_set_current)(ptr::null_mut()) };
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: undoes the one retain of this reference. The handle is not used afterwards except for comparison.
        unsafe { (self.api.calls.primary_ctx_release)(self.device) };
        self.unset_if_dead();
    }
}

/// Keeps the context current on this thread until dropped.
#[must_use = "the context is current only while the guard lives"]
pub(super) struct Bound<'a> {
    pushed_by: Option<&'a Context>,
    /// The current context belongs to one thread, so the guard may not leave it.
    thread: PhantomData<*mut ()>,
}

impl<'a> Bound<'a> {
    fn new(pushed_by: Option<&'a Context>) -> Self {
        Self { pushed_by, thread: PhantomData }
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.pushed_by {
            let mut popped = ptr::null_mut();
            // SAFETY: the out pointer is valid; the top of this thread's stack is what `bind` pushed, because every
            // call in between leaves the stack as it found it.
            unsafe { (context.api.calls.ctx_pop_current)(&raw mut popped) };
        }
    }
}
