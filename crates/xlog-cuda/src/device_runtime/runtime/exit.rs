//! Reports of leaks and races at the end of the process.
//!
//! A shared runtime is never dropped, and a forgotten buffer keeps its runtime for ever: no drop can report them. So an exit handler
//! reports the runtimes with live blocks, by tag, page-locked memory with live blocks, and the simulated devices with unread races.
//!
//! The handler makes no driver call, since the driver may be gone. Its wait is bounded, since a running thread may hold a lock. It
//! does not run on `abort`, `_exit` or a signal.

use std::sync::mpsc;
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

use xlog_base::Mutex;
#[cfg(feature = "sim")]
use xlog_sim::SimDevice;

use super::report::report_leak;
use super::{LeakReport, RuntimeCore};
use crate::device_runtime::PinnedHostResource;

/// The maximum time that an ending process waits for the report.
const LIMIT: Duration = Duration::from_secs(2);

/// A runtime or a simulated device that reports at the end of the process.
trait Reporting: Send + Sync {
    fn report(&self);
}

struct Watched {
    reporting: Weak<dyn Reporting>,
    /// The process that registered it. A forked child has none of its blocks and races.
    process: u32,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Registers a runtime, which reports its live blocks if it is alive at the end of the process.
pub(super) fn watch(core: &Arc<RuntimeCore>) {
    watch_reporting(core.clone());
}

/// Registers a resource of page-locked memory, which reports its live blocks if a forgotten buffer keeps it.
pub(crate) fn watch_pinned(pinned: &Arc<PinnedHostResource>) {
    watch_reporting(pinned.clone());
}

/// Registers a simulated device, which reports its unread races if it is open at the end of the process.
#[cfg(feature = "sim")]
pub(crate) fn watch_races(sim: &Arc<SimDevice>) {
    watch_reporting(sim.clone());
}

fn watch_reporting(reporting: Arc<dyn Reporting>) {
    static REGISTER: Once = Once::new();
    let mut watched = WATCHED.lock();
    watched.retain(|watched| watched.reporting.strong_count() > 0);
    watched.push(Watched { reporting: Arc::downgrade(&reporting), process: std::process::id() });
    drop(watched);
    REGISTER.call_once(|| xlog_trace::at_exit(report_all));
}

impl Reporting for RuntimeCore {
    fn report(&self) {
        if let Some(leak) = live_blocks(self) {
            report_leak(&leak);
        }
    }
}

impl Reporting for PinnedHostResource {
    fn report(&self) {
        self.report_live_blocks(true);
    }
}

#[cfg(feature = "sim")]
impl Reporting for SimDevice {
    fn report(&self) {
        super::report::report_unread_races(self);
    }
}

fn report_all() {
    // The thread that ends the process may hold the lock.
    let Some(watched) = WATCHED.try_lock() else { return };
    let process = std::process::id();
    let alive = watched.iter().filter(|watched| watched.process == process);
    let alive: Vec<_> = alive.filter_map(|watched| watched.reporting.upgrade()).collect();
    drop(watched);
    if alive.is_empty() {
        return;
    }
    let (done, wait) = mpsc::channel();
    let report = move || {
        alive.iter().for_each(|reporting| reporting.report());
        // Dropping the last handle here would call the driver.
        std::mem::forget(alive);
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("xlog-leaks".to_owned()).spawn(report).is_ok() {
        let _ = wait.recv_timeout(LIMIT);
    }
}

/// Returns the leak report of a runtime with live blocks.
fn live_blocks(core: &RuntimeCore) -> Option<LeakReport> {
    let (live_blocks, bytes, holders) = match &core.instrumentation {
        Some(instrumentation) => {
            let live = instrumentation.statistics.live_report();
            (live.blocks, live.bytes, Some(live.to_string()))
        }
        None => (core.resource.statistics().live_blocks, core.resource.bytes_outstanding(), None),
    };
    (live_blocks > 0).then(|| LeakReport {
        device: core.device.spec().to_owned(),
        device_ordinal: core.ordinal,
        at_exit: true,
        is_page_locked: false,
        live_blocks,
        bytes,
        holders,
    })
}
