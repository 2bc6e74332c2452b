//! How blocks come back: at once, after waits, or when their uses on other streams have completed.

use super::PoolResource;
use super::arena::Piece;
use crate::device_runtime::ordering::put_by::keep_first;
use crate::device_runtime::ordering::record::Record;
use crate::device_runtime::ordering::tracker::Retired;
use crate::device_runtime::ordering::tracks::Tracks;
use crate::device_runtime::resource::{DeviceBlock, Generation, ResourceResult};

impl PoolResource {
    /// Puts the memory of a retired block, which its own stream now follows all uses of, back into its arena.
    pub(super) fn put(
        &self,
        generation: Generation,
        record: &Record,
        returned: bool,
    ) -> ResourceResult<()> {
        let home = self.tracker.home(record)?;
        if let Err(error) = home.check_not_capturing("pool free") {
            if returned {
                self.count_return(record.home())?;
            }
            self.put_by.keep(generation);
            return Err(error.into());
        }
        let piece = Piece::of(generation, record);
        if let Some(observer) = &self.observer {
            let _ = observer.end_range(piece.ptr, piece.bytes as usize, home.handle());
        }
        let arena = self.arena(home.clock().key())?;
        if let Some(sanitizer) = &self.sanitizer {
            sanitizer.take_back(piece.ptr);
        }
        record.end();
        arena.with(|arena| {
            match returned {
                true => arena.counts.deallocations += 1,
                // The thread that returned the block under an open use may count it later than this one, which closed the use.
                false => arena.counts.retired = arena.counts.retired.wrapping_sub(1),
            }
            // Read inside: blocks that others put here meanwhile may leave the magazine with this stamp.
            arena.put(piece, record, home.clock().now(), self.room(), &self.tracker.table);
        });
        Ok(())
    }

    /// Puts the memory back after waits for everything outstanding on it. A failure leaves it to a reap.
    pub(super) fn put_in_order(
        &self,
        generation: Generation,
        record: &Record,
    ) -> ResourceResult<()> {
        if let Some(sanitizer) = &self.sanitizer {
            return self.keep_until_complete(sanitizer, generation, record);
        }
        let home = self.tracker.home(record)?;
        let outstanding = record.with_uses(|uses| uses.take_outstanding(&self.tracker.streams));
        if let Err(error) = self.tracker.follow_all(home, &outstanding) {
            record.with_uses(|uses| uses.put_back(outstanding));
            self.put_by.keep(generation);
            return Err(error);
        }
        self.put(generation, record, false)
    }

    pub(super) fn put_all(&self, generations: Vec<Generation>) -> ResourceResult<()> {
        let mut outcome = Ok(());
        for generation in generations {
            if let Some(record) = self.tracker.table.at(generation) {
                let this = self.put_in_order(generation, record);
                outcome = outcome.and(this);
            }
        }
        outcome
    }

    /// Puts back up to `count` of the blocks put by whose uses have completed.
    pub(super) fn put_completed(&self, count: usize) -> ResourceResult<()> {
        let mut outcome = Ok(());
        self.put_by.take_each(count, |generation| {
            let Some(record) = self.tracker.table.at(generation) else { return };
            if self.tracker.is_complete(record) || !self.put_by.put_by(generation) {
                keep_first(&mut outcome, self.put_in_order(generation, record));
            }
        });
        outcome
    }

    /// Puts back all blocks put by, with the waits that takes.
    pub(super) fn put_by_with_waits(&self) -> ResourceResult<()> {
        let mut outcome = Ok(());
        self.put_by.take_each(usize::MAX, |generation| {
            if let Some(record) = self.tracker.table.at(generation) {
                keep_first(&mut outcome, self.put_in_order(generation, record));
            }
        });
        outcome
    }

    /// A free that is not the common one.
    #[inline(never)]
    pub(super) fn give_back(&self, block: &DeviceBlock) -> ResourceResult<()> {
        let generation = block.generation;
        let record = self.tracker.table.find_block(block)?;
        self.take_from_home(record);
        // Once it is retired, the thread that closes its last use may end the record.
        let home = record.home();
        match self.tracker.retire(record, generation)? {
            Retired::Quiet if self.put_retired_at_once(generation, record) => Ok(()),
            Retired::Quiet if self.sanitizer.is_none() => self.put(generation, record, true),
            Retired::Quiet | Retired::Used => self.free_used(generation, record),
            Retired::Open => self.count_return(home),
        }
    }

    /// Frees a returned block that other streams have used.
    pub(super) fn free_used(&self, generation: Generation, record: &Record) -> ResourceResult<()> {
        self.count_return(record.home())?;
        self.free(generation, record)
    }

    pub(super) fn count_return(&self, home: u32) -> ResourceResult<()> {
        let arena = self.arena(home)?;
        arena.with(|arena| {
            arena.counts.deallocations += 1;
            arena.counts.retired = arena.counts.retired.wrapping_add(1);
        });
        Ok(())
    }
}
