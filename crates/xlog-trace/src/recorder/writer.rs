//! The writer thread, which empties the rings into the file.
//!
//! It polls every ring at least once per write interval, and continuously while rings fill up. A flush completes after a
//! full round that began after the request, so all records emitted before it are written. The rings are emptied even if
//! writes fail.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rtrb::Consumer;

use super::config::RecorderConfig;
use super::exit;
use super::intern;
use super::output::{LastWrite, Output};
use super::rings::RecorderShared;
use super::sampled;
use crate::names::{NameId, Names};
use crate::record::Record;
use crate::stacks::StackId;

/// Records taken from one ring before the next, which keeps concurrent records close together in the file.
const TURN_RECORDS: usize = 4096;

pub(super) struct Writer {
    shared: Arc<RecorderShared>,
    rings: Vec<Consumer<Record>>,
    names: Names,
    output: Output,
    ring_records: usize,
    interval: Duration,
}

/// Notifies waiting threads that the writer has ended, even by a panic.
struct Ending(Arc<RecorderShared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ended();
    }
}

impl Writer {
    pub(super) fn new(
        shared: Arc<RecorderShared>,
        output: Output,
        config: &RecorderConfig,
    ) -> Self {
        Self {
            shared,
            rings: Vec::new(),
            names: Names::new(),
            output,
            ring_records: config.ring_records,
            interval: config.write_interval,
        }
    }

    pub(super) fn run(mut self) {
        exit::this_thread_writes();
        let ending = Ending(Arc::clone(&self.shared));
        loop {
            let closing = self.shared.is_closing();
            let request = self.shared.requested();
            let fullest = self.empty_rings();
            if closing {
                let dropped = self.shared.stats();
                self.output.end(dropped.dropped_overflow + dropped.dropped_io);
                self.report();
            }
            self.shared.flushed(request);
            if closing {
                break;
            }
            if fullest < self.ring_records / 8 && self.shared.requested() == request {
                std::thread::park_timeout(self.interval);
            }
        }
        drop(ending);
    }

    /// Empties all rings once. Returns the largest number of records that one of them held.
    fn empty_rings(&mut self) -> usize {
        self.shared.drain_new_rings(&mut self.rings);
        // This round takes the records that are in the rings now; producers may go on.
        let mut owed: Vec<usize> = self.rings.iter().map(Consumer::slots).collect();
        let fullest = owed.iter().copied().max().unwrap_or(0);
        while owed.iter().any(|&left| left > 0) {
            for (ring, left) in self.rings.iter_mut().zip(&mut owed) {
                let count = (*left).min(TURN_RECORDS);
                *left -= count;
                let Ok(chunk) = ring.read_chunk(count) else { continue };
                let (first, second) = chunk.as_slices();
                for record in first.iter().chain(second) {
                    catch_up(&mut self.names, record);
                    self.output.record(record, &self.names);
                }
                chunk.commit_all();
                self.shared.moved_on();
            }
        }
        self.output.write_out();
        self.report();
        fullest
    }

    fn report(&mut self) {
        let counts = self.output.drain_counts();
        self.shared.written.fetch_add(counts.written, Ordering::Relaxed);
        self.shared.dropped_io.fetch_add(counts.dropped, Ordering::Relaxed);
        self.shared.left_out.fetch_add(counts.left_out, Ordering::Relaxed);
        self.shared.io_errors.fetch_add(counts.errors, Ordering::Relaxed);
        match counts.last_write {
            LastWrite::None => {}
            LastWrite::Succeeded => self.shared.set_error(None),
            LastWrite::Failed(kind, text) => self.shared.set_error(Some((kind, text))),
        }
    }
}

/// Adds new names to the writer's copy of the table.
fn catch_up(names: &mut Names, record: &Record) {
    let lost = NameId::LOST.raw();
    let known = names.len() as u32;
    let new = |id: u32| id > known && id != lost;
    let ids = [record.tag, record.error_kind, record.error_message, record.site];
    if ids.into_iter().any(new) {
        intern::catch_up(names);
    }
    if record.stack as usize > names.stack_count() && record.stack != StackId::LOST.raw() {
        sampled::catch_up(names);
    }
}
