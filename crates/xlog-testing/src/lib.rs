//! The device selection and helpers of this workspace's tests.
//!
//! [`for_each_device`] runs a test body on the device that `XLOG_TEST_DEVICE` names, or else on `"sim"` and on `"sim:SEED"` for several
//! seeds. If a body fails, the device and the way to run it again are printed. A program that races on a simulated device fails even if its
//! bytes are right.
//!
//! [`Buffer`] is device memory that frees itself. [`threads`] runs host threads, logical ones under a seed. [`WatchedGate`] fails a test
//! whose call waits for a held stream. [`left_out`] reports a test that needs a missing tool. [`IdleDriver`] is a driver without a device,
//! for measuring the runtime alone. [`decorates`] implements the common methods of test decorators. Helpers panic where a library would
//! return an error.

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

/// Implements the common methods of test decorators by forwarding to the resource in the field `$inner`.
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
