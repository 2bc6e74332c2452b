//! Blocks, their identities, and the requests for them.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_base::{Mutex, escape};

use super::{MIN_ALIGN, ResourceError, ResourceResult};

/// The id of a stream in a [`StreamPool`](crate::device_runtime::StreamPool).
///
/// [`StreamId::DEFAULT`] is a stream of every pool. A pool issues each other id for one lease; it resolves in that pool only, until
/// the stream is returned. `u32::MAX` is never issued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize)]
#[repr(transparent)]
pub struct StreamId(pub u32);

impl StreamId {
    /// The stream that every pool has.
    pub const DEFAULT: Self = Self(0);
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream id {}", self.0)
    }
}

/// A label for logs and statistics.
///
/// ```
/// use xlog_cuda::device_runtime::AllocTag;
///
/// const ROWS: AllocTag = AllocTag("rows");
/// assert_eq!(AllocTag::intern(&format!("ro{}", "ws")), ROWS);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize)]
pub struct AllocTag(pub &'static str);

impl AllocTag {
    /// The tag of allocations without a label.
    pub const UNTAGGED: Self = Self("untagged");

    /// Returns a tag with a copy of `text`. Each distinct text is kept once, for the life of the process.
    #[must_use]
    pub fn intern(text: &str) -> Self {
        static TEXTS: OnceLock<Mutex<HashSet<&'static str>>> = OnceLock::new();
        let texts = TEXTS.get_or_init(Mutex::default);
        let mut texts = texts.lock();
        if let Some(&known) = texts.get(text) {
            return Self(known);
        }
        let kept: &'static str = Box::leak(text.into());
        texts.insert(kept);
        Self(kept)
    }
}

/// Displays the label, with escapes for what would control a terminal or break the line.
impl fmt::Display for AllocTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape::line(self.0))
    }
}

/// The low `SLOT_BITS` of a generation hold the slot of the block's metadata.
pub(crate) const SLOT_BITS: u32 = 24;

/// The number of generations that a thread reserves at a time.
const RANGE: u64 = 1 << 12;

thread_local! {
    /// The next generation of this thread; a multiple of [`RANGE`] if its range is used up.
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// Distinguishes successive blocks at one address; unique in the process, and increasing within a thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// Returns a new generation. Each thread reserves ranges, so threads do not contend for one counter.
    #[inline(always)]
    #[must_use]
    pub fn next() -> Self {
        // `LocalKey::set` compiles to a call.
        let next = NEXT.with(Cell::get);
        if next.is_multiple_of(RANGE) {
            return Self::first_of_range();
        }
        NEXT.with(|cell| cell.set(next + 1));
        Self(next << SLOT_BITS)
    }

    #[cold]
    #[inline(never)]
    fn first_of_range() -> Self {
        // Starts at the second range, so that every generation is greater than every slot number.
        static RANGES: AtomicU64 = AtomicU64::new(RANGE);
        let begin = RANGES.fetch_add(RANGE, Ordering::Relaxed);
        // The first number of a range means that the range is used up, so no generation has it.
        NEXT.set(begin + 2);
        Self((begin + 1) << SLOT_BITS)
    }

    /// Adds a slot.
    pub(crate) fn at(self, slot: u32) -> Self {
        Self(self.0 | u64::from(slot))
    }

    pub(crate) fn slot(self) -> u32 {
        (self.0 & ((1 << SLOT_BITS) - 1)) as u32
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {:#x}", self.0)
    }
}

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum BlockState {
    /// Allocated.
    Live,
    /// Given to `deallocate`; its free has not completed.
    Retired,
    /// Given to `deallocate`; a guard delays the free.
    Quarantined,
    /// Freed, or not a block of the resource.
    Freed,
}

/// One outstanding allocation, owned by the caller until it is given to `deallocate`.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a block that is dropped is never freed; give it to deallocate"]
pub struct DeviceBlock {
    /// The device address.
    pub ptr: u64,
    /// The ordinal of the device.
    pub device_ordinal: u32,
    /// The stream it was allocated on and is freed on.
    pub alloc_stream: StreamId,
    /// Its size; at least that of the request.
    pub bytes: usize,
    /// Its alignment; at least 256.
    pub align: usize,
    /// Its label.
    pub tag: AllocTag,
    /// Distinguishes the block from others at its address.
    pub generation: Generation,
    /// Its state at allocation.
    pub state: BlockState,
}

impl DeviceBlock {
    /// Returns a live block, with the largest alignment that its address has, up to 2 MiB.
    #[inline(always)]
    pub(crate) fn live(
        ptr: u64,
        bytes: usize,
        device_ordinal: u32,
        alloc_stream: StreamId,
        tag: AllocTag,
        generation: Generation,
    ) -> Self {
        // The lowest set bit of the address, at most 2 MiB.
        let address = ptr | 2 << 20;
        let align = ((address & address.wrapping_neg()) as usize).max(MIN_ALIGN);
        let state = BlockState::Live;
        Self { ptr, device_ordinal, alloc_stream, bytes, align, tag, generation, state }
    }
}

/// A request for memory, for [`allocate_request`](super::DeviceMemoryResource::allocate_request).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct AllocRequest {
    /// The minimum size.
    pub bytes: usize,
    /// The minimum alignment, a power of two. Blocks have at least [`MIN_ALIGN`].
    pub align: usize,
    /// The stream it is ordered on.
    pub stream: StreamId,
    /// Its label.
    pub tag: AllocTag,
    /// Whether every use will be prepared, on the allocation stream too. The memory may then have pending work: the first prepare waits
    /// for it.
    pub is_tracked: bool,
}

impl AllocRequest {
    /// Returns the request that [`allocate`](super::DeviceMemoryResource::allocate) makes.
    #[must_use]
    #[inline]
    pub fn new(bytes: usize, stream: StreamId, tag: AllocTag) -> Self {
        Self { bytes, align: MIN_ALIGN, stream, tag, is_tracked: false }
    }

    /// Sets the alignment.
    #[must_use]
    pub fn aligned(self, align: usize) -> Self {
        Self { align, ..self }
    }

    /// Sets [`is_tracked`](Self::is_tracked).
    #[must_use]
    pub fn tracked(self) -> Self {
        Self { is_tracked: true, ..self }
    }

    pub(crate) fn check_align(&self) -> ResourceResult<()> {
        if self.align.is_power_of_two() {
            return Ok(());
        }
        Err(ResourceError::invalid(format!("alignment {}", self.align), "a power of two"))
    }
}

/// The identity of a block, which outlives the block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockId {
    /// The device address.
    pub ptr: u64,
    /// Distinguishes the block from others at its address.
    pub generation: Generation,
    /// The stream it was allocated on.
    pub alloc_stream: StreamId,
    /// The device.
    pub device_ordinal: u32,
}

impl BlockId {
    /// Returns the identity of a block.
    #[must_use]
    pub fn from_block(block: &DeviceBlock) -> Self {
        Self {
            ptr: block.ptr,
            generation: block.generation,
            alloc_stream: block.alloc_stream,
            device_ordinal: block.device_ordinal,
        }
    }
}

impl From<&DeviceBlock> for BlockId {
    fn from(block: &DeviceBlock) -> Self {
        Self::from_block(block)
    }
}
