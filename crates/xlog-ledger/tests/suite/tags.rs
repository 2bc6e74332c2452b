//! Tags for those who look: whole, of the living owner, and nobody's business when nobody looks.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use xlog_ledger::{Ledger, LedgerView, Snapshot};

use crate::support::TestDirectory;

fn told(snapshot: &Snapshot, slot: u32) -> Option<Vec<(String, u64)>> {
    let slot = snapshot.slots.iter().find(|one| one.index == slot)?;
    let tags = &slot.tags.as_ref()?.tags;
    Some(tags.iter().map(|one| (one.tag.clone(), one.bytes)).collect())
}

fn seen(ledger: &Ledger) -> Option<Vec<(String, u64)>> {
    told(&LedgerView::open(ledger.path()).unwrap().snapshot().unwrap(), ledger.slot())
}

#[test]
fn a_ledger_is_watched_as_long_as_one_of_those_who_look_is_there() {
    let directory = TestDirectory::new();
    let (one, other) = (directory.open(100), directory.open(100));
    let view = || LedgerView::open(directory.ledger_path()).unwrap();
    let idle = view();
    assert!(!one.is_watched() && !other.is_watched(), "looking once is not watching");
    let (first, second) = (view(), view());
    first.watch().unwrap();
    second.watch().unwrap();
    assert!(one.is_watched() && other.is_watched());
    drop(first);
    assert!(one.is_watched());
    // Whoever watches is in nobody's way.
    one.charge(100).unwrap();
    other.set_limit(1 << 20).unwrap();
    let third = directory.open(100);
    drop(second);
    assert!(!one.is_watched() && !third.is_watched());
    drop(idle);
}

#[test]
fn tags_go_with_their_owner_and_are_not_those_of_the_next_in_the_slot() {
    let directory = TestDirectory::new();
    let keeper = directory.open(100);
    let owner = directory.open(100);
    let slot = owner.slot();
    assert_eq!(seen(&owner), None);
    owner.publish_tags([("rows", 512), ("index", 256)]);
    assert_eq!(seen(&owner), Some(vec![("rows".to_owned(), 512), ("index".to_owned(), 256)]));
    assert_eq!(seen(&keeper), None);
    let file = std::fs::File::options().read(true).write(true).open(owner.path()).unwrap();
    let at = 4096 + 128 * u64::from(slot) + 64;
    let mut record = [0; 64];
    file.read_exact_at(&mut record, at).unwrap();
    drop(owner);
    let next = directory.open(100);
    assert_eq!(next.slot(), slot, "the slot has a new owner");
    assert_eq!(seen(&next), None);
    // As if the owner before had been killed, and the next were of a version that knows no tags.
    file.write_all_at(&record, at).unwrap();
    assert_eq!(seen(&next), None);
}

#[test]
fn what_is_read_while_it_is_written_is_one_of_the_two_or_none() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let sets = [[("aaaaaaaa", 256), ("bbbbbbbb", 256)], [("cccccccc", 512), ("dddddddd", 512)]];
    let owned = sets.map(|set| set.map(|(tag, bytes)| (tag.to_owned(), bytes)).to_vec());
    let done = AtomicBool::new(false);
    let mut whole = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                sets.iter().for_each(|set| ledger.publish_tags(set.iter().copied()));
            }
        });
        while whole < 2_000 {
            let Some(tags) = told(&ledger.snapshot().unwrap(), ledger.slot()) else { continue };
            if !owned.contains(&tags) {
                done.store(true, Ordering::Relaxed);
                panic!("a mixture: {tags:?}");
            }
            whole += 1;
        }
        done.store(true, Ordering::Relaxed);
    });
}
