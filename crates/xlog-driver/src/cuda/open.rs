//! Opening a device.
//!
//! The order is: library, version, initialisation, number of devices, context, properties. A failed step is a [`DriverError::Unavailable`]
//! with the cause and the remedy.
//!
//! Invariant: a device that could not be opened leaves nothing behind. [`driver_version`] and [`device_count`] open no device; they are for
//! diagnosis.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice, CUuuid};

use super::abi::{self, AllocationProp, Location, attribute, code};
use super::api::Api;
use super::context::Context;
use super::core::DriverCore;
use super::errors::NO_DEVICE_REMEDY;
use super::library;
use crate::{DeviceKind, DeviceProperties, DeviceUuid, DriverError, DriverResult};

/// The oldest supported CUDA driver, as 1000 × major + 10 × minor.
pub const MINIMUM_DRIVER_VERSION: u32 = 12_000;

/// The alignment that `cuMemAlloc` and the stream-ordered pools promise.
const ALLOCATION_ALIGNMENT: usize = 256;

/// Returns the CUDA version of the installed driver as 1000 × major + 10 × minor, even if it is older than [`MINIMUM_DRIVER_VERSION`].
pub fn driver_version() -> DriverResult<u32> {
    version_of(&*library::api()?)
}

/// Returns how many devices the CUDA driver shows to this process: zero if it shows none. A missing driver is an error.
pub fn device_count() -> DriverResult<usize> {
    count_with(&*library::api()?)
}

/// [`driver_version`] of the given driver.
pub(super) fn version_of(api: &Api) -> DriverResult<u32> {
    let mut version: c_int = 0;
    // SAFETY: the out pointer is valid; this call works before initialisation.
    let code = unsafe { (api.calls.driver_get_version)(&raw mut version) };
    api.check_open("cuDriverGetVersion", code)?;
    Ok(u32::try_from(version).unwrap_or(0))
}

/// [`device_count`] of the given driver.
pub(super) fn count_with(api: &Api) -> DriverResult<usize> {
    require_version(api)?;
    // SAFETY: initialisation may be asked for any number of times, on any thread.
    let code = unsafe { (api.calls.init)(0) };
    match code {
        code::SUCCESS => {}
        code::NO_DEVICE => return Ok(0),
        _ => return Err(api.unavailable("cuInit", code)),
    }
    let mut count: c_int = 0;
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (api.calls.device_get_count)(&raw mut count) };
    match code {
        code::SUCCESS => Ok(usize::try_from(count).unwrap_or(0)),
        code::NO_DEVICE => Ok(0),
        _ => Err(api.unavailable("cuDeviceGetCount", code)),
    }
}

/// Opens device `ordinal` of the given driver.
pub(super) fn open_with(api: Arc<Api>, ordinal: usize) -> DriverResult<DriverCore> {
    let count = count_with(&api)?;
    let (Some(driver_ordinal), true) = (c_int::try_from(ordinal).ok(), ordinal < count) else {
        return Err(no_such_device(ordinal, count));
    };
    let mut device: CUdevice = 0;
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (api.calls.device_get)(&raw mut device, driver_ordinal) };
    api.check_open("cuDeviceGet", code)?;
    let context = Context::retain(api, device)?;
    let properties = {
        let _bound = context.bind_relaxed("open")?;
        read_properties(&context, driver_ordinal.unsigned_abs())?
    };
    Ok(DriverCore::new(properties, context))
}

fn require_version(api: &Api) -> DriverResult<u32> {
    let version = version_of(api)?;
    if version < MINIMUM_DRIVER_VERSION {
        let (found, required) = (dotted(version), dotted(MINIMUM_DRIVER_VERSION));
        return Err(DriverError::Unavailable {
            what: format!("the NVIDIA driver speaks CUDA {found}, but CUDA {required} is required"),
            remedy: format!(
                "install an NVIDIA driver of CUDA {required} or later, or use the simulated device"
            ),
        });
    }
    Ok(version)
}

fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn no_such_device(ordinal: usize, count: usize) -> DriverError {
    let visible = match std::env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(value) => format!(" (CUDA_VISIBLE_DEVICES is {value:?})"),
        None => String::new(),
    };
    let (what, remedy) = match count {
        0 => (
            format!("CUDA device {ordinal} does not exist: the driver shows no device{visible}"),
            NO_DEVICE_REMEDY.to_owned(),
        ),
        1 => (
            format!("CUDA device {ordinal} does not exist: the driver shows one device{visible}"),
            "use ordinal 0".to_owned(),
        ),
        _ => (
            format!(
                "CUDA device {ordinal} does not exist: the driver shows {count} devices{visible}"
            ),
            format!("use an ordinal from 0 to {}", count - 1),
        ),
    };
    DriverError::Unavailable { what, remedy }
}

/// Reads everything that does not change. The context is current.
fn read_properties(context: &Context, ordinal: u32) -> DriverResult<DeviceProperties> {
    let (api, device) = (&*context.api, context.device);
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: the driver writes at most the given length, with a NUL at its end.
    let code = unsafe { (api.calls.device_get_name)(name.as_mut_ptr(), 255, device) };
    api.check_open("cuDeviceGetName", code)?;
    // SAFETY: the array was zeroed and the driver was not given its last byte, so there is a NUL inside.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();

    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (api.calls.device_get_uuid)(&raw mut uuid, device) };
    api.check_open("cuDeviceGetUuid", code)?;

    let mut total: usize = 0;
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (api.calls.device_total_mem)(&raw mut total, device) };
    api.check_open("cuDeviceTotalMem", code)?;

    let (mut least, mut greatest): (c_int, c_int) = (0, 0);
    // SAFETY: both out pointers are valid, and the context is current.
    let code =
        unsafe { (api.calls.ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest) };
    api.check_open("cuCtxGetStreamPriorityRange", code)?;

    // A capability needs both the library's calls and the device's attribute.
    let granularity = match flag(api, device, attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        true => mapping_granularity(api, device).unwrap_or(0),
        false => 0,
    };
    Ok(DeviceProperties {
        kind: DeviceKind::Cuda,
        ordinal,
        name,
        uuid: DeviceUuid(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
        total_bytes: total as u64,
        driver_version: version_of(api)?,
        compute_capability: (
            number(api, device, attribute::COMPUTE_CAPABILITY_MAJOR)?,
            number(api, device, attribute::COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: number(api, device, attribute::MULTIPROCESSOR_COUNT)?,
        least_priority: least,
        greatest_priority: greatest,
        async_pools: api.pools.is_some() && flag(api, device, attribute::MEMORY_POOLS_SUPPORTED),
        virtual_memory: granularity > 0,
        granularity,
        peak_bandwidth: peak_bandwidth(api, device),
        allocation_alignment: ALLOCATION_ALIGNMENT,
    })
}

/// The memory's two transfers per clock cycle over the whole bus. `None` if the driver does not report clock or width.
fn peak_bandwidth(api: &Api, device: CUdevice) -> Option<u64> {
    let kilohertz = number(api, device, attribute::MEMORY_CLOCK_RATE).ok()?;
    let bits = number(api, device, attribute::GLOBAL_MEMORY_BUS_WIDTH).ok()?;
    Some(2 * u64::from(kilohertz) * 1000 * u64::from(bits) / 8).filter(|bytes| *bytes > 0)
}

fn number(api: &Api, device: CUdevice, attribute: u32) -> DriverResult<u32> {
    let mut value: c_int = 0;
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (api.calls.device_get_attribute)(&raw mut value, attribute, device) };
    api.check_open("cuDeviceGetAttribute", code)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// True if the driver knows the attribute and it is set.
fn flag(api: &Api, device: CUdevice, attribute: u32) -> bool {
    number(api, device, attribute).is_ok_and(|value| value != 0)
}

/// The larger of the recommended and the minimum granularity.
fn mapping_granularity(api: &Api, device: CUdevice) -> Option<usize> {
    let calls = api.virtual_memory?;
    let prop = device_memory(device);
    let ask = |which| {
        let mut bytes: usize = 0;
        // SAFETY: both pointers are valid for the call, and the layout is the driver's.
        let code = unsafe { (calls.get_granularity)(&raw mut bytes, &raw const prop, which) };
        (code == code::SUCCESS && bytes.is_power_of_two()).then_some(bytes)
    };
    let minimum = ask(abi::GRANULARITY_MINIMUM)?;
    Some(ask(abi::GRANULARITY_RECOMMENDED).map_or(minimum, |recommended| recommended.max(minimum)))
}

/// The properties of memory of `device` that is not shared with other processes.
pub(super) fn device_memory(device: CUdevice) -> AllocationProp {
    AllocationProp {
        allocation_type: abi::ALLOCATION_TYPE_PINNED,
        requested_handle_types: 0,
        location: Location::device(device),
        win32_handle_meta_data: ptr::null_mut(),
        flags: [0; 8],
    }
}
