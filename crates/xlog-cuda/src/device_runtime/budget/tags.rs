//! The indices of tags, for the whole process: charges have an index, reports the name.
//!
//! Each thread caches a few indices by the address of the tag's text; a miss looks up the shared table.

use std::cell::Cell;
use std::collections::HashMap;

use super::primitive::Mutex;
use super::quota::TagIndex;
use crate::device_runtime::resource::AllocTag;

const CACHED: usize = 8;

static NAMES: Mutex<Option<Names>> = Mutex::new(None);

#[derive(Debug, Default)]
struct Names {
    indices: HashMap<&'static str, TagIndex>,
    tags: Vec<AllocTag>,
}

#[derive(Clone, Copy)]
struct Cached {
    address: usize,
    length: usize,
    index: TagIndex,
}

thread_local! {
    static CACHE: [Cell<Cached>; CACHED] =
        const { [const { Cell::new(Cached { address: 0, length: 0, index: 0 }) }; CACHED] };
}

/// Returns the index of a tag.
#[inline(always)]
pub(super) fn index_of(tag: AllocTag) -> TagIndex {
    let (address, length) = (tag.0.as_ptr().addr(), tag.0.len());
    CACHE.with(|cache| {
        let slot = &cache[(address >> 3) % CACHED];
        let known = slot.get();
        if known.address == address && known.length == length {
            return known.index;
        }
        let index = look_up(tag);
        slot.set(Cached { address, length, index });
        index
    })
}

#[cold]
#[inline(never)]
fn look_up(tag: AllocTag) -> TagIndex {
    let mut names = NAMES.lock();
    let Names { indices, tags } = names.get_or_insert_default();
    *indices.entry(tag.0).or_insert_with(|| {
        tags.push(tag);
        (tags.len() - 1) as TagIndex
    })
}

/// Returns the tag of an index.
pub(super) fn name(index: TagIndex) -> AllocTag {
    let names = NAMES.lock();
    let known = names.as_ref().and_then(|names| names.tags.get(index as usize));
    known.copied().unwrap_or(AllocTag::UNTAGGED)
}
