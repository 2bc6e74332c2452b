//! What this test binary does when a test starts it again as another process.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use xlog_ledger::{AskListener, DeviceKey, Heard, Ledger, LedgerConfig, Sharing, UNIT};

use crate::places::{hide_the_home, sparse_on_a_full_disk};
use crate::support::KEY;
use crate::system_calls::traced;
use crate::worker::{watch, work};

/// Bounded, so that nothing outlives a test run that was itself killed.
const LONGEST_LIFE: Duration = Duration::from_secs(300);

fn wait_for_the_end() -> ! {
    std::thread::sleep(LONGEST_LIFE);
    std::process::exit(3)
}

/// Forks a child that sleeps. Returns once the child runs, behind what the C library does in it first.
fn fork_a_sleeper() -> libc::pid_t {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors, which the files below own.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: just opened, owned by nothing else.
    let (mut read, mut write) = unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) };
    // SAFETY: the child writes to its pipe, sleeps, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let _ = write.write_all(b"x");
        // SAFETY: as above.
        unsafe {
            libc::sleep(LONGEST_LIFE.as_secs() as u32);
            libc::_exit(0);
        }
    }
    read.read_exact(&mut [0]).unwrap();
    child
}

#[test]
#[ignore = "a role of other tests, which start it as a process of its own"]
fn role() {
    let role = std::env::var("XLOG_LEDGER_ROLE").expect("started by a test");
    let directory = PathBuf::from(std::env::var_os("XLOG_LEDGER_DIRECTORY").unwrap());
    let open = |chunk: u64| {
        let mut config = LedgerConfig::new(DeviceKey::new(KEY).unwrap())
            .with_directory(&directory)
            .with_chunk(chunk * UNIT)
            .with_name(role.as_str());
        if let Ok(group) = std::env::var("XLOG_LEDGER_GROUP") {
            config = config.with_sharing(Sharing::Group { gid: Some(group.parse().unwrap()) });
        }
        Ledger::open(config).unwrap()
    };
    // Written aside and renamed, so that whoever sees it sees all of it.
    let ready = |text: String| {
        std::fs::write(directory.join("ready.new"), text).unwrap();
        std::fs::rename(directory.join("ready.new"), directory.join("ready")).unwrap();
    };
    match role.as_str() {
        "take-60-and-wait" | "take-60-with-slack-and-wait" => {
            let ledger = open(if role.contains("slack") { 10 } else { 0 });
            ledger.charge(60 * UNIT).unwrap();
            ready(String::new());
            wait_for_the_end();
        }
        "take-60-in-a-static-and-end" => {
            static LEDGER: OnceLock<Arc<Ledger>> = OnceLock::new();
            let ledger = LEDGER.get_or_init(|| Arc::new(open(0)));
            ledger.leave_at_exit();
            ledger.charge(60 * UNIT).unwrap();
            ready(String::new());
        }
        "take-60-and-start-a-program" => {
            let ledger = open(0);
            ledger.charge(60 * UNIT).unwrap();
            let mut program =
                Command::new("sleep").arg(LONGEST_LIFE.as_secs().to_string()).spawn().unwrap();
            ready(program.id().to_string());
            program.wait().unwrap();
        }
        "take-60-and-fork" | "fork-and-hold-the-lock" => {
            let ledger = open(0);
            ledger.charge(60 * UNIT).unwrap();
            let holds = role.contains("lock");
            let _lock = holds.then(|| ledger.hold_file_lock().unwrap());
            let child = fork_a_sleeper();
            ready(child.to_string());
            wait_for_the_end();
        }
        "take-60-and-never-answer" => {
            let ledger = open(0);
            ledger.charge(60 * UNIT).unwrap();
            ledger.publish_memory(50 * UNIT, 5 * UNIT);
            ready(String::new());
            wait_for_the_end();
        }
        "take-60-and-listen" => {
            let ledger = open(0);
            ledger.charge(60 * UNIT).unwrap();
            let mut listener = AskListener::new(&ledger);
            ledger.publish_memory(50 * UNIT, 0);
            ready(String::new());
            assert_eq!(listener.wait(LONGEST_LIFE, || false), Heard::Ask);
            ledger.release(50 * UNIT).unwrap();
            ledger.publish_memory(0, 0);
            listener.answer(false);
            wait_for_the_end();
        }
        "create-over-and-over" => {
            ready(String::new());
            loop {
                let config = LedgerConfig::new(DeviceKey::new(KEY).unwrap())
                    .with_directory(&directory)
                    .with_limit(100 * UNIT);
                let ledger = Ledger::open(config).unwrap();
                std::fs::remove_file(ledger.path()).unwrap();
            }
        }
        "hold-the-lock" => {
            let ledger = open(0);
            let _lock = ledger.hold_file_lock().unwrap();
            ready(String::new());
            wait_for_the_end();
        }
        "name-the-default-directory" => match LedgerConfig::default_directory() {
            Ok(path) => ready(path.display().to_string()),
            Err(error) => ready(error.to_string()),
        },
        "sparse-on-a-full-disk" => {
            sparse_on_a_full_disk(&directory).unwrap_or_else(ready);
        }
        "hide-the-home" => hide_the_home().unwrap_or_else(ready),
        "be-traced" => traced(&directory),
        "work" => work(&directory),
        "watch" => watch(&directory),
        other => panic!("no role {other}"),
    }
}
