//! Files that must not be believed: each is a typed error that names the file, and stays as it is.

use std::ffi::CString;
use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerError, LedgerView, Sharing, UNIT};

use crate::support::{KEY, TestDirectory};

const LIMIT: u64 = 1000;

/// Makes a ledger, damages it, and expects `check` of the refusal, the file untouched and named.
fn refused(damage: impl FnOnce(&Path), check: impl Fn(&LedgerError) -> bool) {
    let directory = TestDirectory::new();
    drop(directory.open(LIMIT));
    let path = directory.ledger_path();
    damage(&path);
    let before = fs::read(&path).unwrap();
    let error = Ledger::open(directory.config(LIMIT)).expect_err("damaged");
    assert!(check(&error), "{error:?}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "names no file: {error}");
    assert_eq!(fs::read(&path).unwrap(), before, "the file was changed");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "something was left behind");
}

fn write(path: &Path, bytes: &[u8], offset: u64) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

fn resize(path: &Path, size: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(size).unwrap();
}

#[test]
fn truncated() {
    for size in [0, 1, 127, 128, 4095, 4096, 4096 + 255 * 128, 4096 + 256 * 192 - 1] {
        refused(
            |path| resize(path, size),
            |error| matches!(error, LedgerError::Truncated { size: found, .. } if *found == size),
        );
    }
}

#[test]
fn longer_than_it_says() {
    refused(|path| resize(path, 1 << 20), |error| matches!(error, LedgerError::Damaged { .. }));
}

#[test]
fn zeroed() {
    refused(
        |path| {
            let size = fs::metadata(path).unwrap().len() as usize;
            fs::write(path, vec![0; size]).unwrap();
        },
        |error| matches!(error, LedgerError::Damaged { what, .. } if what.contains("zero")),
    );
}

#[test]
fn some_other_file() {
    refused(
        |path| fs::write(path, "{}\n".repeat(20_000)).unwrap(),
        |error| matches!(error, LedgerError::Damaged { what, .. } if what.contains("XLOGLDGR")),
    );
}

#[test]
fn newer_version() {
    refused(
        |path| write(path, &3u32.to_le_bytes(), 8),
        |error| {
            matches!(error, LedgerError::NewerVersion { version: 3, supported: 2, .. })
                && error.to_string().contains("update")
        },
    );
}

#[test]
fn a_changed_header_or_limit() {
    for offset in [24, 40, 100, 120, 128, 135] {
        refused(
            |path| write(path, b"~", offset),
            |error| matches!(error, LedgerError::Damaged { .. }),
        );
    }
}

#[test]
fn a_limit_damaged_while_open_is_never_used() {
    let directory = TestDirectory::new();
    let ledger = directory.open(LIMIT);
    write(&directory.ledger_path(), &[0xff; 8], 128);
    assert!(matches!(ledger.charge(1), Err(LedgerError::Damaged { .. })));
    assert!(matches!(ledger.limit(), Err(LedgerError::Damaged { .. })));
    assert!(matches!(ledger.snapshot(), Err(LedgerError::Damaged { .. })));
    assert_eq!(ledger.used(), 0);
}

#[test]
fn the_ledger_of_another_device() {
    let directory = TestDirectory::new();
    drop(directory.open(LIMIT));
    let other = DeviceKey::new("GPU-other").unwrap();
    fs::copy(directory.ledger_path(), directory.path().join("GPU-other.ledger")).unwrap();
    let config = LedgerConfig::new(other).with_directory(directory.path());
    match Ledger::open(config) {
        Err(LedgerError::WrongKey { found, expected, .. }) => {
            assert_eq!((found.as_str(), expected.as_str()), (KEY, "GPU-other"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn read_only() {
    refused(
        |path| fs::set_permissions(path, Permissions::from_mode(0o400)).unwrap(),
        |error| matches!(error, LedgerError::ReadOnly { .. }),
    );
}

#[test]
fn writable_by_others() {
    refused(
        |path| fs::set_permissions(path, Permissions::from_mode(0o666)).unwrap(),
        |error| matches!(error, LedgerError::TooOpen { mode: 0o666, .. }),
    );
}

#[test]
fn wrong_owner() {
    let directory = TestDirectory::new();
    if fs::metadata(directory.path()).unwrap().uid() != 0 {
        println!("skipped: only root can give a file away; the rule is unit tested");
        return;
    }
    drop(directory);
    refused(
        |path| std::os::unix::fs::chown(path, Some(65534), None).unwrap(),
        |error| matches!(error, LedgerError::WrongOwner { found, .. } if found == "user 65534"),
    );
}

/// Puts something at a path.
type Maker = fn(&Path);

#[test]
fn not_a_regular_file() {
    let makers: [(&str, Maker); 4] = [
        ("a directory", |path| fs::create_dir(path).unwrap()),
        ("a symbolic link", |path| {
            let target = path.with_extension("real");
            fs::write(&target, "kept").unwrap();
            symlink(target, path).unwrap();
        }),
        ("a socket", |path| drop(UnixListener::bind(path).unwrap())),
        ("a pipe", |path| {
            let path = CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: plain system call with a terminated string.
            assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        }),
    ];
    for (kind, make) in makers {
        let directory = TestDirectory::new();
        let path = directory.ledger_path();
        make(&path);
        for error in [
            Ledger::open(directory.config(LIMIT)).expect_err(kind),
            LedgerView::open(&path).expect_err(kind),
        ] {
            let names = matches!(&error, LedgerError::WrongKind { found, .. } if *found == kind);
            assert!(names, "{kind}: {error:?}");
        }
    }
}

#[test]
fn a_directory_that_is_a_link_or_open_to_all() {
    let directory = TestDirectory::new();
    let link = directory.path().join("link");
    let real = directory.path().join("real");
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    let error = Ledger::open(directory.config(LIMIT).with_directory(&link));
    assert!(matches!(error, Err(LedgerError::WrongKind { .. })), "{error:?}");
    fs::set_permissions(&real, Permissions::from_mode(0o777)).unwrap();
    let error = Ledger::open(directory.config(LIMIT).with_directory(&real));
    assert!(matches!(error, Err(LedgerError::TooOpen { .. })), "{error:?}");
    assert_eq!(fs::read_dir(&real).unwrap().count(), 0);
}

#[test]
fn private_and_shared_files_have_their_modes() {
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    let directory = TestDirectory::new();
    for (name, sharing, directory_mode, file_mode) in [
        ("private", Sharing::Private, 0o700, 0o600),
        ("shared", Sharing::Group { gid: None }, 0o2770, 0o660),
    ] {
        let place = directory.path().join(name);
        let config = || directory.config(LIMIT).with_directory(&place).with_sharing(sharing);
        let first = Ledger::open(config()).unwrap();
        let second = Ledger::open(config()).unwrap();
        assert!(first.created() && !second.created());
        assert_eq!(mode(&place), directory_mode, "{name}");
        assert_eq!(mode(first.path()), file_mode, "{name}");
    }
    let shared = directory.config(LIMIT).with_directory(directory.path().join("shared"));
    let error = Ledger::open(shared);
    assert!(matches!(error, Err(LedgerError::TooOpen { .. })), "{error:?}");
}

#[test]
fn missing_without_a_limit() {
    let directory = TestDirectory::new();
    let mut config = directory.config(LIMIT);
    config.limit = None;
    assert!(matches!(Ledger::open(config.clone()), Err(LedgerError::Missing { .. })));
    assert!(matches!(LedgerView::open(directory.ledger_path()), Err(LedgerError::Missing { .. })));
    let nowhere = directory.path().join("nowhere");
    config.directory = Some(nowhere.clone());
    assert!(matches!(Ledger::open(config), Err(LedgerError::Missing { .. })));
    assert!(!nowhere.exists());
}

#[test]
fn noise_in_slots_without_an_owner_is_taken_back() {
    let directory = TestDirectory::new();
    drop(directory.open(LIMIT));
    write(&directory.ledger_path(), &[0xff; 128 * 7], 4096 + 128 * 3);
    let ledger = directory.open(LIMIT);
    let shown = ledger.snapshot().unwrap();
    assert_eq!(shown.free, 0);
    assert_eq!(shown.slots.iter().filter(|slot| !slot.alive).count(), 7);
    ledger.charge(LIMIT * UNIT).expect("nobody lives there");
}
