//! Symbol resolution: the program's `dlsym`, and the real addresses behind the hooks.
//!
//! `RTLD_NEXT` and the scope of `RTLD_DEFAULT` depend on the return address of the call. So a lookup that is not handled here continues by
//! a jump, with the caller's stack and arguments. Handled are names of [`HOOKS`] that a handle resolves to the CUDA driver, and, while no
//! driver is loaded, names found only in this library.
//!
//! Before the program's `cuInit` this file neither allocates nor locks, except for the dynamic linker's own lock.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::exports::{HOOKS, Hook};

/// The address of the next `dlsym` after this one.
static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// The driver's library, never closed.
static DRIVER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

const DRIVER_NAME: &CStr = c"libcuda.so.1";
const DRIVER_PREFIX: &[u8] = b"libcuda.so";

/// Results of [`answer`] that are not addresses.
const LEAVE: usize = 0;
const NOT_FOUND: usize = 1;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The exported `dlsym`. Lookups with `RTLD_NEXT`, and names that do not begin with `cu` and a capital letter, jump to the real one.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym() {
    naked_asm!(
        "endbr64",
        "cmp rdi, -1", // RTLD_NEXT
        "je 2f",
        "test rsi, rsi",
        "je 2f",
        "cmp byte ptr [rsi], 99", // c
        "jne 2f",
        "cmp byte ptr [rsi + 1], 117", // u
        "jne 2f",
        "movzx eax, byte ptr [rsi + 2]",
        "sub eax, 65", // A
        "cmp eax, 25",
        "ja 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "cmp rax, 1",
        "ja 3f",
        "jb 2f",
        "xor eax, eax",
        "3: ret",
        "2: mov rax, [rip + {real}]",
        "test rax, rax",
        "jne 4f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "je 3b",
        "4: jmp rax",
        answer = sym answer,
        find = sym find_dlsym,
        real = sym REAL_DLSYM,
    )
}

/// Finds the `dlsym` that the program would call without this library.
extern "C" fn find_dlsym() -> *mut c_void {
    for version in [c"GLIBC_2.2.5", c"GLIBC_2.34"] {
        // SAFETY: both names are terminated strings.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            REAL_DLSYM.store(found, Ordering::Relaxed);
            return found;
        }
    }
    null_mut()
}

/// Calls the real `dlsym`, for which `RTLD_NEXT` means after this library.
fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let mut real = REAL_DLSYM.load(Ordering::Relaxed);
    if real.is_null() {
        real = find_dlsym();
    }
    if real.is_null() {
        return null_mut();
    }
    // SAFETY: the address is that of a `dlsym`, which has this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) };
    // SAFETY: the handle is the caller's own or a constant, and the name is terminated.
    unsafe { real(handle, name.as_ptr()) }
}

/// Handles a lookup of a name that begins like the driver's names.
extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> usize {
    // SAFETY: the caller gave a terminated string to `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(hook) = HOOKS.iter().find(|hook| hook.symbol == name) else { return LEAVE };
    if handle == libc::RTLD_DEFAULT {
        // This library comes before all others, so the real lookup finds it, with or without a driver.
        return if driver().is_null() { NOT_FOUND } else { LEAVE };
    }
    let found = look_up(handle, name);
    if found.is_null() {
        return LEAVE;
    }
    if found == hook.entry() {
        return if driver().is_null() { NOT_FOUND } else { LEAVE };
    }
    if !is_of_driver(found) && !is_driver(handle) {
        return LEAVE;
    }
    keep_loaded(found);
    hook.set_real(found);
    hook.entry() as usize
}

/// Keeps the object of a driver function loaded even if the program closes it, because a hook's address is used until the end.
fn keep_loaded(function: *mut c_void) {
    if !driver().is_null() {
        return;
    }
    // The driver may be loaded under another name.
    if let Some(path) = object_of(function) {
        // SAFETY: the name is terminated; nothing is loaded that is not loaded already. The handle is never closed.
        let _ = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    }
}

/// The handle of the driver's library, if it is loaded.
pub(crate) fn driver() -> *mut c_void {
    let known = DRIVER.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is terminated; nothing is loaded that is not loaded already.
    let handle = unsafe { libc::dlopen(DRIVER_NAME.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !handle.is_null() {
        DRIVER.store(handle, Ordering::Release);
    }
    handle
}

/// Finds a function of the driver, not of this library.
pub(crate) fn driver_symbol(name: &CStr) -> *mut c_void {
    let handle = driver();
    if handle.is_null() { null_mut() } else { look_up(handle, name) }
}

/// Finds the function behind `hook` for a program that did not use `dlsym`: in the next library in load order, which may be another
/// preloaded one, or in the driver.
pub(crate) fn find_real(hook: &Hook) -> *mut c_void {
    let next = look_up(libc::RTLD_NEXT, hook.symbol);
    let found = if next.is_null() { driver_symbol(hook.symbol) } else { next };
    if !found.is_null() {
        keep_loaded(found);
        hook.set_real(found);
    }
    found
}

fn is_of_driver(address: *mut c_void) -> bool {
    let Some(path) = object_of(address) else { return false };
    has_driver_name(path)
}

/// The path of the object that contains `address`.
pub(crate) fn object_of(address: *const c_void) -> Option<&'static CStr> {
    let mut found = libc::Dl_info {
        dli_fname: null(),
        dli_fbase: null_mut(),
        dli_sname: null(),
        dli_saddr: null_mut(),
    };
    // SAFETY: `dladdr` accepts any address and writes to a live structure.
    if unsafe { libc::dladdr(address, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the dynamic linker keeps the name of an object as long as it is loaded; callers use it at once.
    Some(unsafe { CStr::from_ptr(found.dli_fname) })
}

/// True if the handle that just resolved a name is the driver's.
fn is_driver(handle: *mut c_void) -> bool {
    #[repr(C)]
    struct LinkMap {
        address: usize,
        name: *const c_char,
    }
    let mut map: *const LinkMap = null();
    // SAFETY: the handle is valid, since a lookup in it succeeded, and the answer is a pointer to a link map.
    let status =
        unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP as c_int, (&raw mut map).cast()) };
    if status != 0 || map.is_null() {
        return false;
    }
    // SAFETY: the link map of a loaded object is live, and it begins with these two fields.
    let name = unsafe { (*map).name };
    // SAFETY: the name of a link map is a terminated string, or null.
    !name.is_null() && has_driver_name(unsafe { CStr::from_ptr(name) })
}

fn has_driver_name(path: &CStr) -> bool {
    file_name(path.to_bytes()).starts_with(DRIVER_PREFIX)
}

/// The last component of a path.
pub(crate) fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}
