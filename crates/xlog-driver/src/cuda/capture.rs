//! Relaxes the calling thread's capture mode around calls that would invalidate a capture.
//!
//! While any thread captures a stream in the default mode, some calls of every thread fail and invalidate the capture: event and stream
//! queries, synchronisations, `cuMemAlloc`, `cuMemFree`, pinned memory, and allocations from a pool. This crate makes such calls only for
//! streams that are not captured, so each runs in the relaxed mode. Event records and waits, copies, fills, launches and mapping are
//! allowed in every mode.
//!
//! Invariant: dropping the guard restores the mode, whatever the call returned. A driver without `cuThreadExchangeStreamCaptureMode` leaves
//! the mode unchanged.

use std::ffi::c_uint;
use std::marker::PhantomData;

use super::abi::{CAPTURE_MODE_RELAXED, code};
use super::api::{Api, CaptureCalls};

/// Relaxes the thread's capture mode until dropped.
#[must_use = "the mode is relaxed only while the guard lives"]
pub(super) struct Relaxed<'a> {
    /// The mode to restore; `None` if the mode was not changed.
    before: Option<(&'a CaptureCalls, c_uint)>,
    /// The mode belongs to one thread, so the guard may not leave it.
    thread: PhantomData<*mut ()>,
}

impl<'a> Relaxed<'a> {
    #[inline]
    pub(super) fn enter(api: &'a Api) -> Self {
        Self { before: api.capture.as_ref().and_then(exchange), thread: PhantomData }
    }
}

/// Relaxes the mode. Returns the previous mode if it was another one.
#[inline]
fn exchange(calls: &CaptureCalls) -> Option<(&CaptureCalls, c_uint)> {
    let mut mode = CAPTURE_MODE_RELAXED;
    // SAFETY: the pointer is valid for the call, and the value is a mode.
    let code = unsafe { (calls.exchange_mode)(&raw mut mode) };
    (code == code::SUCCESS && mode != CAPTURE_MODE_RELAXED).then_some((calls, mode))
}

impl Drop for Relaxed<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((calls, mut mode)) = self.before {
            // SAFETY: the pointer is valid for the call, and the value is the mode that the driver gave.
            unsafe { (calls.exchange_mode)(&raw mut mode) };
        }
    }
}
