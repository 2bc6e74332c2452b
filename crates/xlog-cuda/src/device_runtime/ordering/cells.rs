//! The parts of the clocks that every use looks at, close together: by the place of a stream in its pool.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::clock::ClockCell;
use super::slab::Slab;

/// Places that are found by one step.
const NEAR: usize = 64;

/// The cells of all streams of one pool.
#[derive(Debug)]
pub(crate) struct Cells {
    near: [ClockCell; NEAR],
    far: Slab<ClockCell, 64>,
}

impl Cells {
    pub(crate) fn new(places: u32) -> Arc<Self> {
        Arc::new(Self {
            near: std::array::from_fn(|_| ClockCell::default()),
            far: Slab::new(places),
        })
    }

    /// One of those that are found by one step.
    #[inline]
    pub(crate) fn near(&self, place: u32) -> Option<&ClockCell> {
        self.near.get(place as usize)
    }

    #[inline]
    pub(crate) fn get(&self, place: u32) -> Option<&ClockCell> {
        match self.near.get(place as usize) {
            Some(cell) => Some(cell),
            None => self.far.get(place),
        }
    }
}

/// The cell of one stream.
#[derive(Debug)]
pub(crate) struct CellRef {
    /// One of `cells`.
    cell: NonNull<ClockCell>,
    _cells: Arc<Cells>,
}

#[allow(unsafe_code)]
// SAFETY: it is a shared reference to a cell, which is made of atomics, and an `Arc` of cells.
unsafe impl Send for CellRef {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for CellRef {}

impl CellRef {
    /// `None` beyond the last place.
    pub(crate) fn new(cells: &Arc<Cells>, place: u32) -> Option<Self> {
        if place as usize >= NEAR {
            cells.far.make(place)?;
        }
        Some(Self { cell: NonNull::from(cells.get(place)?), _cells: Arc::clone(cells) })
    }
}

impl Deref for CellRef {
    type Target = ClockCell;

    #[inline]
    fn deref(&self) -> &ClockCell {
        #[allow(unsafe_code)]
        // SAFETY: it points to a cell of `_cells`, where cells neither move nor go away before the last `Arc` does.
        unsafe {
            self.cell.as_ref()
        }
    }
}
