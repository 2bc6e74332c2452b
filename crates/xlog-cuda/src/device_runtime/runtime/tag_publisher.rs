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
const INTERVAL: Duration = Duration::from_millis(200);
/// More tags than fit are not looked at.
const MAX_TAGS: usize = 8;
/// How often the list is tried before a runtime does without. It is held for microseconds.
const MAX_ATTEMPTS: usize = 100;

/// A runtime in a ledger.
struct TagPublisher {
    number: u64,
    ledger: Arc<Ledger>,
    statistics: Statistics,
}

struct TagPublishers {
    /// The process they are of.
    process: u32,
    all: Vec<TagPublisher>,
    /// How many there ever were.
    made: u64,
    is_running: bool,
}

static PUBLISHERS: Mutex<TagPublishers> =
    Mutex::new(TagPublishers { process: 0, all: Vec::new(), made: 0, is_running: false });

fn publishers() -> MutexGuard<'static, TagPublishers> {
    PUBLISHERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same, of this process; `None` in a forked child whose parent's thread held the lock at that moment. It has the list of its
/// parent, and not the thread.
fn own_publishers() -> Option<MutexGuard<'static, TagPublishers>> {
    for _ in 0..MAX_ATTEMPTS {
        let mut publishers = match PUBLISHERS.try_lock() {
            Ok(publishers) => publishers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
        };
        let process = std::process::id();
        if publishers.process != process {
            (publishers.process, publishers.is_running) = (process, false);
            // The parent's ledgers are not left by its child.
            std::mem::forget(std::mem::take(&mut publishers.all));
        }
        return Some(publishers);
    }
    None
}

/// Tells the tags of a runtime until it is dropped; then it holds the ledger no longer.
#[must_use = "tags are told until this is dropped"]
#[derive(Debug)]
pub(super) struct PublishedTags {
    number: u64,
    process: u32,
}

impl PublishedTags {
    /// `None`: tags are not told.
    pub(super) fn start(ledger: &Arc<Ledger>, statistics: &Statistics) -> Option<Self> {
        let mut publishers = own_publishers()?;
        publishers.made += 1;
        let number = publishers.made;
        let (ledger, statistics) = (ledger.clone(), statistics.clone());
        publishers.all.push(TagPublisher { number, ledger, statistics });
        if !publishers.is_running {
            let thread = std::thread::Builder::new().name("xlog-tags".to_owned());
            publishers.is_running = thread.spawn(publish_all).is_ok();
        }
        Some(Self { number, process: publishers.process })
    }
}

impl Drop for PublishedTags {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if std::process::id() != self.process {
            return;
        }
        let mut publishers = publishers();
        let at = publishers.all.iter().position(|publisher| publisher.number == self.number);
        let gone = at.map(|at| publishers.all.swap_remove(at));
        drop(publishers);
        drop(gone);
    }
}

fn publish_all() {
    loop {
        std::thread::sleep(INTERVAL);
        let mut publishers = publishers();
        if publishers.all.is_empty() {
            publishers.is_running = false;
            return;
        }
        publishers
            .all
            .iter()
            .filter(|publisher| publisher.ledger.is_watched())
            .for_each(TagPublisher::publish);
    }
}

impl TagPublisher {
    fn publish(&self) {
        let held = self.statistics.snapshot().by_tag;
        let held = held.iter().take(MAX_TAGS);
        self.ledger.publish_tags(held.map(|(tag, usage)| (tag.0, usage.current_bytes as u64)));
    }
}
