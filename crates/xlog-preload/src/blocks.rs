//! Memory with an address (`cuMemAlloc`, pitched and managed memory), and the steps common to all allocating calls.
//!
//! A block leaves the table before the driver frees it, and returns to it if that fails, because a freed address may be allocated again by
//! another thread at once.

use std::sync::Arc;
use std::time::Instant;

use xlog_trace::Action;

use crate::account::{Account, Refusal, rounded};
use crate::caller::library;
use crate::contexts;
use crate::driver::{CuResult, OUT_OF_MEMORY, SUCCESS};
use crate::graphs;
use crate::log::Entry;
use crate::messages::guarded;
use crate::pools::{self, Pool};
use crate::state::{State, existing, state};
use xlog_base::IntMap;

/// The kind of a table key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Space {
    Address,
    Array,
    MipmappedArray,
}

/// Live memory that the driver returned as an address or an array handle.
#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) device: u32,
    pub(crate) bytes: u64,
    /// The bytes charged for this block alone; 0 for a block of a pool.
    pub(crate) charged: u64,
    pub(crate) pool: Option<Arc<Pool>>,
    /// The context whose end frees the block; 0 for a block of a pool, which outlives contexts.
    pub(crate) context: u64,
    pub(crate) library: &'static str,
}

/// The live blocks of the process.
pub(crate) type Blocks = IntMap<(Space, u64), Block>;

/// An allocating call before the driver sees it.
pub(crate) struct Request {
    pub(crate) state: &'static State,
    pub(crate) account: &'static Account,
    pub(crate) device: u32,
    pub(crate) bytes: u64,
    pub(crate) stream: Option<u64>,
    library: &'static str,
    /// Set if there is a log.
    started: Option<Instant>,
}

impl Request {
    /// Begins a call on the current device or on `device`. Without a context or an account it returns `None`, and the call is passed on.
    pub(crate) fn begin(
        device: Option<u32>,
        bytes: u64,
        stream: Option<u64>,
        caller: usize,
    ) -> Option<Self> {
        let state = state()?;
        let device = device.or_else(|| state.driver.current_device())?;
        let account = state.account(device)?;
        let library = library(state, caller, bytes);
        let started = state.is_logged().then(Instant::now);
        Some(Self { state, account, device, bytes, stream, library, started })
    }

    /// Charges `bytes` by `try_once`. Before a refusal this process, then the others, return unused memory.
    pub(crate) fn admit<T>(
        &self,
        bytes: u64,
        try_once: impl FnMut() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.account.admit(bytes, || pools::reclaim(self.state, self.device), try_once)
    }

    /// Adds the driver's block to the table.
    pub(crate) fn insert(&self, space: Space, place: u64, charged: u64, pool: Option<Arc<Pool>>) {
        let &Self { device, bytes, library, .. } = self;
        let context = if pool.is_none() { contexts::current(self.state) } else { 0 };
        let block = Block { device, bytes, charged, pool, context, library };
        let replaced = self.state.blocks.lock().insert((space, place), block);
        if let Some(old) = replaced {
            // The driver reused the key, so the program freed the old block by a call that is not intercepted.
            release(self.state, place, None, &old);
        }
        self.note_taken(place, None);
    }

    /// Counts and logs an allocation.
    pub(crate) fn note_taken(&self, place: u64, generation: Option<u64>) {
        self.account.note_held(self.library, self.bytes);
        if let Some(log) = self.state.log() {
            log.write(Entry { generation, ..self.entry(Some(place)) }, None);
        }
    }

    /// Logs a call that this library refuses.
    pub(crate) fn note_refused(&self, refusal: &Refusal) {
        if let Some(log) = self.state.log() {
            log.write(self.entry(None), Some((refusal.kind, &refusal.reason)));
        }
    }

    /// Logs a call that the driver refused.
    pub(crate) fn note_failed(&self, result: CuResult) {
        if let Some(log) = self.state.log() {
            log.write(self.entry(None), Some(("driver", &format!("CUDA error {result}"))));
        }
    }

    pub(crate) fn library(&self) -> &'static str {
        self.library
    }

    fn entry(&self, place: Option<u64>) -> Entry {
        Entry {
            action: Action::Allocate,
            device: self.device,
            place,
            generation: None,
            bytes: self.bytes,
            stream: self.stream,
            library: self.library,
            started: self.started,
            stack: self.state.sample_stack(),
        }
    }
}

/// A free to count and log.
pub(crate) struct Freed {
    pub(crate) device: u32,
    pub(crate) place: u64,
    pub(crate) generation: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) stream: Option<u64>,
    pub(crate) library: &'static str,
}

impl Freed {
    pub(crate) fn note(&self, state: &State) {
        if let Some(account) = state.account(self.device) {
            account.note_freed(self.library, self.bytes);
        }
        if let Some(log) = state.log() {
            let entry = Entry {
                action: Action::Deallocate,
                device: self.device,
                place: Some(self.place),
                generation: self.generation,
                bytes: self.bytes,
                stream: self.stream,
                library: self.library,
                started: None,
                stack: None,
            };
            log.write(entry, None);
        }
    }
}

/// The result of [`charge`].
pub(crate) enum Admission {
    /// Charged; the driver may be called.
    Admitted(Request),
    /// The call returns this status.
    Refused(CuResult),
    /// The call is not counted.
    PassedOn,
}

/// Charges the bytes of a call before the driver sees it.
pub(crate) fn charge(device: Option<u32>, bytes: u64, caller: usize) -> Admission {
    let charged = guarded(|| {
        let request = Request::begin(device, bytes, None, caller)?;
        let bytes = rounded(bytes);
        let outcome = request.admit(bytes, || request.account.try_charge(bytes));
        if let Err(refusal) = &outcome {
            request.note_refused(refusal);
        }
        Some((request, outcome))
    });
    match charged.flatten() {
        Some((request, Ok(()))) => Admission::Admitted(request),
        Some((_, Err(_))) => Admission::Refused(OUT_OF_MEMORY),
        None => Admission::PassedOn,
    }
}

/// Calls the driver between `before` and `after`, which gets what `before` found and the driver's status.
pub(crate) fn around<T>(
    before: impl FnOnce() -> Option<T>,
    call: impl FnOnce() -> CuResult,
    after: impl FnOnce(T, CuResult),
) -> CuResult {
    let found = guarded(before).flatten();
    let result = call();
    if let Some(found) = found {
        guarded(|| after(found, result));
    }
    result
}

/// Calls the driver, and runs `work` if that succeeds. `work` may end early with `None`.
pub(crate) fn after_success(
    call: impl FnOnce() -> CuResult,
    work: impl FnOnce() -> Option<()>,
) -> CuResult {
    let result = call();
    if result == SUCCESS {
        guarded(work);
    }
    result
}

/// Charges, calls the driver, and adds its block to the table. `place` reads what the driver wrote.
pub(crate) fn take(
    space: Space,
    bytes: u64,
    caller: usize,
    call: impl FnOnce() -> CuResult,
    place: impl FnOnce() -> u64,
) -> CuResult {
    let request = match charge(None, bytes, caller) {
        Admission::Admitted(request) => request,
        Admission::Refused(result) => return result,
        Admission::PassedOn => return call(),
    };
    let result = call();
    guarded(|| {
        if result == SUCCESS {
            request.insert(space, place(), rounded(bytes), None);
        } else {
            request.account.release(rounded(bytes));
            request.note_failed(result);
        }
    });
    result
}

/// Removes a block from the table, calls the driver to free it, and releases its bytes.
pub(crate) fn give(
    space: Space,
    place: u64,
    stream: Option<u64>,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let before = || {
        let state = existing()?;
        let block = state.blocks.lock().remove(&(space, place));
        Some((state, block))
    };
    around(before, call, |(state, block), result| match (result, block) {
        (SUCCESS, Some(block)) => release(state, place, stream, &block),
        // It may be the last block of a graph, after which graph memory can be returned.
        (SUCCESS, None) if stream.is_none() => {
            graphs::correct_all(state);
        }
        (SUCCESS, None) => {}
        (_, block) => {
            let mut blocks = state.blocks.lock();
            block.map(|block| blocks.entry((space, place)).or_insert(block));
        }
    })
}

/// Releases the bytes of a block that the driver has freed.
pub(crate) fn release(state: &State, place: u64, stream: Option<u64>, block: &Block) {
    let &Block { device, bytes, charged, ref pool, library, .. } = block;
    match pool {
        Some(pool) => pools::note_freed(state, pool, bytes, stream),
        None => {
            if let Some(account) = state.account(device) {
                account.release(charged);
            }
        }
    }
    Freed { device, place, generation: None, bytes, stream, library }.note(state);
}

/// Reads a value that a successful driver call wrote.
pub(crate) fn written<T: Copy + Default>(out: *const T) -> T {
    // SAFETY: the driver wrote to the caller's pointer and reported success; it would have refused a null pointer.
    unsafe { out.as_ref() }.copied().unwrap_or_default()
}

/// The alignment of rows that is charged before the driver chooses a pitch.
const PITCH: u64 = 512;

/// The bytes that `cuMemAllocPitch` is charged: rows rounded up to [`PITCH`].
pub(crate) fn pitched_bytes(width: usize, height: usize) -> u64 {
    let row = (width as u64).checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    row.saturating_mul(height as u64)
}
