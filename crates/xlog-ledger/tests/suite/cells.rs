//! Shared memory of the multi-process test: eight numbers per process, in a file that all read and write in place.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const WORKERS: usize = 8;
/// The row of the process that watches.
pub(crate) const MONITOR: usize = WORKERS;
const FIELDS: usize = 8;

/// Commands, in the low byte; the rest is a number that makes each command another.
pub(crate) const RUN: u64 = 0;
pub(crate) const PAUSE: u64 = 1;
pub(crate) const HOLD: u64 = 2;
pub(crate) const QUIT: u64 = 3;

/// The columns of a worker's row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Field {
    /// What the process really holds: units in the low half, the number of changes in the high half.
    Truth = 0,
    /// What it is told to do.
    Command = 1,
    /// The command it has seen last.
    Answer = 2,
    /// Not 0 once it is sentenced: what it holds ends with it.
    Doomed = 3,
    /// Takes and gives tried.
    Steps = 4,
    /// Takes refused because they did not fit.
    Refused = 5,
    /// Calls refused because the file lock was held.
    Busy = 6,
    /// At least its quota, in units plus one, 0 if it has none; in the high half the number of changes.
    Quota = 7,
}

/// The columns of the monitor's row.
pub(crate) const SAMPLES: Field = Field::Steps;
pub(crate) const VIOLATIONS: Field = Field::Refused;
pub(crate) const HIGHEST: Field = Field::Busy;

pub(crate) struct Cells(File);

impl Cells {
    pub(crate) fn create(path: &Path) -> Self {
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.write_all_at(&[0; (WORKERS + 1) * FIELDS * 8], 0).unwrap();
        Self(file)
    }

    pub(crate) fn open(path: &Path) -> Self {
        Self(OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    pub(crate) fn load(&self, row: usize, field: Field) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, Self::offset(row, field)).unwrap();
        u64::from_le_bytes(bytes)
    }

    pub(crate) fn store(&self, row: usize, field: Field, value: u64) {
        self.0.write_all_at(&value.to_le_bytes(), Self::offset(row, field)).unwrap();
    }

    /// Adds to a cell that no other process writes.
    pub(crate) fn add(&self, row: usize, field: Field, value: u64) {
        self.store(row, field, self.load(row, field) + value);
    }

    /// The units a worker really holds.
    pub(crate) fn units(&self, row: usize) -> u64 {
        self.load(row, Field::Truth) & u64::from(u32::MAX)
    }

    fn offset(row: usize, field: Field) -> u64 {
        ((row * FIELDS + field as usize) * 8) as u64
    }
}

/// What a worker really holds, published after a take and before a give.
pub(crate) struct Truth<'a> {
    cells: &'a Cells,
    row: usize,
    units: u64,
    changes: u64,
}

impl<'a> Truth<'a> {
    pub(crate) fn new(cells: &'a Cells, row: usize) -> Self {
        Self { cells, row, units: 0, changes: cells.load(row, Field::Truth) >> 32 }
    }

    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    pub(crate) fn set(&mut self, units: u64) {
        self.units = units;
        self.changes = (self.changes + 1) & u64::from(u32::MAX);
        self.cells.store(self.row, Field::Truth, self.changes << 32 | self.units);
    }
}
