//! Who takes part: several openers, dead ones, forked ones, late ones, onlookers.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use xlog_ledger::{Ledger, LedgerError, LedgerView, Sharing, UNIT, list};

use crate::support::{KEY, Process, Random, TestDirectory, role_command, seed, wait_until};

#[test]
fn two_openings_in_one_process_have_a_slot_each() {
    let directory = TestDirectory::new();
    let first = directory.open(100);
    let second = directory.open(100);
    assert_ne!(first.slot(), second.slot());
    first.charge(60 * UNIT).unwrap();
    assert!(second.charge(41 * UNIT).is_err());
    second.charge(40 * UNIT).unwrap();
    assert_eq!(second.reclaim_dead().unwrap().slots, 0, "a sibling was declared dead");
    drop(first);
    assert_eq!(second.used(), 40 * UNIT, "closing one touched the other");
    second.charge(60 * UNIT).unwrap();
    let third = directory.open(100);
    assert_eq!(third.slot(), 0, "the slot is used again");
    assert!(third.charge(1).is_err());
}

#[test]
fn a_drop_gives_everything_back_at_once() {
    let directory = TestDirectory::new();
    let stays = directory.open(100);
    let leaves = Ledger::open(directory.config(100).with_chunk(10 * UNIT)).unwrap();
    leaves.charge(70 * UNIT).unwrap();
    drop(leaves);
    let shown = stays.snapshot().unwrap();
    assert_eq!((shown.free, shown.slots.len()), (100 * UNIT, 1));
}

#[test]
fn every_slot_taken() {
    let directory = TestDirectory::new();
    let open = || Ledger::open(directory.config(100).with_slots(2));
    let (first, _second) = (open().unwrap(), open().unwrap());
    assert!(matches!(open(), Err(LedgerError::NoSlot { slots: 2, .. })));
    drop(first);
    assert!(open().is_ok(), "a slot came free");
}

fn holder(directory: &TestDirectory, role: &str) -> Process {
    let process = Process::spawn(role_command(role, directory.path()));
    wait_until("the other process holds its bytes", || directory.path().join("ready").exists());
    process
}

#[test]
fn the_bytes_of_a_killed_process_go_to_the_next_request_that_needs_them() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = holder(&directory, "take-60-and-wait");
    assert!(
        matches!(ledger.charge(50 * UNIT), Err(LedgerError::Full { available, .. }) if available == 40 * UNIT)
    );
    other.kill();
    let left = ledger.snapshot().unwrap();
    let dead: Vec<_> = left.slots.iter().filter(|slot| !slot.alive).collect();
    assert_eq!((dead.len(), dead[0].pid, dead[0].used), (1, other.pid(), 60 * UNIT));
    ledger.charge(100 * UNIT).expect("one request is enough");
    assert_eq!(ledger.snapshot().unwrap().slots.len(), 1);
}

#[test]
fn dead_slots_are_reclaimed_on_request() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = holder(&directory, "take-60-and-wait");
    assert_eq!(ledger.reclaim_dead().unwrap().slots, 0, "it lives");
    other.kill();
    let reclaimed = ledger.reclaim_dead().unwrap();
    assert_eq!((reclaimed.slots, reclaimed.bytes), (1, 60 * UNIT));
    assert_eq!(ledger.reclaim_dead().unwrap().slots, 0);
}

/// A reader of `/proc/PID` keeps the memory of the dead process for a while, and with it the mapped ledger.
#[test]
fn a_killed_process_whose_memory_is_read_meanwhile_is_dead_at_once() {
    for _ in 0..10 {
        let directory = TestDirectory::new();
        let ledger = directory.open(100);
        let mut other = holder(&directory, "take-60-and-wait");
        let path = format!("/proc/{}/smaps", other.pid());
        let reads = || while fs::read(&path).is_ok_and(|text| !text.is_empty()) {};
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(reads);
            }
            other.kill();
            assert_eq!(ledger.reclaim_dead().unwrap().slots, 1);
        });
    }
}

/// The descriptor is close-on-exec: a program the dead one had started does not keep its slot alive.
#[test]
fn a_program_started_by_a_killed_process_keeps_nothing() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = holder(&directory, "take-60-and-start-a-program");
    let program: u32 = fs::read_to_string(directory.path().join("ready")).unwrap().parse().unwrap();
    other.kill();
    ledger.charge(100 * UNIT).expect("dead, whatever it started");
    // SAFETY: plain system call; the program was started for this test and waits for its end.
    unsafe { libc::kill(program as libc::pid_t, libc::SIGKILL) };
}

/// A forked child lets go of its parent's descriptors and mapping, and with them of the locks.
#[test]
fn a_forked_child_that_lives_on_does_not_keep_the_slot_of_its_dead_parent() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = holder(&directory, "take-60-and-fork");
    let child: i32 = fs::read_to_string(directory.path().join("ready")).unwrap().parse().unwrap();
    other.kill();
    let taken = ledger.charge(100 * UNIT);
    // SAFETY: plain system call; the child was forked for this test and sleeps.
    unsafe { libc::kill(child, libc::SIGKILL) };
    taken.expect("its owner is dead");
}

/// Also the file lock, which the parent held when it was killed.
#[test]
fn a_forked_child_that_lives_on_does_not_keep_the_file_lock_of_its_dead_parent() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = holder(&directory, "fork-and-hold-the-lock");
    let child: i32 = fs::read_to_string(directory.path().join("ready")).unwrap().parse().unwrap();
    other.kill();
    let taken = ledger.charge(100 * UNIT);
    // SAFETY: as above.
    unsafe { libc::kill(child, libc::SIGKILL) };
    taken.expect("its holder is dead");
}

#[test]
fn users_of_a_group_share_a_ledger() {
    const GROUP: u32 = 4242;
    const NOBODY: u32 = 65534;
    let directory = TestDirectory::new();
    if fs::metadata(directory.path()).unwrap().uid() != 0 {
        println!("skipped: only root can become another user");
        return;
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let place = directory.path().join("shared");
    let sharing = Sharing::Group { gid: Some(GROUP) };
    let config = directory.config(100).with_directory(&place).with_sharing(sharing);
    let ledger = Ledger::open(config).unwrap();
    let mut command = role_command("take-60-and-wait", &place);
    command.uid(NOBODY).gid(GROUP).env("XLOG_LEDGER_GROUP", GROUP.to_string());
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: another user cannot run this test: {error}");
            return;
        }
    };
    let mut other = Process(child);
    wait_until("the other user holds its bytes", || place.join("ready").exists());
    assert!(
        matches!(ledger.charge(41 * UNIT), Err(LedgerError::Full { others, .. }) if others == 60 * UNIT)
    );
    ledger.charge(40 * UNIT).unwrap();
    other.kill();
    ledger.charge(60 * UNIT).expect("a dead process of another user is dead too");
}

#[test]
fn a_stopped_process_is_alive_and_its_unused_grant_is_not_lost() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let other = holder(&directory, "take-60-with-slack-and-wait");
    other.stop();
    let shown = ledger.snapshot().unwrap();
    assert!(shown.granted() > 0, "{shown:?}");
    assert!(
        matches!(ledger.charge(41 * UNIT), Err(LedgerError::Full { available, .. }) if available == 40 * UNIT)
    );
    ledger.charge(40 * UNIT).expect("a grant that is not used is in nobody's way");
}

#[test]
fn a_stopped_lock_holder_costs_others_an_error_and_only_if_they_need_the_lock() {
    let directory = TestDirectory::new();
    let config = directory.config(100).with_lock_deadline(Duration::from_millis(50));
    let ledger = Ledger::open(config.with_chunk(10 * UNIT)).unwrap();
    ledger.charge(UNIT).unwrap();
    let mut other = holder(&directory, "hold-the-lock");
    other.stop();
    ledger.charge(5 * UNIT).expect("served from the grant");
    ledger.release(5 * UNIT).expect("a give needs no lock");
    match ledger.charge(50 * UNIT) {
        Err(LedgerError::Busy { holder: Some(holder), .. }) => {
            assert_eq!(holder.pid, other.pid());
            assert_eq!(holder.name.as_deref(), Some("hold-the-lock"));
        }
        refused => panic!("{refused:?}"),
    }
    assert_eq!(ledger.used(), UNIT);
    other.kill();
    ledger.charge(50 * UNIT).expect("the kernel dropped the lock with its holder");
}

#[test]
fn a_forked_child_is_refused_and_leaves_its_parent_alone() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_chunk(10 * UNIT)).unwrap();
    let sibling = directory.open(100);
    ledger.charge(60 * UNIT).unwrap();
    let lock = ledger.hold_file_lock().unwrap();
    // SAFETY: the child calls only atomics, munmap, close and free, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(ledger.charge(UNIT), Err(LedgerError::Forked { .. }))
            && matches!(ledger.release(UNIT), Err(LedgerError::Forked { .. }))
            && matches!(ledger.set_limit(1 << 20), Err(LedgerError::Forked { .. }));
        drop(lock);
        drop(ledger);
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: plain system call on the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child was not refused");
    assert_eq!(ledger.used(), 60 * UNIT);
    let quick = directory.config(100).with_lock_deadline(Duration::from_millis(10));
    assert!(matches!(Ledger::open(quick), Err(LedgerError::Busy { .. })), "the child unlocked");
    drop(lock);
    assert_eq!(sibling.reclaim_dead().unwrap().slots, 0, "the child took the slot's lock along");
    assert!(sibling.charge(41 * UNIT).is_err());
    ledger.release(60 * UNIT).unwrap();
}

#[test]
fn many_at_once_create_one_file() {
    for _ in 0..20 {
        let directory = TestDirectory::new();
        let place = directory.path().join("new");
        let start = Barrier::new(8);
        let created: usize = std::thread::scope(|scope| {
            let handles: Vec<_> = (1..=8u64)
                .map(|index| {
                    let config = directory.config(100 * index).with_directory(&place);
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        // Kept open until all have opened; a failure is judged after that.
                        let ledger = Ledger::open(config);
                        start.wait();
                        let ledger = ledger.unwrap();
                        (usize::from(ledger.created()), ledger.limit().unwrap())
                    })
                })
                .collect();
            let results: Vec<_> =
                handles.into_iter().map(|handle| handle.join().unwrap()).collect();
            assert!(results.iter().all(|result| result.1 == results[0].1), "{results:?}");
            results.iter().map(|result| result.0).sum()
        });
        assert_eq!(created, 1);
        assert_eq!(fs::read_dir(&place).unwrap().count(), 1, "drafts are left");
    }
}

#[test]
fn a_creator_killed_at_any_point_leaves_a_whole_file_or_none() {
    let mut random = Random::new(seed("a_creator_killed_at_any_point_leaves_a_whole_file_or_none"));
    let mut drafts = 0;
    for _ in 0..60 {
        let directory = TestDirectory::new();
        let mut creator = holder(&directory, "create-over-and-over");
        std::thread::sleep(Duration::from_micros(random.below_u64(2_000)));
        creator.kill();
        let names = fs::read_dir(directory.path()).unwrap();
        let is_draft = |name: &str| name.ends_with(".tmp");
        drafts += names
            .filter(|name| is_draft(name.as_ref().unwrap().file_name().to_str().unwrap()))
            .count();
        let ledger = directory.open(100);
        ledger.charge(100 * UNIT).expect("nobody lives there");
    }
    println!("{drafts} drafts were left behind");
}

#[test]
fn what_a_killed_creator_left_is_ignored_and_swept_when_old() {
    let directory = TestDirectory::new();
    let draft = |name: &str| directory.path().join(format!(".{KEY}.ledger.{name}.tmp"));
    for name in ["old", "new"] {
        fs::write(draft(name), "half a hea").unwrap();
    }
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    fs::File::options().write(true).open(draft("old")).unwrap().set_modified(long_ago).unwrap();
    let ledger = directory.open(100);
    assert!(ledger.created());
    assert!(!draft("old").exists());
    assert!(draft("new").exists(), "somebody may be writing it");
    assert_eq!(list(directory.path()).unwrap().len(), 1);
}

#[test]
fn a_view_sees_everything_and_touches_nothing() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_name("viewed\x1b[2J")).unwrap();
    ledger.charge(30 * UNIT).unwrap();
    ledger.release(20 * UNIT).unwrap();
    let before = fs::read(ledger.path()).unwrap();
    let view = LedgerView::open(ledger.path()).unwrap();
    let shown = view.snapshot().unwrap();
    assert_eq!(shown.key.as_str(), KEY);
    assert_eq!((shown.limit, shown.used(), shown.free), (100 * UNIT, 10 * UNIT, 90 * UNIT));
    let slot = &shown.slots[0];
    assert!(slot.alive);
    assert_eq!((slot.pid, slot.peak), (std::process::id(), 30 * UNIT));
    assert_eq!(slot.name, "viewed?[2J");
    assert!(slot.started.elapsed().unwrap() < Duration::from_secs(600));
    assert_eq!(fs::read(ledger.path()).unwrap(), before);
    drop(ledger);
    assert_eq!(view.snapshot().unwrap().slots.len(), 0);
    fs::OpenOptions::new().write(true).open(directory.ledger_path()).unwrap().set_len(100).unwrap();
    assert!(matches!(view.snapshot(), Err(LedgerError::Truncated { .. })));
}

#[test]
fn the_ledgers_of_a_directory() {
    let directory = TestDirectory::new();
    let open = |key: &str| {
        let mut config = directory.config(100);
        config.key = xlog_ledger::DeviceKey::new(key).unwrap();
        Ledger::open(config).unwrap()
    };
    let (_second, _first) = (open("b"), open("a"));
    fs::write(directory.path().join("notes.txt"), "x").unwrap();
    fs::create_dir(directory.path().join("c.ledger")).unwrap();
    let found = list(directory.path()).unwrap();
    let keys: Vec<_> = found.iter().map(|file| file.key.as_str()).collect();
    assert_eq!(keys, ["a", "b"]);
    assert!(found.iter().all(|file| LedgerView::open(&file.path).is_ok()));
    assert!(list(&directory.path().join("nowhere")).unwrap().is_empty());
}

#[test]
fn a_ledger_in_a_static_is_left_at_the_normal_end_of_its_process() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let mut other = Process::spawn(role_command("take-60-in-a-static-and-end", directory.path()));
    assert!(other.wait().success());
    assert!(directory.path().join("ready").exists(), "it held its bytes");
    let shown = ledger.snapshot().unwrap();
    assert_eq!((shown.slots.len(), shown.free), (1, 100 * UNIT), "{shown:?}");
}

#[test]
fn who_has_left_takes_nothing_more_and_may_still_give() {
    let directory = TestDirectory::new();
    let (ledger, other) = (directory.open(100), directory.open(100));
    ledger.charge(60 * UNIT).unwrap();
    assert!(ledger.leave() && ledger.leave());
    assert!(matches!(ledger.charge(UNIT), Err(LedgerError::Closed { .. })));
    assert!(matches!(ledger.set_limit(UNIT), Err(LedgerError::Closed { .. })));
    assert!(matches!(ledger.snapshot(), Err(LedgerError::Closed { .. })));
    assert_eq!(other.snapshot().unwrap().slots.len(), 1, "nothing is shown of it");
    // A thread of it may be in the middle of a call: its slot is nobody else's yet.
    let next = directory.open(100);
    assert_ne!(next.slot(), ledger.slot());
    next.charge(50 * UNIT).unwrap();
    ledger.release(60 * UNIT).unwrap();
    ledger.publish_tags([("mine", 7)]);
    assert_eq!((ledger.used(), ledger.granted()), (0, 0));
    let slot = ledger.slot();
    drop(ledger);
    assert_eq!(directory.open(100).slot(), slot);
    assert_eq!(next.used(), 50 * UNIT);
    assert!(other.charge(51 * UNIT).is_err());
    assert_eq!(other.reclaim_dead().unwrap().slots, 0);
}

/// Who asked for too much has set the pressure word, and nobody has been served since.
#[test]
fn pressure_ends_with_those_who_made_it() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    ledger.charge(90 * UNIT).unwrap();
    let other = directory.open(100);
    assert!(other.charge(50 * UNIT).is_err());
    assert!(other.snapshot().unwrap().pressure);
    drop(ledger);
    assert!(!other.snapshot().unwrap().pressure, "everything is free");
    let mut holder = holder(&directory, "take-60-and-wait");
    other.charge(35 * UNIT).unwrap();
    assert!(other.charge(50 * UNIT).is_err());
    assert!(other.snapshot().unwrap().pressure);
    holder.kill();
    let shown = other.snapshot().unwrap();
    assert!(!shown.pressure, "what a dead process held is in nobody's way");
    assert_eq!(shown.left_by_the_dead(), 60 * UNIT);
}
