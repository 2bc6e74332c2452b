//! The charge of each block, by the identity that the resource below gave it.
//!
//! If the resource below gives each live block a slot of its own ([`DeviceMemoryResource::places_blocks`]), the charge is a few
//! plain words in that slot. Otherwise charges are in a map.
//!
//! Invariant: the words are written before the block is handed out and never cleared. A reader uses them only if the resource below
//! then accepts the free, which it does only for the block that they were written for.
//!
//! It does not add charges up: that is the quotas' work.
//!
//! [`DeviceMemoryResource::places_blocks`]: crate::device_runtime::resource::DeviceMemoryResource::places_blocks

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::primitive::Mutex;
use super::tag_counts::TagIndex;
use super::tree::ScopeIndex;
use crate::device_runtime::resource::{Generation, SLOT_BITS};

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNKS: usize = 1 << (SLOT_BITS - CHUNK_BITS);
const MAPS: usize = 16;

/// The charge of a block: its bytes, its tag and its scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Charge {
    pub(crate) bytes: usize,
    pub(crate) tag: TagIndex,
    pub(crate) scope: ScopeIndex,
}

/// Slots of one chunk. Threads own slots in runs of 16, so this alignment keeps the charges of two threads out of one pair of cache
/// lines.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ChargeChunk([ChargeSlot; CHUNK]);

#[derive(Debug)]
#[repr(align(32))]
struct ChargeSlot {
    generation: AtomicU64,
    bytes: AtomicU64,
    /// The tag in the low half, the scope in the high one.
    tag_and_scope: AtomicU64,
}

/// The charges of one budget.
#[derive(Debug)]
pub(crate) enum ChargeTable {
    BySlot(Box<[Chunk; CHUNKS]>),
    ByAddress(Box<[Map; MAPS]>),
}

/// A chunk, allocated when its first slot is used.
type Chunk = OnceLock<Box<ChargeChunk>>;

/// Charges by address and generation.
pub(crate) type Map = Mutex<HashMap<(u64, Generation), Charge>>;

impl ChargeTable {
    pub(crate) fn new(by_slot: bool) -> Self {
        if by_slot {
            Self::BySlot(boxed(OnceLock::new))
        } else {
            Self::ByAddress(boxed(Mutex::default))
        }
    }

    /// Stores the charge of a block that is about to be handed out.
    #[inline(always)]
    pub(crate) fn insert(&self, ptr: u64, generation: Generation, charge: Charge) {
        match self {
            Self::BySlot(chunks) => {
                let index = generation.slot() as usize;
                let chunk = chunks[(index >> CHUNK_BITS) % CHUNKS].get_or_init(new_chunk);
                let slot = &chunk.0[index % CHUNK];
                slot.bytes.store(charge.bytes as u64, Ordering::Relaxed);
                let tag_and_scope = u64::from(charge.tag) | u64::from(charge.scope) << 32;
                slot.tag_and_scope.store(tag_and_scope, Ordering::Relaxed);
                slot.generation.store(generation.0, Ordering::Release);
            }
            Self::ByAddress(maps) => {
                map_of(maps, ptr).lock().insert((ptr, generation), charge);
            }
        }
    }

    /// Returns the charge of a block; `None` if the block did not come from this budget.
    #[inline(always)]
    pub(crate) fn find(&self, ptr: u64, generation: Generation) -> Option<Charge> {
        match self {
            Self::BySlot(chunks) => {
                let index = generation.slot() as usize;
                let slot = &chunks[(index >> CHUNK_BITS) % CHUNKS].get()?.0[index % CHUNK];
                if slot.generation.load(Ordering::Acquire) != generation.0 {
                    return None;
                }
                let tag_and_scope = slot.tag_and_scope.load(Ordering::Relaxed);
                Some(Charge {
                    bytes: slot.bytes.load(Ordering::Relaxed) as usize,
                    tag: tag_and_scope as u32,
                    scope: (tag_and_scope >> 32) as u32,
                })
            }
            Self::ByAddress(maps) => map_of(maps, ptr).lock().get(&(ptr, generation)).copied(),
        }
    }

    /// Removes the charge of a returned block.
    #[inline(always)]
    pub(crate) fn remove(&self, ptr: u64, generation: Generation) {
        if let Self::ByAddress(maps) = self {
            map_of(maps, ptr).lock().remove(&(ptr, generation));
        }
    }
}

#[cold]
fn new_chunk() -> Box<ChargeChunk> {
    let mut chunk = Box::<ChargeChunk>::new_uninit();
    #[allow(unsafe_code)]
    // SAFETY: the box has room for one; it is nothing but integers, of which zero is one.
    unsafe {
        chunk.as_mut_ptr().write_bytes(0, 1);
        chunk.assume_init()
    }
}

/// Boxes an array by way of a list: the array is too large for the stack.
fn boxed<T, const N: usize>(new: fn() -> T) -> Box<[T; N]> {
    let list: Box<[T]> = std::iter::repeat_with(new).take(N).collect();
    list.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| new())))
}

fn map_of(maps: &[Map; MAPS], ptr: u64) -> &Map {
    // Blocks are aligned to 256 bytes at least.
    &maps[(ptr >> 8) as usize % MAPS]
}
