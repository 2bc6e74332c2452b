//! Registers heaps with a tool, and the regions in them that may be accessed.
//!
//! A heap is one driver allocation that a program splits into blocks. After its registration only its regions may be accessed. A region
//! takes effect at host time, so it must stay registered until the work on it has completed. This file handles addresses as numbers and
//! reads no memory behind them.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use crate::layout::{
    COMPAT_MEMORY, HeapDescription, MESSAGE_ASCII, REFERENCE_POINTER, RegionName, RegionsName,
    RegionsRegister, RegionsUnregister, TYPE_VIRTUAL_ADDRESS, USAGE_SUB_ALLOCATOR, VirtualRange,
};
use crate::tool::Tool;

/// A tool's name space for one part of a program, released on drop.
#[derive(Debug)]
pub struct Domain {
    tool: Tool,
    /// Null, the default domain, if the tool has no domains.
    handle: *mut c_void,
}

// SAFETY: the handle is only passed to the tool, whose functions may be called on any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// A heap that a tool accepted.
#[derive(Debug)]
#[must_use = "it is unregistered before its memory is freed"]
pub struct Heap(*mut c_void);

// SAFETY: as for `Domain`.
unsafe impl Send for Heap {}
// SAFETY: as for `Domain`.
unsafe impl Sync for Heap {}

impl Domain {
    /// Makes a domain of this name.
    #[must_use]
    pub fn new(tool: &Tool, name: &str) -> Self {
        let name = c_string(name);
        let handle = match tool.domain_create {
            // SAFETY: the name is a string that lives over the call.
            Some(create) => unsafe { create(name.as_ptr()) },
            None => ptr::null_mut(),
        };
        Self { tool: *tool, handle }
    }

    /// Registers one driver allocation as a heap, of which from now on only the regions may be accessed. `None` if the tool refuses, as for
    /// memory that is mapped, came from a driver pool, or is unknown to it.
    #[must_use]
    pub fn register_heap(&self, address: u64, bytes: usize, name: &str) -> Option<Heap> {
        let name = c_string(name);
        let range = VirtualRange { size: bytes, ptr: address };
        let description = HeapDescription {
            compat: COMPAT_MEMORY,
            struct_size: size_of::<HeapDescription>() as u16,
            reserved: 0,
            usage: USAGE_SUB_ALLOCATOR,
            kind: TYPE_VIRTUAL_ADDRESS,
            range_size: size_of::<VirtualRange>(),
            range: &raw const range,
            category: 0,
            name_kind: MESSAGE_ASCII,
            name: name.as_ptr(),
        };
        // SAFETY: the description and what it points to live over the call.
        let heap = unsafe { (self.tool.heap_register)(self.handle, &raw const description) };
        (!matches!(heap as isize, -1 | 0)).then_some(Heap(heap))
    }

    /// Unregisters a heap without regions, after which its memory may be freed.
    pub fn unregister_heap(&self, heap: Heap) {
        // SAFETY: the tool issued this handle, and it is released once.
        unsafe { (self.tool.heap_unregister)(self.handle, heap.0) };
    }

    /// Registers a region of a heap, whose bytes may be accessed. It must not overlap another region.
    pub fn register_region(&self, heap: &Heap, address: u64, bytes: usize, name: &str) {
        let range = VirtualRange { size: bytes, ptr: address };
        let batch = RegionsRegister {
            compat: COMPAT_MEMORY,
            struct_size: size_of::<RegionsRegister>() as u16,
            kind: TYPE_VIRTUAL_ADDRESS,
            heap: heap.0,
            count: 1,
            element_size: size_of::<VirtualRange>(),
            elements: &raw const range,
            handles: ptr::null_mut(),
        };
        // SAFETY: the batch and what it points to live over the call.
        unsafe { (self.tool.regions_register)(self.handle, &raw const batch) };
        self.name_region(address, name);
    }

    fn name_region(&self, address: u64, name: &str) {
        let Some(function) = self.tool.regions_name else { return };
        let name = c_string(name);
        let text: *const c_char = name.as_ptr();
        let element = RegionName {
            reference_kind: REFERENCE_POINTER,
            name_kind: MESSAGE_ASCII,
            region: address,
            name: text,
            category: 0,
            reserved: 0,
        };
        let batch = RegionsName {
            compat: COMPAT_MEMORY,
            struct_size: size_of::<RegionsName>() as u16,
            reserved: 0,
            count: 1,
            element_size: size_of::<RegionName>(),
            elements: &raw const element,
            reserved_at_end: 0,
        };
        // SAFETY: the batch and what it points to live over the call.
        unsafe { function(self.handle, &raw const batch) };
    }

    /// Unregisters the region at this address, which may not be accessed any more.
    pub fn unregister_region(&self, address: u64) {
        let batch = RegionsUnregister {
            compat: COMPAT_MEMORY,
            struct_size: size_of::<RegionsUnregister>() as u16,
            reference_kind: REFERENCE_POINTER,
            count: 1,
            element_size: size_of::<u64>(),
            elements: &raw const address,
        };
        // SAFETY: the batch and what it points to live over the call.
        unsafe { (self.tool.regions_unregister)(self.handle, &raw const batch) };
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Some(destroy) = self.tool.domain_destroy
            && !self.handle.is_null()
        {
            // SAFETY: the tool issued this handle, and it is released once.
            unsafe { destroy(self.handle) };
        }
    }
}

/// Converts a name to a C string, up to its first NUL.
fn c_string(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::c_string;

    #[test]
    fn a_name_ends_at_its_first_zero() {
        assert_eq!(c_string("rows").as_bytes(), b"rows");
        assert_eq!(c_string("ro\0ws").as_bytes(), b"ro");
        assert_eq!(c_string("").as_bytes(), b"");
    }
}
