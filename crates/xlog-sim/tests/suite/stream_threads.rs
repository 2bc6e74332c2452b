//! The threads behind streams end with them. It counts threads of the process, so it runs in one of its own: this
//! test binary asked for one ignored test.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::memset;
use xlog_driver::Driver;
use xlog_sim::{Call, SimConfig, SimDevice};

/// The main thread has the name of the binary, which in the bundle starts with the crate's.
fn stream_threads() -> usize {
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| name(task.ok()?))
        .filter(|name| name.starts_with("xlog-sim-"))
        .count()
}

fn comes_true(condition: impl Fn() -> bool) -> bool {
    let patience = Instant::now();
    while !condition() && patience.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(1));
    }
    condition()
}

#[test]
fn a_stream_destroyed_while_a_host_thread_runs_its_last_copy_leaves_no_thread() {
    let test = "stream_threads::child_counts_the_threads_that_are_left";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--ignored", "--exact", "--nocapture", test]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    assert!(printed.contains("1 passed"), "no test is called {test}:\n{printed}");
}

#[test]
#[ignore = "run by the test above in a process of its own"]
fn child_counts_the_threads_that_are_left() {
    const BYTES: usize = 32 << 20;
    let device = SimDevice::open(SimConfig::default()).unwrap();
    let block = device.alloc(BYTES).unwrap();
    let mut bytes = vec![0_u8; BYTES];
    for inward in [false, true] {
        for _ in 0..4 {
            let stream = device.stream_create(0).unwrap();
            memset(&device, block, 1, 8, stream);
            device.stream_synchronize(stream).unwrap();
            // A thread takes its name after it has started.
            assert!(comes_true(|| stream_threads() > 0), "a stream's thread is not called that");
            let call = if inward { Call::CopyHtod } else { Call::CopyDtoh };
            let before = device.faults().calls(call);
            let gate = (!inward).then(|| device.hold(stream).unwrap());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // SAFETY: the block is live and this long.
                    let copied = unsafe {
                        match inward {
                            true => device.copy_htod(block, &bytes, stream),
                            false => device.copy_dtoh(&mut bytes, block, stream),
                        }
                    };
                    copied.unwrap();
                });
                while device.faults().calls(call) == before {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(1));
                // SAFETY: made here, and not used any more.
                unsafe { device.stream_destroy(stream) }.unwrap();
                drop(gate);
            });
            device.synchronize().unwrap();
        }
    }
    let ended = comes_true(|| stream_threads() == 0);
    assert!(ended, "{} threads are left while the device lives", stream_threads());
}
