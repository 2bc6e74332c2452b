//! How the tests of this workspace take their device.
//!
//! One test source runs on every device: [`for_each_device`] runs a body on the device that `XLOG_TEST_DEVICE` names, or,
//! when it is not set, on `"sim"` and on `"sim:SEED"` for a handful of seeds. When a body fails, the device and the way to
//! run it again are printed, and a program that races on a simulated device fails whatever its bytes were.
//!
//! [`Buffer`] is device memory that frees itself, [`threads`] runs host threads (logical ones under a seed), and
//! [`WatchedGate`] turns a call that waits for a held stream into a failure instead of a hang; [`left_out`] reports a test
//! that needs a tool which is missing. [`IdleDriver`] is a driver without a device, for measuring the runtime alone; [`decorates`] has
//! the methods that decorators of tests share. A helper of tests: it panics where a library would return an error.

// A helper of tests fails tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod buffer;
mod devices;
mod gate;
mod idle_driver;
pub mod kernels;
mod tools;

pub use buffer::{Buffer, pattern};
pub use devices::{
    SEEDS, TEST_DEVICE_VARIABLE, for_each_device, for_each_seam, for_each_sim, specs, threads, turn,
};
pub use gate::{WatchedGate, promptly};
pub use idle_driver::IdleDriver;
pub use tools::{TEST_TOOLS_VARIABLE, left_out};

/// Implements what most decorators of tests have in common: they name the resource in the field `$inner`, and answer as it does.
#[macro_export]
macro_rules! decorates {
    ($inner:tt) => {
        fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
            Some(&self.$inner)
        }
        fn device_ordinal(&self) -> u32 {
            self.$inner.device_ordinal()
        }
        fn bytes_outstanding(&self) -> usize {
            self.$inner.bytes_outstanding()
        }
    };
}
