//! The tool that is attached to the process: its discovery, and its functions.
//!
//! `NVTX_INJECTION64_PATH` names the tool's library. The library is loaded once, offered the core interface and the memory extension, and
//! stays loaded until the process ends. A tool counts as attached if it stored all four functions that register and unregister heaps and
//! regions; a profiler that wants only ranges does not.

use std::ffi::{OsStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::core_tables;
use crate::layout::{
    COMPAT_MEMORY, DomainCreate, DomainDestroy, HeapRegister, HeapUnregister, InitializeCore,
    InitializeExtension, MODULE_MEMORY, ModuleInfo, ModuleSegment, NVTX_VERSION, NameRegions,
    RegisterRegions, SEGMENT, SLOTS, UnregisterRegions, slot,
};

/// The environment variable that names a tool's library.
pub const INJECTION_VARIABLE: &str = if cfg!(target_pointer_width = "64") {
    "NVTX_INJECTION64_PATH"
} else {
    "NVTX_INJECTION32_PATH"
};

/// Errors of attaching a tool.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The library cannot be loaded.
    #[error("{INJECTION_VARIABLE} names {path}, which cannot be loaded: {message}", path = path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// The message of the system's loader.
        message: String,
    },
    /// The library has no entry point for extensions.
    #[error(
        "{INJECTION_VARIABLE} names {path}, which has no InitializeInjectionNvtxExtension; \
         expected a tool such as compute-sanitizer",
        path = path.display()
    )]
    EntryPoint {
        /// The library.
        path: PathBuf,
    },
    /// The search for a tool has run already, or another tool is attached.
    #[error(
        "a tool is attached already, or was looked for; inject one before the first pool is made"
    )]
    Late,
}

/// The functions of an attached tool.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    pub(crate) heap_register: HeapRegister,
    pub(crate) heap_unregister: HeapUnregister,
    pub(crate) regions_register: RegisterRegions,
    pub(crate) regions_unregister: UnregisterRegions,
    pub(crate) regions_name: Option<NameRegions>,
    pub(crate) domain_create: Option<DomainCreate>,
    pub(crate) domain_destroy: Option<DomainDestroy>,
}

type Answer = Result<Option<Tool>, AttachError>;

static TOOL: OnceLock<Answer> = OnceLock::new();

/// Returns the attached tool that accepts memory registrations. The search runs once.
pub fn tool() -> Result<Option<&'static Tool>, AttachError> {
    let answer = TOOL.get_or_init(|| match std::env::var_os(INJECTION_VARIABLE) {
        Some(path) if !path.is_empty() => load(&path),
        _ => Ok(None),
    });
    answer.as_ref().map(Option::as_ref).map_err(Clone::clone)
}

/// Attaches a tool that is part of the program, for checkers and tests. Returns `None` if it does not accept memory registrations.
///
/// It overrides the environment. After the first call of [`tool`] it fails with [`AttachError::Late`].
///
/// # Safety
/// `initialize` leaves the slots alone or stores functions of the memory extension, revision 0x0102.
pub unsafe fn inject(
    initialize: InitializeExtension,
) -> Result<Option<&'static Tool>, AttachError> {
    let mut mine = false;
    let answer = TOOL.get_or_init(|| {
        mine = true;
        // SAFETY: the caller's promise.
        Ok(unsafe { extension(initialize) })
    });
    if mine {
        answer.as_ref().map(Option::as_ref).map_err(Clone::clone)
    } else {
        Err(AttachError::Late)
    }
}

fn load(path: &OsStr) -> Answer {
    let path = Path::new(path);
    // SAFETY: the user who sets the variable asks for the library's code to run in this process, as with LD_PRELOAD.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let message = source.unwrap_or_else(|| error.to_string());
        AttachError::Load { path: path.to_owned(), message }
    })?;
    // The tool's functions are used until the process ends.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    // SAFETY: a function of this name has this type in every tool.
    let core = unsafe { library.get::<InitializeCore>(b"InitializeInjectionNvtx2\0") };
    if let Ok(core) = core {
        // A tool that refuses the core may still accept memory registrations.
        // SAFETY: the tables are those of the interface, and live as long as the process.
        let _ = unsafe { core(core_tables::export_table) };
    }
    // SAFETY: as above.
    let extension_entry =
        unsafe { library.get::<InitializeExtension>(b"InitializeInjectionNvtxExtension\0") };
    match extension_entry {
        // SAFETY: a tool that exports this name implements the interface.
        Ok(initialize) => Ok(unsafe { extension(*initialize) }),
        Err(_) => Err(AttachError::EntryPoint { path: path.to_owned() }),
    }
}

/// Offers the memory extension to a tool.
///
/// # Safety
/// As for [`inject`].
unsafe fn extension(initialize: InitializeExtension) -> Option<Tool> {
    // A tool may keep the address and store functions later, so the slots are never freed.
    let slots: &'static mut [isize; SLOTS] = Box::leak(Box::new([0; SLOTS]));
    let slots = slots.as_mut_ptr();
    let segment = ModuleSegment { segment: SEGMENT, slot_count: SLOTS, slots };
    let segment = Box::leak(Box::new(segment));
    let info = Box::leak(Box::new(ModuleInfo {
        version: NVTX_VERSION,
        struct_size: size_of::<ModuleInfo>() as u16,
        module: MODULE_MEMORY,
        compat: COMPAT_MEMORY,
        segment_count: 1,
        segments: segment,
        export_function: std::ptr::null(),
        extension_info: std::ptr::null(),
    }));
    // SAFETY: all arguments live as long as the process; the caller promises that the tool implements the interface.
    if unsafe { initialize(info) } == 0 {
        return None;
    }
    // SAFETY: the slots are ours, and the tool has returned.
    let filled = |at: usize| function(unsafe { slots.add(at).read() });
    let (register, unregister) = (filled(slot::HEAP_REGISTER)?, filled(slot::HEAP_UNREGISTER)?);
    let (regions, gone) = (filled(slot::REGIONS_REGISTER)?, filled(slot::REGIONS_UNREGISTER)?);
    let name = filled(slot::REGIONS_NAME);
    // SAFETY: each slot holds a function of the type that belongs to its number, by the caller's promise.
    unsafe {
        Some(Tool {
            heap_register: std::mem::transmute::<*const c_void, HeapRegister>(register),
            heap_unregister: std::mem::transmute::<*const c_void, HeapUnregister>(unregister),
            regions_register: std::mem::transmute::<*const c_void, RegisterRegions>(regions),
            regions_unregister: std::mem::transmute::<*const c_void, UnregisterRegions>(gone),
            regions_name: name.map(|name| std::mem::transmute::<*const c_void, NameRegions>(name)),
            domain_create: core_tables::domain_create(),
            domain_destroy: core_tables::domain_destroy(),
        })
    }
}

/// The address in a slot. 0 (empty), 1 (disabled) and -1 (older interfaces) mean none.
fn function(value: isize) -> Option<*const c_void> {
    (!matches!(value, -1..=1)).then_some(value as *const c_void)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_int;

    unsafe extern "C" fn refuses(_info: *mut ModuleInfo) -> c_int {
        0
    }

    unsafe extern "C" fn wants_nothing(_info: *mut ModuleInfo) -> c_int {
        1
    }

    /// Stores only what a profiler might store.
    unsafe extern "C" fn wants_names(info: *mut ModuleInfo) -> c_int {
        // SAFETY: called below with what the interface says.
        unsafe { (*(*info).segments).slots.add(slot::REGIONS_NAME).write(4096) };
        1
    }

    #[test]
    fn a_tool_without_the_functions_for_memory_is_none() {
        for initialize in [refuses, wants_nothing, wants_names] as [InitializeExtension; 3] {
            // SAFETY: they store nothing that is called.
            assert!(unsafe { extension(initialize) }.is_none());
        }
    }

    #[test]
    fn no_function_is_taken_from_a_slot_that_says_there_is_none() {
        for value in [-1, 0, 1] {
            assert_eq!(function(value), None);
        }
        assert_eq!(function(4096), Some(4096 as *const c_void));
    }

    #[test]
    fn a_library_that_is_none_is_named_with_the_variable() {
        let said = load(OsStr::new("/nowhere/tool.so")).unwrap_err().to_string();
        assert!(said.contains("NVTX_INJECTION") && said.contains("/nowhere/tool.so"), "{said}");
        // The C library is a library, and no tool.
        let said = load(OsStr::new("libc.so.6")).unwrap_err();
        assert_eq!(said, AttachError::EntryPoint { path: "libc.so.6".into() });
    }
}
