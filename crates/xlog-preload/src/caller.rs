//! Attribution of a call to a library: the object that contains its return address.
//!
//! The CUDA runtime and Python's `ctypes` call on behalf of others. For a call from such an intermediate object, the stack is walked to the
//! first other frame. Names are cached by return address, of which a program has few. No lock is held while the dynamic linker is queried.
//!
//! A walk costs more than the rest of a call. Without a log, small requests from one return address are attributed to the result of its
//! last walk, until their sum reaches [`WALK_STEP`]. With a log, every call is walked.

use std::collections::HashSet;
use std::ffi::{c_int, c_void};

use xlog_trace::{StackId, record_stack};

use crate::resolve::{file_name, object_of};
use crate::state::State;
use xlog_base::IntMap;

/// Objects that call the driver on behalf of others.
const INTERMEDIATE: [&str; 5] = ["libcudart", "libcuda.so", OWN, "libffi.so", "_ctypes."];
const OWN: &str = "libxlog_preload";
/// The maximum number of frames searched for the library behind such a call.
const MAX_FRAMES: usize = 32;
/// The maximum number of frames of a logged stack.
const MAX_FRAMES_OF_STACK: usize = 64;
/// The bytes that requests from one return address may total between two walks.
const WALK_STEP: u64 = 8 << 20;
const UNKNOWN: &str = "(unknown)";
/// The maximum number of cached addresses; a program that generates code may have more.
const MAX_ADDRESSES: usize = 1 << 16;

#[derive(Default)]
pub(crate) struct Callers {
    by_address: IntMap<usize, Object>,
    names: HashSet<&'static str>,
}

#[derive(Clone, Copy)]
struct Object {
    name: &'static str,
    /// True if it calls the driver on behalf of others.
    is_intermediate: bool,
    /// The library that the last walk found.
    behind: Option<&'static str>,
    /// The bytes requested since that walk.
    since_walk: u64,
}

/// Returns the library behind a call that returns to `caller`. `bytes` is the size of the request; 0 if unknown.
pub(crate) fn library(state: &State, caller: usize, bytes: u64) -> &'static str {
    let direct = object(state, caller);
    if !direct.is_intermediate {
        return direct.name;
    }
    let since_walk = direct.since_walk.saturating_add(bytes);
    let is_small = bytes > 0 && since_walk < WALK_STEP && !state.is_logged();
    if let Some(behind) = direct.behind.filter(|_| is_small) {
        note_behind(state, caller, behind, since_walk);
        return behind;
    }
    let mut found = None;
    let mut frames = 0;
    walk(|address| {
        let object = object(state, address);
        found = (!object.is_intermediate).then_some(object.name);
        frames += 1;
        found.is_none() && frames < MAX_FRAMES
    });
    let found = found.unwrap_or(direct.name);
    note_behind(state, caller, found, 0);
    found
}

fn note_behind(state: &State, caller: usize, behind: &'static str, since_walk: u64) {
    if let Some(object) = state.callers.lock().by_address.get_mut(&caller) {
        object.behind = Some(behind);
        object.since_walk = since_walk;
    }
}

/// Captures the stack of this call without this library's own frames. The thread that writes the log resolves it.
pub(crate) fn stack(state: &State) -> StackId {
    let mut addresses = [0; MAX_FRAMES_OF_STACK];
    let mut depth = 0;
    walk(|address| {
        // The frames of this library come first and are skipped.
        if depth > 0 || !object(state, address).name.starts_with(OWN) {
            addresses[depth] = address;
            depth += 1;
        }
        depth < MAX_FRAMES_OF_STACK
    });
    record_stack(addresses.get(..depth).unwrap_or(&[]))
}

const CONTINUE: c_int = 0;
const STOP: c_int = 5;

unsafe extern "C" {
    fn _Unwind_Backtrace(
        visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// Calls `visit` with the address of each frame, the innermost first, while it returns true.
fn walk<F: FnMut(usize) -> bool>(mut visit: F) {
    extern "C" fn frame<F: FnMut(usize) -> bool>(
        context: *mut c_void,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: the argument is the closure of `walk`, which no other code uses meanwhile.
        let visit = unsafe { &mut *visit.cast::<F>() };
        // SAFETY: the unwinder gave this context for the time of the call.
        let address = unsafe { _Unwind_GetIP(context) };
        if address != 0 && visit(address) { CONTINUE } else { STOP }
    }
    // SAFETY: the callback has the type that the unwinder expects, and its argument lives until the call returns.
    unsafe { _Unwind_Backtrace(frame::<F>, (&raw mut visit).cast()) };
}

fn object(state: &State, address: usize) -> Object {
    if let Some(known) = state.callers.lock().by_address.get(&address) {
        return *known;
    }
    let path = object_of(std::ptr::without_provenance(address));
    let name =
        path.map_or(UNKNOWN.into(), |path| String::from_utf8_lossy(file_name(path.to_bytes())));
    let mut callers = state.callers.lock();
    let known = callers.names.get(name.as_ref()).copied();
    let name = known.unwrap_or_else(|| String::leak(name.into_owned()));
    callers.names.insert(name);
    let is_intermediate = INTERMEDIATE.iter().any(|prefix| name.starts_with(prefix));
    let object = Object { name, is_intermediate, behind: None, since_walk: 0 };
    if callers.by_address.len() < MAX_ADDRESSES {
        callers.by_address.insert(address, object);
    }
    object
}
