//! Runtimes that follow limits which change while the process runs.
//!
//! The quota of a process limits physical memory at once, because the ledger grants each byte. Memory that a pool has cached was granted
//! before, so a smaller quota needs a smaller budget as well. Under `xlogmem exec` the driver reports the quota as its total.
//!
//! Runtimes that were composed of parts have no budget and do not follow.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use xlog_base::Mutex;

use super::core::RuntimeCore;
use crate::device_runtime::budget::EffectiveLimit;
use crate::device_runtime::resource::DeviceMemoryResource;

/// The maximum wait for work that keeps memory above a new limit.
const PENDING_WAIT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);

static FOLLOWED: Mutex<Vec<Weak<RuntimeCore>>> = Mutex::new(Vec::new());

/// The limit that the budget of a runtime was given.
#[derive(Debug)]
pub(super) struct GivenLimit {
    /// The limit that the runtime set last. If the budget has another one, the user has set that.
    bytes: usize,
    /// The limit that the user has set.
    by_user: Option<usize>,
}

impl GivenLimit {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, by_user: None }
    }
}

/// Includes a runtime in [`refresh_all`] for as long as it lives.
pub(super) fn follow(core: &Arc<RuntimeCore>) {
    if core.instrumentation.is_some() {
        let mut followed = FOLLOWED.lock();
        followed.retain(|core| core.strong_count() > 0);
        followed.push(Arc::downgrade(core));
    }
}

/// Gives every runtime its current limit, and returns cached memory above it. Returns the number of runtimes.
pub(super) fn refresh_all() -> usize {
    // The lock is not held over the calls: a budget calls pressure callbacks, a trim may wait, and the last handle drops its runtime.
    let followed: Vec<_> = FOLLOWED.lock().iter().filter_map(Weak::upgrade).collect();
    for core in &followed {
        let limit = refresh(core, true);
        let limit = limit.map_or(usize::MAX, |limit| limit.bytes());
        return_above(core, limit);
    }
    followed.len()
}

/// Returns memory above `limit` to the device. Waits for pending work, up to a bound.
fn return_above(core: &RuntimeCore, limit: usize) {
    let end = Instant::now() + PENDING_WAIT;
    while core.resource.physical_bytes().is_some_and(|held| held > limit) {
        // The user's next reap retries a failed free, and returns its error.
        let _ = core.graphs.reap_completed();
        let returned = core.graphs.trim().unwrap_or(0);
        let pending = core.resource.memory_use().map_or(0, |held| held.pending);
        if (returned == 0 && pending == 0) || Instant::now() >= end {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Gives the budget of a runtime its current limit. If `keeps_lower`, a lower limit that the user has set stays; else it is replaced.
/// Returns the current limit; `None` for a runtime that was composed of parts.
pub(super) fn refresh(core: &RuntimeCore, keeps_lower: bool) -> Option<EffectiveLimit> {
    let instrumentation = core.instrumentation.as_ref()?;
    instrumentation.capacity.refresh(&core.device);
    let limit = core.effective_limit()?;
    let mut given = instrumentation.given.lock();
    let present = instrumentation.budget.limit();
    if !keeps_lower {
        given.by_user = None;
    } else if present != given.bytes {
        given.by_user = Some(present);
    }
    given.bytes = given.by_user.map_or(limit.bytes(), |by_user| by_user.min(limit.bytes()));
    // Under the lock: after two concurrent changes, the budget has the limit that `given` has.
    let over = instrumentation.budget.change_limit(given.bytes);
    drop(given);
    instrumentation.budget.call_pressure_callbacks(over);
    Some(limit)
}
