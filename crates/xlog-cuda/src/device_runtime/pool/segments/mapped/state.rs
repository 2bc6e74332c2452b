//! State of the mappings, and the operations that change it.
//!
//! Invariant: until it is destroyed, every handle is in exactly one of three sets:
//! - `handles`: mapped, and known to the pool;
//! - `stranded`: mapped at addresses unknown to the pool, because an undo could not unmap it;
//! - `loose`: without an address, because it could not be destroyed.
//!
//! A sweep retries to unmap and destroy the last two. A handle in `handles` may also be mapped at addresses in `stale`.

use std::collections::{BTreeMap, HashSet};

use xlog_driver::{DriverError, DriverResult, MapAccess, MemoryHandle, VirtualMemory};

use super::super::super::super::resource::ResourceResult;
use super::super::{FreeMemory, LastWork, Span, coalesce, to_usize};
use super::addresses::Addresses;
use super::plan::{Need, Piece, Plan, plan};

/// Physical memory without an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PhysicalHandle {
    pub(super) bytes: u64,
    pub(super) memory: MemoryHandle,
}

/// The old mapping of a handle that is mapped elsewhere now.
#[derive(Clone, Copy, Debug)]
struct StaleMapping {
    span: Span,
    memory: MemoryHandle,
    /// Pending work at these addresses; `None` if there is none.
    last_work: Option<LastWork>,
}

pub(super) struct State {
    pub(super) addresses: Addresses,
    /// Mapped and accessible handles that the pool knows, by address.
    pub(super) handles: BTreeMap<u64, PhysicalHandle>,
    stale: Vec<StaleMapping>,
    stranded: Vec<(u64, PhysicalHandle)>,
    loose: Vec<PhysicalHandle>,
}

impl State {
    pub(super) fn new(addresses: Addresses) -> Self {
        let handles = BTreeMap::new();
        Self { addresses, handles, stale: Vec::new(), stranded: Vec::new(), loose: Vec::new() }
    }

    /// Returns the handles inside one of `idle`, by address.
    pub(super) fn inside(&self, idle: &[Span]) -> Vec<Span> {
        // Most free ranges are smaller than any handle.
        let granularity = self.addresses.granularity();
        let mut found: Vec<Span> = idle
            .iter()
            .filter(|range| range.bytes >= granularity)
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

    /// Plans a request over free memory and the unmapped addresses.
    pub(super) fn plan(&self, free: FreeMemory<'_>, need: Need) -> Option<Plan> {
        let handles = match need.max_moved {
            0 => Vec::new(),
            _ if free.pending.is_empty() => self.inside(free.idle),
            _ => self.inside(&coalesce([free.idle, free.pending].concat())),
        };
        plan(&self.pieces(free), &handles, need)
    }

    /// Returns the handles inside one of `idle` that have no second mapping, by address. Only they can be returned.
    pub(super) fn returnable(&self, idle: &[Span]) -> Vec<Span> {
        let mut found = self.inside(idle);
        let stale: HashSet<MemoryHandle> =
            self.stale.iter().map(|mapping| mapping.memory).collect();
        if !stale.is_empty() {
            found.retain(|span| {
                self.handles.get(&span.ptr).is_some_and(|handle| !stale.contains(&handle.memory))
            });
        }
        found
    }

    /// Lists free memory and unmapped addresses, by address.
    fn pieces(&self, free: FreeMemory<'_>) -> Vec<Piece> {
        let mapped = free.idle.iter().chain(free.pending);
        let mapped = mapped.map(|&span| Piece { span, is_mapped: true });
        let gaps = self.addresses.gaps().map(|span| Piece { span, is_mapped: false });
        let mut pieces: Vec<Piece> = mapped.chain(gaps).collect();
        // A stable sort merges the sorted runs.
        pieces.sort_by_key(|piece| piece.span.ptr);
        pieces
    }

    /// Maps `handles` in sequence at free addresses, with access. An error returns the handles that were not mapped.
    pub(super) fn map_handles(
        &mut self,
        memory: &dyn VirtualMemory,
        handles: Vec<PhysicalHandle>,
    ) -> Result<Span, (Vec<PhysicalHandle>, DriverError)> {
        let bytes = handles.iter().map(|handle| handle.bytes).sum();
        match self.addresses.allocate(memory, bytes) {
            Ok(ptr) => self.map_at(memory, ptr, handles),
            Err(error) => Err((handles, error)),
        }
    }

    /// Maps `handles` in sequence at `ptr`, with access. The addresses are allocated. An error frees them and returns the
    /// handles that were not mapped.
    pub(super) fn map_at(
        &mut self,
        memory: &dyn VirtualMemory,
        ptr: u64,
        handles: Vec<PhysicalHandle>,
    ) -> Result<Span, (Vec<PhysicalHandle>, DriverError)> {
        let bytes = handles.iter().map(|handle| handle.bytes).sum();
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

    /// Undoes [`Self::map_at`] before the pool knows the handles, and returns those that are unmapped.
    pub(super) fn unmap_at(
        &mut self,
        memory: &dyn VirtualMemory,
        span: Span,
    ) -> Vec<PhysicalHandle> {
        let mut unplaced = Vec::new();
        for inside in self.inside(&[span]) {
            let Some(handle) = self.handles.remove(&inside.ptr) else { continue };
            if unmap(memory, inside.ptr, handle).is_err() {
                self.stranded.push((inside.ptr, handle));
            } else {
                self.addresses.free(inside.ptr, inside.bytes);
                unplaced.push(handle);
            }
        }
        unplaced
    }

    /// Unmaps a handle on which the host has seen all work complete. Its addresses stay allocated.
    pub(super) fn unmap_handle(
        &mut self,
        memory: &dyn VirtualMemory,
        span: Span,
    ) -> DriverResult<PhysicalHandle> {
        let handle = self.handle_at(span)?;
        unmap(memory, span.ptr, handle)?;
        self.handles.remove(&span.ptr);
        Ok(handle)
    }

    /// Returns the handle at exactly these addresses.
    pub(super) fn handle_at(&self, span: Span) -> DriverResult<PhysicalHandle> {
        let found =
            self.handles.get(&span.ptr).copied().filter(|handle| handle.bytes == span.bytes);
        found.ok_or_else(|| {
            let value = format!("the range of {} bytes at {:#x}", span.bytes, span.ptr);
            DriverError::invalid("unmap", value, "a piece that is held")
        })
    }

    /// Forgets the old address of a handle that is mapped elsewhere now. [`Self::unmap_stale`] unmaps it.
    pub(super) fn leave(&mut self, old: Span, last_work: Option<LastWork>) {
        if let Some(handle) = self.handles.remove(&old.ptr) {
            self.stale.push(StaleMapping { span: old, memory: handle.memory, last_work });
        }
    }

    /// Notes that stranded handles among `kept` are also mapped where the pool knows them: a sweep must not destroy them.
    pub(super) fn keep(&mut self, kept: &[PhysicalHandle]) {
        for (ptr, handle) in self.stranded.extract_if(.., |(_, handle)| kept.contains(handle)) {
            let span = Span { ptr, bytes: handle.bytes };
            self.stale.push(StaleMapping { span, memory: handle.memory, last_work: None });
        }
    }

    /// Unmaps at most `most` stale mappings, without pending work and the oldest first. One that the driver refuses is kept for the
    /// next call.
    pub(super) fn unmap_stale(
        &mut self,
        memory: &dyn VirtualMemory,
        mut most: usize,
        is_complete: &dyn Fn(LastWork) -> bool,
    ) {
        let Self { stale, addresses, .. } = self;
        stale.retain(|StaleMapping { span, last_work, memory: handle }| {
            let handle = PhysicalHandle { bytes: span.bytes, memory: *handle };
            let is_unmapped = most > 0
                && last_work.is_none_or(is_complete)
                && unmap(memory, span.ptr, handle).is_ok();
            if is_unmapped {
                addresses.free(span.ptr, span.bytes);
                most -= 1;
            }
            !is_unmapped
        });
    }

    /// Destroys unmapped handles; returns the number of released bytes.
    pub(super) fn destroy(
        &mut self,
        memory: &dyn VirtualMemory,
        handles: impl IntoIterator<Item = PhysicalHandle>,
    ) -> (u64, ResourceResult<()>) {
        let (mut freed, mut outcome) = (0, Ok(()));
        for handle in handles {
            #[allow(unsafe_code)]
            // SAFETY: the segments own the handle, and keep it only if this fails.
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

    /// Unmaps and destroys what an earlier failure left behind; returns the number of released bytes.
    pub(super) fn sweep(&mut self, memory: &dyn VirtualMemory) -> (u64, ResourceResult<()>) {
        self.unmap_stale(memory, usize::MAX, &|_| false);
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
    // SAFETY: the caller allocated these addresses from a reservation, and keeps them allocated while a handle is
    // mapped there.
    unsafe {
        memory.map(ptr, to_usize(handle.bytes), handle.memory)
    }
}

fn unmap(memory: &dyn VirtualMemory, ptr: u64, handle: PhysicalHandle) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the state says that exactly this handle is mapped here. Either the address was never published, or the
    // pool promised that no block lies there and that the host has seen all work on it complete.
    unsafe {
        memory.unmap(ptr, to_usize(handle.bytes))
    }
}

fn set_access(memory: &dyn VirtualMemory, ptr: u64, bytes: u64) -> DriverResult<()> {
    #[allow(unsafe_code)]
    // SAFETY: the caller has just mapped handles that make up exactly this range; no right is taken away.
    unsafe {
        memory.set_access(ptr, to_usize(bytes), MapAccess::ReadWrite)
    }
}
