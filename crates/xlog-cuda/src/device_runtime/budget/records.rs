//! What each block was charged, by the identity that the resource below gave it.
//!
//! Where no two blocks below share a place ([`DeviceMemoryResource::places_blocks`]) a record is a few plain words at that place,
//! written before the block is handed out and left there: what is read matters only if the resource below then accepts the free,
//! and it does so only for the block the record was written for. Elsewhere records are in a map.
//!
//! [`DeviceMemoryResource::places_blocks`]: crate::device_runtime::resource::DeviceMemoryResource::places_blocks

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::primitive::Mutex;
use super::tally::TagIndex;
use super::tree::ScopeIndex;
use crate::device_runtime::resource::{Generation, SLOT_BITS};

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNKS: usize = 1 << (SLOT_BITS - CHUNK_BITS);
const MAPS: usize = 16;

/// What a block costs and whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) charge: usize,
    pub(crate) tag: TagIndex,
    pub(crate) scope: ScopeIndex,
}

/// Threads have places in rows of 16. So aligned, the records of a row share no cache line with others, nor the one that is fetched
/// along with it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Entries([Entry; CHUNK]);

#[derive(Debug)]
#[repr(align(32))]
struct Entry {
    generation: AtomicU64,
    charge: AtomicU64,
    /// The tag in the low half, the scope in the high one.
    whose: AtomicU64,
}

/// The records of one budget.
#[derive(Debug)]
pub(crate) enum Records {
    Placed(Box<[Chunk; CHUNKS]>),
    Mapped(Box<[Map; MAPS]>),
}

/// Made when the first of its places is used.
type Chunk = OnceLock<Box<Entries>>;

/// Records by address and generation.
pub(crate) type Map = Mutex<HashMap<(u64, Generation), Record>>;

impl Records {
    pub(crate) fn new(placed: bool) -> Self {
        if placed {
            Self::Placed(boxed(OnceLock::new))
        } else {
            Self::Mapped(boxed(Mutex::default))
        }
    }

    /// Remembers a block that is about to be handed out.
    #[inline(always)]
    pub(crate) fn put(&self, ptr: u64, generation: Generation, record: Record) {
        match self {
            Self::Placed(chunks) => {
                let place = generation.slot() as usize;
                let chunk = chunks[(place >> CHUNK_BITS) % CHUNKS].get_or_init(new_chunk);
                let entry = &chunk.0[place % CHUNK];
                entry.charge.store(record.charge as u64, Ordering::Relaxed);
                let whose = u64::from(record.tag) | u64::from(record.scope) << 32;
                entry.whose.store(whose, Ordering::Relaxed);
                entry.generation.store(generation.0, Ordering::Release);
            }
            Self::Mapped(maps) => {
                map_of(maps, ptr).lock().insert((ptr, generation), record);
            }
        }
    }

    /// What a block was charged; `None` for one that did not come from this budget.
    #[inline(always)]
    pub(crate) fn find(&self, ptr: u64, generation: Generation) -> Option<Record> {
        match self {
            Self::Placed(chunks) => {
                let place = generation.slot() as usize;
                let entry = &chunks[(place >> CHUNK_BITS) % CHUNKS].get()?.0[place % CHUNK];
                if entry.generation.load(Ordering::Acquire) != generation.0 {
                    return None;
                }
                let whose = entry.whose.load(Ordering::Relaxed);
                Some(Record {
                    charge: entry.charge.load(Ordering::Relaxed) as usize,
                    tag: whose as u32,
                    scope: (whose >> 32) as u32,
                })
            }
            Self::Mapped(maps) => map_of(maps, ptr).lock().get(&(ptr, generation)).copied(),
        }
    }

    /// Forgets a block that was returned.
    #[inline(always)]
    pub(crate) fn forget(&self, ptr: u64, generation: Generation) {
        if let Self::Mapped(maps) = self {
            map_of(maps, ptr).lock().remove(&(ptr, generation));
        }
    }
}

#[cold]
fn new_chunk() -> Box<Entries> {
    let mut chunk = Box::<Entries>::new_uninit();
    #[allow(unsafe_code)]
    // SAFETY: the box has room for one; it is nothing but integers, of which zero is one.
    unsafe {
        chunk.as_mut_ptr().write_bytes(0, 1);
        chunk.assume_init()
    }
}

/// By way of a list: so large an array must not go over the stack.
fn boxed<T, const N: usize>(new: fn() -> T) -> Box<[T; N]> {
    let list: Box<[T]> = std::iter::repeat_with(new).take(N).collect();
    list.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| new())))
}

fn map_of(maps: &[Map; MAPS], ptr: u64) -> &Map {
    // Blocks are aligned to 256 bytes at least.
    &maps[(ptr >> 8) as usize % MAPS]
}
