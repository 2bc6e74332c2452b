//! Limits that change while the process runs: the runtimes that follow them.
//!
//! The quota of a process holds for physical memory at once, because the ledger is asked for each byte. Memory that a pool has cached was
//! granted before, so a smaller quota needs a smaller budget as well. Under `xlogmem exec` the quota is in the total that the driver
//! reports.
//!
//! Runtimes composed of parts have no budget and do not follow.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use xlog_base::Mutex;

use super::core::RuntimeCore;
use crate::device_runtime::budget::EffectiveLimit;
use crate::device_runtime::resource::DeviceMemoryResource;

/// How long a change waits for work that keeps memory above the new limit.
const PENDING_WAIT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);

static FOLLOWED: Mutex<Vec<Weak<RuntimeCore>>> = Mutex::new(Vec::new());

/// What the budget of a runtime was given.
#[derive(Debug)]
pub(super) struct GivenLimit {
    /// The limit that the runtime gave it last. Another one that it has was set by the user.
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

/// Gives every runtime its limit of now, and returns cached memory above it. Returns the number of runtimes.
pub(super) fn refresh_all() -> usize {
    // The lock is not held over the calls: a budget calls pressure callbacks, a trim may wait, and the last handle ends its runtime.
    let followed: Vec<_> = FOLLOWED.lock().iter().filter_map(Weak::upgrade).collect();
    for core in &followed {
        let limit = refresh(core, true);
        let limit = limit.map_or(usize::MAX, |limit| limit.bytes());
        return_above(core, limit);
    }
    followed.len()
}

/// Returns memory above `limit` to the device. Memory with pending work is waited for, up to a bound.
fn return_above(core: &RuntimeCore, limit: usize) {
    let end = Instant::now() + PENDING_WAIT;
    while core.resource.physical_bytes().is_some_and(|held| held > limit) {
        // A failure stays with its blocks, and is returned by the next reap of the user.
        let _ = core.graphs.reap_completed();
        let returned = core.graphs.trim().unwrap_or(0);
        let pending = core.resource.memory_use().map_or(0, |held| held.pending);
        if (returned == 0 && pending == 0) || Instant::now() >= end {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Gives the budget of a runtime its limit of now. A lower one that the user has set stays, if `keeps_lower`; else it is forgotten.
/// Returns the limit of now; `None` for a runtime that was composed of parts.
pub(super) fn refresh(core: &RuntimeCore, keeps_lower: bool) -> Option<EffectiveLimit> {
    let seen = core.instrumentation.as_ref()?;
    seen.capacity.refresh(&core.device);
    let limit = core.effective_limit()?;
    let mut given = seen.given.lock();
    let present = seen.budget.limit();
    if !keeps_lower {
        given.by_user = None;
    } else if present != given.bytes {
        given.by_user = Some(present);
    }
    given.bytes = given.by_user.map_or(limit.bytes(), |by_user| by_user.min(limit.bytes()));
    // Under the lock: of two changes at once, the budget keeps the one that is noted here.
    let over = seen.budget.change_limit(given.bytes);
    drop(given);
    seen.budget.press(over);
    Some(limit)
}
