//! Finding and loading libcuda.
//!
//! The library is probed under cudarc's candidate names, in the same order, before cudarc's own loader runs, because that loader panics if
//! it finds none. After a successful probe it loads the same library, and shares it with all other users of cudarc in this process. A
//! library that fails to load is reported differently from a missing one.
//!
//! Invariant: a loaded library stays loaded until the process ends, so its symbols never dangle. A failed attempt is not cached.

use std::error::Error;
use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::api::{Api, Symbols};
use crate::{DriverError, DriverResult};

/// The driver functions of this process, loaded on first use.
pub(super) fn api() -> DriverResult<Arc<Api>> {
    static PROBED: OnceLock<libloading::Library> = OnceLock::new();
    static API: OnceLock<Arc<Api>> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(Arc::clone(api));
    }
    if PROBED.get().is_none() {
        let library = probe(&candidates())?;
        PROBED.get_or_init(|| library);
    }
    let api = Arc::new(Api::load(&LoadedLibrary)?);
    Ok(Arc::clone(API.get_or_init(|| api)))
}

/// The path of the loaded libcuda, if it is loaded and the system reports it.
#[must_use]
pub fn library_path() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        let file = path.rsplit('/').next()?;
        file.starts_with("libcuda.so").then(|| PathBuf::from(path))
    })
}

/// The names under which cudarc searches for the library.
pub(super) fn candidates() -> Vec<String> {
    ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates).collect()
}

/// Loads the first candidate that loads.
pub(super) fn probe(candidates: &[String]) -> DriverResult<libloading::Library> {
    let mut broken = Vec::new();
    for name in candidates {
        // SAFETY: the candidates name the CUDA driver, whose initialisers may run on any thread at any time.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => {
                let message = message(&error);
                if !is_absent(name, &message) {
                    broken.push(message);
                }
            }
        }
    }
    Err(if broken.is_empty() {
        DriverError::Unavailable {
            what: "libcuda was not found".to_owned(),
            remedy: "install the NVIDIA driver, add the folder of libcuda.so.1 to the library path, or use the \
                     simulated device"
                .to_owned(),
        }
    } else {
        DriverError::Unavailable {
            what: format!("libcuda is there but does not load ({})", broken.join("; ")),
            remedy:
                "reinstall the NVIDIA driver for this architecture, or use the simulated device"
                    .to_owned(),
        }
    })
}

/// The message of the system's loader. libloading keeps it in the source of its error.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// True when the loader reports the candidate itself as missing; for a missing dependency the message starts with that name.
fn is_absent(candidate: &str, message: &str) -> bool {
    let missing = message.contains("No such file or directory") || cfg!(windows);
    missing && (message.starts_with(candidate) || cfg!(windows))
}

/// cudarc's handle of the library. Constructed only after a successful probe.
pub(super) struct LoadedLibrary;

// SAFETY: the addresses are those libcuda exports, and the library is never unloaded.
unsafe impl Symbols for LoadedLibrary {
    fn address(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: loading runs only the initialisers of libcuda, which have already run for the probe.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbol is only taken as an address; its type is given by the table that asked for it.
        let symbol = unsafe { library.get::<*mut c_void>(name) }.ok()?;
        NonNull::new(*symbol)
    }
}
