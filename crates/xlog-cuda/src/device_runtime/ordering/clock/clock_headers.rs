//! Clock headers of all streams of a pool, packed by stream slot.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::stream_clock::ClockHeader;
use crate::device_runtime::ordering::block::slab::Slab;

/// The number of inline headers, which need no second load.
const INLINE: usize = 64;

/// The clock headers of all streams of one pool.
#[derive(Debug)]
pub(crate) struct ClockHeaders {
    /// The headers of the first slots.
    pub(crate) inline: [ClockHeader; INLINE],
    overflow: Slab<ClockHeader, 64>,
}

impl ClockHeaders {
    pub(crate) fn new(slots: u32) -> Arc<Self> {
        Arc::new(Self {
            inline: std::array::from_fn(|_| ClockHeader::default()),
            overflow: Slab::new(slots),
        })
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&ClockHeader> {
        match self.inline.get(slot as usize) {
            Some(header) => Some(header),
            None => self.overflow.get(slot),
        }
    }
}

/// A reference to the header of one stream.
#[derive(Debug)]
pub(crate) struct ClockHeaderRef {
    /// A header of `_headers`.
    header: NonNull<ClockHeader>,
    _headers: Arc<ClockHeaders>,
}

#[allow(unsafe_code)]
// SAFETY: a shared reference to a header, which consists of atomics, and an `Arc` of the headers.
unsafe impl Send for ClockHeaderRef {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for ClockHeaderRef {}

impl ClockHeaderRef {
    /// `None` beyond the last slot.
    pub(crate) fn new(headers: &Arc<ClockHeaders>, slot: u32) -> Option<Self> {
        if slot as usize >= INLINE {
            headers.overflow.get_or_make(slot)?;
        }
        Some(Self { header: NonNull::from(headers.get(slot)?), _headers: Arc::clone(headers) })
    }
}

impl Deref for ClockHeaderRef {
    type Target = ClockHeader;

    #[inline]
    fn deref(&self) -> &ClockHeader {
        #[allow(unsafe_code)]
        // SAFETY: it points to a header of `_headers`, where headers neither move nor end before the last `Arc` does.
        unsafe {
            self.header.as_ref()
        }
    }
}
