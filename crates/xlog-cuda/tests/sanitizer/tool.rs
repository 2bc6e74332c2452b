//! A memory checker inside the test: it knows heaps and regions, and writes down whatever no checker should be told.
//!
//! It has a description of the interface of its own, so that it does not take over a mistake of the one under test. There is one
//! for the whole process; a test has it to itself.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use xlog_nvtx::ModuleInfo;

/// What the tool knows.
#[derive(Default)]
pub(crate) struct Known {
    /// By address: how many bytes.
    pub(crate) heaps: BTreeMap<u64, u64>,
    pub(crate) regions: BTreeMap<u64, Region>,
    /// By the address of a block: set by the work on it. A region ends after all of it.
    pub(crate) work: HashMap<u64, Vec<Arc<AtomicBool>>>,
    pub(crate) ended: usize,
    /// What was wrong.
    pub(crate) complaints: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    pub(crate) bytes: u64,
    pub(crate) name: String,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

pub(crate) fn known<R>(look: impl FnOnce(&mut Known) -> R) -> R {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    look(known.get_or_insert_default())
}

/// The tool, attached, knowing nothing, for one test alone.
pub(crate) fn attached() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static ATTACHED: Once = Once::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    ATTACHED.call_once(|| {
        // SAFETY: the functions below are those of the interface.
        let tool = unsafe { xlog_nvtx::inject(initialize) };
        assert!(tool.unwrap().is_some());
    });
    known(|known| *known = Known::default());
    alone
}

#[repr(C)]
struct Range {
    bytes: usize,
    at: u64,
}

#[repr(C)]
struct HeapDescription {
    header: u64,
    usage: [u32; 2],
    range_bytes: usize,
    range: *const Range,
    category: [u32; 2],
    name: *const c_char,
}

#[repr(C)]
struct Register {
    header: u64,
    heap: *mut c_void,
    count: usize,
    element: usize,
    elements: *const Range,
    handles: *mut c_void,
}

#[repr(C)]
struct Unregister {
    header: u64,
    count: usize,
    element: usize,
    elements: *const u64,
}

#[repr(C)]
struct Name {
    kinds: [u32; 2],
    region: u64,
    name: *const c_char,
    category: u64,
}

#[repr(C)]
struct Names {
    header: u64,
    count: usize,
    element: usize,
    elements: *const Name,
    reserved: usize,
}

unsafe extern "C" fn initialize(info: *mut ModuleInfo) -> c_int {
    // SAFETY: called with a module that has one segment of 63 slots.
    unsafe {
        let slots = (*(*info).segments).slots;
        slots.write(heap_register as *const () as isize);
        slots.add(1).write(heap_unregister as *const () as isize);
        slots.add(3).write(regions_register as *const () as isize);
        slots.add(5).write(regions_unregister as *const () as isize);
        slots.add(6).write(regions_name as *const () as isize);
    }
    1
}

unsafe extern "C" fn heap_register(_: *mut c_void, heap: *const HeapDescription) -> *mut c_void {
    // SAFETY: the description and its range live over the call.
    let Range { bytes, at } = unsafe { (*heap).range.read() };
    known(|known| {
        known.heaps.insert(at, bytes as u64);
    });
    at as *mut c_void
}

unsafe extern "C" fn heap_unregister(_: *mut c_void, heap: *mut c_void) {
    known(|known| {
        let at = heap as u64;
        let Some(bytes) = known.heaps.remove(&at) else {
            return known.complaints.push(format!("no heap at {at:#x} to end"));
        };
        for (region, _) in known.regions.range(at..at + bytes) {
            known.complaints.push(format!("the heap at {at:#x} ends with a region at {region:#x}"));
        }
    });
}

unsafe extern "C" fn regions_register(_: *mut c_void, batch: *const Register) {
    // SAFETY: the batch has one range, which lives over the call.
    let (heap, Range { bytes, at }) = unsafe { ((*batch).heap as u64, (*batch).elements.read()) };
    known(|known| {
        let end = at + bytes as u64;
        let inside = known.heaps.get(&heap).is_some_and(|size| heap <= at && end <= heap + size);
        if !inside {
            known.complaints.push(format!("{at:#x}..{end:#x} is not inside heap {heap:#x}"));
        }
        let before = known.regions.range(..end).next_back();
        if let Some((start, region)) = before
            && start + region.bytes > at
        {
            let text = format!("{at:#x}..{end:#x} overlaps {start:#x} and {} bytes", region.bytes);
            known.complaints.push(text);
        }
        known.regions.insert(at, Region { bytes: bytes as u64, name: String::new() });
    });
}

unsafe extern "C" fn regions_unregister(_: *mut c_void, batch: *const Unregister) {
    // SAFETY: the batch has one address.
    let at = unsafe { (*batch).elements.read() };
    known(|known| {
        if known.regions.remove(&at).is_none() {
            known.complaints.push(format!("no region at {at:#x} to end"));
        }
        let work = known.work.remove(&at).unwrap_or_default();
        if work.iter().any(|done| !done.load(Ordering::Acquire)) {
            known.complaints.push(format!("the region at {at:#x} ends before work on it"));
        }
        known.ended += 1;
    });
}

unsafe extern "C" fn regions_name(_: *mut c_void, batch: *const Names) {
    // SAFETY: the batch has one name, and its text lives over the call.
    let (at, name) = unsafe {
        let name = (*batch).elements.read();
        (name.region, CStr::from_ptr(name.name).to_string_lossy().into_owned())
    };
    known(|known| {
        if let Some(region) = known.regions.get_mut(&at) {
            region.name = name;
        }
    });
}
