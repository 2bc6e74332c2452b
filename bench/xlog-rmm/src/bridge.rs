//! Loads the library that exposes RMM through C functions, and opens its allocators.
//!
//! The head of `bench/peers/rmm_bridge.cu` specifies the functions. The library stays loaded while an allocator of it exists.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use xlog_cuda::device_runtime::ResourceError;

/// The version of the C interface.
const VERSION: u32 = 1;
/// The maximum length of a message of the bridge in bytes.
const MESSAGE: usize = 512;

const OK: i32 = 0;
const OUT_OF_MEMORY: i32 = 1;

type VersionFunction = unsafe extern "C" fn() -> u32;
type OpenFunction = unsafe extern "C" fn(
    kind: *const c_char,
    ordinal: u32,
    initial: usize,
    message: *mut c_char,
    room: usize,
) -> *mut c_void;
type CloseFunction = unsafe extern "C" fn(resource: *mut c_void);
type AllocateFunction = unsafe extern "C" fn(
    resource: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
    ptr: *mut u64,
    message: *mut c_char,
    room: usize,
) -> i32;
type DeallocateFunction = unsafe extern "C" fn(
    resource: *mut c_void,
    ptr: u64,
    bytes: usize,
    stream: *mut c_void,
    message: *mut c_char,
    room: usize,
) -> i32;

/// Why the bridge or a resource cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// The library cannot be loaded, or lacks a function.
    #[error("{} is not a bridge to RMM: {reason}", path.display())]
    Library {
        /// The library.
        path: PathBuf,
        /// The loader's message.
        reason: String,
    },
    /// The library has another version of the interface.
    #[error("{} speaks version {found} of the bridge, this build speaks {VERSION}; build the bridge anew", path.display())]
    Version {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// RMM could not create the resource.
    #[error("no {kind} resource of RMM: {reason}")]
    Open {
        /// The request.
        kind: RmmKind,
        /// RMM's message.
        reason: String,
    },
}

/// The kind of an RMM resource.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RmmKind {
    /// `pool_memory_resource` over `cuda_memory_resource`.
    Pool,
    /// `arena_memory_resource` over `cuda_memory_resource`.
    Arena,
    /// `binning_memory_resource` with bins of 256 KiB to 4 MiB over a pool.
    Binning,
    /// `cuda_async_memory_resource`.
    Async,
    /// `cuda_memory_resource`.
    Cuda,
}

impl RmmKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Pool, Self::Arena, Self::Binning, Self::Async, Self::Cuda];

    /// Returns its name in the bridge.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Arena => "arena",
            Self::Binning => "binning",
            Self::Async => "async",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for RmmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A loaded bridge.
#[derive(Clone)]
pub struct Bridge(Arc<Loaded>);

struct Loaded {
    path: PathBuf,
    open: OpenFunction,
    close: CloseFunction,
    allocate: AllocateFunction,
    deallocate: DeallocateFunction,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Bridge {
    /// Loads the library at `path`.
    ///
    /// # Safety
    /// The library is a bridge to RMM as described in `bench/peers/rmm_bridge.cu`: its initializers are safe to run, and its
    /// functions have the signatures given there.
    pub unsafe fn load(path: impl AsRef<Path>) -> Result<Self, BridgeError> {
        let path = path.as_ref();
        let blame = |error: libloading::Error| BridgeError::Library {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        // SAFETY: the caller guarantees that the library is safe to load.
        let library = unsafe { Library::new(path) }.map_err(blame)?;
        // SAFETY: the caller guarantees the signatures; the pointers are used only while the library is loaded.
        let loaded = unsafe {
            let version = *library.get::<VersionFunction>(b"xlog_rmm_version\0").map_err(blame)?;
            let found = version();
            if found != VERSION {
                return Err(BridgeError::Version { path: path.to_owned(), found });
            }
            Loaded {
                path: path.to_owned(),
                open: *library.get(b"xlog_rmm_open\0").map_err(blame)?,
                close: *library.get(b"xlog_rmm_close\0").map_err(blame)?,
                allocate: *library.get(b"xlog_rmm_allocate\0").map_err(blame)?,
                deallocate: *library.get(b"xlog_rmm_deallocate\0").map_err(blame)?,
                _library: library,
            }
        };
        Ok(Self(Arc::new(loaded)))
    }

    /// Opens an allocator on a device; a pool or an arena starts with `initial` bytes.
    pub(crate) fn open(
        &self,
        kind: RmmKind,
        ordinal: u32,
        initial: usize,
    ) -> Result<Allocator, BridgeError> {
        let refused = |reason: String| BridgeError::Open { kind, reason };
        let name = CString::new(kind.name()).map_err(|error| refused(error.to_string()))?;
        let mut message = [0_u8; MESSAGE];
        // SAFETY: the name is NUL-terminated, and the message buffer has the stated size.
        let resource = unsafe {
            (self.0.open)(name.as_ptr(), ordinal, initial, message.as_mut_ptr().cast(), MESSAGE)
        };
        if resource.is_null() {
            return Err(refused(text(&message)));
        }
        Ok(Allocator { bridge: self.clone(), resource })
    }
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bridge").field(&self.0.path).finish()
    }
}

/// Returns the NUL-terminated text that the bridge wrote.
fn text(message: &[u8]) -> String {
    let end = message.iter().position(|&byte| byte == 0).unwrap_or(message.len());
    match String::from_utf8_lossy(message.get(..end).unwrap_or(message)).into_owned() {
        empty if empty.is_empty() => "no reason given".to_owned(),
        said => said,
    }
}

/// An open RMM resource.
pub(crate) struct Allocator {
    bridge: Bridge,
    resource: *mut c_void,
}

// SAFETY: any threads may use RMM's resources concurrently, and the bridge adds no state.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// Allocates `bytes` bytes in the order of `stream`.
    ///
    /// # Safety
    /// `stream` is a live stream of the allocator's device.
    pub(crate) unsafe fn allocate(
        &self,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<u64, ResourceError> {
        let mut message = [0_u8; MESSAGE];
        let mut ptr = 0_u64;
        // SAFETY: the resource is open, the message buffer has the stated size, and the caller guarantees the stream.
        let status = unsafe {
            (self.bridge.0.allocate)(
                self.resource,
                bytes,
                stream,
                &raw mut ptr,
                message.as_mut_ptr().cast(),
                MESSAGE,
            )
        };
        match status {
            OK => Ok(ptr),
            OUT_OF_MEMORY => {
                Err(ResourceError::OutOfMemory { requested: bytes, detail: text(&message) })
            }
            _ => Err(ResourceError::Driver(format!("RMM: {}", text(&message)))),
        }
    }

    /// Frees an address in the order of `stream`.
    ///
    /// # Safety
    /// The address came from [`allocate`](Self::allocate) with this size and was not freed; `stream` meets the same condition; all work
    /// on the bytes is ordered before the free on `stream`.
    pub(crate) unsafe fn deallocate(
        &self,
        ptr: u64,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<(), ResourceError> {
        let mut message = [0_u8; MESSAGE];
        // SAFETY: the resource is open, the message buffer has the stated size, and the caller guarantees the rest.
        let status = unsafe {
            (self.bridge.0.deallocate)(
                self.resource,
                ptr,
                bytes,
                stream,
                message.as_mut_ptr().cast(),
                MESSAGE,
            )
        };
        match status {
            OK => Ok(()),
            _ => Err(ResourceError::Driver(format!("RMM: {}", text(&message)))),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: this bridge opened it, and it is closed once.
        unsafe { (self.bridge.0.close)(self.resource) };
    }
}
