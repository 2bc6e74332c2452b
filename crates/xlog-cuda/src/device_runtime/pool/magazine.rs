//! Magazine: free blocks of one stream, by size class, ready to be handed out again.
//!
//! A cached block keeps its node and its metadata, so handing it out again changes only its generation. The lists are
//! linked through the metadata of the blocks: nothing is copied and nothing allocated. Sizes come in 32 classes for
//! each doubling, so a freed block fits the next request of its class.

use super::arena::UNIT;
use crate::device_runtime::ordering::{BlockMeta, BlockTable};

/// The largest block that is cached. Requests up to this size are rounded up to whole classes.
pub(super) const MAX_CACHED: u64 = 4 << 20;
const BINS: usize = 321;
/// The maximum of blocks in a bin of small sizes, and in one of large sizes.
const MAX_SMALL: u32 = 64;
const MAX_LARGE: u32 = 16;
/// The first bin of large sizes.
const LARGE: usize = 64;

/// A class of sizes: the bytes of its blocks, and its bin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SizeClass {
    pub(super) bytes: u64,
    pub(super) bin: usize,
}

/// Returns the size class: one for each unit up to 32 units, then 32 for each doubling. At most 1/32 is wasted.
#[inline(always)]
pub(super) fn class_of(bytes: u64) -> SizeClass {
    let units = bytes.wrapping_add(UNIT - 1) / UNIT;
    let shift = (units | 32).ilog2() - 5;
    let steps = (units + (1 << shift) - 1) >> shift;
    SizeClass { bytes: (steps << shift) * UNIT, bin: (shift as usize) * 32 + steps as usize }
}

/// Returns the bin of a size that is a whole class; for other sizes the result is meaningless.
#[inline(always)]
fn bin_of(units: u32) -> usize {
    let shift = (units | 32).ilog2() - 5;
    (shift as usize) * 32 + (units >> shift) as usize
}

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The cached blocks of one class: the slot of the first, and their number.
#[derive(Clone, Copy, Debug)]
struct Bin {
    first: u32,
    count: u32,
}

#[derive(Debug)]
pub(super) struct Magazine {
    bins: Box<[Bin; BINS]>,
    bytes: u64,
}

impl Default for Magazine {
    fn default() -> Self {
        Self { bins: Box::new([Bin { first: NONE, count: 0 }; BINS]), bytes: 0 }
    }
}

impl Magazine {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pops the newest block of a class if it has the alignment.
    #[inline(always)]
    pub(super) fn pop<'a>(
        &mut self,
        class: SizeClass,
        align: u64,
        table: &'a BlockTable,
    ) -> Option<(u32, &'a BlockMeta)> {
        let bin = self.bins.get_mut(class.bin)?;
        let slot = bin.first;
        let meta = table.blocks.get(slot)?;
        if align > UNIT && meta.ptr() & (align - 1) != 0 {
            return None;
        }
        bin.first = meta.next();
        bin.count = bin.count.wrapping_sub(1);
        self.bytes -= class.bytes;
        Some((slot, meta))
    }

    /// Caches a block of `units` whose metadata has ended, if `capacity` bytes and its bin allow it.
    #[inline(always)]
    pub(super) fn push(&mut self, slot: u32, meta: &BlockMeta, units: u32, capacity: u64) -> bool {
        let at = bin_of(units);
        let total = self.bytes + u64::from(units) * UNIT;
        let Some(bin) = self.bins.get_mut(at) else { return false };
        let maximum = if at < LARGE { MAX_SMALL } else { MAX_LARGE };
        // `units` is 0 for a size that cannot be counted in units: it wraps and is refused.
        let is_kept = u64::from(units.wrapping_sub(1)) < MAX_CACHED / UNIT;
        if !is_kept || bin.count >= maximum || total > capacity {
            return false;
        }
        meta.set_next(bin.first);
        *bin = Bin { first: slot, count: bin.count + 1 };
        self.bytes = total;
        true
    }

    pub(super) fn drain(&mut self, table: &BlockTable, mut each: impl FnMut(u32, &BlockMeta)) {
        if self.bytes == 0 {
            return;
        }
        for bin in self.bins.iter_mut() {
            let mut slot = bin.first;
            while let Some(meta) = table.blocks.get(slot) {
                let next = meta.next();
                each(slot, meta);
                slot = next;
            }
            *bin = Bin { first: NONE, count: 0 };
        }
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_runtime::ordering::{BlockMemory, BlockOwner};
    use crate::device_runtime::resource::StreamId;

    #[test]
    fn a_block_too_large_to_be_counted_in_units_is_not_kept() {
        let table = BlockTable::new(0);
        for (bytes, is_kept) in [(1 << 40, false), (8 << 20, false), (4 << 20, true)] {
            let slot = table.allocate_slot().expect("there is room");
            let memory = BlockMemory { ptr: 1 << 20, bytes, node: 0 };
            let owner = BlockOwner { id: StreamId::DEFAULT, slot: 0, stamp: 1 };
            assert!(table.begin_at(slot, memory, owner).is_some());
            let meta = table.blocks.get(slot).expect("it was just taken");
            meta.end();
            let mut magazine = Magazine::default();
            assert_eq!(magazine.push(slot, meta, meta.units(), u64::MAX), is_kept, "{bytes}");
            assert_eq!(magazine.bytes(), if is_kept { bytes as u64 } else { 0 });
        }
    }

    #[test]
    fn a_class_holds_its_sizes_and_wastes_no_more_than_a_32nd() {
        let mut last = (0, 0);
        for units in 1..=MAX_CACHED / UNIT {
            let bytes = units * UNIT;
            let class = class_of(bytes);
            let (size, bin) = (class.bytes, class.bin);
            assert!(size >= bytes && (size - bytes) * 32 <= bytes, "{bytes} in {size}");
            assert_eq!(class_of(size), class, "a class is its own");
            assert_eq!(class_of(bytes - 1), class, "sizes are whole units");
            assert_eq!(bin_of((size / UNIT) as u32), bin, "found again when it comes back");
            assert!(bin < BINS);
            // Larger sizes never have a smaller class, and every class has one size.
            assert!(size > last.0 && bin == last.1 + 1 || (size, bin) == last, "{bytes}");
            last = (size, bin);
        }
        assert_eq!(last, (MAX_CACHED, BINS - 1));
    }
}
