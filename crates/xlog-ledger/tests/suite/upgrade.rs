//! Files of version 1, which have no quotas: joined as they are while processes are on them, and upgraded otherwise.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;

use xlog_ledger::{Ledger, LedgerError, LedgerView, Quota, UNIT};

use crate::support::{TestDirectory, run_python};

const SLOTS: u64 = 3;
const SIZE_1: u64 = 4096 + SLOTS * 128;
const SIZE_2: u64 = SIZE_1 + SLOTS * 64;

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Makes the file as a program of version 1 did, from one of version 2.
fn make_version_1(directory: &TestDirectory) {
    drop(Ledger::open(directory.config(100).with_slots(SLOTS as u32)).unwrap());
    let path = directory.ledger_path();
    let mut bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, SIZE_2);
    bytes.truncate(SIZE_1 as usize);
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    bytes[16..24].copy_from_slice(&SIZE_1.to_le_bytes());
    let sum = checksum(&bytes[..120]);
    bytes[120..128].copy_from_slice(&sum.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
}

fn version(path: &Path) -> u32 {
    LedgerView::open(path).unwrap().snapshot().unwrap().version
}

/// A process of version 1 in slot 0, which uses some units.
struct OldProcess {
    file: File,
}

/// The lock on the first byte of slot 0.
fn slot_lock(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 4096,
        l_len: 1,
        l_pid: 0,
    }
}

impl Drop for OldProcess {
    fn drop(&mut self) {
        // Not by the close alone: a process that another test is starting may have a copy of the descriptor.
        let range = slot_lock(libc::F_UNLCK);
        // SAFETY: the descriptor is open; the kernel only reads the range.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    }
}

impl OldProcess {
    fn join(path: &Path, units: u32) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let range = slot_lock(libc::F_WRLCK);
        // SAFETY: the descriptor is open; the kernel only reads the range.
        let refused = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
        assert_eq!(refused, 0);
        file.write_all_at(&units.to_le_bytes(), 4096).unwrap();
        file.write_all_at(&4711u32.to_le_bytes(), 4096 + 16).unwrap();
        Self { file }
    }
}

#[test]
fn a_file_that_no_process_uses_is_upgraded_and_keeps_its_limit() {
    let directory = TestDirectory::new();
    make_version_1(&directory);
    let path = directory.ledger_path();
    let view = LedgerView::open(&path).unwrap();
    assert_eq!(view.snapshot().unwrap().version, 1, "reading changes nothing");
    // What a killed process of version 1 left is reclaimed as ever.
    drop(OldProcess::join(&path, 60));
    let ledger =
        Ledger::open(directory.config(5).with_quota(Quota::limited_to(90 * UNIT))).unwrap();
    assert_eq!((ledger.limit().unwrap(), version(&path)), (100 * UNIT, 2));
    assert_eq!(fs::metadata(&path).unwrap().len(), SIZE_2);
    ledger.charge(90 * UNIT).unwrap();
    assert!(matches!(ledger.charge(1), Err(LedgerError::OverQuota { .. })));
    assert_eq!(view.snapshot().unwrap().version, 2, "a view that was open follows");
}

#[test]
fn a_file_that_an_older_process_uses_is_joined_as_it_is() {
    let directory = TestDirectory::new();
    make_version_1(&directory);
    let path = directory.ledger_path();
    let old = OldProcess::join(&path, 60);
    let refused = Ledger::open(directory.config(5).with_quota(Quota::limited_to(UNIT)));
    assert!(matches!(refused, Err(LedgerError::NoQuotas { .. })), "{refused:?}");
    let ledger = directory.open(5);
    assert_eq!((version(&path), fs::metadata(&path).unwrap().len()), (1, SIZE_1));
    assert!(
        matches!(ledger.charge(41 * UNIT), Err(LedgerError::Full { available, .. }) if available == 40 * UNIT)
    );
    ledger.charge(40 * UNIT).unwrap();
    assert!(matches!(
        ledger.set_quota(&Quota::limited_to(UNIT)),
        Err(LedgerError::NoQuotas { .. })
    ));
    assert!(ledger.quota().unwrap().is_empty());
    drop(old);
    ledger.charge(60 * UNIT).expect("what the dead one held");
    drop(ledger);
    drop(directory.open(5));
    assert_eq!(version(&path), 2, "the last one has left");
}

#[test]
fn an_upgrade_that_was_killed_in_the_middle_is_completed() {
    let directory = TestDirectory::new();
    make_version_1(&directory);
    let path = directory.ledger_path();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(SIZE_2).unwrap();
    assert_eq!(version(&path), 1);
    let ledger = directory.open(5);
    ledger.set_quota(&Quota::limited_to(7 * UNIT)).unwrap();
    assert_eq!(version(&path), 2);
    ledger.charge(7 * UNIT).unwrap();
}

#[test]
fn openers_that_race_to_upgrade_all_join_one_ledger() {
    for _ in 0..20 {
        let directory = TestDirectory::new();
        make_version_1(&directory);
        let start = Barrier::new(SLOTS as usize);
        let join = || {
            start.wait();
            directory.open(5)
        };
        let ledgers: Vec<Ledger> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..SLOTS).map(|_| scope.spawn(join)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(version(&directory.ledger_path()), 2);
        for ledger in &ledgers {
            ledger.set_quota(&Quota::limited_to(30 * UNIT)).unwrap();
            ledger.charge(30 * UNIT).unwrap();
        }
        assert_eq!(ledgers[0].snapshot().unwrap().used(), 90 * UNIT);
    }
}

#[test]
fn readers_beside_an_upgrade_see_the_old_file_or_the_new_one() {
    for _ in 0..50 {
        let directory = TestDirectory::new();
        make_version_1(&directory);
        let path = directory.ledger_path();
        let start = Barrier::new(4);
        let read = || {
            start.wait();
            let view = LedgerView::open(&path).unwrap();
            while view.snapshot().unwrap().version == 1 {
                LedgerView::open(&path).unwrap();
            }
        };
        std::thread::scope(|scope| {
            (0..3).for_each(|_| drop(scope.spawn(read)));
            start.wait();
            drop(directory.open(5));
        });
    }
}

#[test]
fn python_upgrades_to_the_same_bytes_and_joins_what_is_in_use() {
    let (ours, theirs) = (TestDirectory::new(), TestDirectory::new());
    for directory in [&ours, &theirs] {
        make_version_1(directory);
    }
    let path = theirs.ledger_path();
    let old = OldProcess::join(&path, 60);
    let in_use = "
with Ledger(path) as ledger:
    ledger.charge(40 * 256)
    raises(Full, ledger.charge, 1)
    raises(xlog_ledger.NoQuotas, ledger.set_quota, xlog_ledger.Quota(limit=0))
    assert ledger.quota == xlog_ledger.Quota() and len(ledger.slots()) == 2
raises(xlog_ledger.NoQuotas, Ledger, path, quota=xlog_ledger.Quota(limit=0))
";
    let Some(output) = run_python(&path, in_use) else { return };
    assert!(output.status.success());
    assert_eq!(version(&path), 1);
    drop(old);
    let unused = "
with Ledger(path, quota=xlog_ledger.Quota(limit=90 * 256)) as ledger:
    ledger.charge(90 * 256)
    raises(xlog_ledger.OverQuota, ledger.charge, 1)
";
    assert!(run_python(&path, unused).unwrap().status.success());
    drop(ours.open(5));
    let (ours, theirs) = (fs::read(ours.ledger_path()).unwrap(), fs::read(&path).unwrap());
    assert_eq!((&ours[..136], ours.len()), (&theirs[..136], theirs.len()));
    assert!(ours[4096..] == theirs[4096..], "slots and quotas are empty in both");
}
