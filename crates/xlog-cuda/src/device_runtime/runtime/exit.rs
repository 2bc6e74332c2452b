//! Reports at the end of the process of leaks and races that no drop can report.
//!
//! A shared runtime is never dropped, and a forgotten buffer keeps its runtime for ever. So every runtime and every simulated
//! device is registered. An exit handler reports the runtimes with live blocks, by tag, and the devices with unread races.
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

/// The maximum time that the end of a process waits for the report.
const LIMIT: Duration = Duration::from_secs(2);

/// Something with a report to make at the end of the process.
trait Reporting: Send + Sync {
    fn report(&self);
}

struct Watched {
    /// Gone if it has ended before the process.
    reporting: Weak<dyn Reporting>,
    /// Its process. A fork has none of its blocks and none of its races.
    process: u32,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Reports the live blocks of a runtime at the end of the process, if the runtime is alive by then.
pub(super) fn watch(core: &Arc<RuntimeCore>) {
    watch_reporting(core.clone());
}

/// Reports the unread races of a simulated device at the end of the process, if the device is open by then.
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

#[cfg(feature = "sim")]
impl Reporting for SimDevice {
    fn report(&self) {
        super::report::report_unread_races(self);
    }
}

fn report_all() {
    // A thread that ends the process while it holds the list must not wait for itself.
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
        // They end with the process, not with the last of these handles.
        std::mem::forget(alive);
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("xlog-leaks".to_owned()).spawn(report).is_ok() {
        let _ = wait.recv_timeout(LIMIT);
    }
}

/// The live blocks of a runtime, if it has some.
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
        live_blocks,
        bytes,
        holders,
    })
}
