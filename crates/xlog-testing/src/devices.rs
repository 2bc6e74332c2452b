//! Which devices a test runs on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xlog_cuda::sim::SimDevice;
use xlog_cuda::{CudaDevice, DeviceSpec};

/// The environment variable that names the one device to test on.
pub const TEST_DEVICE_VARIABLE: &str = "XLOG_TEST_DEVICE";

/// The seeds tried when no device is named.
pub const SEEDS: [u64; 5] = [0, 1, 17, 4711, u64::MAX];

/// The specs of the devices to test on.
///
/// # Panics
/// When `XLOG_TEST_DEVICE` is set to something that names no device.
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

/// The devices to test on, each newly opened.
///
/// # Panics
/// When one cannot be opened.
#[must_use]
pub fn devices() -> Vec<Arc<CudaDevice>> {
    specs().iter().map(|spec| open(spec)).collect()
}

fn open(spec: &str) -> Arc<CudaDevice> {
    Arc::new(CudaDevice::open(spec).unwrap_or_else(|error| panic!("{error}")))
}

/// Runs `body` on each device to test on, one after the other.
///
/// # Panics
/// When the body does, or when it left a race behind.
pub fn for_each_device(body: impl Fn(&Arc<CudaDevice>)) {
    for spec in specs() {
        let device = open(&spec);
        let _replay = Replay(&spec);
        let _alone = alone(&device);
        body(&device);
        let races = device.races();
        assert!(races.is_empty(), "the program races: {races:#?}");
    }
}

/// The same, and on a simulated device behind the plain seam where no device is named.
///
/// # Panics
/// As [`for_each_device`].
pub fn for_each_seam(body: impl Fn(&Arc<CudaDevice>)) {
    for_each_device(&body);
    if std::env::var_os(TEST_DEVICE_VARIABLE).is_none() {
        on_a_plain_driver(body);
    }
}

/// A simulated device behind the plain seam: what only knows that it has some driver goes the same way as on a GPU.
fn on_a_plain_driver(body: impl Fn(&Arc<CudaDevice>)) {
    let sim = SimDevice::open(Default::default()).unwrap_or_else(|error| panic!("{error}"));
    let device = Arc::new(CudaDevice::from_driver(Arc::clone(&sim) as _));
    body(&device);
    let races = sim.races();
    assert!(races.is_empty(), "the program races behind the plain seam: {races:#?}");
}

/// Runs `body` on each simulated device to test on: on none at all when a GPU is asked for. Races are the body's affair.
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
/// Under a seed they are logical threads that the device schedules, otherwise real ones.
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

/// One test at a time on a GPU: there is one context per process, and a device-wide wait of one test would wait for the
/// gates of another.
fn alone(device: &CudaDevice) -> Option<MutexGuard<'static, ()>> {
    static GPU: Mutex<()> = Mutex::new(());
    device.sim().is_none().then(|| GPU.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Says how to run a failed body again.
struct Replay<'a>(&'a str);

impl Drop for Replay<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed on device {0}; run it again with {TEST_DEVICE_VARIABLE}={0}", self.0);
        }
    }
}
