//! Page-locked host memory, simulated.
//!
//! The host address is that of the bytes. The device address lies in the simulated address space, so a program that confuses the two fails.
//! Host memory does not count towards the device's capacity.

#![allow(unsafe_code)]

use xlog_driver::{DriverError, DriverResult, HostAllocation, HostMemory};

use crate::device::SimDevice;
use crate::faults::Call;
use crate::memory::{BLOCK_ALIGN, Backing, Owner, RegionKind, round_up};

/// The alignment of both addresses.
const PAGE: usize = 4096;

impl HostMemory for SimDevice {
    fn alloc_host(&self, bytes: usize) -> DriverResult<HostAllocation> {
        let call = Call::AllocHost;
        let mut state = self.enter(call)?;
        Self::refuse_zero(call, bytes)?;
        Self::cost(&mut state, |model| model.alloc);
        let allocated = round_up(bytes as u64, BLOCK_ALIGN).and_then(|span| {
            // Extra space to align to a page: the system allocator would touch every page for a larger alignment.
            let backing = Backing::new(usize::try_from(span).ok()?.checked_add(PAGE)?)?;
            let (host, offset) = backing.first_multiple_of(PAGE)?;
            let device = state.space.allocate_addresses(self.ordinal(), span, PAGE as u64)?;
            let kind = RegionKind::Block { owner: Owner::Host, backing, offset };
            state.space.insert(device, bytes as u64, span, self.ordinal(), kind);
            Some(HostAllocation { host, device })
        });
        let requested = bytes as u64;
        allocated.ok_or(DriverError::OutOfHostMemory { call: call.name(), requested })
    }

    unsafe fn free_host(&self, memory: HostAllocation) -> DriverResult<()> {
        let call = Call::FreeHost;
        self.wait_for_captured()?;
        let mut state = self.enter(call)?;
        let ptr = memory.device;
        if let Some(region) = state.space.containing(ptr) {
            self.check_home(call, ptr, region.ordinal)?;
        }
        let is_known = state.space.starting_at(ptr).is_some_and(|region| {
            matches!(region.kind, RegionKind::Block { owner: Owner::Host, .. })
        });
        if !is_known {
            let value = format!("{ptr:#x}");
            return Err(call.invalid(value, "live memory of alloc_host"));
        }
        Self::cost(&mut state, |model| model.alloc);
        Self::end_block(&mut state, ptr, "free_host");
        Ok(())
    }
}
