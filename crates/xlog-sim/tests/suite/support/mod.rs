//! What the tests of the simulated device share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod model;
pub mod program;
pub mod run;

use std::sync::Arc;

use xlog_driver::{Driver, MapAccess, StreamHandle, VirtualMemory};
use xlog_sim::{SimConfig, SimDevice};

pub use xlog_base::Random;

/// The concurrent engine and some seeds of the deterministic one.
pub fn devices() -> Vec<Arc<SimDevice>> {
    let mut devices = vec![SimDevice::open(SimConfig::default()).unwrap()];
    devices.extend((0..12).map(seeded));
    devices
}

pub fn seeded(seed: u64) -> Arc<SimDevice> {
    SimDevice::open(SimConfig::default().with_seed(seed)).unwrap()
}

pub fn memset(device: &SimDevice, ptr: u64, value: u8, bytes: usize, stream: StreamHandle) {
    // SAFETY: the simulated device checks the range itself.
    unsafe { device.memset(ptr, value, bytes, stream) }.unwrap();
}

pub fn read(device: &SimDevice, ptr: u64, bytes: usize, stream: StreamHandle) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: the simulated device checks the range itself.
    unsafe { device.copy_dtoh(&mut out, ptr, stream) }.unwrap();
    out
}

/// Makes `to` wait for what is queued on `from`.
pub fn edge(device: &SimDevice, from: StreamHandle, to: StreamHandle) {
    let event = device.event_create().unwrap();
    device.event_record(event, from).unwrap();
    device.stream_wait_event(to, event).unwrap();
    // SAFETY: made here, and not used any more.
    unsafe { device.event_destroy(event) }.unwrap();
}

/// A fresh range of one granularity, mapped and open for everything.
pub fn mapped(device: &SimDevice) -> (u64, usize) {
    let unit = device.granularity();
    let range = device.reserve(unit, 0).unwrap();
    let memory = device.create(unit).unwrap();
    // SAFETY: a fresh reservation.
    unsafe {
        device.map(range, unit, memory).unwrap();
        device.set_access(range, unit, MapAccess::ReadWrite).unwrap();
    }
    (range, unit)
}

pub fn two_streams(device: &SimDevice) -> (StreamHandle, StreamHandle) {
    (device.stream_create(0).unwrap(), device.stream_create(0).unwrap())
}
