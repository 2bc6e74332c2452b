//! The calling thread's capture mode, relaxed around calls that would break a capture.
//!
//! While any thread captures a stream in the default mode, some calls of every thread fail and invalidate the capture: event and
//! stream queries, synchronisations, `cuMemAlloc`, `cuMemFree`, pinned memory, and allocations of a pool. Our calls of these kinds
//! never concern a captured stream, so each runs with the thread's mode relaxed. Recording an event, waiting for one, copies,
//! fills, launches and mapping are allowed in every mode.
//!
//! Invariant: the drop of the guard restores the mode, whatever the call returned. With a driver that lacks the exchange the mode
//! stays.

use std::ffi::c_uint;
use std::marker::PhantomData;

use super::abi::{CAPTURE_MODE_RELAXED, code};
use super::api::{Api, CaptureCalls};

/// The thread's capture mode is relaxed while this lives.
#[must_use = "the mode is relaxed only while the guard lives"]
pub(super) struct Relaxed<'a> {
    /// How to go back, and to which mode; `None` where nothing was changed.
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

/// Relaxes the mode; says how to go back if it was another one.
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
