//! Pressure between processes: who is asked, who is waited for, and how a wait ends.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use xlog_ledger::{AskListener, Heard, Ledger, LedgerView, SlotMemory, UNIT};

use crate::support::{Process, TestDirectory, role_command, wait_until};

/// Only ends a hang.
const LONG: Duration = Duration::from_secs(300);

fn start(directory: &TestDirectory, role: &str) -> Process {
    let process = Process::spawn(role_command(role, directory.path()));
    wait_until("the process is ready", || directory.path().join("ready").exists());
    process
}

fn memory_of(ledger: &Ledger, pid: u32) -> Option<SlotMemory> {
    let snapshot = ledger.snapshot().unwrap();
    snapshot.slots.iter().find(|slot| slot.pid == pid).and_then(|slot| slot.memory)
}

#[test]
fn an_idle_process_returns_what_it_has_cached_when_another_one_asks() {
    let directory = TestDirectory::new();
    let asking = directory.open(100);
    let other = start(&directory, "take-60-and-listen");
    let before = memory_of(&asking, other.pid()).unwrap();
    assert_eq!((before.cached, before.pending), (50 * UNIT, 0));
    assert!(asking.charge(70 * UNIT).is_err());
    assert!(asking.request_cached(70 * UNIT, LONG));
    asking.charge(70 * UNIT).unwrap();
    wait_until("the answer is there", || {
        memory_of(&asking, other.pid()).is_some_and(|memory| memory.has_answered)
    });
    assert_eq!(memory_of(&asking, other.pid()).unwrap().cached, 0);
}

#[test]
fn a_process_that_is_killed_while_it_is_asked_is_not_waited_for() {
    let directory = TestDirectory::new();
    let asking = directory.open(100);
    let mut other = start(&directory, "take-60-and-never-answer");
    let pid = other.pid();
    let watching = directory.open(100);
    std::thread::scope(|scope| {
        let pressed = scope.spawn(|| asking.request_cached(70 * UNIT, LONG));
        wait_until("the process is asked", || !memory_of(&watching, pid).unwrap().has_answered);
        other.kill();
        assert!(pressed.join().unwrap());
    });
    asking.charge(70 * UNIT).unwrap();
    assert!(asking.has_reclaimed_within(LONG));
}

#[test]
fn a_stopped_process_costs_the_deadline_and_is_named_with_what_it_has_cached() {
    let directory = TestDirectory::new();
    let asking = directory.open(100);
    let other = start(&directory, "take-60-and-listen");
    other.stop();
    assert!(!asking.request_cached(70 * UNIT, Duration::from_millis(50)));
    let memory = memory_of(&asking, other.pid()).unwrap();
    assert_eq!((memory.cached, memory.has_answered), (50 * UNIT, false));
    // It has heard the ask when it goes on.
    other.signal(libc::SIGCONT);
    assert!(asking.request_cached(70 * UNIT, LONG));
}

#[test]
fn whoever_has_nothing_to_return_ends_the_wait_by_its_answer() {
    let directory = TestDirectory::new();
    let (asking, other) = (directory.open(100), directory.open(100));
    // Nobody is there to be asked.
    other.charge(60 * UNIT).unwrap();
    assert!(!asking.request_cached(70 * UNIT, LONG));
    std::thread::scope(|scope| {
        let (begun, listening) = std::sync::mpsc::channel();
        let answered = scope.spawn(move || {
            let mut listener = AskListener::new(&other);
            other.publish_memory(0, 0);
            begun.send(()).unwrap();
            assert_eq!(listener.wait(LONG, || false), Heard::Ask);
            listener.answer(false);
            other
        });
        listening.recv().unwrap();
        assert!(!asking.request_cached(70 * UNIT, LONG), "it has answered, and has nothing");
        drop(answered.join().unwrap());
    });
}

#[test]
fn a_process_with_pending_memory_is_asked_again_until_it_has_returned_it() {
    let directory = TestDirectory::new();
    let (asking, other) = (directory.open(100), directory.open(100));
    other.charge(60 * UNIT).unwrap();
    std::thread::scope(|scope| {
        let (begun, listening) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let mut listener = AskListener::new(&other);
            other.publish_memory(0, 60 * UNIT);
            begun.send(()).unwrap();
            for _ in 0..5 {
                while listener.wait(LONG, || false) != Heard::Ask {}
                listener.answer(true);
            }
            while listener.wait(LONG, || false) != Heard::Ask {}
            other.release(60 * UNIT).unwrap();
            listener.answer(false);
        });
        listening.recv().unwrap();
        assert!(asking.request_cached(70 * UNIT, LONG));
    });
}

#[test]
fn a_listener_is_woken_by_a_viewer_and_by_its_own_process_and_hears_no_ask_of_its_own() {
    let directory = TestDirectory::new();
    let (one, other) = (directory.open(100), directory.open(100));
    let mut listener = AskListener::new(&one);
    one.charge(80 * UNIT).unwrap();
    assert!(!one.request_cached(30 * UNIT, LONG));
    assert_eq!(listener.wait(Duration::ZERO, || false), Heard::Nothing, "its own ask");
    assert!(!other.request_cached(30 * UNIT, LONG), "nobody publishes");
    assert_eq!(listener.wait(LONG, || false), Heard::Ask);
    listener.answer(false);
    assert_eq!(listener.wait(LONG, || true), Heard::Nothing, "it is over");
    std::thread::scope(|scope| {
        let woken = scope.spawn(move || (listener.wait(LONG, || false), listener));
        let view = LedgerView::open(one.path()).unwrap();
        // A viewer writes nothing, so it wakes only those that wait already.
        wait_until("a viewer wakes the listener", || {
            view.watch().unwrap();
            woken.is_finished()
        });
        let (heard, mut listener) = woken.join().unwrap();
        assert_eq!(heard, Heard::Nothing);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let is_over = || over.load(Ordering::SeqCst);
            scope.spawn(
                move || while listener.wait(LONG, is_over) == Heard::Nothing && !is_over() {},
            );
            over.store(true, Ordering::SeqCst);
            one.wake_listeners();
        });
    });
}

/// Files of versions without these fields: what they have there is zero, or of an earlier owner.
#[test]
fn a_slot_without_published_memory_shows_none_whatever_an_earlier_owner_left() {
    let directory = TestDirectory::new();
    let keeper = directory.open(100);
    let pid = std::process::id();
    assert_eq!(memory_of(&keeper, pid), None);
    keeper.charge(60 * UNIT).unwrap();
    keeper.publish_memory(40 * UNIT, 15 * UNIT);
    let seen = keeper.snapshot().unwrap();
    let slot = &seen.slots[0];
    assert_eq!((slot.pid, slot.used, slot.live()), (pid, 60 * UNIT, Some(5 * UNIT)));
    assert_eq!((seen.cached(), seen.pending()), (40 * UNIT, 15 * UNIT));
    // The next owner is of a version that writes its process id as eight bytes.
    let file = std::fs::File::options().write(true).open(keeper.path()).unwrap();
    file.write_all_at(&u64::from(pid).to_le_bytes(), 4096 + 16).unwrap();
    assert_eq!(memory_of(&keeper, pid), None);
    keeper.publish_memory(0, 0);
    let memory = memory_of(&keeper, pid).unwrap();
    assert_eq!((memory.cached, memory.pending), (0, 0));
    keeper.withdraw_memory();
    assert_eq!(memory_of(&keeper, pid), None);
    keeper.publish_memory(u64::MAX, u64::MAX);
    assert_eq!(keeper.snapshot().unwrap().slots[0].live(), Some(0), "no figure overflows");
}
