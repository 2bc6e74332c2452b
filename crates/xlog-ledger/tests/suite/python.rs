//! The Python client beside the Rust one: same bytes, same rules.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use xlog_ledger::{Ledger, LedgerError, UNIT};

use crate::support::{Process, TestDirectory, role_command, run_python, wait_until};

fn run_well(path: &Path, program: &str) -> bool {
    run_python(path, program).is_some_and(|output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        true
    })
}

#[test]
fn both_clients_create_the_same_bytes() {
    let (ours, theirs) = (TestDirectory::new(), TestDirectory::new());
    drop(ours.open(12345));
    let program = "Ledger(path, limit=12345 * 256).close(); Ledger(path, limit=99999).close()";
    if run_well(&theirs.ledger_path(), program) {
        let bytes = |directory: &TestDirectory| fs::read(directory.ledger_path()).unwrap();
        assert_eq!(bytes(&ours), bytes(&theirs));
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 1, "a draft is left");
        assert_eq!(theirs.open(1).limit().unwrap(), 12345 * UNIT);
    }
}

#[test]
fn the_limit_is_exact_for_python() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    ledger.charge(30 * UNIT).unwrap();
    run_well(
        directory.ledger_path().as_path(),
        "
with Ledger(path) as ledger:
    assert ledger.limit == 25600
    refusal = raises(Full, ledger.charge, 70 * 256 + 1)
    assert (refusal.requested, refusal.available, refusal.limit) == (17921, 17920, 25600)
    ledger.charge(69 * 256 + 1)
    assert ledger.used == 17920
    assert raises(Full, ledger.charge, 1).available == 0
    raises(ValueError, ledger.release, 70 * 256 + 1)
    raises(ValueError, ledger.charge, -1)
    assert ledger.used == 17920
    ledger.release(69 * 256 + 1)
    assert ledger.used == 0
raises(LedgerError, ledger.charge, 1)
",
    );
    ledger.charge(70 * UNIT).unwrap();
}

#[test]
fn what_a_killed_python_process_held_goes_to_rust() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let path = directory.ledger_path();
    let program = "
ledger = Ledger(path, name='short-lived')
ledger.charge(60 * 256)
os.kill(os.getpid(), signal.SIGKILL)
";
    let Some(output) = run_python(&path, program) else { return };
    assert!(!output.status.success());
    let shown = ledger.snapshot().unwrap();
    let left = shown.slots.iter().find(|slot| slot.name == "short-lived").unwrap();
    assert_eq!((left.alive, left.used, left.peak), (false, 60 * UNIT, 60 * UNIT));
    ledger.charge(100 * UNIT).expect("one request is enough");
}

#[test]
fn what_a_killed_rust_process_held_goes_to_python() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    // Leaves a slot free below the dead one: Python must look for the dead, not just sit down in its place.
    let filler = directory.open(100);
    let mut other = Process::spawn(role_command("take-60-and-wait", directory.path()));
    wait_until("the other process holds its bytes", || directory.path().join("ready").exists());
    other.kill();
    drop(filler);
    assert_eq!(ledger.snapshot().unwrap().used(), 60 * UNIT);
    let path = directory.ledger_path();
    if run_well(&path, "ledger = Ledger(path); ledger.charge(100 * 256); ledger.close()") {
        assert_eq!(ledger.snapshot().unwrap().used(), 0);
    }
}

/// Python cannot take a grant away; it asks, and owners answer at their next call.
#[test]
fn python_gets_the_grants_of_owners_that_are_active() {
    let directory = TestDirectory::new();
    let ledger = Ledger::open(directory.config(100).with_chunk(40 * UNIT)).unwrap();
    ledger.charge(UNIT).unwrap();
    assert_eq!(ledger.granted(), 40 * UNIT);
    let path = directory.ledger_path();
    let idle = "
ledger = Ledger(path, patience=0.01)
assert raises(Full, ledger.charge, 99 * 256).available == 59 * 256
";
    if !run_well(&path, idle) {
        return;
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                match ledger.charge(UNIT) {
                    Ok(()) => ledger.release(UNIT).unwrap(),
                    Err(LedgerError::Full { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let active = "
ledger = Ledger(path, patience=120)
ledger.charge(98 * 256)
";
        let result = std::panic::catch_unwind(|| run_well(&path, active));
        done.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

#[test]
fn python_believes_no_damaged_file() {
    let directory = TestDirectory::new();
    drop(directory.open(100));
    run_well(
        directory.ledger_path().as_path(),
        "
good = open(path, 'rb').read()
def refuses(content, word):
    with open(path, 'wb') as file:
        file.write(content)
    message = str(raises(LedgerError, Ledger, path, limit=1 << 20))
    assert path in message and word in message, message
    assert open(path, 'rb').read() == content
refuses(good[:4000], 'truncated')
refuses(good[:-1], 'bytes of')
refuses(bytes(len(good)), 'XLOGLDGR')
refuses(good[:8] + b'\\3' + good[9:], 'version 3')
for at in (24, 40, 100, 120):
    refuses(good[:at] + b'~' + good[at + 1:], 'damaged')
refuses(good[:128] + b'~' + good[129:], 'limit word')
os.chmod(path, 0o666)
refuses(good, 'lets others write')
os.chmod(path, 0o600)
os.rename(path, path.replace('GPU-test', 'GPU-other'))
raises(LedgerError, Ledger, path.replace('GPU-test', 'GPU-other'))
raises(LedgerError, Ledger, path)
os.symlink('/etc/passwd', path)
raises(OSError, Ledger, path)
raises(ValueError, Ledger, '/tmp/.hidden.ledger')
",
    );
}

#[test]
fn a_forked_python_child_leaves_its_parent_alone() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    run_well(
        directory.ledger_path().as_path(),
        "
ledger = Ledger(path)
ledger.charge(60 * 256)
child = os.fork()
if child == 0:
    raises(LedgerError, ledger.charge, 1)
    ledger.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert ledger.used == 60 * 256
other = Ledger(path)
assert raises(Full, other.charge, 41 * 256).available == 40 * 256
",
    );
    ledger.charge(100 * UNIT).expect("Python ended");
}

#[test]
fn a_forked_python_child_that_lives_on_does_not_keep_the_slot_of_its_dead_parent() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let child = directory.path().join("child");
    let program = "
ledger = Ledger(path)
ledger.charge(60 * 256)
child = os.fork()
if child == 0:
    # The pipes of the test would wait for it.
    os.closerange(0, 3)
    import time
    time.sleep(60)
    os._exit(0)
with open(os.path.join(os.path.dirname(path), 'child'), 'w') as file:
    file.write(str(child))
os.kill(os.getpid(), signal.SIGKILL)
";
    if run_python(&directory.ledger_path(), program).is_none() {
        return;
    }
    let child: i32 = fs::read_to_string(child).unwrap().parse().unwrap();
    // The child lets go before its interpreter goes on; closing its standard error, which ended the wait, comes later.
    let taken = ledger.charge(100 * UNIT);
    // SAFETY: plain system call; the child was forked for this test and sleeps.
    unsafe { libc::kill(child, libc::SIGKILL) };
    taken.expect("its owner is dead");
}

#[test]
fn a_python_process_that_ends_without_closing_leaves_no_slot_behind() {
    let directory = TestDirectory::new();
    let ledger = directory.open(100);
    let program = "
ledger = Ledger(path)
ledger.charge(60 * 256)
";
    if run_well(&directory.ledger_path(), program) {
        assert_eq!(ledger.snapshot().unwrap().slots.len(), 1);
    }
}
