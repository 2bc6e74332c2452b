//! What the driver's management library (NVML) reports of a GPU: all bytes in use, and those of each process, contexts and modules included. The
//! ledger counts allocations only, so the difference is what a process takes beside them.
//!
//! It is optional: without the library, in a container that hides processes, or on a simulated device there are no such figures. It makes no context
//! on the GPU.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::Library;

const LIBRARY: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;
/// Processes of one GPU that are read.
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

/// The memory of one GPU.
#[derive(Debug, Default)]
pub(super) struct CardMemory {
    pub(super) used: u64,
    /// By process.
    pub(super) processes: HashMap<u32, u64>,
}

/// The library, initialised.
pub(super) struct Nvml {
    shutdown: Plain,
    by_uuid: ByUuid,
    memory: Memory,
    processes: Processes,
    _library: Library,
}

#[allow(unsafe_code)]
impl Nvml {
    /// Loads the library; `None` where it is missing or does not work.
    pub(super) fn open() -> Option<Self> {
        // SAFETY: the initialisers of the driver's library have no conditions.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        // SAFETY: the library's functions of these names have these types.
        let (init, shutdown, by_uuid, memory, processes) = unsafe {
            (
                *library.get::<Plain>(b"nvmlInit_v2\0").ok()?,
                *library.get::<Plain>(b"nvmlShutdown\0").ok()?,
                *library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get::<Memory>(b"nvmlDeviceGetMemoryInfo\0").ok()?,
                *library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?,
            )
        };
        // SAFETY: it takes no arguments, and is matched by the shutdown of the drop.
        let is_open = unsafe { init() } == SUCCESS;
        is_open.then_some(Self { shutdown, by_uuid, memory, processes, _library: library })
    }

    /// The memory of the GPU with this identity, which is the key of its ledger; `None` for another device.
    pub(super) fn memory(&self, uuid: &str) -> Option<CardMemory> {
        let uuid = CString::new(uuid).ok()?;
        let mut card = null_mut();
        // SAFETY: the text ends in a zero, and the handle is a live local.
        if unsafe { (self.by_uuid)(uuid.as_ptr(), &raw mut card) } != SUCCESS {
            return None;
        }
        let mut memory = MemoryInfo::default();
        // SAFETY: the handle is the library's, and the structure is a live local of its type.
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
            // SAFETY: there are as many elements as the count says.
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
        // SAFETY: it was initialised by `open`, and no call is under way.
        let _ = unsafe { (self.shutdown)() };
    }
}
