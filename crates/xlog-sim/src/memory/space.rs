//! The address space: blocks, reservations and mappings by address.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use xlog_driver::{DriverError, DriverResult, MapAccess, MemoryRange};

use super::{Backing, BackingRange, round_up};

/// The lowest simulated address, which hosts map only on request.
const BASE: u64 = 1 << 52;
const MACHINE_SHIFT: u32 = 48;
const ORDINAL_SHIFT: u32 = 44;
/// The number of freed blocks kept for error messages.
const REMEMBERED: usize = 4096;

/// The allocator of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    Plain,
    Pool(u64),
    /// Page-locked host memory.
    Host,
}

/// One mapping inside a reservation.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    /// Changes with every new mapping, and when access rights are revoked.
    pub(crate) generation: u64,
    pub(crate) bytes: u64,
    pub(crate) memory: u64,
    pub(crate) backing: Arc<Backing>,
    pub(crate) access: MapAccess,
}

#[derive(Debug)]
pub(crate) enum RegionKind {
    Block { owner: Owner, backing: Arc<Backing>, offset: usize },
    Reservation { mappings: BTreeMap<u64, Mapping> },
}

/// A live range of addresses.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) start: u64,
    /// The bytes that a program may touch.
    pub(crate) bytes: u64,
    /// The bytes of address space.
    pub(crate) span: u64,
    pub(crate) ordinal: u32,
    /// Distinguishes this region from an earlier one at the same address.
    pub(crate) generation: u64,
    pub(crate) kind: RegionKind,
}

/// The regions of a machine.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    machine: u64,
    regions: BTreeMap<u64, Region>,
    bump: Vec<u64>,
    spare: HashMap<(u32, u64), Vec<u64>>,
    freed: BTreeMap<u64, u64>,
    freed_order: std::collections::VecDeque<u64>,
    tags: BTreeMap<u64, (u64, Arc<str>)>,
    next_generation: u64,
}

impl AddressSpace {
    pub(crate) fn new(machine: u64, ordinals: u32) -> Self {
        Self {
            machine: machine % 4096,
            regions: BTreeMap::new(),
            bump: vec![0; ordinals as usize],
            spare: HashMap::new(),
            freed: BTreeMap::new(),
            freed_order: std::collections::VecDeque::new(),
            tags: BTreeMap::new(),
            next_generation: 1,
        }
    }

    /// Allocates unused addresses, preferably a freed range of the same size.
    pub(crate) fn allocate_addresses(
        &mut self,
        ordinal: u32,
        span: u64,
        align: u64,
    ) -> Option<u64> {
        if let Some(list) = self.spare.get_mut(&(ordinal, span))
            && let Some(i) = list.iter().rposition(|start| start.is_multiple_of(align))
        {
            return Some(list.remove(i));
        }
        let bump = self.bump.get_mut(ordinal as usize)?;
        let offset = round_up(*bump, align)?;
        let end = offset.checked_add(span)?;
        if end > 1 << ORDINAL_SHIFT {
            return None;
        }
        *bump = end;
        Some(
            BASE + (self.machine << MACHINE_SHIFT) + (u64::from(ordinal) << ORDINAL_SHIFT) + offset,
        )
    }

    pub(crate) fn free_addresses(&mut self, ordinal: u32, start: u64, span: u64) {
        self.spare.entry((ordinal, span)).or_default().push(start);
    }

    /// Returns a new number for a region or a mapping.
    pub(crate) fn generation(&mut self) -> u64 {
        let generation = self.next_generation;
        self.next_generation += 1;
        generation
    }

    /// Adds a live region.
    pub(crate) fn insert(
        &mut self,
        start: u64,
        bytes: u64,
        span: u64,
        ordinal: u32,
        kind: RegionKind,
    ) {
        let generation = self.generation();
        self.freed.remove(&start);
        self.regions.insert(start, Region { start, bytes, span, ordinal, generation, kind });
    }

    /// Removes the region that starts at `start`.
    pub(crate) fn remove(&mut self, start: u64) -> Option<Region> {
        let region = self.regions.remove(&start)?;
        if self.freed.insert(start, region.bytes).is_none() {
            self.freed_order.push_back(start);
            if self.freed_order.len() > REMEMBERED
                && let Some(oldest) = self.freed_order.pop_front()
            {
                self.freed.remove(&oldest);
            }
        }
        let tagged: Vec<u64> =
            self.tags.range(start..start + region.span).map(|(&at, _)| at).collect();
        for at in tagged {
            self.tags.remove(&at);
        }
        Some(region)
    }

    pub(crate) fn starting_at(&self, start: u64) -> Option<&Region> {
        self.regions.get(&start)
    }

    /// The region that contains `ptr`.
    pub(crate) fn containing(&self, ptr: u64) -> Option<&Region> {
        let (_, region) = self.regions.range(..=ptr).next_back()?;
        (ptr - region.start < region.span).then_some(region)
    }

    pub(crate) fn containing_mut(&mut self, ptr: u64) -> Option<&mut Region> {
        let (_, region) = self.regions.range_mut(..=ptr).next_back()?;
        (ptr - region.start < region.span).then_some(region)
    }

    /// Returns the region that contains a whole range, or an error with the reason.
    pub(crate) fn check(&self, call: &'static str, ptr: u64, bytes: u64) -> DriverResult<&Region> {
        let range = || format!("the range of {bytes} bytes at {ptr:#x}");
        match self.containing(ptr) {
            Some(region) => {
                let end = region.start + region.bytes;
                if ptr.checked_add(bytes).is_some_and(|stop| stop <= end) {
                    return Ok(region);
                }
                Err(DriverError::invalid(
                    call,
                    range(),
                    format!(
                        "a range inside its block of {} bytes at {:#x}",
                        region.bytes, region.start
                    ),
                ))
            }
            None => Err(DriverError::invalid(call, range(), self.why_unknown(ptr))),
        }
    }

    /// Describes an address that is in no live region.
    pub(crate) fn why_unknown(&self, ptr: u64) -> String {
        match self.freed.range(..=ptr).next_back() {
            Some((&start, &bytes)) if ptr - start < bytes.max(1) => {
                format!(
                    "live memory of this device: the block of {bytes} bytes at {start:#x} was freed"
                )
            }
            _ => "live memory of this device".to_owned(),
        }
    }

    /// Names a range for race reports.
    pub(crate) fn tag(&mut self, ptr: u64, bytes: u64, tag: &str) {
        self.tags.insert(ptr, (bytes, Arc::from(tag)));
    }

    pub(crate) fn tag_of(&self, ptr: u64) -> Option<Arc<str>> {
        let (&start, (bytes, tag)) = self.tags.range(..=ptr).next_back()?;
        (ptr - start < *bytes).then(|| Arc::clone(tag))
    }
}

impl Region {
    /// Returns the bytes behind a range of this region; `None` unless mappings that allow the access cover all of it.
    pub(crate) fn pieces(&self, ptr: u64, bytes: u64, writes: bool) -> Option<Vec<BackingRange>> {
        match &self.kind {
            RegionKind::Block { backing, offset, .. } => {
                let at = offset + (ptr - self.start) as usize;
                Some(vec![BackingRange::new(backing, at, bytes as usize, ptr)?])
            }
            RegionKind::Reservation { mappings } => {
                let mut pieces = Vec::new();
                let mut at = ptr;
                let end = ptr + bytes;
                while at < end {
                    let (&start, mapping) = mappings.range(..=at).next_back()?;
                    let inside = at - start;
                    let allowed = match mapping.access {
                        MapAccess::None => false,
                        MapAccess::Read => !writes,
                        MapAccess::ReadWrite => true,
                    };
                    if inside >= mapping.bytes || !allowed {
                        return None;
                    }
                    let take = (mapping.bytes - inside).min(end - at);
                    pieces.push(BackingRange::new(
                        &mapping.backing,
                        inside as usize,
                        take as usize,
                        at,
                    )?);
                    at += take;
                }
                Some(pieces)
            }
        }
    }

    /// Returns the block or the writable mapping that contains `ptr`.
    pub(crate) fn memory_at(&self, ptr: u64) -> Option<MemoryRange> {
        let (start, bytes) = match &self.kind {
            // As on CUDA, the device reaches host memory, but does not own it.
            RegionKind::Block { owner: Owner::Host, .. } => return None,
            RegionKind::Block { .. } => (self.start, self.bytes),
            RegionKind::Reservation { mappings } => {
                let (&start, mapping) = mappings.range(..=ptr).next_back()?;
                (start, if mapping.access == MapAccess::ReadWrite { mapping.bytes } else { 0 })
            }
        };
        (ptr - start < bytes).then_some(MemoryRange { start, bytes })
    }

    /// Returns the generations of the mappings behind a range; none unless all of them allow the access.
    pub(crate) fn mapped(&self, ptr: u64, bytes: u64, writes: bool) -> Vec<u64> {
        match &self.kind {
            RegionKind::Reservation { mappings } if self.pieces(ptr, bytes, writes).is_some() => {
                let first = mappings.range(..=ptr).next_back().map_or(ptr, |(&at, _)| at);
                mappings.range(first..ptr + bytes).map(|(_, m)| m.generation).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns all bytes of a block, including its rounding.
    pub(crate) fn whole(&self) -> Option<Vec<BackingRange>> {
        match &self.kind {
            RegionKind::Block { backing, offset, .. } => {
                Some(vec![BackingRange::new(backing, *offset, self.span as usize, self.start)?])
            }
            RegionKind::Reservation { .. } => None,
        }
    }
}
