//! What a resource knows of its blocks.
//!
//! A record never moves and is used again for another block, so a stale identity finds a record and is told by its generation.
//! The place of the record is in the low bits of the generation: no map, no lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::baton::Shared;
use super::gate::{BlockGate, OwnStamps};
use super::primitive::Lock;
use super::slab::Slab;
use super::uses::Uses;
use crate::device_runtime::resource::{
    BlockId, BlockState, DeviceBlock, Generation, MIN_ALIGN, ResourceError, ResourceResult,
    StreamId,
};
use crate::device_runtime::stream_table::MAX_PLACES;
use crate::stream::RawStream;

/// Blocks a resource can have at a time.
const MAX_BLOCKS: u32 = 1 << 24;

/// One block, on one cache line: all that allocating and freeing one changes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Record {
    generation: AtomicU64,
    ptr: AtomicU64,
    stream_id: AtomicU32,
    /// The place of the allocation stream in its pool, and the bytes beyond whole units.
    home: AtomicU32,
    /// Where a sub-allocator has the block in its own books.
    node: AtomicU32,
    /// Its whole units. A size of so many that they cannot be told here is 0 units and no bytes, and stands in `Far`.
    units: AtomicU32,
    pub(crate) stamps: OwnStamps,
    pub(crate) gate: BlockGate<Far>,
}

const _: () = assert!(size_of::<Record>() == 64 && MIN_ALIGN == 1 << REST_BITS);
const _: () = assert!(MAX_PLACES <= NOWHERE);
const REST_BITS: u32 = 8;

/// What is kept of a block that is used, or is very large.
#[derive(Debug, Default)]
pub(crate) struct Far {
    /// The name of the use that was opened last through the lock, while it is open; 0 otherwise. Only a hint, except under the lock
    /// while there is a baton.
    opened: AtomicU64,
    shared: Lock<Shared>,
    bytes: AtomicU64,
}

impl Far {
    /// The lock of the block.
    #[inline(always)]
    pub(crate) fn shared(&self) -> &Lock<Shared> {
        &self.shared
    }

    /// A use of this name was opened through the lock.
    #[inline]
    pub(crate) fn set_opened(&self, name: u64) {
        self.opened.store(name, Ordering::Relaxed);
    }

    /// No use that was opened through the lock is open. Called with the lock held.
    #[inline(always)]
    pub(crate) fn set_none_opened(&self) {
        self.opened.store(0, Ordering::Relaxed);
    }

    /// True when a use of this name is open, as far as can be seen without the lock.
    #[inline(always)]
    pub(crate) fn has_opened(&self, name: u64) -> bool {
        self.opened.load(Ordering::Relaxed) == name
    }

    #[inline(always)]
    pub(crate) fn has_none_opened(&self) -> bool {
        self.has_opened(0)
    }
}

/// A use as a record has it: the stream and kind.
#[inline(always)]
pub(crate) fn use_name(id: StreamId, writes: bool) -> u64 {
    (u64::from(id.0) << 1 | u64::from(writes)) + 1
}

/// The home of a block that has none.
pub(crate) const NOWHERE: u32 = u32::MAX >> REST_BITS;

impl Record {
    #[inline]
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn ptr(&self) -> u64 {
        self.ptr.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        let rest = self.home.load(Ordering::Relaxed) as usize % MIN_ALIGN;
        match self.units.load(Ordering::Relaxed) as usize * MIN_ALIGN + rest {
            0 => self.gate.rest().map_or(0, |far| far.bytes.load(Ordering::Relaxed) as usize),
            bytes => bytes,
        }
    }

    /// Its whole units; 0 where there are too many.
    #[inline(always)]
    pub(crate) fn units(&self) -> u32 {
        self.units.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn stream_id(&self) -> u32 {
        self.stream_id.load(Ordering::Relaxed)
    }

    /// The place of the stream the block was allocated on.
    #[inline]
    pub(crate) fn home(&self) -> u32 {
        self.home.load(Ordering::Relaxed) >> REST_BITS
    }

    /// True when it is a block of a stream at this place, and has exactly so many units.
    #[inline(always)]
    pub(crate) fn is_of(&self, home: u32, units: u32) -> bool {
        self.home.load(Ordering::Relaxed) == home << REST_BITS && self.units() == units
    }

    #[inline]
    pub(crate) fn node(&self) -> u32 {
        self.node.load(Ordering::Relaxed)
    }

    /// Makes the block live, in a record that nobody else has.
    #[inline(always)]
    fn begin(
        &self,
        generation: Generation,
        ptr: u64,
        bytes: usize,
        (id, home, stamp): (u32, u32, u64),
    ) {
        self.set_memory(ptr, bytes, home);
        self.stream_id.store(id, Ordering::Relaxed);
        self.generation.store(generation.0, Ordering::Relaxed);
        self.stamps.begin(stamp);
        self.gate.begin(tag_of(generation));
    }

    /// A live block of a stream at a place, and its generation.
    #[cfg(test)]
    pub(crate) fn begun(id: StreamId, home: u32, stamp: u64) -> (Self, Generation) {
        let (record, generation) = (Self::default(), Generation::next().at(0));
        record.begin(generation, 0x1000, MIN_ALIGN, (id.0, home, stamp));
        (record, generation)
    }

    #[inline(always)]
    fn set_memory(&self, ptr: u64, bytes: usize, home: u32) {
        self.ptr.store(ptr, Ordering::Relaxed);
        let (units, rest) = (bytes / MIN_ALIGN, (bytes % MIN_ALIGN) as u32);
        if let Ok(units) = u32::try_from(units) {
            self.units.store(units, Ordering::Relaxed);
            self.home.store(home << REST_BITS | rest, Ordering::Relaxed);
        } else {
            self.set_huge(bytes, home);
        }
    }

    #[cold]
    fn set_huge(&self, bytes: usize, home: u32) {
        self.units.store(0, Ordering::Relaxed);
        self.home.store(home << REST_BITS, Ordering::Relaxed);
        self.gate.make_rest().bytes.store(bytes as u64, Ordering::Relaxed);
    }

    /// Makes another block of the same memory live, on the stream that had the last one. It belongs to the arena of that stream,
    /// see [`BlockGate::begin_at_home`].
    #[inline(always)]
    pub(crate) fn begin_again(&self, generation: Generation, id: StreamId, stamp: u64) {
        self.stream_id.store(id.0, Ordering::Relaxed);
        self.generation.store(generation.0, Ordering::Relaxed);
        self.stamps.begin(stamp);
        self.gate.begin_at_home(tag_of(generation));
    }

    /// Ends a retired block; the record stays with whoever ends it.
    #[inline]
    pub(crate) fn end(&self) {
        self.gate.end();
        self.forget();
    }

    /// The rest of it, where the gate has ended.
    #[inline(always)]
    pub(crate) fn forget(&self) {
        self.generation.store(0, Ordering::Relaxed);
    }

    /// The place that follows an ended record in the list that it is in.
    #[inline(always)]
    pub(crate) fn next(&self) -> u32 {
        self.generation.load(Ordering::Relaxed) as u32
    }

    /// Puts an ended record into a list, before that place. No block has a generation so low, so it stays ended.
    #[inline(always)]
    pub(crate) fn set_next(&self, place: u32) {
        self.generation.store(u64::from(place), Ordering::Relaxed);
    }

    /// What there is of a block that is used, made if there is not.
    #[inline(always)]
    pub(crate) fn far(&self) -> &Far {
        self.gate.make_rest()
    }

    /// A use of this name was closed.
    #[inline]
    pub(crate) fn set_closed(&self, name: u64) {
        if let Some(far) = self.gate.rest()
            && far.has_opened(name)
        {
            far.set_none_opened();
        }
    }

    /// True when a use of this name is open, as far as can be seen without the lock.
    #[inline(always)]
    pub(crate) fn has_opened(&self, name: u64) -> bool {
        self.gate.rest().is_some_and(|far| far.has_opened(name))
    }

    /// The stream of the use that is open, and whether it writes.
    pub(crate) fn opened(&self) -> Option<(StreamId, bool)> {
        let name = self.gate.rest()?.opened.load(Ordering::Relaxed).checked_sub(1)?;
        Some((StreamId((name >> 1) as u32), name & 1 != 0))
    }

    /// The lock of the block.
    #[inline(always)]
    pub(crate) fn shared(&self) -> &Lock<Shared> {
        &self.far().shared
    }

    /// Runs `body` with all uses, under the lock of the block.
    #[inline(always)]
    pub(crate) fn with_uses<R>(&self, body: impl FnOnce(&mut Uses) -> R) -> R {
        self.shared().with(|shared| body(shared.all(self)))
    }
}

/// The part of a generation that the gate of a record carries.
#[inline]
pub(crate) fn tag_of(generation: Generation) -> u32 {
    (generation.0 >> crate::device_runtime::resource::SLOT_BITS) as u32
}

/// All blocks of one resource.
#[derive(Debug)]
pub(crate) struct BlockTable {
    records: Slab<Record>,
    ordinal: u32,
}

impl BlockTable {
    pub(crate) fn new(ordinal: u32) -> Self {
        Self { records: Slab::new(MAX_BLOCKS), ordinal }
    }

    /// Makes a block live; `None` when there are too many.
    #[inline]
    pub(crate) fn begin(
        &self,
        ptr: u64,
        bytes: usize,
        home: Option<(StreamId, &RawStream)>,
    ) -> Option<Generation> {
        let (place, record) = self.records.take()?;
        let generation = Generation::next().at(place);
        let home = match home {
            Some((id, raw)) => (id.0, raw.clock().key(), raw.clock().now()),
            None => (u32::MAX, NOWHERE, 0),
        };
        record.begin(generation, ptr, bytes, home);
        Some(generation)
    }

    /// The record at a place.
    #[inline(always)]
    pub(crate) fn at_place(&self, place: u32) -> Option<&Record> {
        self.records.get(place)
    }

    /// A place for blocks of a sub-allocator that keeps records with its memory; `None` when there are too many.
    pub(crate) fn take_place(&self) -> Option<u32> {
        self.records.take().map(|(place, _)| place)
    }

    /// Up to `most` such places that were used before and are free, to be found at once.
    pub(crate) fn take_places(&self, places: &mut Vec<u32>, most: usize) {
        self.records.take_some(places, most);
    }

    pub(crate) fn give_places(&self, places: impl IntoIterator<Item = u32>) {
        self.records.give(places);
    }

    /// Makes a block live at a place that the caller has, on a stream of this id, place and stamp.
    #[inline(always)]
    pub(crate) fn begin_at(
        &self,
        place: u32,
        (ptr, bytes): (u64, usize),
        node: u32,
        (id, home, stamp): (StreamId, u32, u64),
    ) -> Option<Generation> {
        let record = self.records.get(place)?;
        let generation = Generation::next().at(place);
        record.node.store(node, Ordering::Relaxed);
        record.begin(generation, ptr, bytes, (id.0, home, stamp));
        Some(generation)
    }

    /// The same for a block that belongs to who holds the memory of its stream, which the caller does; whole units.
    #[inline]
    pub(crate) fn begin_at_home(
        &self,
        place: u32,
        (ptr, bytes): (u64, usize),
        node: u32,
        (id, home, stamp): (StreamId, u32, u64),
    ) -> Option<Generation> {
        let record = self.records.get(place)?;
        let generation = Generation::next().at(place);
        record.node.store(node, Ordering::Relaxed);
        record.set_memory(ptr, bytes, home);
        record.begin_again(generation, id, stamp);
        Some(generation)
    }

    /// The record that a claim of identity names, if it is one of this table's blocks.
    #[inline(always)]
    pub(crate) fn look(&self, block: BlockId) -> Option<&Record> {
        let record = self.records.get(block.generation.slot())?;
        let same = block.device_ordinal == self.ordinal
            && record.generation() == block.generation
            && record.ptr() == block.ptr;
        same.then_some(record)
    }

    /// The record that a claim of identity names: device, address, generation, in this order.
    #[inline]
    pub(crate) fn find(
        &self,
        ordinal: u32,
        ptr: u64,
        generation: Generation,
    ) -> ResourceResult<&Record> {
        if ordinal == self.ordinal
            && let Some(record) = self.records.get(generation.slot())
            && record.ptr() == ptr
            && record.generation() == generation
        {
            return Ok(record);
        }
        Err(self.refusal(ordinal, generation))
    }

    #[inline]
    pub(crate) fn find_id(&self, block: BlockId) -> ResourceResult<&Record> {
        self.find(block.device_ordinal, block.ptr, block.generation)
    }

    pub(crate) fn find_block(&self, block: &DeviceBlock) -> ResourceResult<&Record> {
        self.find(block.device_ordinal, block.ptr, block.generation)
    }

    #[cold]
    fn refusal(&self, ordinal: u32, generation: Generation) -> ResourceError {
        let own = self.ordinal;
        if ordinal != own {
            let text =
                format!("a block of device {ordinal} was given to a resource of device {own}");
            return ResourceError::Driver(text);
        }
        ResourceError::UseAfterFree { generation }
    }

    /// The blocks are gone; their records may serve others. Returns their bytes.
    pub(crate) fn end(&self, generations: &[Generation]) -> usize {
        let mut bytes = 0;
        for generation in generations {
            let Some(record) = self.records.get(generation.slot()) else { continue };
            bytes += record.bytes();
            record.end();
        }
        self.records.give(generations.iter().map(|generation| generation.slot()));
        bytes
    }

    pub(crate) fn at(&self, generation: Generation) -> Option<&Record> {
        self.records.get(generation.slot()).filter(|record| record.generation() == generation)
    }

    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        match self.find_id(block) {
            Ok(record) if record.gate.is_live(tag_of(block.generation)) => BlockState::Live,
            Ok(_) => BlockState::Retired,
            Err(_) => BlockState::Freed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_runtime::ordering::gate::Attempt;

    #[test]
    fn every_size_is_told_exactly_beside_every_home() {
        for home in [0, 1, 63, 64, (1 << 16) - 1, NOWHERE] {
            let record = Record::default();
            for bytes in [1, 255, 256, 257, 1000, 1 << 20, (1 << 40) - 256, (1 << 40) - 1] {
                record.set_memory(0x1000, bytes, home);
                assert_eq!((record.bytes(), record.home()), (bytes, home));
                assert_eq!(record.units() as usize, bytes / MIN_ALIGN);
                let is_whole = bytes % MIN_ALIGN == 0;
                assert_eq!(record.is_of(home, (bytes / MIN_ALIGN) as u32), is_whole);
                assert!(record.gate.rest().is_none(), "nothing is kept elsewhere for it");
            }
            // Too many units to be told in the record.
            for bytes in [1 << 40, (1 << 40) + 3, 1 << 47] {
                record.set_memory(0x1000, bytes, home);
                assert_eq!((record.bytes(), record.home(), record.units()), (bytes, home, 0));
            }
            record.set_memory(0x1000, 300, home);
            assert_eq!(record.bytes(), 300, "what is kept elsewhere is of another block");
        }
    }

    /// Opens and closes until a thread that keeps using the block would be given it, at most so often.
    fn rows(record: &Record, generation: Generation, most: usize) -> Option<usize> {
        let tag = tag_of(generation);
        (1..=most).find(|_| {
            let attempt = record.gate.open(tag, true);
            assert!(record.gate.close(tag, true, 6, &record.stamps) == Attempt::Done);
            attempt == Attempt::Again
        })
    }

    #[test]
    fn a_stale_claim_closes_no_use_of_the_next_block_at_its_place() {
        let (record, first) = Record::begun(StreamId(1), 3, 5);
        assert!(record.with_uses(|_| record.gate.retire(tag_of(first))));
        record.end();
        let next = Generation::next().at(0);
        record.begin(next, 0x1000, MIN_ALIGN, (1, 3, 5));
        for writes in [false, true] {
            assert_eq!(record.gate.open(tag_of(next), writes), Attempt::Done);
            record.with_uses(|_| {
                assert!(!record.gate.has_counted(tag_of(first), writes));
                assert!(!record.gate.close_counted(tag_of(first), writes));
                assert!(record.gate.has_counted(tag_of(next), writes), "its use was closed");
                assert!(record.gate.close_counted(tag_of(next), writes));
            });
        }
    }

    #[test]
    fn a_block_that_was_taken_from_its_thread_leaves_nothing_to_the_next_one() {
        let (record, generation) = Record::begun(StreamId(1), 3, 5);
        let needed = rows(&record, generation, 100);
        assert!(needed.is_some(), "a thread that keeps using it is given it");
        record.with_uses(|_| record.gate.grant(tag_of(generation)));
        assert!(record.gate.is_biased());
        std::thread::scope(|scope| {
            scope.spawn(|| record.with_uses(|_| record.gate.share()));
        });
        assert_eq!(rows(&record, generation, 100), None, "it is not given to one again");
        assert!(record.with_uses(|_| record.gate.retire(tag_of(generation))));
        record.end();
        // One that was at home, and one that never was.
        let next = Generation::next().at(0);
        record.begin_again(next, StreamId(1), 7);
        assert!(record.gate.is_live_at_home(tag_of(next)) && !record.gate.is_biased());
        record.gate.leave_home();
        assert_eq!(rows(&record, next, 100), needed);
        assert!(record.with_uses(|_| record.gate.retire(tag_of(next))));
        record.end();
        let last = Generation::next().at(0);
        record.begin(last, 0x1000, MIN_ALIGN, (1, 3, 9));
        assert_eq!(rows(&record, last, 100), needed);
        assert_eq!(record.opened(), None);
    }
}
