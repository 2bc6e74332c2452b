//! `cuGetProcAddress`, with hooks in place of the functions that have one.
//!
//! The base name, the requested version and the per-thread flag select the hook. If the driver returned another function than the hook's
//! symbol and exports a later version of it, the request is for a version unknown here, and the driver's result stays.

use std::ffi::{CStr, c_char, c_void};

use crate::driver::{CuResult, SUCCESS};
use crate::exports::{HOOKS, Hook};
use crate::messages::guarded;
use crate::resolve::driver_symbol;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// `cuGetProcAddress`: replaces the address that the driver wrote by that of the hook.
pub(crate) fn find(
    name: *const c_char,
    out: *mut *mut c_void,
    version: i32,
    flags: u64,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let result = call();
    replace(result, name, out, version, flags);
    result
}

fn replace(result: CuResult, name: *const c_char, out: *mut *mut c_void, version: i32, flags: u64) {
    if result != SUCCESS || name.is_null() || out.is_null() {
        return;
    }
    // SAFETY: the driver accepted the name and wrote the address.
    let (name, found) = unsafe { (CStr::from_ptr(name), *out) };
    if found.is_null() {
        return;
    }
    let Some(Some(hook)) = guarded(|| hook_for(name, found, version, flags)) else { return };
    hook.set_real(found);
    // SAFETY: the driver wrote to the same place just now.
    unsafe { *out = hook.entry() };
}

/// The hook that replaces the function `found`.
fn hook_for(name: &CStr, found: *mut c_void, version: i32, flags: u64) -> Option<&'static Hook> {
    let per_thread = flags & PER_THREAD != 0;
    let of_name = || HOOKS.iter().filter(|hook| hook.base == name && hook.since <= version);
    let latest = |is_per_thread: bool| {
        of_name().filter(move |hook| hook.per_thread == is_per_thread).max_by_key(|hook| hook.since)
    };
    let hook = if per_thread { latest(true).or_else(|| latest(false)) } else { latest(false) }?;
    (found == driver_symbol(hook.symbol) || !has_unknown_successor(hook)).then_some(hook)
}

/// True if the driver exports the next version of the function of `hook`, and that version has no hook.
fn has_unknown_successor(hook: &Hook) -> bool {
    let base = hook.base.to_bytes();
    let is_second =
        hook.symbol.to_bytes().strip_prefix(base).is_some_and(|end| end.starts_with(b"_v2"));
    let version: &[u8] = if is_second { b"_v3" } else { b"_v2" };
    let suffix: &[u8] = if hook.per_thread { b"_ptsz" } else { b"" };
    // On the stack, because the program may not have called `cuInit` yet.
    let mut name = [0_u8; 64];
    let letters = base.iter().chain(version).chain(suffix);
    name.iter_mut().zip(letters).for_each(|(place, letter)| *place = *letter);
    CStr::from_bytes_until_nul(&name).is_ok_and(|name| {
        HOOKS.iter().all(|known| known.symbol != name) && !driver_symbol(name).is_null()
    })
}
