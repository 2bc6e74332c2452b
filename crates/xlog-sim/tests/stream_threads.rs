//! The threads behind streams end with them. Alone in its file: it counts threads of the process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use support::memset;
use xlog_driver::Driver;
use xlog_sim::{Call, SimConfig, SimDevice};

fn stream_threads() -> usize {
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| name(task.ok()?))
        .filter(|name| name.starts_with("xlog-sim"))
        .count()
}

#[test]
fn a_stream_destroyed_while_a_host_thread_runs_its_last_copy_leaves_no_thread() {
    const BYTES: usize = 32 << 20;
    let device = SimDevice::open(SimConfig::default()).unwrap();
    let block = device.alloc(BYTES).unwrap();
    let mut bytes = vec![0_u8; BYTES];
    for inward in [false, true] {
        for _ in 0..4 {
            let stream = device.stream_create(0).unwrap();
            memset(&device, block, 1, 8, stream);
            device.stream_synchronize(stream).unwrap();
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
                device.stream_destroy(stream).unwrap();
                drop(gate);
            });
            device.synchronize().unwrap();
        }
    }
    let patience = Instant::now();
    while stream_threads() > 0 && patience.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(stream_threads(), 0, "threads are left while the device lives");
}
