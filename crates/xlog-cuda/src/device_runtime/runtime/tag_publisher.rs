//! Publishes the largest tags of each runtime in the ledger, while a viewer watches it.
//!
//! One thread of the process, which runs while a runtime is in a ledger, polls for viewers and reads the statistics only if there
//! is one. Allocations do no work for it.
//!
//! Published tags are for display only. Any failure here, also to start the thread, only means that tags are not shown.

use std::sync::Arc;
use std::time::Duration;

use xlog_base::{Mutex, MutexGuard};
use xlog_ledger::Ledger;

use crate::device_runtime::statistics::Statistics;

/// The interval of polls and publications.
const INTERVAL: Duration = Duration::from_millis(200);
/// The maximum number of published tags.
const MAX_TAGS: usize = 8;
/// Attempts to lock the list, which is held for microseconds, before a runtime works without a publisher.
const MAX_ATTEMPTS: usize = 100;

/// A runtime in a ledger.
struct TagPublisher {
    number: u64,
    ledger: Arc<Ledger>,
    statistics: Statistics,
}

struct TagPublishers {
    /// The process that they belong to.
    process: u32,
    all: Vec<TagPublisher>,
    /// The number of publishers ever made.
    made: u64,
    is_running: bool,
}

static PUBLISHERS: Mutex<TagPublishers> =
    Mutex::new(TagPublishers { process: 0, all: Vec::new(), made: 0, is_running: false });

fn publishers() -> MutexGuard<'static, TagPublishers> {
    PUBLISHERS.lock()
}

/// Locks the list of this process. A forked child inherits its parent's list, but not the thread, so it starts with an empty list.
/// `None` if the parent's thread held the lock at the fork.
fn own_publishers() -> Option<MutexGuard<'static, TagPublishers>> {
    for _ in 0..MAX_ATTEMPTS {
        let Some(mut publishers) = PUBLISHERS.try_lock() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let process = std::process::id();
        if publishers.process != process {
            (publishers.process, publishers.is_running) = (process, false);
            // A child must not leave its parent's ledgers.
            std::mem::forget(std::mem::take(&mut publishers.all));
        }
        return Some(publishers);
    }
    None
}

/// Publishes the tags of a runtime until it is dropped, which also releases the ledger.
#[must_use = "tags are told until this is dropped"]
#[derive(Debug)]
pub(super) struct PublishedTags {
    number: u64,
    process: u32,
}

impl PublishedTags {
    /// Starts to publish; `None` if that is not possible.
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
