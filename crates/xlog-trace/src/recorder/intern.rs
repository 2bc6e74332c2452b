//! The strings of this process: one table behind a small cache in every thread.
//!
//! The cache identifies a `&'static str` by its address and length, so a known tag takes no lock. The table is bounded
//! like every [`Names`], and entries are never removed.

use std::cell::Cell;
use std::panic::Location;
use std::sync::LazyLock;

use xlog_base::{Mutex, MutexGuard};

use crate::names::{NameId, Names};

static TABLE: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

const CACHE_ENTRIES: usize = 128;

thread_local! {
    static CACHE: [Cell<(usize, usize, Option<NameId>)>; CACHE_ENTRIES] =
        const { [const { Cell::new((0, 0, None)) }; CACHE_ENTRIES] };
}

pub(super) fn table() -> MutexGuard<'static, Names> {
    TABLE.lock()
}

/// Returns the number of a text, for records of this process. A known text costs a lookup in the thread's cache.
#[inline]
pub fn intern(text: &'static str) -> NameId {
    cached(text.as_ptr() as usize, text.len(), || table().intern(text))
}

/// Returns the number of the `file:line` of a source location, for records of this process. It uses the cache of [`intern`].
#[inline]
pub fn intern_site(site: &'static Location<'static>) -> NameId {
    // No text has this length, so a location is never mistaken for a text at the same address.
    cached(std::ptr::from_ref(site) as usize, usize::MAX, || name_site(site))
}

#[cold]
fn name_site(site: &Location<'_>) -> NameId {
    table().intern(&format!("{}:{}", site.file(), site.line()))
}

/// Returns the number of the text at an address, from the thread's cache or else from `name`.
#[inline(always)]
fn cached(address: usize, len: usize, name: impl Fn() -> NameId) -> NameId {
    let place = (address ^ (address >> 7) ^ len.wrapping_mul(31)) % CACHE_ENTRIES;
    CACHE
        .try_with(|cache| {
            let Some(entry) = cache.get(place) else { return name() };
            match entry.get() {
                (known, known_len, Some(id)) if known == address && known_len == len => id,
                _ => {
                    let id = name();
                    entry.set((address, len, Some(id)));
                    id
                }
            }
        })
        .unwrap_or_else(|_| name())
}

/// Returns the number of a text of any lifetime. It takes a lock, so it is for errors, not for every record.
///
/// Such texts fill at most half of the table, so that tags always have space; beyond that they are [`NameId::LOST`].
pub fn intern_text(text: &str) -> NameId {
    let mut table = table();
    match table.find(text) {
        Some(known) => known,
        None if table.is_half_full() => NameId::LOST,
        None => table.intern(text),
    }
}

/// Returns the number of a frame's text. Frames fill at most half of the table, as messages do.
pub(super) fn intern_frame(text: &str) -> NameId {
    intern_text(text)
}

/// Returns whether the table has no more space for frames.
pub(super) fn is_frame_table_full() -> bool {
    table().is_half_full()
}

/// Calls `look` with the text of a name of this process.
pub(super) fn with_text<T>(id: NameId, look: impl FnOnce(&str) -> T) -> T {
    look(table().text_or_empty(Some(id)))
}

/// Updates a copy of the table.
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

    #[cfg(unix)]
    #[test]
    #[allow(unsafe_code)]
    fn a_forked_child_can_name_texts_while_another_thread_of_its_parent_does() {
        crate::recorder::exit::at_exit(|| {});
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let held = table();
                sender.send(()).unwrap();
                // The fork begins meanwhile and waits for the table.
                std::thread::sleep(std::time::Duration::from_millis(200));
                drop(held);
            });
            receiver.recv().unwrap();
            // SAFETY: the child takes the table's lock and ends; a signal ends it if it cannot.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: neither call takes a pointer.
                unsafe { libc::alarm(120) };
                let is_named = intern("only in the child") != NameId::LOST;
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!is_named)) };
            }
            let mut status = -1;
            // SAFETY: the pointer is that of a live value.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "14 is the alarm");
        });
    }
}
