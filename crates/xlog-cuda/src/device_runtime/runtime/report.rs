//! Reports of failures in a drop, which cannot return them, and of races that no call has returned.
//!
//! A program may set one handler of each kind for the whole process; the default writes a line to standard error. A handler runs on the
//! dropping thread, so it must not wait for the device. A panic in a handler is caught: a drop never unwinds.

use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use xlog_base::{Mutex, escape};

use crate::device_runtime::resource::{AllocTag, BlockId, ResourceError};

/// The live blocks of a runtime at its end or at the end of the process. They are never freed, nor are the parts of the runtime.
///
/// A [`PinnedHostResource`](crate::device_runtime::PinnedHostResource) that no runtime holds reports its live blocks alike.
///
/// ```
/// use xlog_cuda::device_runtime::{LeakReport, set_leak_handler};
///
/// fn complain(leak: &LeakReport) {
///     eprintln!("{} blocks of {} were never freed", leak.live_blocks, leak.device);
/// }
/// set_leak_handler(complain);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakReport {
    /// The spec of the device.
    pub device: String,
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// Whether the runtime is still alive at the end of the process: it is shared, or a forgotten buffer keeps it.
    pub at_exit: bool,
    /// Whether the blocks are those of a resource of page-locked memory, not of a runtime.
    pub is_page_locked: bool,
    /// The number of live blocks; 0 if the resource does not count blocks.
    pub live_blocks: usize,
    /// Their bytes, and those of freed blocks whose free has not completed.
    pub bytes: usize,
    /// The live blocks by tag and age, in lines; `None` for a runtime that was composed of parts.
    pub holders: Option<String>,
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, device_ordinal, at_exit, is_page_locked, live_blocks, bytes, holders } =
            self;
        let owner = if *is_page_locked { "page-locked memory" } else { "runtime" };
        let (end, goes) = match at_exit {
            true => ("is alive at the end of the process", "the process ends".to_owned()),
            false => ("ended", format!("the {owner} goes")),
        };
        write!(
            f,
            "the {owner} of device {device:?} (ordinal {device_ordinal}) {end} with {live_blocks} live blocks, \
             {bytes} bytes outstanding; they are leaked: free every block before {goes}"
        )?;
        match holders {
            Some(holders) => write!(f, "\n{holders}"),
            None => Ok(()),
        }
    }
}

/// A dropped buffer that its resource did not free.
///
/// ```
/// use xlog_cuda::device_runtime::{FailedFree, set_failed_free_handler};
///
/// fn complain(failed: &FailedFree) {
///     eprintln!("{} bytes tagged {}: {}", failed.bytes, failed.tag, failed.error);
/// }
/// set_failed_free_handler(complain);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedFree {
    /// The block.
    pub block: BlockId,
    /// Its size.
    pub bytes: usize,
    /// Its label.
    pub tag: AllocTag,
    /// The reason why it was not freed. After a failure of the driver the resource keeps the block, and a later reap retries the free.
    pub error: ResourceError,
}

impl fmt::Display for FailedFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, bytes, tag, error } = self;
        let (ptr, ordinal) = (block.ptr, block.device_ordinal);
        write!(f, "freeing {bytes} bytes ({tag}) at {ptr:#x} of device {ordinal} failed: {error}")
    }
}

static LEAK: Hook<LeakReport> = Hook::new();
static FAILED_FREE: Hook<FailedFree> = Hook::new();

/// Sets the handler of leaks, for the whole process. The default writes one line to standard error.
pub fn set_leak_handler(handler: fn(&LeakReport)) {
    LEAK.set(handler);
}

/// Sets the handler of buffers that could not be freed, for the whole process. The default writes one line to standard error.
pub fn set_failed_free_handler(handler: fn(&FailedFree)) {
    FAILED_FREE.set(handler);
}

pub(crate) fn report_leak(leak: &LeakReport) {
    LEAK.call(leak);
}

pub(crate) fn report_failed_free(failed: &FailedFree) {
    FAILED_FREE.call(failed);
}

/// Writes the number of unread races of a simulated device, and the first few of them, to standard error.
#[cfg(feature = "sim")]
pub(crate) fn report_unread_races(sim: &xlog_sim::SimDevice) {
    const SHOWN: usize = 5;
    let unread = sim.take_unread_races();
    if unread.total == 0 {
        return;
    }
    let spec = crate::CudaDevice::spec_of(sim);
    let shown: Vec<_> = unread.first.iter().take(SHOWN).map(|race| format!("\n  {race}")).collect();
    catch_panic(|| {
        print_report(format_args!(
            "{} races on device \"{spec}\" were neither returned by a call nor read by CudaDevice::races(); the first {}:{}",
            unread.total,
            shown.len(),
            shown.concat()
        ));
    });
}

/// Writes one line to standard error.
#[cfg(feature = "ledger")]
pub(crate) fn print_line(line: fmt::Arguments<'_>) {
    print(&escape::line(&line.to_string()));
}

/// Writes a report to standard error. Its own line breaks stay, so the names in it are escaped before.
pub(crate) fn print_report(report: fmt::Arguments<'_>) {
    print(&escape::lines(&report.to_string()));
}

fn print(text: &str) {
    // `eprintln` panics if standard error is closed.
    let _ = writeln!(std::io::stderr(), "xlog-cuda: {text}");
}

/// Runs the work of a drop and stops a panic in it, after the panic hook has reported it.
pub(crate) fn catch_panic<R>(work: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// A handler. No lock is held while it runs, so it may set another one.
struct Hook<T>(Mutex<Option<fn(&T)>>);

impl<T: fmt::Display> Hook<T> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn set(&self, handler: fn(&T)) {
        *self.0.lock() = Some(handler);
    }

    fn call(&self, report: &T) {
        let handler = *self.0.lock();
        catch_panic(|| match handler {
            Some(handler) => handler(report),
            None => print_report(format_args!("{report}")),
        });
    }
}
