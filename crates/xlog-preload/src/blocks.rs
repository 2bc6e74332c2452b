//! Memory with an address: `cuMemAlloc`, pitched and managed memory, and the common way of every call that takes memory.
//!
//! A block is removed from the table before the driver frees it and put back if that fails: once it is freed, another thread may get
//! the same address.

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
use xlog_base::PlaceMap;

/// What a key of the table is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Space {
    Address,
    Array,
    MipmappedArray,
}

/// Live memory that the driver gave under an address or the handle of an array.
#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) device: u32,
    pub(crate) bytes: u64,
    /// Charged for this block alone; none for a block of a pool.
    pub(crate) charged: u64,
    pub(crate) pool: Option<Arc<Pool>>,
    /// The context whose end frees it; 0 for a block of a pool, which outlives contexts.
    pub(crate) context: u64,
    pub(crate) library: &'static str,
}

/// The live blocks of a process.
pub(crate) type Blocks = PlaceMap<(Space, u64), Block>;

/// A call that takes memory, before the driver sees it.
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
    /// Begins a call on the current device, or on `device`. `None` passes it on: there is no context, or no account.
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

    /// Adds the block that the driver gave to the table.
    pub(crate) fn insert(&self, space: Space, place: u64, charged: u64, pool: Option<Arc<Pool>>) {
        let &Self { device, bytes, library, .. } = self;
        let context = if pool.is_none() { contexts::current(self.state) } else { 0 };
        let block = Block { device, bytes, charged, pool, context, library };
        let replaced = self.state.blocks.lock().insert((space, place), block);
        if let Some(old) = replaced {
            // The program freed it in a way that is not intercepted, or the driver could not have given the place again.
            release(self.state, place, None, &old);
        }
        self.note_taken(place, None);
    }

    /// Counts and logs memory that was taken.
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

/// Logs and counts memory that was given back.
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
    /// The call is answered with this status.
    Refused(CuResult),
    /// The call is not counted.
    PassedOn,
}

/// Charges the bytes of a call before the driver sees it.
pub(crate) fn charge(device: Option<u32>, bytes: u64, caller: usize) -> Admission {
    let charged = guarded(|| {
        let request = Request::begin(device, bytes, None, caller)?;
        let reclaim = || pools::reclaim(request.state, request.device);
        let outcome = request.account.charge(rounded(bytes), reclaim);
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

/// Charges, calls the driver, and adds what it gave to the table. `place` reads what the driver wrote.
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

/// Removes a block, calls the driver to free it, and releases its bytes.
pub(crate) fn give(
    space: Space,
    place: u64,
    stream: Option<u64>,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let removed = guarded(|| {
        let state = existing()?;
        let block = state.blocks.lock().remove(&(space, place));
        Some((state, block))
    });
    let result = call();
    let Some((state, block)) = removed.flatten() else { return result };
    guarded(|| match (result, block) {
        (SUCCESS, Some(block)) => release(state, place, stream, &block),
        // It may be a block of a graph, and the last one that kept graph memory.
        (SUCCESS, None) if stream.is_none() => {
            graphs::correct_all(state);
        }
        (SUCCESS, None) => {}
        (_, block) => {
            let mut blocks = state.blocks.lock();
            block.map(|block| blocks.entry((space, place)).or_insert(block));
        }
    });
    result
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
    // SAFETY: the driver wrote to the caller's pointer and reported success; a null pointer it would have refused.
    unsafe { out.as_ref() }.copied().unwrap_or_default()
}

/// `cuMemAlloc`.
pub(crate) fn allocate(
    real: unsafe extern "C" fn(*mut u64, usize) -> CuResult,
    out: *mut u64,
    bytes: usize,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    take(Space::Address, bytes as u64, caller, || unsafe { real(out, bytes) }, || written(out))
}

/// `cuMemAllocManaged`: counts in full, wherever its pages are.
pub(crate) fn allocate_managed(
    real: unsafe extern "C" fn(*mut u64, usize, u32) -> CuResult,
    out: *mut u64,
    bytes: usize,
    flags: u32,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, bytes, flags) };
    take(Space::Address, bytes as u64, caller, call, || written(out))
}

/// The pitch that is charged before the driver chooses one.
const PITCH: u64 = 512;

/// `cuMemAllocPitch`: charged with rows of a multiple of [`PITCH`].
pub(crate) fn allocate_pitch(
    real: unsafe extern "C" fn(*mut u64, *mut usize, usize, usize, u32) -> CuResult,
    out: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
    caller: usize,
) -> CuResult {
    let row = (width as u64).checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    let bytes = row.saturating_mul(height as u64);
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, pitch, width, height, element) };
    take(Space::Address, bytes, caller, call, || written(out))
}

/// `cuMemFree`, of any memory with an address.
pub(crate) fn free(
    real: unsafe extern "C" fn(u64) -> CuResult,
    address: u64,
    _caller: usize,
) -> CuResult {
    // SAFETY: the argument is the caller's own.
    give(Space::Address, address, None, || unsafe { real(address) })
}
