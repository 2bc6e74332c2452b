//! Host functions queued on a stream.
//!
//! The driver gets a raw reference to a `Job` that holds the closure. The driver's thread, or the caller whose queueing failed, takes the
//! closure out and runs or drops it. So it runs at most once, even if the driver reports an earlier fault for a call that did queue the
//! function.
//!
//! A lost device never calls a function that it had accepted; its closure is neither run nor dropped.

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use xlog_base::Mutex;

use super::abi::code;
use super::context::Context;
use super::errors::is_sticky;
use crate::{DriverResult, HostFn};

thread_local! {
    static ON_CALLBACK_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread runs a host function for the driver, which must not make driver calls.
pub(super) fn on_callback_thread() -> bool {
    ON_CALLBACK_THREAD.try_with(Cell::get).unwrap_or(false)
}

struct Job(Mutex<Option<HostFn>>);

impl Job {
    fn take(&self) -> Option<HostFn> {
        self.0.lock().take()
    }
}

/// Queues `work`. The context is current and the stream is not being captured: a graph would run `work` repeatedly.
pub(super) fn queue(context: &Context, stream: CUstream, work: HostFn) -> DriverResult<()> {
    let job = Arc::new(Job(Mutex::new(Some(work))));
    let share = Arc::into_raw(Arc::clone(&job));
    // SAFETY: `run` consumes exactly one reference to a `Job`, which `share` is.
    let code = unsafe {
        (context.api.calls.launch_host_func)(stream, Some(run), share.cast_mut().cast::<c_void>())
    };
    if code != code::SUCCESS {
        drop(job.take());
        if !is_sticky(code) {
            // SAFETY: the driver refused the call, so `run` does not get this reference.
            drop(unsafe { Arc::from_raw(share) });
        }
    }
    context.check("cuLaunchHostFunc", code)
}

/// Returns a pointer to `work` for [`run`], which the driver must call exactly once.
pub(super) fn once(work: HostFn) -> *mut c_void {
    Arc::into_raw(Arc::new(Job(Mutex::new(Some(work))))).cast_mut().cast::<c_void>()
}

/// Drops work of [`once`] that the driver refused.
///
/// # Safety
/// `work` comes from [`once`], and the driver does not call it.
pub(super) unsafe fn drop_once(work: *mut c_void) {
    // SAFETY: the caller promises that `once` made the pointer, and that the driver did not take it.
    drop(unsafe { Arc::from_raw(work.cast_const().cast::<Job>()) });
}

/// The callback that the driver runs on a thread of its own.
pub(super) unsafe extern "C" fn run(share: *mut c_void) {
    // SAFETY: `queue` or `once` made the pointer from a reference to a `Job`, and the driver calls this once for each.
    let job = unsafe { Arc::from_raw(share.cast_const().cast::<Job>()) };
    let Some(work) = job.take() else { return };
    let _ = ON_CALLBACK_THREAD.try_with(|flag| flag.set(true));
    if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
        discard(payload);
    }
    let _ = ON_CALLBACK_THREAD.try_with(|flag| flag.set(false));
}

/// Drops the payload of a panic. Its own drop may panic too, and unwinding into the driver would abort the process.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
}
