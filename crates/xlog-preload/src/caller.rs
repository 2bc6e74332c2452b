//! The library that asked for memory: the object that has the return address of the call.
//!
//! The CUDA runtime and Python's `ctypes` ask on behalf of others. Where a call comes from one of them, the stack is walked to the
//! first frame outside. Return addresses are few, so names are kept by address; no lock is held while the dynamic linker is asked.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};

use xlog_trace::{StackId, record_stack};

use crate::resolve::{file_name, object_of};
use crate::state::State;

/// Objects that call the driver for others.
const INTERMEDIATE: [&str; 5] = ["libcudart", "libcuda.so", OWN, "libffi.so", "_ctypes."];
const OWN: &str = "libxlog_preload";
/// Frames that are searched for the library behind such a call.
const MAX_FRAMES: usize = 32;
/// Frames of a logged stack.
const MAX_FRAMES_OF_STACK: usize = 64;
const UNKNOWN: &str = "(unknown)";
/// Addresses that are kept; a program that generates code may have any number.
const MAX_ADDRESSES: usize = 1 << 16;

/// The names of objects by return address.
#[derive(Default)]
pub(crate) struct Callers {
    by_address: HashMap<usize, &'static str>,
    names: HashSet<&'static str>,
}

/// The name of the library behind a call that returns to `caller`.
pub(crate) fn library(state: &State, caller: usize) -> &'static str {
    let direct = object_name(state, caller);
    if !is_intermediate(direct) {
        return direct;
    }
    let mut walk = Walk { state, frames: 0, found: None };
    // SAFETY: the callback has the type that the unwinder expects, and its argument lives until the call returns.
    unsafe { _Unwind_Backtrace(visit, (&raw mut walk).cast()) };
    walk.found.unwrap_or(direct)
}

/// Records the stack of this call, from the program's own frame on. The thread that writes the log resolves it.
pub(crate) fn stack(state: &State) -> StackId {
    let mut frames = Frames { state, addresses: [0; MAX_FRAMES_OF_STACK], depth: 0 };
    // SAFETY: the callback has the type that the unwinder expects, and its argument lives until the call returns.
    unsafe { _Unwind_Backtrace(collect, (&raw mut frames).cast()) };
    record_stack(frames.addresses.get(..frames.depth).unwrap_or(&[]))
}

struct Frames<'a> {
    state: &'a State,
    addresses: [usize; MAX_FRAMES_OF_STACK],
    depth: usize,
}

extern "C" fn collect(context: *mut c_void, argument: *mut c_void) -> c_int {
    // SAFETY: the argument is the frames of `stack`, which nothing else uses meanwhile.
    let frames = unsafe { &mut *argument.cast::<Frames<'_>>() };
    // SAFETY: the unwinder gave this context for the time of the call.
    let address = unsafe { _Unwind_GetIP(context) };
    if address == 0 || frames.depth == MAX_FRAMES_OF_STACK {
        return STOP;
    }
    // Frames of this library come first.
    if frames.depth > 0 || !object_name(frames.state, address).starts_with(OWN) {
        frames.addresses[frames.depth] = address;
        frames.depth += 1;
    }
    CONTINUE
}

struct Walk<'a> {
    state: &'a State,
    frames: usize,
    found: Option<&'static str>,
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

extern "C" fn visit(context: *mut c_void, argument: *mut c_void) -> c_int {
    // SAFETY: the argument is the walk of `library`, which nothing else uses meanwhile.
    let walk = unsafe { &mut *argument.cast::<Walk<'_>>() };
    walk.frames += 1;
    // SAFETY: the unwinder gave this context for the time of the call.
    let address = unsafe { _Unwind_GetIP(context) };
    if walk.frames > MAX_FRAMES || address == 0 {
        return STOP;
    }
    let name = object_name(walk.state, address);
    if is_intermediate(name) {
        return CONTINUE;
    }
    walk.found = Some(name);
    STOP
}

fn is_intermediate(name: &str) -> bool {
    INTERMEDIATE.iter().any(|prefix| name.starts_with(prefix))
}

fn object_name(state: &State, address: usize) -> &'static str {
    if let Some(known) = state.callers.lock().by_address.get(&address) {
        return known;
    }
    let path = object_of(std::ptr::without_provenance(address));
    let name =
        path.map_or(UNKNOWN.into(), |path| String::from_utf8_lossy(file_name(path.to_bytes())));
    let mut callers = state.callers.lock();
    let known = callers.names.get(name.as_ref()).copied();
    let name = known.unwrap_or_else(|| String::leak(name.into_owned()));
    callers.names.insert(name);
    if callers.by_address.len() < MAX_ADDRESSES {
        callers.by_address.insert(address, name);
    }
    name
}
