//! Races that no call returned: written to standard error when the device or the process ends.
//!
//! Standard error is the process's, so each case runs in a process of its own: this test binary, asked for one ignored test.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::Command;

use xlog_cuda::device_runtime::{AllocTag, DeviceStream, GpuMemoryManager, XlogDeviceRuntime};

/// Names the case in the processes that this file starts; the ignored test means nothing elsewhere.
const CASE: &str = "XLOG_TEST_RACES";

/// Runs a case and returns what it wrote to standard error about races.
fn written(case: &str, device: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "unread_races::child_races"]);
    let output = command.env(CASE, case).env("XLOG_DEVICE", device).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}\n{errors}");
    errors
}

#[test]
fn a_race_that_no_call_returned_is_written_when_the_device_or_the_process_ends() {
    for device in ["sim", "sim:1", "sim:7"] {
        for case in ["dropped buffer", "forgotten runtime", "exit", "bare device"] {
            let errors = written(case, device);
            let head = format!("on device {device:?} were neither returned by a call nor read");
            assert_eq!(errors.matches(&head).count(), 1, "{case}, {device}: {errors}");
            assert!(errors.contains("memset"), "the operations are named: {errors}");
        }
    }
}

#[test]
fn a_race_that_was_returned_or_read_is_not_written_again() {
    for device in ["sim", "sim:1", "sim:7"] {
        for case in ["read", "returned", "no race"] {
            let errors = written(case, device);
            assert!(!errors.contains("race"), "{case}, {device}: {errors}");
        }
    }
}

#[test]
fn of_many_races_the_first_few_are_written() {
    let errors = written("many", "sim:1");
    let head = errors.lines().find(|line| line.contains("neither returned")).unwrap();
    assert!(head.starts_with("xlog-cuda: 20 races"), "{head}");
    assert_eq!(errors.lines().filter(|line| line.starts_with("  ")).count(), 5, "{errors}");
}

/// Two writes that nothing orders. Memory from the driver has one report for each.
fn race(runtime: &XlogDeviceRuntime, a: &DeviceStream, b: &DeviceStream) {
    let block = runtime.device().driver().alloc(64).unwrap();
    // SAFETY: the block is live, and never freed.
    unsafe {
        a.memset(block, 1, 64).unwrap();
        b.memset(block, 2, 64).unwrap();
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_races() {
    let Ok(case) = std::env::var(CASE) else { return };
    let device = std::env::var("XLOG_DEVICE").unwrap();
    if case == "bare device" {
        let device = xlog_cuda::CudaDevice::open(&device).unwrap();
        let driver = device.driver();
        let streams = [driver.stream_create(0).unwrap(), driver.stream_create(0).unwrap()];
        let block = driver.alloc(64).unwrap();
        for stream in streams {
            // SAFETY: the block is live, and never freed.
            unsafe { driver.memset(block, 1, 64, stream).unwrap() };
        }
        return;
    }
    let runtime = XlogDeviceRuntime::open(&device).unwrap();
    let (a, b) = (runtime.stream_pool().lease().unwrap(), runtime.stream_pool().lease().unwrap());
    match case.as_str() {
        "dropped buffer" => {
            let manager = GpuMemoryManager::with_runtime(runtime.clone()).on_stream(a.id());
            let rows = manager.alloc_from(&[7_u32; 1024]).unwrap();
            // SAFETY: the buffer is live.
            unsafe { b.memset(rows.ptr(), 9, 4096).unwrap() };
        }
        "forgotten runtime" => {
            race(&runtime, &a, &b);
            std::mem::forget(runtime);
        }
        "exit" => {
            race(&runtime, &a, &b);
            // The test's own line, which the parent looks for.
            println!("1 passed");
            std::process::exit(0);
        }
        "read" => {
            race(&runtime, &a, &b);
            assert_eq!(runtime.device().races().len(), 1);
        }
        "returned" => {
            race(&runtime, &a, &b);
            b.synchronize().unwrap_err();
        }
        "many" => (0..20).for_each(|_| race(&runtime, &a, &b)),
        "no race" => {
            let block = runtime.allocate(64, a.id(), AllocTag::UNTAGGED).unwrap();
            runtime.deallocate(block).unwrap();
        }
        other => panic!("no case is called {other}"),
    }
}
