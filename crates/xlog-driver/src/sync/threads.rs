//! The threads of the process: a number for logs, and the record by which a thread owns biases.
//!
//! Numbers are never reused. When a thread ends, the next new thread takes over its record and the biases that the record owns. So the
//! number of records is at most the peak number of live threads.
//!
//! Inheriting biases is sound. The registry's lock orders the old thread's end before the new thread's start, so all that the old thread
//! did inside happens-before all that the new one does. The old thread was inside no bias when it returned the record. To a revoking thread
//! the two are one thread: it reads the slots of the record, and its barrier reaches all running threads.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use xlog_base::Mutex;

use super::barrier::ENTRY_SLOTS;
use super::thread_record::{NO_THREAD, ThreadRecord};

const CHUNK: usize = 32;
/// The maximum number of records. A thread beyond it has none and owns no bias.
const MAX_RECORDS: usize = 32 << 10;

/// The records by id, allocated in chunks on first use. They are never freed, so an id can be looked up without a lock.
static RECORDS: [OnceLock<Box<[ThreadRecord; CHUNK]>>; MAX_RECORDS / CHUNK] =
    [const { OnceLock::new() }; MAX_RECORDS / CHUNK];

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { free: BTreeSet::new(), next: 1 });

/// Stands in for a thread without a record: not registered yet, or ended.
static UNREGISTERED: ThreadRecord = ThreadRecord {
    id: NO_THREAD,
    nested: AtomicU32::new(0),
    slots: [const { AtomicUsize::new(0) }; ENTRY_SLOTS],
    is_live: AtomicBool::new(false),
};

struct Registry {
    /// Ids of unused records. The lowest is reused first, so that ids stay small.
    free: BTreeSet<u32>,
    /// The lowest id that was never used. 0 means no owner.
    next: u32,
}

thread_local! {
    /// Has no destructor, so that it can be read until the thread has ended.
    static CURRENT: Cell<&'static ThreadRecord> = const { Cell::new(&UNREGISTERED) };
    static NAME: Cell<u32> = const { Cell::new(0) };
    static END: End = const { End };
}

/// Returns the record when its thread ends. Code that still runs on the thread afterwards has no record and no number.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        let record = CURRENT.replace(&UNREGISTERED);
        NAME.set(0);
        // A thread that ends inside a bias keeps its record; a successor would be inside too.
        if record.id != NO_THREAD && record.is_outside() {
            let mut registry = REGISTRY.lock();
            record.is_live.store(false, Ordering::Release);
            registry.free.insert(record.id);
        }
    }
}

/// Returns a number that no other thread of the process has had; 0 if there is none.
#[inline]
pub fn thread_name() -> u32 {
    let name = NAME.get();
    if name != 0 { name } else { first_name() }
}

#[cold]
fn first_name() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    // A thread that is ending gets none.
    if END.try_with(|_| ()).is_err() {
        return 0;
    }
    let next = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
    NAME.set(next.unwrap_or(0));
    NAME.get()
}

/// Returns a small number that no other live thread has; 0 if there is none. A later thread may reuse it, and sees all that this one did.
#[inline]
pub fn thread_index() -> u32 {
    let id = CURRENT.get().id;
    if id != NO_THREAD { id } else { register().map_or(0, |record| record.id) }
}

/// The record of this thread; [`UNREGISTERED`] before its registration.
#[inline(always)]
pub(super) fn current() -> &'static ThreadRecord {
    CURRENT.get()
}

/// The record of this thread, registered if necessary. `None` for an ending thread and beyond [`MAX_RECORDS`].
pub(super) fn current_or_new() -> Option<&'static ThreadRecord> {
    let current = CURRENT.get();
    if current.id != NO_THREAD { Some(current) } else { register() }
}

#[cold]
fn register() -> Option<&'static ThreadRecord> {
    // Without a destructor run the record would never be returned.
    END.try_with(|_| ()).ok()?;
    let mut registry = REGISTRY.lock();
    let id = match registry.free.pop_first() {
        Some(id) => id,
        None if (registry.next as usize) < MAX_RECORDS => {
            registry.next += 1;
            registry.next - 1
        }
        None => return None,
    };
    let chunk = id as usize / CHUNK;
    let record = RECORDS.get(chunk)?.get_or_init(|| {
        Box::new(std::array::from_fn(|at| ThreadRecord::new((chunk * CHUNK + at) as u32)))
    });
    let record = &record[id as usize % CHUNK];
    record.is_live.store(true, Ordering::Relaxed);
    drop(registry);
    CURRENT.set(record);
    Some(record)
}

/// The record of `id`, if its chunk was allocated.
pub(super) fn record(id: u32) -> Option<&'static ThreadRecord> {
    RECORDS.get(id as usize / CHUNK)?.get()?.get(id as usize % CHUNK)
}

/// Runs `look` with the ids of unused records, while no thread registers or ends.
#[cfg(test)]
pub(super) fn while_none_starts_or_ends<R>(look: impl FnOnce(&BTreeSet<u32>) -> R) -> R {
    look(&REGISTRY.lock().free)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn threads_that_live_at_one_time_have_different_indices_and_names() {
        let all = Barrier::new(40);
        let mut taken: Vec<(u32, u32)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..40)
                .map(|_| {
                    scope.spawn(|| {
                        let taken = (thread_index(), thread_name());
                        all.wait();
                        assert_eq!(taken, (thread_index(), thread_name()));
                        taken
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
        });
        assert!(taken.iter().all(|(index, name)| *index != 0 && *name != 0));
        taken.sort_unstable();
        taken.dedup_by_key(|(index, _)| *index);
        assert_eq!(taken.len(), 40);
        taken.sort_unstable_by_key(|(_, name)| *name);
        taken.dedup_by_key(|(_, name)| *name);
        assert_eq!(taken.len(), 40);
    }

    #[test]
    fn ten_thousand_ended_threads_leave_no_more_records_than_lived_at_one_time() {
        let mut names = Vec::new();
        for _ in 0..1250 {
            std::thread::scope(|scope| {
                let take = || (thread_index(), thread_name());
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
                for thread in threads {
                    let (index, name) = thread.join().unwrap_or_default();
                    assert!(
                        index != 0 && index < 1000,
                        "record {index}: ended threads keep theirs"
                    );
                    names.push(name);
                }
            });
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 10_000, "a name was used again");
        let registry = REGISTRY.lock();
        assert!(registry.next < 1000 && registry.free.len() < 1000);
    }

    #[test]
    fn a_thread_that_is_about_to_end_has_no_record_and_no_name() {
        thread_local! {
            static LATE: Cell<Option<std::sync::mpsc::Sender<(u32, u32)>>> = const { Cell::new(None) };
            static LAST: Last = const { Last };
        }
        struct Last;
        impl Drop for Last {
            fn drop(&mut self) {
                // Whether END was dropped before depends on the system; both results must be consistent.
                if let Ok(Some(report)) = LATE.try_with(Cell::take) {
                    let _ = report.send((thread_index(), thread_name()));
                }
            }
        }
        let (report, late) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            LATE.set(Some(report));
            LAST.with(|_| ());
            (thread_index(), thread_name())
        });
        let before = thread.join().unwrap_or_default();
        assert!(before.0 != 0 && before.1 != 0);
        if let Ok(late) = late.recv() {
            assert!(late == before || late == (0, 0), "{late:?} after {before:?}");
        }
    }
}
