//! Which physical memory is mapped where, and the steps that change it.
//!
//! Every handle that was created is in exactly one of three places until it is destroyed: among the pieces that the pool knows,
//! among those stranded at addresses that the pool does not know (an undo could not unmap them), or loose, without an address
//! (it could not be destroyed). A sweep tries again to get rid of the last two; a step that fails half way puts them there.

use std::collections::BTreeMap;

use xlog_driver::{DriverResult, MapAccess, MemoryHandle, VirtualMemory};

use super::super::super::super::resource::ResourceResult;
use super::super::{Span, to_usize};
use super::addresses::Addresses;

/// Physical memory without an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PhysicalHandle {
    pub(super) bytes: u64,
    pub(super) memory: MemoryHandle,
}

pub(super) struct State {
    pub(super) addresses: Addresses,
    /// By address. Mapped, accessible, and the pool's.
    pub(super) handles: BTreeMap<u64, PhysicalHandle>,
    stranded: Vec<(u64, PhysicalHandle)>,
    loose: Vec<PhysicalHandle>,
}

impl State {
    pub(super) fn new(addresses: Addresses) -> Self {
        Self { addresses, handles: BTreeMap::new(), stranded: Vec::new(), loose: Vec::new() }
    }

    /// The pieces that lie inside one of `idle`, in order of their addresses.
    pub(super) fn inside(&self, idle: &[Span]) -> Vec<Span> {
        let mut found: Vec<Span> = idle
            .iter()
            .flat_map(|range| {
                let handles = self.handles.range(range.ptr..range.end().max(range.ptr));
                let spans = handles.map(|(&ptr, handle)| Span { ptr, bytes: handle.bytes });
                spans.filter(|span| range.contains(*span))
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Maps `handles` one after the other at free addresses, with all rights. Pieces that it could not place are given back.
    pub(super) fn map_handles(
        &mut self,
        memory: &dyn VirtualMemory,
        handles: Vec<PhysicalHandle>,
    ) -> Result<Span, (Vec<PhysicalHandle>, xlog_driver::DriverError)> {
        let bytes = handles.iter().map(|handle| handle.bytes).sum();
        let ptr = match self.addresses.allocate(memory, bytes) {
            Ok(ptr) => ptr,
            Err(error) => return Err((handles, error)),
        };
        let mut at = ptr;
        let mut outcome = Ok(());
        let mut mapped = 0;
        for handle in &handles {
            outcome = map(memory, at, *handle);
            if outcome.is_err() {
                break;
            }
            mapped += 1;
            at += handle.bytes;
        }
        let outcome = outcome.and_then(|()| set_access(memory, ptr, bytes));
        let mut at = ptr;
        let mut unplaced = Vec::new();
        for (index, handle) in handles.iter().enumerate() {
            if outcome.is_ok() {
                self.handles.insert(at, *handle);
            } else if index < mapped && unmap(memory, at, *handle).is_err() {
                self.stranded.push((at, *handle));
            } else {
                self.addresses.free(at, handle.bytes);
                unplaced.push(*handle);
            }
            at += handle.bytes;
        }
        outcome.map(|()| Span { ptr, bytes }).map_err(|error| (unplaced, error))
    }

    /// Takes a piece from its address, which stays taken.
    ///
    /// The pool has promised that the host has seen all work on it complete.
    pub(super) fn unmap_handle(
        &mut self,
        memory: &dyn VirtualMemory,
        span: Span,
    ) -> DriverResult<PhysicalHandle> {
        let found =
            self.handles.get(&span.ptr).copied().filter(|handle| handle.bytes == span.bytes);
        let Some(handle) = found else {
            let value = format!("the range of {} bytes at {:#x}", span.bytes, span.ptr);
            return Err(xlog_driver::DriverError::invalid("unmap", value, "a piece that is held"));
        };
        unmap(memory, span.ptr, handle)?;
        self.handles.remove(&span.ptr);
        Ok(handle)
    }

    /// Puts a piece back to where it was lifted from; false when it has no address now, or none that the pool knows.
    pub(super) fn remap(
        &mut self,
        memory: &dyn VirtualMemory,
        ptr: u64,
        handle: PhysicalHandle,
    ) -> bool {
        if map(memory, ptr, handle).is_err() {
            self.addresses.free(ptr, handle.bytes);
            self.loose.push(handle);
            return false;
        }
        if set_access(memory, ptr, handle.bytes).is_err() {
            self.stranded.push((ptr, handle));
            return false;
        }
        self.handles.insert(ptr, handle);
        true
    }

    /// Gives pieces without address back to the device; answers how many bytes that were.
    pub(super) fn destroy(
        &mut self,
        memory: &dyn VirtualMemory,
        handles: impl IntoIterator<Item = PhysicalHandle>,
    ) -> (u64, ResourceResult<()>) {
        let (mut freed, mut outcome) = (0, Ok(()));
        for handle in handles {
            #[allow(unsafe_code)]
            // SAFETY: the segments own the handle, and keep it only where this fails.
            let destroyed = unsafe { memory.destroy(handle.memory) };
            match destroyed {
                Ok(()) => freed += handle.bytes,
                Err(error) => {
                    self.loose.push(handle);
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        (freed, outcome)
    }

    /// Gives back what an earlier failure left behind; answers how many bytes that were.
    pub(super) fn sweep(&mut self, memory: &dyn VirtualMemory) -> (u64, ResourceResult<()>) {
        let mut outcome = Ok(());
        for (ptr, handle) in std::mem::take(&mut self.stranded) {
            match unmap(memory, ptr, handle) {
                Ok(()) => {
                    self.addresses.free(ptr, handle.bytes);
                    self.loose.push(handle);
                }
                Err(error) => {
                    self.stranded.push((ptr, handle));
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        let loose = std::mem::take(&mut self.loose);
        let (freed, destroyed) = self.destroy(memory, loose);
        (freed, outcome.and(destroyed))
    }

    #[cfg(test)]
    pub(super) fn hidden_bytes(&self) -> u64 {
        let stranded: u64 = self.stranded.iter().map(|(_, handle)| handle.bytes).sum();
        stranded + self.loose.iter().map(|handle| handle.bytes).sum::<u64>()
    }
}

fn map(memory: &dyn VirtualMemory, ptr: u64, handle: PhysicalHandle) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the caller took these addresses from a reservation, and keeps them taken while a piece is mapped there.
    unsafe {
        memory.map(ptr, to_usize(handle.bytes), handle.memory)
    }
}

fn unmap(memory: &dyn VirtualMemory, ptr: u64, handle: PhysicalHandle) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the state says that exactly this piece is mapped here. Either nobody was told of the address, or the pool promised
    // that nobody uses it and that the host has seen all work on it complete.
    unsafe {
        memory.unmap(ptr, to_usize(handle.bytes))
    }
}

/// Gives the device all rights on mapped pieces.
fn set_access(memory: &dyn VirtualMemory, ptr: u64, bytes: u64) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the caller has just mapped pieces that make up exactly this range; no right is taken away.
    unsafe {
        memory.set_access(ptr, to_usize(bytes), MapAccess::ReadWrite)
    }
}
