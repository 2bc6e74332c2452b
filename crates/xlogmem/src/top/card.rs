//! The GPU memory that the driver's management library (NVML) reports: bytes in use, in total and per process, including
//! contexts and modules. The ledger counts allocations only, so the difference is what a process uses beside them.
//!
//! NVML is optional: there are no figures without the library, in a container that hides processes, or on a simulated
//! device. It creates no context on the GPU.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::Library;

const LIBRARY: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;
/// The maximum number of processes read per GPU.
const MAX_PROCESSES: usize = 1 << 16;

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

type Plain = unsafe extern "C" fn() -> c_int;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type Memory = unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_int;
type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int;

#[derive(Debug, Default)]
pub(super) struct CardMemory {
    pub(super) used: u64,
    pub(super) processes: HashMap<u32, u64>,
}

/// The initialized library.
pub(super) struct Nvml {
    shutdown: Plain,
    by_uuid: ByUuid,
    memory: Memory,
    processes: Processes,
    _library: Library,
}

#[allow(unsafe_code)]
impl Nvml {
    /// Loads the library; `None` if it is missing or does not work.
    pub(super) fn open() -> Option<Self> {
        // SAFETY: the initializers of the driver's library have no preconditions.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        // SAFETY: the library's functions with these names have these types.
        let (init, shutdown, by_uuid, memory, processes) = unsafe {
            (
                *library.get::<Plain>(b"nvmlInit_v2\0").ok()?,
                *library.get::<Plain>(b"nvmlShutdown\0").ok()?,
                *library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get::<Memory>(b"nvmlDeviceGetMemoryInfo\0").ok()?,
                *library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?,
            )
        };
        // SAFETY: it takes no arguments, and the drop calls the matching shutdown.
        let is_open = unsafe { init() } == SUCCESS;
        is_open.then_some(Self { shutdown, by_uuid, memory, processes, _library: library })
    }

    /// Returns the memory of the GPU with this UUID, which is its ledger's key; `None` for another device.
    pub(super) fn memory(&self, uuid: &str) -> Option<CardMemory> {
        let uuid = CString::new(uuid).ok()?;
        let mut card = null_mut();
        // SAFETY: the text is NUL-terminated, and the handle is a live local.
        if unsafe { (self.by_uuid)(uuid.as_ptr(), &raw mut card) } != SUCCESS {
            return None;
        }
        let mut memory = MemoryInfo::default();
        // SAFETY: the library returned the handle, and the structure is a live local of its type.
        if unsafe { (self.memory)(card, &raw mut memory) } != SUCCESS {
            return None;
        }
        let known = self.processes(card).into_iter().filter(|process| process.used != UNKNOWN);
        let processes = known.map(|process| (process.pid, process.used)).collect();
        Some(CardMemory { used: memory.used, processes })
    }

    fn processes(&self, card: *mut c_void) -> Vec<ProcessInfo> {
        let mut found = vec![ProcessInfo::default(); 64];
        loop {
            let mut count = found.len() as c_uint;
            // SAFETY: the array has as many elements as the count says.
            match unsafe { (self.processes)(card, &raw mut count, found.as_mut_ptr()) } {
                SUCCESS => {
                    found.truncate(count as usize);
                    return found;
                }
                INSUFFICIENT_SIZE if found.len() < MAX_PROCESSES => {
                    found.resize(found.len() * 4, ProcessInfo::default());
                }
                _ => return Vec::new(),
            }
        }
    }
}

#[allow(unsafe_code)]
impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `open` initialized it, and no call is in progress.
        let _ = unsafe { (self.shutdown)() };
    }
}
