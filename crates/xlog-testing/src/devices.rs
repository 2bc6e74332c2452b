//! The devices of a test.

use std::sync::Arc;

use xlog_base::{Mutex, MutexGuard};
use xlog_cuda::device_runtime::StreamPool;
use xlog_cuda::sim::SimDevice;
use xlog_cuda::{CudaDevice, DeviceSpec};

use crate::Buffer;

/// The environment variable that names the device to test on.
pub const TEST_DEVICE_VARIABLE: &str = "XLOG_TEST_DEVICE";

/// The seeds that are tested if no device is named.
pub const SEEDS: [u64; 5] = [0, 1, 17, 4711, u64::MAX];

/// Returns the specs of the devices to test on.
///
/// # Panics
/// If `XLOG_TEST_DEVICE` names no device.
#[must_use]
pub fn specs() -> Vec<String> {
    match std::env::var_os(TEST_DEVICE_VARIABLE) {
        Some(spec) => {
            let spec = spec.to_string_lossy().into_owned();
            if let Err(error) = spec.parse::<DeviceSpec>() {
                panic!("{TEST_DEVICE_VARIABLE}: {error}");
            }
            vec![spec]
        }
        None => std::iter::once(DeviceSpec::Sim)
            .chain(SEEDS.map(DeviceSpec::SimSeeded))
            .map(|spec| spec.to_string())
            .collect(),
    }
}

fn open(spec: &str) -> Arc<CudaDevice> {
    let device = Arc::new(CudaDevice::open(spec).unwrap_or_else(|error| panic!("{error}")));
    if device.sim().is_none() {
        warm_up(&device);
    }
    device
}

/// Fills and copies once. A process's first fill loads a kernel; under a memory checker that waits for all streams, including one that a
/// test holds.
fn warm_up(device: &Arc<CudaDevice>) {
    const BYTES: usize = 1 << 20;
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let stream = streams.lease().unwrap_or_else(|error| panic!("{error}"));
    let (from, to) = (Buffer::new(device, BYTES), Buffer::new(device, BYTES));
    let read = from
        .fill(&stream, 1)
        .and_then(|()| from.copy_to(&stream, &to))
        .and_then(|()| to.read(&stream));
    assert!(
        read.is_ok_and(|bytes| bytes.iter().all(|byte| *byte == 1)),
        "the device does not copy"
    );
}

/// Runs `body` on each device to test on, one after another.
///
/// # Panics
/// If the body panics or left a race behind.
pub fn for_each_device(body: impl Fn(&Arc<CudaDevice>)) {
    for spec in specs() {
        let _replay = Replay(&spec);
        in_turn(&spec, open, |device| {
            body(device);
            let races = device.races();
            assert!(races.is_empty(), "the program races: {races:#?}");
        });
    }
}

/// Opens a device, runs `body` and closes the device, all in one turn, because opening and closing wait for the whole device.
fn in_turn<D>(spec: &str, open: impl FnOnce(&str) -> D, body: impl FnOnce(&D)) {
    let _turn = turn(spec);
    let device = open(spec);
    body(&device);
}

/// Runs `body` on each device, and, unless a device is named, also on a simulated device behind a plain driver.
///
/// # Panics
/// As [`for_each_device`].
pub fn for_each_seam(body: impl Fn(&Arc<CudaDevice>)) {
    for_each_device(&body);
    if std::env::var_os(TEST_DEVICE_VARIABLE).is_none() {
        on_a_plain_driver(body);
    }
}

/// Hides that the device is simulated, so that code which only knows a driver runs as on a GPU.
fn on_a_plain_driver(body: impl Fn(&Arc<CudaDevice>)) {
    let sim = SimDevice::open(Default::default()).unwrap_or_else(|error| panic!("{error}"));
    let device = Arc::new(CudaDevice::from_driver(Arc::clone(&sim) as _));
    body(&device);
    let races = sim.races();
    assert!(races.is_empty(), "the program races behind the plain seam: {races:#?}");
}

/// Runs `body` on each simulated device to test on, and on none if a GPU is named. The body checks races itself.
pub fn for_each_sim(body: impl Fn(&Arc<CudaDevice>, &Arc<SimDevice>)) {
    for spec in specs() {
        if !spec.parse::<DeviceSpec>().is_ok_and(DeviceSpec::is_simulated) {
            continue;
        }
        let device = open(&spec);
        let _replay = Replay(&spec);
        if let Some(sim) = device.sim() {
            body(&device, sim);
        }
    }
}

/// Runs the bodies as concurrent host threads and returns when all have ended.
///
/// With a seed they are logical threads that the device schedules, otherwise real ones.
pub fn threads<'a>(device: &CudaDevice, bodies: Vec<Box<dyn FnOnce() + Send + 'a>>) {
    match device.sim() {
        Some(sim) => sim.run_threads(bodies),
        None => std::thread::scope(|scope| {
            for body in bodies {
                scope.spawn(body);
            }
        }),
    }
}

/// The lock of the test that uses the GPU.
static GPU: Mutex<()> = Mutex::new(());

/// Locks the GPU of this process for one test. `None` for a simulated device, on which tests run concurrently.
///
/// A process has one context. Driver calls that free memory or load kernels wait for all its work, so those of one test would wait for the
/// gates of another. [`for_each_device`] takes the lock; a test that opens its device itself locks before, and unlocks after dropping the
/// device.
#[must_use]
pub fn turn(spec: &str) -> Option<MutexGuard<'static, ()>> {
    let is_simulated = spec.parse::<DeviceSpec>().is_ok_and(DeviceSpec::is_simulated);
    (!is_simulated).then(|| GPU.lock())
}

/// Prints how to run a failed body again.
struct Replay<'a>(&'a str);

impl Drop for Replay<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed on device {0}; run it again with {TEST_DEVICE_VARIABLE}={0}", self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the GPU is locked while the device is opened and closed.
    struct Device;

    impl Device {
        fn open(_: &str) -> Self {
            assert!(GPU.try_lock().is_none(), "opened out of turn");
            Self
        }
    }

    impl Drop for Device {
        fn drop(&mut self) {
            assert!(GPU.try_lock().is_none(), "closed out of turn");
        }
    }

    #[test]
    fn a_gpu_is_opened_and_closed_within_the_turn_of_its_test() {
        in_turn("cuda:0", Device::open, |_| assert!(GPU.try_lock().is_none()));
        assert!(turn("sim").is_none() && turn("sim:7").is_none());
    }
}
