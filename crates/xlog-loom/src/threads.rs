//! `sync::threads` for a bias, on loom: the records, their threads, and the hand-over at a thread's end.

use std::cell::Cell;

use loom::sync::Mutex;

use crate::thread_record::{NO_THREAD, ThreadRecord};

/// The number of records; record 0 stands for threads without one.
const RECORDS: u32 = 6;

loom::lazy_static! {
    static ref TABLE: Vec<ThreadRecord> = {
        let of = |id| ThreadRecord::new(if id == 0 { NO_THREAD } else { id });
        (0..RECORDS).map(of).collect()
    };
    /// Ids of unused records; the last is used first.
    static ref FREE: Mutex<Vec<u32>> = Mutex::new((1..RECORDS).rev().collect());
}

loom::thread_local! {
    static ID: Cell<u32> = Cell::new(0);
}

pub(crate) fn current() -> &'static ThreadRecord {
    &TABLE[ID.with(Cell::get) as usize]
}

pub(crate) fn current_or_new() -> Option<&'static ThreadRecord> {
    if ID.with(Cell::get) == 0 {
        let free = FREE.lock().unwrap().pop()?;
        record(free)?.is_live.store(true, loom::sync::atomic::Ordering::Relaxed);
        ID.with(|id| id.set(free));
    }
    Some(current())
}

pub(crate) fn thread_index() -> u32 {
    current_or_new().map_or(0, |record| record.id)
}

pub(crate) fn record(id: u32) -> Option<&'static ThreadRecord> {
    TABLE.get(id as usize)
}

/// Ends a thread: the next one that needs a record takes over its record.
pub(crate) fn end() {
    let id = ID.with(|id| id.replace(0));
    if let Some(record) = record(id).filter(|_| id != 0) {
        let mut free = FREE.lock().unwrap();
        record.is_live.store(false, loom::sync::atomic::Ordering::Release);
        free.push(id);
    }
}
