//! Virtual memory, simulated.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_driver::{DriverError, DriverResult, MapAccess, MemoryHandle, VirtualMemory};

use crate::detector::{HostEnd, Revoked};
use crate::device::SimDevice;
use crate::faults::Call;
use crate::memory::{Backing, BackingRange, Mapping, RegionKind};
use crate::op::Label;
use crate::state::{Physical, State};

impl SimDevice {
    fn check_granular(&self, call: Call, what: &str, value: u64) -> DriverResult<()> {
        let unit = self.properties.granularity as u64;
        if value == 0 || !value.is_multiple_of(unit) {
            return Err(call.invalid(
                format!("{what} {value:#x}"),
                format!("a multiple of the granularity, {unit:#x}"),
            ));
        }
        Ok(())
    }

    /// The mappings that make up exactly this range.
    fn exact_mappings(
        &self,
        state: &State,
        call: Call,
        ptr: u64,
        bytes: u64,
    ) -> DriverResult<Vec<(u64, Mapping)>> {
        let refuse = |accepted: &str| {
            let value = format!("the range of {bytes} bytes at {ptr:#x}");
            Err(call.invalid(value, accepted))
        };
        let region = state.space.containing(ptr);
        if let Some(region) = region {
            self.check_home(call, ptr, region.ordinal)?;
        }
        let Some(RegionKind::Reservation { mappings }) = region.map(|region| &region.kind) else {
            return refuse("a range inside a reservation of this device");
        };
        let Some(end) = ptr.checked_add(bytes) else {
            return refuse("a range inside a reservation of this device");
        };
        let found: Vec<(u64, Mapping)> =
            mappings.range(ptr..end).map(|(&at, mapping)| (at, mapping.clone())).collect();
        let mut at = ptr;
        for (start, mapping) in &found {
            if *start != at {
                break;
            }
            at += mapping.bytes;
        }
        if found.is_empty() || at != end {
            return refuse("exactly one or more whole mappings without a gap");
        }
        Ok(found)
    }

    fn check_physical<'a>(
        &self,
        state: &'a State,
        call: Call,
        memory: MemoryHandle,
    ) -> DriverResult<&'a Physical> {
        let known = state.physical.get(&memory.number()).filter(|known| !known.destroyed);
        let Some(known) = known else {
            let value = format!("{memory}, unknown or destroyed");
            return Err(call.invalid(value, "live physical memory"));
        };
        if known.ordinal != self.ordinal() {
            return Err(call.invalid(
                format!("{memory} of device {}", known.ordinal),
                format!("live physical memory of device {}", self.ordinal()),
            ));
        }
        Ok(known)
    }

    /// Reports work that may still use mappings from which `taken` revokes something.
    fn revoke(
        &self,
        state: &mut State,
        call: &'static str,
        mappings: &[(u64, Mapping)],
        taken: impl Fn(&Mapping) -> Option<Revoked>,
    ) {
        if mappings.iter().all(|(_, mapping)| taken(mapping).is_none()) {
            return;
        }
        let meta = state.meta(Label::Fixed(call), None);
        let host = Arc::clone(&state.host);
        for (at, mapping) in mappings {
            let piece = BackingRange::new(&mapping.backing, 0, mapping.bytes as usize, *at);
            if let (Some(what), Some(piece)) = (taken(mapping), piece) {
                let end = HostEnd { host: &host, meta: &meta, what };
                let notices = state.detector.end_by_host(&piece, &end);
                state.notify_races(notices);
            }
        }
    }

    /// Releases physical memory without mappings or handles.
    fn drop_physical(state: &mut State, handle: u64) {
        let idle = state.physical.get(&handle).is_some_and(|m| m.destroyed && m.mappings == 0);
        if !idle {
            return;
        }
        if let Some(memory) = state.physical.remove(&handle) {
            state.detector.forget(memory.backing.id());
            state.release_bytes(memory.ordinal, memory.bytes);
        }
    }
}

impl VirtualMemory for SimDevice {
    fn granularity(&self) -> usize {
        self.properties.granularity
    }

    fn reserve(&self, bytes: usize, align: usize) -> DriverResult<u64> {
        let call = Call::Reserve;
        let mut state = self.enter(call)?;
        self.check_granular(call, "size", bytes as u64)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(call.invalid(format!("alignment {align}"), "0 or a power of two"));
        }
        Self::cost(&mut state, |model| model.map);
        let align = align.max(self.properties.granularity) as u64;
        let start = state.space.allocate_addresses(self.ordinal(), bytes as u64, align);
        let Some(start) = start else {
            return Err(DriverError::OutOfMemory { call: call.name(), requested: bytes as u64 });
        };
        let kind = RegionKind::Reservation { mappings: BTreeMap::new() };
        state.space.insert(start, bytes as u64, bytes as u64, self.ordinal(), kind);
        Ok(start)
    }

    unsafe fn release(&self, ptr: u64, bytes: usize) -> DriverResult<()> {
        let call = Call::Release;
        let mut state = self.enter(call)?;
        if let Some(region) = state.space.containing(ptr) {
            self.check_home(call, ptr, region.ordinal)?;
        }
        let accepted = match state.space.starting_at(ptr) {
            Some(region) => match &region.kind {
                RegionKind::Reservation { .. } if region.bytes != bytes as u64 => {
                    Some(format!("the whole reservation of {} bytes", region.bytes))
                }
                RegionKind::Reservation { mappings } if !mappings.is_empty() => {
                    Some(format!("a reservation without mappings; {} remain", mappings.len()))
                }
                RegionKind::Reservation { .. } => None,
                RegionKind::Block { .. } => Some("a reservation, not a block".to_owned()),
            },
            None => Some("the start of a reservation of this device".to_owned()),
        };
        if let Some(accepted) = accepted {
            let value = format!("the range of {bytes} bytes at {ptr:#x}");
            return Err(call.invalid(value, accepted));
        }
        if let Some(region) = state.space.remove(ptr) {
            state.space.free_addresses(region.ordinal, region.start, region.span);
        }
        Ok(())
    }

    fn create(&self, bytes: usize) -> DriverResult<MemoryHandle> {
        let call = Call::Create;
        let mut state = self.enter(call)?;
        self.check_granular(call, "size", bytes as u64)?;
        Self::cost(&mut state, |model| model.map);
        state.charge_bytes(call.name(), self.ordinal(), bytes as u64)?;
        let Some(backing) = Backing::new(bytes) else {
            state.release_bytes(self.ordinal(), bytes as u64);
            return Err(DriverError::OutOfMemory { call: call.name(), requested: bytes as u64 });
        };
        let handle = state.handle();
        let memory = Physical {
            ordinal: self.ordinal(),
            bytes: bytes as u64,
            backing,
            mappings: 0,
            destroyed: false,
        };
        state.physical.insert(handle, memory);
        Ok(MemoryHandle::numbered(handle))
    }

    unsafe fn destroy(&self, memory: MemoryHandle) -> DriverResult<()> {
        let call = Call::Destroy;
        let mut state = self.enter(call)?;
        self.check_physical(&state, call, memory)?;
        if let Some(known) = state.physical.get_mut(&memory.number()) {
            known.destroyed = true;
        }
        Self::drop_physical(&mut state, memory.number());
        Ok(())
    }

    unsafe fn map(&self, ptr: u64, bytes: usize, memory: MemoryHandle) -> DriverResult<()> {
        let call = Call::Map;
        let mut state = self.enter(call)?;
        self.check_granular(call, "address", ptr)?;
        self.check_granular(call, "size", bytes as u64)?;
        let known = self.check_physical(&state, call, memory)?;
        if known.bytes != bytes as u64 {
            return Err(call.invalid(
                format!("size {bytes}"),
                format!("the whole physical memory of {} bytes", known.bytes),
            ));
        }
        let backing = Arc::clone(&known.backing);
        let value = format!("the range of {bytes} bytes at {ptr:#x}");
        let region = state.space.check(call.name(), ptr, bytes as u64)?;
        self.check_home(call, ptr, region.ordinal)?;
        let generation = state.space.generation();
        let region = state.space.containing_mut(ptr).map(|region| &mut region.kind);
        let Some(RegionKind::Reservation { mappings }) = region else {
            return Err(call.invalid(value, "a range inside a reservation of this device"));
        };
        let end = ptr + bytes as u64;
        let taken = mappings.range(..end).next_back().is_some_and(|(at, m)| at + m.bytes > ptr);
        if taken {
            return Err(call.invalid(value, "a range in which nothing is mapped"));
        }
        let access = MapAccess::None;
        let mapping =
            Mapping { generation, bytes: bytes as u64, memory: memory.number(), backing, access };
        mappings.insert(ptr, mapping);
        if let Some(known) = state.physical.get_mut(&memory.number()) {
            known.mappings += 1;
        }
        Self::cost(&mut state, |model| model.map);
        Ok(())
    }

    unsafe fn unmap(&self, ptr: u64, bytes: usize) -> DriverResult<()> {
        let call = Call::Unmap;
        let mut state = self.enter(call)?;
        let found = self.exact_mappings(&state, call, ptr, bytes as u64)?;
        Self::cost(&mut state, |model| model.map);
        self.revoke(&mut state, "unmap", &found, |_| Some(Revoked::Mapping));
        for (at, mapping) in found {
            let region = state.space.containing_mut(at).map(|region| &mut region.kind);
            if let Some(RegionKind::Reservation { mappings }) = region {
                mappings.remove(&at);
            }
            if let Some(known) = state.physical.get_mut(&mapping.memory) {
                known.mappings -= 1;
            }
            Self::drop_physical(&mut state, mapping.memory);
        }
        Ok(())
    }

    unsafe fn set_access(&self, ptr: u64, bytes: usize, access: MapAccess) -> DriverResult<()> {
        let call = Call::SetAccess;
        let mut state = self.enter(call)?;
        let found = self.exact_mappings(&state, call, ptr, bytes as u64)?;
        Self::cost(&mut state, |model| model.map);
        let lost = |mapping: &Mapping| match (mapping.access, access) {
            (MapAccess::Read | MapAccess::ReadWrite, MapAccess::None) => Some(Revoked::Access),
            (MapAccess::ReadWrite, MapAccess::Read) => Some(Revoked::Writing),
            _ => None,
        };
        self.revoke(&mut state, "set_access", &found, lost);
        for (at, mapping) in found {
            // Queued work depends on the rights it had, even if they are restored before it is analysed.
            let generation = match lost(&mapping) {
                Some(_) => state.space.generation(),
                None => mapping.generation,
            };
            let region = state.space.containing_mut(at).map(|region| &mut region.kind);
            if let Some(RegionKind::Reservation { mappings }) = region
                && let Some(mapping) = mappings.get_mut(&at)
            {
                (mapping.access, mapping.generation) = (access, generation);
            }
        }
        Ok(())
    }
}
