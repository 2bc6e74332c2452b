//! Physical memory of `cuMemCreate`, which lives until its last handle is released and its last mapping is unmapped.
//!
//! The driver may reuse a handle value while the memory behind its first meaning is still mapped, so allocations have their own numbers.
//! Imported memory has no entry here: its exporter is charged.
//!
//! A handle or mapping leaves its table before the driver's call, after which the driver may reuse the value. It stays charged until the
//! call has succeeded.

use std::collections::{BTreeMap, HashMap};

use crate::account::rounded;
use crate::blocks::{Admission, Freed, after_success, around, charge, written};
use crate::driver::{CuResult, SUCCESS, device_of};
use crate::messages::guarded;
use crate::state::{State, existing};

type Id = u64;

#[derive(Default)]
pub(crate) struct Handles {
    last: Id,
    by_handle: HashMap<u64, Named>,
    allocations: HashMap<Id, Allocation>,
    /// By address.
    mappings: BTreeMap<u64, Mapping>,
}

/// The current meaning of a handle value.
#[derive(Clone, Copy)]
struct Named {
    id: Id,
    references: u64,
}

#[derive(Clone, Copy)]
struct Allocation {
    device: u32,
    bytes: u64,
    /// The first handle.
    handle: u64,
    library: &'static str,
    references: u64,
    mappings: u64,
}

#[derive(Clone, Copy)]
struct Mapping {
    id: Id,
    bytes: u64,
}

impl Handles {
    /// Adds an allocation. Also returns the previous meaning of its handle, if the driver reused it.
    fn insert(&mut self, allocation: Allocation) -> (Id, Option<Named>) {
        self.last += 1;
        let named = Named { id: self.last, references: 1 };
        let replaced = self.by_handle.insert(allocation.handle, named);
        self.allocations.insert(self.last, allocation);
        (self.last, replaced)
    }

    fn remove_name(&mut self, handle: u64) -> Option<Id> {
        let named = self.by_handle.get_mut(&handle)?;
        let id = named.id;
        named.references -= 1;
        if named.references == 0 {
            self.by_handle.remove(&handle);
        }
        Some(id)
    }

    fn add_name(&mut self, handle: u64, id: Id) {
        let named = self.by_handle.entry(handle).or_insert(Named { id, references: 0 });
        if named.id == id {
            named.references += 1;
        }
    }

    fn add_mapping(&mut self, address: u64, mapping: Mapping) {
        if let Some(allocation) = self.allocations.get_mut(&mapping.id) {
            allocation.mappings += 1;
            self.mappings.insert(address, mapping);
        }
    }

    fn remove_mappings(&mut self, address: u64, bytes: u64) -> Vec<(u64, Mapping)> {
        let range = address..address.saturating_add(bytes);
        let addresses: Vec<u64> = self.mappings.range(range).map(|(at, _)| *at).collect();
        addresses.into_iter().filter_map(|at| Some((at, self.mappings.remove(&at)?))).collect()
    }

    /// The allocation mapped at `address`.
    fn mapped_at(&self, address: u64) -> Option<Id> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some(mapping.id)
    }

    /// Subtracts references and mappings, and removes an allocation without either.
    fn end(&mut self, id: Id, references: u64, mappings: u64) -> Option<Allocation> {
        let allocation = self.allocations.get_mut(&id)?;
        allocation.references = allocation.references.saturating_sub(references);
        allocation.mappings = allocation.mappings.saturating_sub(mappings);
        if allocation.references > 0 || allocation.mappings > 0 {
            return None;
        }
        self.allocations.remove(&id)
    }
}

/// Ends references and mappings of an allocation, and releases its bytes with the last one.
fn end(state: &State, id: Id, references: u64, mappings: u64) {
    let dead = state.handles.lock().end(id, references, mappings);
    let Some(Allocation { device, bytes, handle, library, .. }) = dead else { return };
    if let Some(account) = state.account(device) {
        account.release(rounded(bytes));
    }
    let generation = Some(id);
    Freed { device, place: handle, generation, bytes, stream: None, library }.note(state);
}

/// `cuMemCreate`. Host memory is not counted.
pub(crate) fn create(
    out: *mut u64,
    bytes: u64,
    properties: *const i32,
    caller: usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let Some(device) = device_of(properties) else { return call() };
    let request = match charge(Some(device), bytes, caller) {
        Admission::Admitted(request) => request,
        Admission::Refused(result) => return result,
        Admission::PassedOn => return call(),
    };
    let result = call();
    guarded(|| {
        if result != SUCCESS {
            request.account.release(rounded(bytes));
            return request.note_failed(result);
        }
        let handle = written(out);
        let (id, replaced) = request.state.handles.lock().insert(Allocation {
            device,
            bytes,
            handle,
            library: request.library(),
            references: 1,
            mappings: 0,
        });
        if let Some(Named { id, references }) = replaced {
            end(request.state, id, references, 0);
        }
        request.note_taken(handle, Some(id));
    });
    result
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = || {
        let state = existing()?;
        let id = state.handles.lock().remove_name(handle)?;
        Some((state, id))
    };
    around(before, call, |(state, id), result| match result {
        SUCCESS => end(state, id, 1, 0),
        _ => state.handles.lock().add_name(handle, id),
    })
}

/// `cuMemMap`.
pub(crate) fn map(
    address: u64,
    bytes: u64,
    handle: u64,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    // Added before the call, because another thread may release the handle as soon as the memory is mapped.
    let before = || {
        let state = existing()?;
        let mut handles = state.handles.lock();
        let id = handles.by_handle.get(&handle)?.id;
        let is_new = !handles.mappings.contains_key(&address);
        is_new.then(|| handles.add_mapping(address, Mapping { id, bytes }))?;
        Some((state, id))
    };
    around(before, call, |(state, id), result| {
        if result != SUCCESS {
            state.handles.lock().mappings.remove(&address);
            end(state, id, 0, 1);
        }
    })
}

/// `cuMemUnmap` for any number of mappings.
pub(crate) fn unmap(address: u64, bytes: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = || {
        let state = existing()?;
        Some((state, state.handles.lock().remove_mappings(address, bytes)))
    };
    around(before, call, |(state, mappings), result| {
        if result != SUCCESS {
            return state.handles.lock().mappings.extend(mappings);
        }
        mappings.into_iter().for_each(|(_, mapping)| end(state, mapping.id, 0, 1));
    })
}

/// `cuMemRetainAllocationHandle`: one more reference, possibly with another handle.
pub(crate) fn retain(out: *mut u64, address: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    after_success(call, || {
        let mut handles = existing()?.handles.lock();
        let id = handles.mapped_at(address)?;
        handles.allocations.get_mut(&id)?.references += 1;
        handles.add_name(written(out), id);
        Some(())
    })
}
