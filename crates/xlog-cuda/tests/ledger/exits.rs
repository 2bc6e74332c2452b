//! What a process leaves behind in the ledger when it ends.

use std::process::{Command, Stdio};

use xlog_cuda::StreamId;
use xlog_cuda::device_runtime::{AllocTag, LedgerStatus, XlogDeviceRuntime};
use xlog_cuda::ledger::LedgerView;

use crate::support::{MIB, TestDirectory};

/// The runtime of a process is in a static, which is never dropped.
#[test]
fn a_shared_runtime_that_ends_normally_leaves_no_slot_behind() {
    for resource in ["direct", "async", "pool"] {
        for ending in ["returns", "exits", "exits-on-a-thread"] {
            let directory = TestDirectory::new();
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "exits::role", "--ignored", "--nocapture"])
                .env("XLOG_DEVICE", "sim")
                .env("XLOG_DEVICE_LEDGER", directory.ledger_path())
                .env("XLOG_DEVICE_BUDGET", "64MiB")
                .env("XLOG_DEVICE_RESOURCE", resource)
                .env("XLOG_TEST_ENDING", ending)
                .stdout(Stdio::null());
            assert!(command.status().unwrap().success(), "{resource} {ending}");
            let shown = LedgerView::open(directory.ledger_path()).unwrap().snapshot().unwrap();
            assert!(shown.slots.is_empty(), "{resource} {ending}: {shown:?}");
            assert_eq!((shown.free, shown.pressure), (64 * MIB, false), "{resource} {ending}");
        }
    }
}

#[test]
#[ignore = "a role of another test, which starts it as a process of its own"]
fn role() {
    let ending = std::env::var("XLOG_TEST_ENDING").expect("started by a test");
    let runtime = XlogDeviceRuntime::try_get(0).unwrap();
    assert!(matches!(runtime.ledger(), LedgerStatus::Joined(_)));
    let block = runtime.allocate(48 << 20, StreamId::DEFAULT, AllocTag("kept")).unwrap();
    assert!(runtime.allocate(48 << 20, StreamId::DEFAULT, AllocTag("refused")).is_err());
    assert!(runtime.ledger_snapshot().unwrap().unwrap().used() >= 48 * MIB);
    match ending.as_str() {
        "returns" => runtime.deallocate(block).unwrap(),
        "exits" => std::process::exit(0),
        _ => std::thread::spawn(|| std::process::exit(0)).join().unwrap(),
    }
}
