//! The strings of this process: one table, and a small cache in every thread in front of it.
//!
//! A `&'static str` is known by its address and length, so that a thread which has met a tag
//! before takes no lock for it. The table is bounded like every [`Names`]; nothing leaves it.

use std::cell::Cell;
use std::sync::LazyLock;

use xlog_base::{Mutex, MutexGuard};

use crate::names::{NameId, Names};

static TABLE: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

const CACHE_ENTRIES: usize = 128;

thread_local! {
    static CACHE: [Cell<(usize, usize, Option<NameId>)>; CACHE_ENTRIES] =
        const { [const { Cell::new((0, 0, None)) }; CACHE_ENTRIES] };
}

fn table() -> MutexGuard<'static, Names> {
    TABLE.lock()
}

/// Returns the number of a text, for records of this process. A known text costs a lookup in the thread's cache.
#[inline]
pub fn intern(text: &'static str) -> NameId {
    let (address, len) = (text.as_ptr() as usize, text.len());
    let place = (address ^ (address >> 7) ^ len.wrapping_mul(31)) % CACHE_ENTRIES;
    CACHE
        .try_with(|cache| {
            let Some(entry) = cache.get(place) else { return table().intern(text) };
            match entry.get() {
                (known, known_len, Some(id)) if known == address && known_len == len => id,
                _ => {
                    let id = table().intern(text);
                    entry.set((address, len, Some(id)));
                    id
                }
            }
        })
        .unwrap_or_else(|_| table().intern(text))
}

/// The number of a text of any lifetime. Takes a lock: for errors, not for every record.
///
/// Such texts fill at most half of the table, so that messages with numbers in them leave room for
/// tags; beyond that they are [`NameId::LOST`].
pub fn intern_text(text: &str) -> NameId {
    let mut table = table();
    match table.find(text) {
        Some(known) => known,
        None if table.is_half_full() => NameId::LOST,
        None => table.intern(text),
    }
}

/// Brings a copy of the table up to date.
pub(super) fn catch_up(names: &mut Names) {
    for text in table().since(names.len()) {
        names.intern(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_at_different_addresses_are_one_name() {
        let leaked: &'static str = String::from("interned twice").leak();
        let first = intern("interned twice");
        assert_eq!(first, intern(leaked));
        assert_eq!(first, intern("interned twice"));
        assert_ne!(first, intern(&leaked[..8]));
        let mut copy = Names::new();
        catch_up(&mut copy);
        assert_eq!(copy.text(first), Some("interned twice"));
    }
}
