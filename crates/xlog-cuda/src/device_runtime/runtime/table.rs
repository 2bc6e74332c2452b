//! The shared runtimes of the process: one per ordinal, built once, never dropped.
//!
//! A slot is empty until a build succeeds. The lock of a slot is held over the build, so one thread builds and the others wait. If a
//! build fails or panics, the slot stays empty and keeps its configuration for the next call. Calls for a filled slot do not lock.
//! The user's layers run under the lock: a layer that requests the runtime that its thread is building gets an error.
//!
//! Simulated devices with one spec are devices of one simulated machine: ordinal n is its device n.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use xlog_driver::sync::Mutex;
#[cfg(feature = "sim")]
use xlog_sim::{SimConfig, SimMachine};

use super::stack::stack;
use super::{MAX_DEVICE_ORDINALS, RuntimeConfig, XlogDeviceRuntime};
use crate::{CudaDevice, DEVICE_VARIABLE, DeviceSpec, Result, XlogError};

struct Slot {
    built: OnceLock<Arc<XlogDeviceRuntime>>,
    /// The configuration that was set before first use. Locked while the runtime is built.
    config: Mutex<Option<RuntimeConfig>>,
}

static TABLE: [Slot; MAX_DEVICE_ORDINALS] =
    [const { Slot { built: OnceLock::new(), config: Mutex::new(None) } }; MAX_DEVICE_ORDINALS];

fn slot(ordinal: u32) -> Result<&'static Slot> {
    TABLE.get(ordinal as usize).ok_or_else(|| {
        XlogError::Kernel(format!(
            "device ordinal {ordinal} has no place in the table of shared runtimes; ask for 0 to {}, or compose a runtime \
             with XlogDeviceRuntime::with_resource",
            MAX_DEVICE_ORDINALS - 1
        ))
    })
}

thread_local! {
    /// The ordinals whose runtimes this thread is building, one bit each.
    static BUILDING: Cell<u32> = const { Cell::new(0) };
}

const _: () = assert!(MAX_DEVICE_ORDINALS <= u32::BITS as usize);

/// Marks a build on this thread until it is dropped.
struct Building {
    before: u32,
}

impl Building {
    fn begin(ordinal: u32) -> Self {
        let before = BUILDING.get();
        BUILDING.set(before | 1 << ordinal);
        Self { before }
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        BUILDING.set(self.before);
    }
}

/// Refuses a call for the runtime that this thread is building: it would deadlock.
fn check_not_building(ordinal: u32) -> Result<()> {
    if BUILDING.get() & 1 << ordinal == 0 {
        return Ok(());
    }
    Err(XlogError::Kernel(format!(
        "the runtime of device ordinal {ordinal} is being built by this thread; a layer of its configuration cannot ask for it, only \
         wrap the resource that it is given"
    )))
}

pub(super) fn shared(ordinal: u32) -> Result<&'static Arc<XlogDeviceRuntime>> {
    let slot = slot(ordinal)?;
    if let Some(runtime) = slot.built.get() {
        return Ok(runtime);
    }
    check_not_building(ordinal)?;
    let config = slot.config.lock();
    // Another thread may have built it while this one waited for the lock.
    if let Some(runtime) = slot.built.get() {
        return Ok(runtime);
    }
    let built = match &*config {
        Some(config) => build(ordinal, config),
        None => RuntimeConfig::from_environment().and_then(|config| build(ordinal, &config)),
    };
    match built {
        Ok(runtime) => Ok(slot.built.get_or_init(|| Arc::new(runtime))),
        Err(error) => {
            let text =
                format!("no runtime for device ordinal {ordinal}: {error}{}", advice(&error));
            Err(XlogError::kernel(text, error))
        }
    }
}

pub(super) fn configure(ordinal: u32, config: RuntimeConfig) -> Result<()> {
    let slot = slot(ordinal)?;
    if let Some(DeviceSpec::Cuda(gpu)) = config.device
        && gpu != ordinal as usize
    {
        return Err(XlogError::Kernel(format!(
            "the runtime of device ordinal {ordinal} cannot stand on \"cuda:{gpu}\"; configure ordinal {gpu} instead, or \
             name \"cuda:{ordinal}\" or a simulated device"
        )));
    }
    check_not_building(ordinal)?;
    let mut wanted = slot.config.lock();
    if slot.built.get().is_some() {
        return Err(XlogError::Kernel(format!(
            "the runtime of device ordinal {ordinal} is in use; configure it before its first use"
        )));
    }
    *wanted = Some(config);
    Ok(())
}

fn build(ordinal: u32, config: &RuntimeConfig) -> Result<XlogDeviceRuntime> {
    crate::spans::slow_path!("runtime_build", ordinal);
    let _building = Building::begin(ordinal);
    stack(Arc::new(open(ordinal, config.device_of(ordinal))?), config)
}

fn open(ordinal: u32, spec: DeviceSpec) -> Result<CudaDevice> {
    if spec.is_simulated() { open_simulated(ordinal, spec) } else { CudaDevice::open_spec(spec) }
}

/// Returns the advice for a machine without a GPU.
fn advice(error: &XlogError) -> String {
    match error {
        XlogError::Open { spec, .. } if spec.starts_with("cuda") => format!(
            "; for the simulated device set {DEVICE_VARIABLE}=sim or call XlogDeviceRuntime::configure"
        ),
        _ => String::new(),
    }
}

/// Refuses: this build has no simulated device.
#[cfg(not(feature = "sim"))]
fn open_simulated(_ordinal: u32, spec: DeviceSpec) -> Result<CudaDevice> {
    CudaDevice::open_spec(spec)
}

/// Returns device `ordinal` of the simulated machine of this spec.
#[cfg(feature = "sim")]
fn open_simulated(ordinal: u32, spec: DeviceSpec) -> Result<CudaDevice> {
    let seed = match spec {
        DeviceSpec::SimSeeded(seed) => Some(seed),
        _ => None,
    };
    let failed = |cause| XlogError::Open { spec: spec.to_string(), cause };
    // Nothing under the lock calls back: it only creates device objects.
    static MACHINES: Mutex<Vec<(Option<u64>, SimMachine)>> = Mutex::new(Vec::new());
    let mut machines = MACHINES.lock();
    let machine = match machines.iter().position(|(known, _)| *known == seed) {
        Some(index) => &machines[index].1,
        None => {
            let mut config = SimConfig::default().with_ordinals(MAX_DEVICE_ORDINALS as u32);
            config.seed = seed;
            machines.push((seed, SimMachine::new(config).map_err(failed)?));
            &machines[machines.len() - 1].1
        }
    };
    Ok(CudaDevice::from_sim(machine.device(ordinal).map_err(failed)?))
}
