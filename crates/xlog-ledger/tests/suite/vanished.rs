//! A ledger that loses its name while processes count in it: there is one account, or a refusal, never two accounts.

use std::fs;
use std::path::Path;

use xlog_ledger::{Ledger, LedgerError, LedgerView, UNIT};

use crate::support::{Process, TestDirectory, role_command, run_python, wait_until};

/// A survivor holds 60 of 100 units while `displace` takes the name of its file away. A newcomer is refused, the survivor goes on
/// within the limit, and the device has a ledger again once the survivor has ended.
fn one_account(displace: impl FnOnce(&Path)) {
    let outside = TestDirectory::new();
    let place = outside.path().join("place");
    let config = || outside.config(100).with_directory(&place);
    let survivor = Ledger::open(config()).unwrap();
    survivor.charge(60 * UNIT).unwrap();
    let path = survivor.path().to_owned();
    displace(&path);

    let names_it = |error: LedgerError| {
        assert!(matches!(&error, LedgerError::Displaced { .. }), "{error:?}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    };
    names_it(Ledger::open(config()).expect_err("a second account"));
    let mut joins_only = config();
    joins_only.limit = None;
    names_it(Ledger::open(joins_only).expect_err("a second account"));
    if !path.exists() {
        names_it(LedgerView::open(&path).expect_err("there is a ledger, elsewhere"));
    }
    let python = "
error = raises(LedgerError, Ledger, path, limit=100 * 256)
assert path in str(error) and 'in use' in str(error), error
";
    if let Some(output) = run_python(&path, python) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    if !path.exists() {
        survivor.charge(40 * UNIT).expect("nobody counts elsewhere");
        assert!(matches!(survivor.charge(UNIT), Err(LedgerError::Full { .. })));
    }
    drop(survivor);
    let next = Ledger::open(config()).expect("nobody is left");
    next.charge(100 * UNIT).unwrap();
}

#[test]
fn removed() {
    one_account(|path| fs::remove_file(path).unwrap());
}

#[test]
fn renamed() {
    one_account(|path| fs::rename(path, path.with_extension("old")).unwrap());
}

#[test]
fn hard_linked_and_removed() {
    one_account(|path| {
        fs::hard_link(path, path.with_extension("link")).unwrap();
        fs::remove_file(path).unwrap();
    });
}

#[test]
fn its_directory_moved() {
    one_account(|path| {
        let directory = path.parent().unwrap();
        fs::rename(directory, directory.with_extension("old")).unwrap();
    });
}

#[test]
fn its_directory_removed() {
    one_account(|path| fs::remove_dir_all(path.parent().unwrap()).unwrap());
}

#[test]
fn replaced_by_another_valid_ledger() {
    one_account(|path| {
        let copy = path.with_extension("copy");
        fs::copy(path, &copy).unwrap();
        fs::rename(&copy, path).unwrap();
    });
}

/// Somebody may count in the other file, by a client that claims nothing.
#[test]
fn a_survivor_of_a_replaced_file_is_refused_and_keeps_what_it_has() {
    let directory = TestDirectory::new();
    let survivor = Ledger::open(directory.config(100).with_chunk(10 * UNIT)).unwrap();
    survivor.charge(UNIT).unwrap();
    let copy = directory.path().join("copy");
    fs::copy(survivor.path(), &copy).unwrap();
    fs::rename(&copy, survivor.path()).unwrap();
    survivor.charge(UNIT).expect("the grant is still good");
    let error = survivor.charge(50 * UNIT).expect_err("two ledgers of one device");
    assert!(matches!(error, LedgerError::Removed { .. }), "{error:?}");
    survivor.release(UNIT).unwrap();
    assert_eq!(survivor.used(), UNIT);
}

#[test]
fn moved_back_it_is_the_same_account() {
    let directory = TestDirectory::new();
    let survivor = directory.open(100);
    survivor.charge(60 * UNIT).unwrap();
    let aside = directory.path().join("aside");
    fs::rename(survivor.path(), &aside).unwrap();
    assert!(matches!(Ledger::open(directory.config(100)), Err(LedgerError::Displaced { .. })));
    assert!(!directory.ledger_path().exists(), "the refused newcomer left a file");
    fs::rename(&aside, survivor.path()).unwrap();
    let newcomer = directory.open(100);
    assert!(
        matches!(newcomer.charge(41 * UNIT), Err(LedgerError::Full { available, .. }) if available == 40 * UNIT)
    );
    newcomer.charge(40 * UNIT).unwrap();
}

#[test]
fn a_survivor_in_python_keeps_newcomers_out_too() {
    let directory = TestDirectory::new();
    let path = directory.ledger_path();
    let program = "
ledger = Ledger(path, limit=100 * 256)
ledger.charge(60 * 256)
os.remove(path)
open(os.path.join(os.path.dirname(path), 'ready'), 'w').close()
ledger.charge(40 * 256)
sys.stdin.read()
";
    let Some(mut command) = crate::support::python_command(&path, program) else { return };
    command.stdin(std::process::Stdio::piped());
    let mut python = Process::spawn(command);
    wait_until("Python is ready", || directory.path().join("ready").exists());
    assert!(matches!(Ledger::open(directory.config(100)), Err(LedgerError::Displaced { .. })));
    drop(python.0.stdin.take());
    assert!(python.wait().success(), "its growth failed");
    directory.open(100).charge(100 * UNIT).unwrap();
}

/// A killed survivor's claim goes with it.
#[test]
fn a_killed_survivor_keeps_nobody_out() {
    let directory = TestDirectory::new();
    drop(directory.open(100));
    let mut survivor = Process::spawn(role_command("take-60-and-wait", directory.path()));
    wait_until("the survivor holds its bytes", || directory.path().join("ready").exists());
    fs::remove_file(directory.ledger_path()).unwrap();
    assert!(matches!(Ledger::open(directory.config(100)), Err(LedgerError::Displaced { .. })));
    survivor.kill();
    directory.open(100).charge(100 * UNIT).unwrap();
}
