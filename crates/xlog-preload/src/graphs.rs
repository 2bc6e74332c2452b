//! The memory of CUDA graphs: what the driver has reserved for their allocation nodes.
//!
//! The driver reserves this memory when a graph is first launched or uploaded, and keeps it until the executable graph is destroyed and the
//! device's graph memory is trimmed. The bytes of the allocation nodes are known when a graph is instantiated. They are charged before the
//! first launch and then corrected to what the driver has reserved, which is less if a graph reuses memory.
//!
//! When the last executable graph of a device is destroyed, its graph memory is trimmed at once, because this process may make no further
//! call. Memory of running launches, and of blocks that graphs left to the program, is trimmed after the synchronisation that covers it.
//!
//! Graphs without allocation nodes are not tracked. A trim may return memory of idle executable graphs; it is charged again before their
//! next launches and corrected in the same way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_base::Mutex;

use crate::account::{Account, Refusal, rounded};
use crate::blocks::{Freed, Request, after_success, around, written};
use crate::driver::{CuResult, Driver, OUT_OF_MEMORY, SUCCESS};
use crate::messages::{Kind, guarded, say_once};
use crate::outstanding::{Stream, stream_of};
use crate::state::{State, existing};

/// The minimum step in which the driver reserves memory for graphs.
const GROWTH: u64 = 2 << 20;
/// The maximum depth of child graphs that are read.
const DEPTH: u32 = 8;

/// The graphs of the process.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Executable graphs with allocation nodes.
    executables: Mutex<HashMap<u64, Executable>>,
    /// The number of executables, so that launches of other graphs take no lock.
    count: AtomicU64,
    devices: Mutex<HashMap<u32, GraphMemory>>,
}

/// The graph memory of one device.
#[derive(Clone, Copy, Default)]
struct GraphMemory {
    charged: u64,
    /// The part of the charge for launches in progress, which the driver may not have reserved yet.
    pending: u64,
    /// The bytes that trims returned and graphs may reserve again.
    trimmed: u64,
}

#[derive(Clone, Copy)]
struct Executable {
    device: u32,
    /// The bytes of its allocation nodes.
    bytes: u64,
    library: &'static str,
    /// True if its memory was charged since the last trim.
    is_charged: bool,
    /// True if its memory was logged and counted for its library.
    is_noted: bool,
    /// The stream of its last launch, which waits for the earlier ones.
    stream: Option<Stream>,
}

impl Graphs {
    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    fn insert(&self, handle: u64, executable: Executable) {
        let mut executables = self.executables.lock();
        executables.insert(handle, executable);
        self.count.store(executables.len() as u64, Ordering::Release);
    }

    fn remove(&self, handle: u64) -> Option<Executable> {
        let mut executables = self.executables.lock();
        let removed = executables.remove(&handle);
        self.count.store(executables.len() as u64, Ordering::Release);
        removed
    }

    /// Corrects the charge of a device to what the driver has reserved and launches in progress may still reserve. An error leaves the
    /// charge unchanged.
    fn correct(&self, driver: &Driver, account: &Account, device: u32) -> Result<(), Refusal> {
        self.end_launch(driver, account, device, 0)
    }

    /// Corrects the charge after a launch that charged `pending`.
    fn end_launch(
        &self,
        driver: &Driver,
        account: &Account,
        device: u32,
        pending: u64,
    ) -> Result<(), Refusal> {
        let mut devices = self.devices.lock();
        let Some(memory) = devices.get_mut(&device) else { return Ok(()) };
        memory.pending = memory.pending.saturating_sub(pending);
        let reserved = rounded(driver.graph_reserved(device).unwrap_or(memory.charged));
        let most = reserved.saturating_add(memory.pending);
        if reserved > memory.charged {
            account.try_charge(reserved - memory.charged)?;
            memory.charged = reserved;
        } else if most < memory.charged {
            account.release(memory.charged - most);
            memory.charged = most;
        }
        Ok(())
    }

    /// Charges a launch until [`end_launch`](Self::end_launch). The charge itself is made unlocked, because the ledger may delay it.
    fn charge(&self, account: &Account, device: u32, bytes: u64) -> Result<(), Refusal> {
        account.try_charge(bytes)?;
        let mut devices = self.devices.lock();
        let memory = devices.entry(device).or_default();
        memory.charged = memory.charged.saturating_add(bytes);
        memory.pending = memory.pending.saturating_add(bytes);
        Ok(())
    }

    fn of_device(&self, device: u32) -> GraphMemory {
        self.devices.lock().get(&device).copied().unwrap_or_default()
    }
}

/// Makes the driver return unused graph memory, before a request is refused.
pub(crate) fn reclaim(state: &State, device: u32) {
    if state.graphs.of_device(device).charged == 0 {
        return;
    }
    correct(state, device);
    let before = state.graphs.of_device(device).charged;
    state.driver.trim_graphs(device);
    note_trimmed(state, device, before);
}

/// Corrects the charges of graphs on all devices. Returns true if the driver may still return memory.
pub(crate) fn correct_all(state: &State) -> bool {
    let devices: Vec<u32> = state.graphs.devices.lock().keys().copied().collect();
    for device in devices {
        correct(state, device);
        trim_unused(state, device);
    }
    state.graphs.devices.lock().values().any(|memory| memory.charged > 0)
}

/// Makes the driver return the graph memory of a device without executable graphs.
fn trim_unused(state: &State, device: u32) {
    let is_used =
        state.graphs.executables.lock().values().any(|executable| executable.device == device);
    if !is_used {
        reclaim(state, device);
    }
}

fn correct(state: &State, device: u32) {
    if let Some(account) = state.account(device) {
        // If raising the charge is refused, the next launch does it.
        let _ = state.graphs.correct(&state.driver, account, device);
    }
}

/// Corrects the charge after a trim. If it returned memory, every graph of the device is charged again at its next launch.
fn note_trimmed(state: &State, device: u32, before: u64) {
    correct(state, device);
    let returned = before.saturating_sub(state.graphs.of_device(device).charged);
    if returned == 0 {
        return;
    }
    if let Some(memory) = state.graphs.devices.lock().get_mut(&device) {
        memory.trimmed = memory.trimmed.saturating_add(returned);
    }
    let mut executables = state.graphs.executables.lock();
    let on_device = executables.values_mut().filter(|executable| executable.device == device);
    on_device.for_each(|executable| executable.is_charged = false);
}

/// The sum of a graph's allocation nodes, and the device of the first one.
fn allocated_by(driver: &Driver, graph: u64, depth: u32) -> Option<(u32, u64)> {
    let mut found: Option<(u32, u64)> = None;
    let mut add = |device: u32, bytes: u64| {
        let (first, sum) = found.unwrap_or((device, 0));
        found = Some((first, sum.saturating_add(bytes)));
    };
    for node in driver.graph_nodes(graph) {
        if let Some((device, bytes)) = driver.allocation_of_node(node) {
            add(device, bytes);
        } else if depth > 0
            && let Some(child) = driver.child_graph(node)
            && let Some((device, bytes)) = allocated_by(driver, child, depth - 1)
        {
            add(device, bytes);
        }
    }
    found
}

/// Instantiates a graph, and notes the memory that its launches allocate.
pub(crate) fn instantiate(
    out: *const u64,
    graph: u64,
    caller: usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    after_success(call, || {
        let request = Request::begin(None, 0, None, caller)?;
        let state = request.state;
        let (device, bytes) = allocated_by(&state.driver, graph, DEPTH)?;
        let library = request.library();
        let (is_charged, is_noted, stream) = (false, false, None);
        let executable = Executable { device, bytes, library, is_charged, is_noted, stream };
        state.graphs.insert(written(out), executable);
        Some(())
    })
}

/// `cuGraphLaunch` and `cuGraphUpload`: charges a graph before it is launched or uploaded.
pub(crate) fn launch(
    handle: u64,
    stream: u64,
    caller: usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let tracked = guarded(|| {
        let state = existing().filter(|state| !state.graphs.is_empty())?;
        let launched_on = stream_of(state, stream);
        let mut executables = state.graphs.executables.lock();
        let executable = executables.get_mut(&handle)?;
        executable.stream = Some(launched_on);
        (!executable.is_charged).then_some((state, *executable))
    });
    let Some((state, executable)) = tracked.flatten() else { return call() };
    let device = executable.device;
    let begun = guarded(|| {
        let request = Request::begin(Some(device), executable.bytes, Some(stream), caller)?;
        // If raising the charge is refused, the request below is refused as well.
        let _ = state.graphs.correct(&state.driver, request.account, device);
        let memory = state.graphs.of_device(device);
        let bytes = executable.bytes.checked_next_multiple_of(GROWTH).unwrap_or(u64::MAX);
        let bytes = if executable.is_noted { bytes.min(memory.trimmed) } else { bytes };
        let bytes = rounded(bytes);
        let admitted = request.admit(bytes, || state.graphs.charge(request.account, device, bytes));
        Some((admitted, request, bytes, memory.charged))
    });
    let Some((admitted, request, pending, before)) = begun.flatten() else { return call() };
    if let Err(refusal) = &admitted {
        guarded(|| request.note_refused(refusal));
        return OUT_OF_MEMORY;
    }
    let result = call();
    guarded(|| {
        let corrected = state.graphs.end_launch(&state.driver, request.account, device, pending);
        if corrected.is_err() {
            say_once(Kind::Pool, "graphs of the driver hold more than was charged for them");
        }
        if result != SUCCESS {
            return request.note_failed(result);
        }
        if let Some(memory) = state.graphs.devices.lock().get_mut(&device) {
            memory.trimmed = memory.trimmed.saturating_sub(memory.charged.saturating_sub(before));
        }
        let mut executables = state.graphs.executables.lock();
        let Some(known) = executables.get_mut(&handle) else { return };
        // If the correction was refused, the next launch repeats it.
        known.is_charged = corrected.is_ok();
        let is_first = !std::mem::replace(&mut known.is_noted, true);
        drop(executables);
        if is_first {
            request.note_taken(handle, None);
        }
    });
    result
}

/// `cuGraphExecDestroy`. The driver keeps the memory for other graphs; without other graphs it is trimmed here.
pub(crate) fn destroy(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    // Removed before the call, because the driver may reuse the handle.
    let before = || {
        let state = existing().filter(|state| !state.graphs.is_empty())?;
        Some((state, state.graphs.remove(handle)?))
    };
    around(before, call, |(state, executable), result| {
        if result != SUCCESS {
            return state.graphs.insert(handle, executable);
        }
        let Executable { device, bytes, library, is_noted, stream, .. } = executable;
        // Recorded before the trim, which does not return memory of running launches.
        state.outstanding.note(stream);
        if is_noted {
            let place = handle;
            Freed { device, place, generation: None, bytes, stream: None, library }.note(state);
        }
        correct(state, device);
        trim_unused(state, device);
    })
}

/// `cuDeviceGraphMemTrim`.
pub(crate) fn trim(device: i32, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = || {
        let (state, device) = (existing()?, u32::try_from(device).ok()?);
        correct(state, device);
        Some((state, device, state.graphs.of_device(device).charged))
    };
    around(before, call, |(state, device, charged), _| note_trimmed(state, device, charged))
}
