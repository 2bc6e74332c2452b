//! The binary interface between a program and a tool: numbers, structures and function types.
//!
//! It has two parts. The core gives a domain. The memory extension, which tools such as compute-sanitizer read, gives heaps and regions.
//! Sizes and offsets are those of a 64-bit C compiler and are checked at compile time.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// The NVTX version of this interface.
pub(crate) const NVTX_VERSION: u16 = 3;
/// The number of the memory extension.
pub(crate) const MODULE_MEMORY: u16 = 1;
/// The revision of the memory extension's structures.
pub(crate) const COMPAT_MEMORY: u16 = 0x0102;
/// The only segment of the memory extension.
pub(crate) const SEGMENT: usize = 1;
/// The number of functions that a tool may store.
pub(crate) const SLOTS: usize = 63;

/// The slot of each function.
pub(crate) mod slot {
    pub(crate) const HEAP_REGISTER: usize = 0;
    pub(crate) const HEAP_UNREGISTER: usize = 1;
    pub(crate) const REGIONS_REGISTER: usize = 3;
    pub(crate) const REGIONS_UNREGISTER: usize = 5;
    pub(crate) const REGIONS_NAME: usize = 6;
}

pub(crate) const USAGE_SUB_ALLOCATOR: u32 = 1;
pub(crate) const TYPE_VIRTUAL_ADDRESS: u32 = 1;
pub(crate) const REFERENCE_POINTER: u32 = 1;
pub(crate) const MESSAGE_ASCII: u32 = 1;

/// A table into which a tool stores its functions.
#[repr(C)]
#[derive(Debug)]
pub struct ModuleSegment {
    /// The number of the segment.
    pub segment: usize,
    /// The number of slots.
    pub slot_count: usize,
    /// The slots: 0 until a tool stores a function's address.
    pub slots: *mut isize,
}

/// The description of an extension for a tool.
#[repr(C)]
#[derive(Debug)]
pub struct ModuleInfo {
    /// The version of NVTX.
    pub version: u16,
    /// The size of this structure.
    pub struct_size: u16,
    /// The number of the extension.
    pub module: u16,
    /// The revision of its structures.
    pub compat: u16,
    /// The number of segments.
    pub segment_count: usize,
    /// The segments.
    pub segments: *mut ModuleSegment,
    /// A function for further requests of a tool; null here.
    pub export_function: *const c_void,
    /// Further data of the extension; null here.
    pub extension_info: *const c_void,
}

/// A tool's entry point for extensions. It returns 0 to refuse.
pub type InitializeExtension = unsafe extern "C" fn(info: *mut ModuleInfo) -> c_int;

pub(crate) type ExportTable = unsafe extern "C" fn(id: u32) -> *const c_void;
pub(crate) type InitializeCore = unsafe extern "C" fn(tables: ExportTable) -> c_int;
pub(crate) type DomainCreate = unsafe extern "C" fn(name: *const c_char) -> *mut c_void;
pub(crate) type DomainDestroy = unsafe extern "C" fn(domain: *mut c_void);

/// A slot of the core interface, into which a tool stores a function.
pub(crate) type Slot = *mut *const c_void;

#[repr(C)]
pub(crate) struct CallbackTable {
    pub(crate) struct_size: usize,
    pub(crate) module_table:
        unsafe extern "C" fn(module: u32, table: *mut *const Slot, size: *mut c_uint) -> c_int,
}

#[repr(C)]
pub(crate) struct VersionTable {
    pub(crate) struct_size: usize,
    pub(crate) version: u32,
    pub(crate) reserved: u32,
    pub(crate) set_tool_version: unsafe extern "C" fn(version: u32),
}

#[repr(C)]
pub(crate) struct VirtualRange {
    pub(crate) size: usize,
    pub(crate) ptr: u64,
}

#[repr(C)]
pub(crate) struct HeapDescription {
    pub(crate) compat: u16,
    pub(crate) struct_size: u16,
    pub(crate) reserved: u32,
    pub(crate) usage: u32,
    pub(crate) kind: u32,
    pub(crate) range_size: usize,
    pub(crate) range: *const VirtualRange,
    pub(crate) category: u32,
    pub(crate) name_kind: u32,
    pub(crate) name: *const c_char,
}

#[repr(C)]
pub(crate) struct RegionsRegister {
    pub(crate) compat: u16,
    pub(crate) struct_size: u16,
    pub(crate) kind: u32,
    pub(crate) heap: *mut c_void,
    pub(crate) count: usize,
    pub(crate) element_size: usize,
    pub(crate) elements: *const VirtualRange,
    pub(crate) handles: *mut *mut c_void,
}

#[repr(C)]
pub(crate) struct RegionsUnregister {
    pub(crate) compat: u16,
    pub(crate) struct_size: u16,
    pub(crate) reference_kind: u32,
    pub(crate) count: usize,
    pub(crate) element_size: usize,
    pub(crate) elements: *const u64,
}

#[repr(C)]
pub(crate) struct RegionName {
    pub(crate) reference_kind: u32,
    pub(crate) name_kind: u32,
    pub(crate) region: u64,
    pub(crate) name: *const c_char,
    pub(crate) category: u32,
    pub(crate) reserved: u32,
}

#[repr(C)]
pub(crate) struct RegionsName {
    pub(crate) compat: u16,
    pub(crate) struct_size: u16,
    pub(crate) reserved: u32,
    pub(crate) count: usize,
    pub(crate) element_size: usize,
    pub(crate) elements: *const RegionName,
    pub(crate) reserved_at_end: usize,
}

pub(crate) type HeapRegister =
    unsafe extern "C" fn(domain: *mut c_void, heap: *const HeapDescription) -> *mut c_void;
pub(crate) type HeapUnregister = unsafe extern "C" fn(domain: *mut c_void, heap: *mut c_void);
pub(crate) type RegisterRegions =
    unsafe extern "C" fn(domain: *mut c_void, batch: *const RegionsRegister);
pub(crate) type UnregisterRegions =
    unsafe extern "C" fn(domain: *mut c_void, batch: *const RegionsUnregister);
pub(crate) type NameRegions = unsafe extern "C" fn(domain: *mut c_void, batch: *const RegionsName);

#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ModuleSegment>() == 24 && offset_of!(ModuleSegment, slots) == 16);
    assert!(size_of::<ModuleInfo>() == 40 && offset_of!(ModuleInfo, segments) == 16);
    assert!(size_of::<CallbackTable>() == 16 && size_of::<VersionTable>() == 24);
    assert!(size_of::<VirtualRange>() == 16 && offset_of!(VirtualRange, ptr) == 8);
    assert!(size_of::<HeapDescription>() == 48 && offset_of!(HeapDescription, range_size) == 16);
    assert!(offset_of!(HeapDescription, category) == 32 && offset_of!(HeapDescription, name) == 40);
    assert!(size_of::<RegionsRegister>() == 48 && offset_of!(RegionsRegister, heap) == 8);
    assert!(offset_of!(RegionsRegister, elements) == 32);
    assert!(size_of::<RegionsUnregister>() == 32 && offset_of!(RegionsUnregister, elements) == 24);
    assert!(size_of::<RegionName>() == 32 && offset_of!(RegionName, name) == 16);
    assert!(size_of::<RegionsName>() == 40 && offset_of!(RegionsName, elements) == 24);
};
