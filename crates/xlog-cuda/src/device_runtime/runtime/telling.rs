//! Tags for those who look: while somebody watches a ledger, the runtimes that take part tell which of their tags hold most.
//!
//! One thread of the process, there as long as a runtime is in a ledger, asks now and then whether somebody looks, and only then
//! reads the statistics. Allocations know nothing of it. What is told is for display and decides nothing, so whatever fails here,
//! also starting the thread, means that tags are not shown.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use xlog_ledger::Ledger;

use crate::device_runtime::statistics::Statistics;

/// How often it is asked whether somebody looks, and told.
const EVERY: Duration = Duration::from_millis(200);
/// More tags than fit are not looked at.
const MOST: usize = 8;
/// How often the list is tried before a runtime does without. It is held for microseconds.
const TRIES: usize = 100;

/// A runtime in a ledger.
struct Teller {
    number: u64,
    ledger: Arc<Ledger>,
    statistics: Statistics,
}

struct Tellers {
    /// The process they are of.
    process: u32,
    all: Vec<Teller>,
    /// How many there ever were.
    made: u64,
    is_running: bool,
}

static TELLERS: Mutex<Tellers> =
    Mutex::new(Tellers { process: 0, all: Vec::new(), made: 0, is_running: false });

fn tellers() -> MutexGuard<'static, Tellers> {
    TELLERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same, of this process; `None` in a forked child whose parent's thread held the lock at that moment. It has the list of its
/// parent, and not the thread.
fn own_tellers() -> Option<MutexGuard<'static, Tellers>> {
    for _ in 0..TRIES {
        let mut tellers = match TELLERS.try_lock() {
            Ok(tellers) => tellers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
        };
        let process = std::process::id();
        if tellers.process != process {
            (tellers.process, tellers.is_running) = (process, false);
            // The parent's ledgers are not left by its child.
            std::mem::forget(std::mem::take(&mut tellers.all));
        }
        return Some(tellers);
    }
    None
}

/// Tells the tags of a runtime until it is dropped; then it holds the ledger no longer.
#[must_use = "tags are told until this is dropped"]
#[derive(Debug)]
pub(super) struct Telling {
    number: u64,
    process: u32,
}

impl Telling {
    /// `None`: tags are not told.
    pub(super) fn start(ledger: &Arc<Ledger>, statistics: &Statistics) -> Option<Self> {
        let mut tellers = own_tellers()?;
        tellers.made += 1;
        let number = tellers.made;
        let (ledger, statistics) = (ledger.clone(), statistics.clone());
        tellers.all.push(Teller { number, ledger, statistics });
        if !tellers.is_running {
            let thread = std::thread::Builder::new().name("xlog-tags".to_owned());
            tellers.is_running = thread.spawn(tell_all).is_ok();
        }
        Some(Self { number, process: tellers.process })
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if std::process::id() != self.process {
            return;
        }
        let mut tellers = tellers();
        let at = tellers.all.iter().position(|teller| teller.number == self.number);
        let gone = at.map(|at| tellers.all.swap_remove(at));
        drop(tellers);
        drop(gone);
    }
}

fn tell_all() {
    loop {
        std::thread::sleep(EVERY);
        let mut tellers = tellers();
        if tellers.all.is_empty() {
            tellers.is_running = false;
            return;
        }
        tellers.all.iter().filter(|teller| teller.ledger.is_watched()).for_each(Teller::tell);
    }
}

impl Teller {
    fn tell(&self) {
        let held = self.statistics.snapshot().by_tag;
        let held = held.iter().take(MOST);
        self.ledger.tell_tags(held.map(|(tag, usage)| (tag.0, usage.current_bytes as u64)));
    }
}
