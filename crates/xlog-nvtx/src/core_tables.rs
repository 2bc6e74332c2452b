//! The core handshake: tables into which a tool stores its functions. Only the functions for domains are used.
//!
//! Invariant: the tables live as long as the process and never move, because a tool may write to them at any time.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::layout::{CallbackTable, DomainCreate, DomainDestroy, NVTX_VERSION, Slot, VersionTable};

/// The number of functions of each module, including the unused number 0, indexed by module.
const MODULES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
/// The module of the functions for domains, and their numbers in it.
const DOMAINS: usize = 5;
const DOMAIN_CREATE: usize = 12;
const DOMAIN_DESTROY: usize = 14;

const CALLBACKS: u32 = 1;
const VERSION: u32 = 3;

type Cell = AtomicPtr<c_void>;

/// The slots of one module and the table of their addresses, with null at number 0 and after the last.
struct Module {
    slots: &'static [Cell],
    table: &'static [AtomicPtr<*const c_void>],
}

fn modules() -> &'static [Module] {
    static MADE: OnceLock<Vec<Module>> = OnceLock::new();
    MADE.get_or_init(|| MODULES.iter().map(|&size| Module::new(size)).collect())
}

impl Module {
    fn new(size: usize) -> Self {
        let slots: &'static [Cell] =
            Box::leak((0..size).map(|_| Cell::new(ptr::null_mut())).collect());
        let addresses = slots.iter().enumerate().map(|(number, slot)| match number {
            0 => ptr::null_mut(),
            _ => slot.as_ptr().cast::<*const c_void>(),
        });
        let table = addresses.chain([ptr::null_mut()]).map(AtomicPtr::new).collect();
        Self { slots, table: Box::leak(table) }
    }
}

/// The function that a tool stored under `number`.
fn domain_function(number: usize) -> Option<*const c_void> {
    let stored = modules().get(DOMAINS)?.slots.get(number)?.load(Ordering::Acquire).cast_const();
    (!stored.is_null()).then_some(stored)
}

pub(crate) fn domain_create() -> Option<DomainCreate> {
    // SAFETY: a tool that fills in this number stores a function of this type.
    domain_function(DOMAIN_CREATE).map(|function| unsafe { std::mem::transmute(function) })
}

pub(crate) fn domain_destroy() -> Option<DomainDestroy> {
    // SAFETY: as above.
    domain_function(DOMAIN_DESTROY).map(|function| unsafe { std::mem::transmute(function) })
}

/// Returns the table `id` to a tool; null for an unknown table.
pub(crate) unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    static CALLBACK_TABLE: CallbackTable =
        CallbackTable { struct_size: size_of::<CallbackTable>(), module_table };
    static VERSION_TABLE: VersionTable = VersionTable {
        struct_size: size_of::<VersionTable>(),
        version: NVTX_VERSION as u32,
        reserved: 0,
        set_tool_version,
    };
    match id {
        CALLBACKS => ptr::from_ref(&CALLBACK_TABLE).cast(),
        VERSION => ptr::from_ref(&VERSION_TABLE).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn module_table(
    module: u32,
    table: *mut *const Slot,
    size: *mut c_uint,
) -> c_int {
    let Some(found) = modules().get(module as usize).filter(|module| !module.slots.is_empty())
    else {
        return 0;
    };
    // SAFETY: the tool passes pointers to its own memory, or null.
    unsafe {
        if let Some(table) = table.as_mut() {
            *table = found.table.as_ptr().cast();
        }
        if let Some(size) = size.as_mut() {
            *size = found.slots.len() as c_uint;
        }
    }
    1
}

unsafe extern "C" fn set_tool_version(_version: u32) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_has_a_table_with_room_for_its_functions() {
        for (module, size) in MODULES.into_iter().enumerate() {
            let (mut table, mut count): (*const Slot, c_uint) = (ptr::null(), 0);
            // SAFETY: both places are ours.
            let known = unsafe { module_table(module as u32, &raw mut table, &raw mut count) };
            assert_eq!((known, count as usize), (c_int::from(size > 0), size));
            if known == 0 {
                continue;
            }
            // SAFETY: the table has one entry more than there are functions.
            let entries = unsafe { std::slice::from_raw_parts(table, size + 1) };
            assert!(entries.first().unwrap().is_null() && entries.last().unwrap().is_null());
            assert!(entries[1..size].iter().all(|entry| !entry.is_null()));
        }
        // SAFETY: null is accepted.
        let unknown = unsafe { module_table(7, ptr::null_mut(), ptr::null_mut()) };
        assert_eq!(unknown, 0);
    }

    #[test]
    fn a_table_that_does_not_exist_is_null() {
        for (id, exists) in [(0, false), (CALLBACKS, true), (2, false), (VERSION, true), (4, false)]
        {
            // SAFETY: any number may be asked for.
            assert_eq!(!unsafe { export_table(id) }.is_null(), exists, "table {id}");
        }
    }
}
