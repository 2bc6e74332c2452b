//! Leak reports at the end of the process, for blocks that no drop can report.
//!
//! A shared runtime is never dropped, and a forgotten buffer keeps its runtime for ever. So every runtime is registered, and an
//! exit handler reports those with live blocks, by tag.
//!
//! The handler makes no driver call, since the driver may be gone. Its wait is bounded, since a running thread may hold a lock. It
//! does not run on `abort`, `_exit` or a signal.

use std::sync::mpsc;
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

use xlog_base::Mutex;

use super::report::report_leak;
use super::{LeakReport, RuntimeCore};

/// The maximum time that the end of a process waits for the report.
const LIMIT: Duration = Duration::from_secs(2);

struct Watched {
    core: Weak<RuntimeCore>,
    /// The process of the runtime. A fork has none of its blocks.
    process: u32,
}

static RUNTIMES: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// Reports the live blocks of a runtime at the end of the process, if the runtime is alive by then.
pub(super) fn watch(core: &Arc<RuntimeCore>) {
    static REGISTER: Once = Once::new();
    let mut runtimes = RUNTIMES.lock();
    runtimes.retain(|watched| watched.core.strong_count() > 0);
    runtimes.push(Watched { core: Arc::downgrade(core), process: std::process::id() });
    drop(runtimes);
    REGISTER.call_once(|| xlog_trace::at_exit(report_all));
}

fn report_all() {
    // A thread that ends the process while it holds the list must not wait for itself.
    let Some(runtimes) = RUNTIMES.try_lock() else { return };
    let process = std::process::id();
    let alive = runtimes.iter().filter(|watched| watched.process == process);
    let alive: Vec<Arc<RuntimeCore>> = alive.filter_map(|watched| watched.core.upgrade()).collect();
    drop(runtimes);
    if alive.is_empty() {
        return;
    }
    let (done, wait) = mpsc::channel();
    let report = move || {
        alive.iter().filter_map(|core| live_blocks(core)).for_each(|leak| report_leak(&leak));
        // The runtimes end with the process, not with the last of these handles.
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
