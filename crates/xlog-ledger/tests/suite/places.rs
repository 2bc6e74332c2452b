//! Where a ledger is by default, and file systems that are full.

use std::ffi::{CStr, CString};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, LedgerError, UNIT};

use crate::support::{TestDirectory, role_command, run_python};

/// The default place as a process sees it that was started with this environment.
fn default_place(environment: &[(&str, &str)]) -> String {
    let directory = TestDirectory::new();
    let mut command = role_command("name-the-default-directory", directory.path());
    for name in ["HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR", "USER", "LOGNAME"] {
        command.env_remove(name);
    }
    command.envs(environment.iter().copied());
    assert!(command.status().unwrap().success());
    fs::read_to_string(directory.path().join("ready")).unwrap()
}

#[test]
fn the_default_place_is_the_same_in_every_kind_of_login() {
    let user = fs::metadata("/proc/self").unwrap().uid();
    let bare = default_place(&[]);
    let fallback = format!("/tmp/xlog-ledger-{user}");
    assert!(bare.ends_with("/.local/state/xlog/ledger") || bare == fallback, "{bare}");
    for environment in [
        &[("XDG_RUNTIME_DIR", "/run/user/7")][..],
        &[("XDG_RUNTIME_DIR", "not/absolute"), ("XDG_STATE_HOME", "/elsewhere")],
        &[("HOME", "/nonexistent"), ("TMPDIR", "/nonexistent"), ("USER", "somebody")],
    ] {
        assert_eq!(default_place(environment), bare, "{environment:?}");
    }
    let python = format!(
        "
assert xlog_ledger.default_directory() == {bare:?}, xlog_ledger.default_directory()
assert xlog_ledger.default_path('GPU-1') == {bare:?} + '/GPU-1.ledger'
"
    );
    if let Some(output) = run_python(Path::new("/x/k.ledger"), &python) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A service that cannot see the home directory has another default directory than a login of the same user.
#[test]
fn two_default_places_of_one_user_are_never_two_accounts() {
    let directory = TestDirectory::new();
    let key = format!("test-{}", std::process::id());
    let config = LedgerConfig::new(DeviceKey::new(&key).unwrap()).with_limit(100 * UNIT);
    let Ok(ledger) = Ledger::open(config) else {
        println!("skipped: this machine has no default directory that can be written");
        return;
    };
    let output = role_command("hide-the-home", directory.path())
        .env("XLOG_LEDGER_KEY", &key)
        .output()
        .unwrap();
    let _ = fs::remove_file(ledger.path());
    let ready = fs::read_to_string(directory.path().join("ready")).unwrap_or_default();
    if ready.starts_with("skipped") {
        println!("{ready}");
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?} {said}", output.status);
}

/// The process of the test above.
pub(crate) fn hide_the_home() -> Result<(), String> {
    let before = LedgerConfig::default_directory().unwrap();
    let Some(home) = before.to_str().unwrap().strip_suffix("/.local/state/xlog/ledger") else {
        return Err("skipped: the home directory is not the default place".into());
    };
    mount_for_this_process(Path::new(home), c"size=64k,mode=0000,ro")?;
    let now = LedgerConfig::default_directory().unwrap();
    assert!(now.starts_with("/tmp"), "{now:?}");
    let key = DeviceKey::new(std::env::var("XLOG_LEDGER_KEY").unwrap()).unwrap();
    let refused = Ledger::open(LedgerConfig::new(key).with_limit(100 * UNIT));
    let _ = fs::remove_dir(now);
    assert!(matches!(refused, Err(LedgerError::Displaced { .. })), "{refused:?}");
    Ok(())
}

fn make_sparse(path: &Path) {
    let content = fs::read(path).unwrap();
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(0).unwrap();
    file.set_len(content.len() as u64).unwrap();
    file.write_all_at(&content[..4096], 0).unwrap();
    assert!(fs::metadata(path).unwrap().blocks() * 512 < content.len() as u64, "no holes here");
}

#[test]
fn the_holes_of_a_sparse_file_are_filled_when_it_is_opened() {
    let directory = TestDirectory::new();
    drop(directory.open(100));
    make_sparse(&directory.ledger_path());
    let ledger = directory.open(100);
    let facts = fs::metadata(ledger.path()).unwrap();
    assert!(facts.blocks() * 512 >= facts.len(), "{} blocks", facts.blocks());
    ledger.charge(100 * UNIT).unwrap();
}

#[test]
fn a_sparse_file_on_a_full_disk_is_an_error() {
    let directory = TestDirectory::new();
    let output = role_command("sparse-on-a-full-disk", directory.path()).output().unwrap();
    let ready = fs::read_to_string(directory.path().join("ready")).unwrap_or_default();
    if ready.starts_with("skipped") {
        println!("{ready}");
        return;
    }
    assert!(
        output.status.success(),
        "{:?} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The process of the test above, in a mount namespace of its own. Answers why it cannot play.
pub(crate) fn sparse_on_a_full_disk(directory: &Path) -> Result<(), String> {
    let place = directory.join("small");
    fs::create_dir(&place).unwrap();
    mount_for_this_process(&place, c"size=64k,mode=0700")?;
    let config = || {
        LedgerConfig::new(DeviceKey::new("full").unwrap())
            .with_directory(&place)
            .with_limit(100 * UNIT)
            .with_chunk(0)
    };
    let path = Ledger::open(config()).unwrap().path().to_owned();
    make_sparse(&path);
    let filler = fs::write(place.join("filler"), vec![1; 1 << 20]);
    assert!(filler.is_err(), "the disk is not full");
    let error = Ledger::open(config()).expect_err("there is no room for its pages");
    assert!(matches!(&error, LedgerError::NoRoom { .. }), "{error:?}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    fs::remove_file(place.join("filler")).unwrap();
    Ledger::open(config()).unwrap().charge(100 * UNIT).unwrap();
    Ok(())
}

/// Mounts a file system in memory that this process alone sees.
fn mount_for_this_process(place: &Path, options: &CStr) -> Result<(), String> {
    let failed = |what| format!("skipped: no {what}: {}", std::io::Error::last_os_error());
    // SAFETY: plain system call; only this process is moved to the namespace.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(failed("mount namespace"));
    }
    let none = std::ptr::null();
    let target = CString::new(place.to_str().unwrap()).unwrap();
    let (apart, kind) = (libc::MS_REC | libc::MS_PRIVATE, c"tmpfs".as_ptr());
    // SAFETY: plain system calls with terminated strings.
    let mounted = unsafe {
        libc::mount(kind, c"/".as_ptr(), none, apart, none.cast()) == 0
            && libc::mount(kind, target.as_ptr(), kind, 0, options.as_ptr().cast()) == 0
    };
    if mounted { Ok(()) } else { Err(failed("mount")) }
}
