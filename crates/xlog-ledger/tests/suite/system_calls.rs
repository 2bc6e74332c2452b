//! What the grant serves makes no system call: shown by strace, where there is one.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use xlog_ledger::{DeviceKey, Ledger, LedgerConfig, UNIT};

use crate::support::{KEY, TestDirectory, role_command};
use crate::tools::left_out;

const PAIRS: usize = 10_000;
/// Written to standard error, so that they stand in the trace.
const MARKS: [&str; 4] = ["xlog-mark-0", "xlog-mark-1", "xlog-mark-2", "xlog-mark-3"];

/// The traced process: nothing, pairs from the grant, one request that needs the lock.
pub(crate) fn traced(directory: &Path) {
    let config = LedgerConfig::new(DeviceKey::new(KEY).unwrap())
        .with_directory(directory)
        .with_chunk(1024 * UNIT);
    let ledger = Ledger::open(config).unwrap();
    ledger.charge(UNIT).unwrap();
    let mark = |text: &str| std::io::stderr().write_all(text.as_bytes()).unwrap();
    mark(MARKS[0]);
    mark(MARKS[1]);
    for _ in 0..PAIRS {
        ledger.charge(64 * UNIT).unwrap();
        ledger.release(64 * UNIT).unwrap();
    }
    mark(MARKS[2]);
    ledger.charge(5000 * UNIT).unwrap();
    mark(MARKS[3]);
}

#[test]
fn pairs_from_the_grant_make_no_system_call() {
    let missing = match Command::new("strace").args(["-o", "/dev/null", "true"]).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Some(format!("strace may not trace: {}", said.lines().last().unwrap_or_default()))
        }
        Err(error) => Some(format!("strace cannot be run: {error}")),
    };
    if let Some(missing) = missing {
        return left_out("the system calls of the ledger", &missing);
    }
    let directory = TestDirectory::new();
    drop(directory.open(100_000));
    let trace = directory.path().join("trace");
    let role = role_command("be-traced", directory.path());
    let mut command = Command::new("strace");
    command.arg("-f").arg("-o").arg(&trace).arg(role.get_program()).args(role.get_args());
    for (name, value) in role.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let trace = std::fs::read_to_string(trace).unwrap();
    let thread = trace
        .lines()
        .find(|line| line.contains(MARKS[0]))
        .and_then(|line| line.split_whitespace().next())
        .expect("the first mark is in the trace");
    let own: Vec<&str> = trace.lines().filter(|line| line.starts_with(thread)).collect();
    let places = MARKS.map(|mark| own.iter().position(|line| line.contains(mark)).expect(mark));
    let between = |first: usize| &own[places[first] + 1..places[first + 1]];
    println!("{PAIRS} pairs from the grant: {} system calls", between(1).len());
    println!("one request under the lock: {} system calls", between(2).len());
    assert_eq!(between(0), [""; 0], "the marks are apart");
    assert_eq!(between(1), [""; 0]);
    assert!(between(2).iter().any(|line| line.contains("F_OFD_SETLK")), "{:?}", between(2));
}
