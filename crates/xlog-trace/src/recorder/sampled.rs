//! Call stacks of this process: threads record addresses, and the thread that writes a log resolves them.
//!
//! Sampling walks the stack and looks up its addresses in a table, under one lock. Function names and source lines come
//! from the program's debug information, read on the first resolution. Both tables are bounded; nothing is removed.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, LazyLock};

use xlog_base::Mutex;

use super::intern::{intern_frame, is_frame_table_full};
use crate::names::{NameId, Names};
use crate::stacks::{MAX_FRAMES, MAX_STACKS, StackId};

/// Extra frames of a walk: the innermost ones belong to the recorder and are omitted later.
const OWN_FRAMES: usize = 48;
/// Crates whose innermost frames are omitted, since they are not part of the program.
const OWN_CRATES: [&str; 5] = ["backtrace", "xlog_trace", "xlog_cuda", "xlog_driver", "core"];

#[derive(Debug, Default)]
struct Addresses {
    all: Vec<Arc<[usize]>>,
    ids: HashMap<Arc<[usize]>, u32>,
}

#[derive(Debug, Default)]
struct Resolved {
    /// The frames of each recorded stack, by its number.
    stacks: Vec<Arc<[NameId]>>,
    /// The frames at an address: several if calls were inlined.
    frames: HashMap<usize, Arc<[NameId]>>,
}

static RECORDED: LazyLock<Mutex<Addresses>> = LazyLock::new(Mutex::default);
static RESOLVED: LazyLock<Mutex<Resolved>> = LazyLock::new(Mutex::default);

/// Records the stack of the calling thread without resolving it, which takes some microseconds. Returns
/// [`StackId::LOST`] if the bounded table is full.
#[cold]
#[inline(never)]
pub fn capture_stack() -> StackId {
    let mut addresses = [0usize; MAX_FRAMES + OWN_FRAMES];
    let mut depth = 0;
    #[allow(unsafe_code)]
    // SAFETY: the caller must synchronize where the platform's unwinder is not thread-safe; Linux's is.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            if let Some(slot) = addresses.get_mut(depth) {
                *slot = frame.ip() as usize;
                depth += 1;
            }
            depth < addresses.len()
        });
    }
    record_stack(addresses.get(..depth).unwrap_or(&[]))
}

/// Records a stack that the caller has walked: return addresses, the innermost first.
pub fn record_stack(addresses: &[usize]) -> StackId {
    let mut recorded = RECORDED.lock();
    if let Some(&id) = recorded.ids.get(addresses) {
        return StackId::from_raw(id).unwrap_or(StackId::LOST);
    }
    if recorded.all.len() >= MAX_STACKS {
        return StackId::LOST;
    }
    let addresses: Arc<[usize]> = addresses.into();
    recorded.all.push(Arc::clone(&addresses));
    let id = recorded.all.len() as u32;
    recorded.ids.insert(addresses, id);
    StackId::from_raw(id).unwrap_or(StackId::LOST)
}

/// Resolves all stacks recorded so far. The first call reads the debug information, which may take a second.
pub fn resolve_stacks() {
    let mut resolved = RESOLVED.lock();
    let known = resolved.stacks.len();
    let new: Vec<_> = RECORDED.lock().all.get(known..).unwrap_or(&[]).to_vec();
    for addresses in new {
        let mut frames = Vec::new();
        for &address in &*addresses {
            frames.extend_from_slice(&resolved.at(address));
        }
        let own = frames.iter().take_while(|frame| is_own(**frame)).count();
        let shown = if own < frames.len() { own } else { 0 };
        let frames: Vec<NameId> = frames.into_iter().skip(shown).take(MAX_FRAMES).collect();
        resolved.stacks.push(frames.into());
    }
}

/// Returns the frames of a recorded stack, the innermost first: `function (file:line)`, or `function`.
pub fn stack_frames(stack: StackId) -> Vec<String> {
    let mut names = Names::new();
    super::intern::catch_up(&mut names);
    catch_up(&mut names);
    names.stack_texts(Some(stack)).map(str::to_owned).collect()
}

/// Resolves the stacks that a copy of the names lacks and adds them.
pub(super) fn catch_up(names: &mut Names) {
    resolve_stacks();
    super::intern::catch_up(names);
    for frames in RESOLVED.lock().stacks.get(names.stack_count()..).unwrap_or(&[]) {
        names.push_stack(frames);
    }
}

fn is_own(frame: NameId) -> bool {
    super::intern::with_text(frame, |text| {
        OWN_CRATES.iter().any(|own| is_named_in(text, own) || is_source_of(text, own))
    })
}

/// Returns whether the path of a frame's function begins with this crate.
fn is_named_in(frame: &str, own: &str) -> bool {
    let rest = frame.trim_start_matches('<').strip_prefix(own);
    rest.is_some_and(|rest| rest.starts_with("::") || rest.starts_with('['))
}

/// Returns whether a frame's source file belongs to this crate. With line tables alone, functions lack their path.
fn is_source_of(frame: &str, own: &str) -> bool {
    let Some((_, file)) = frame.rsplit_once(" (") else { return false };
    let folders: Vec<&str> = file.split('/').collect();
    folders.windows(2).any(|pair| {
        let version = pair[0].replace('-', "_");
        let version = version.strip_prefix(own);
        // A registry crate's directory has its version after its name.
        pair[1] == "src" && version.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    })
}

/// Describes an address without a symbol by its object file and offset, which vary less between runs than the address.
fn place_of(address: usize) -> String {
    let none = std::ptr::null_mut();
    let mut found = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: none,
        dli_sname: std::ptr::null(),
        dli_saddr: none,
    };
    #[allow(unsafe_code)]
    // SAFETY: `dladdr` accepts any address and writes to a live structure.
    let is_found = unsafe { libc::dladdr(address as *const c_void, &raw mut found) } != 0;
    if !is_found || found.dli_fname.is_null() {
        return format!("{address:#x}");
    }
    #[allow(unsafe_code)]
    // SAFETY: the dynamic linker keeps the name of an object while it is loaded.
    let path = unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy();
    let file = path.rsplit('/').next().unwrap_or(&path);
    format!("{file}+{:#x}", address.wrapping_sub(found.dli_fbase as usize))
}

impl Resolved {
    fn at(&mut self, address: usize) -> Arc<[NameId]> {
        if let Some(frames) = self.frames.get(&address) {
            return Arc::clone(frames);
        }
        let mut frames = Vec::new();
        if !is_frame_table_full() {
            backtrace::resolve(address as *mut c_void, |symbol| {
                let name =
                    symbol.name().map_or_else(|| place_of(address), |name| format!("{name:#}"));
                let text = match (symbol.filename(), symbol.lineno()) {
                    (Some(file), Some(line)) => format!("{name} ({}:{line})", file.display()),
                    _ => name,
                };
                frames.push(intern_frame(&text));
            });
        }
        if frames.is_empty() {
            frames.push(intern_frame(&place_of(address)));
        }
        let frames: Arc<[NameId]> = frames.into();
        self.frames.insert(address, Arc::clone(&frames));
        frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_the_recording_are_told_by_name_or_by_source_file() {
        let own = |frame: &str| is_own(intern_frame(frame));
        assert!(own("xlog_cuda::stream::raw (a.rs:1)") && own("<xlog_cuda::Slice as Drop>::drop"));
        assert!(own("allocate (/home/user/xlog-cuda-0.1.0/src/stream/raw.rs:7)"));
        assert!(own("trace (/registry/backtrace-0.3.77/src/backtrace/libunwind.rs:117)"));
        assert!(!own("allocate (/home/user/xlog-cuda/tests/logging/stacks.rs:7)"));
        assert!(!own("main (/home/user/program/src/main.rs:7)") && !own("program::xlog_cuda"));
    }

    #[inline(never)]
    fn an_inner_function_of_the_test() -> StackId {
        std::hint::black_box(capture_stack())
    }

    #[test]
    fn equal_stacks_are_one_and_are_resolved_later() {
        let mut stacks = Vec::new();
        for _ in 0..std::hint::black_box(2) {
            stacks.push(an_inner_function_of_the_test());
        }
        assert_eq!(stacks[0], stacks[1]);
        let other = an_inner_function_of_the_test();
        assert_ne!(stacks[0], other);
        let frames = stack_frames(other);
        assert!(frames.len() > 1 && frames.len() <= MAX_FRAMES, "{frames:?}");
        let mut copy = Names::new();
        catch_up(&mut copy);
        assert_eq!(copy.stack_texts(Some(other)).collect::<Vec<_>>(), frames);
        assert_eq!(stack_frames(StackId::LOST), [""; 0]);
    }
}
