//! The conversion of the driver's codes to [`DriverError`].
//!
//! A code becomes a decision of the caller: retry after freeing, use another way, or abandon the device. Every other code, known or not, is
//! reported as a number with the driver's name for it.
//!
//! A code means a lost device only if the driver's documentation says that all further work returns the same error. `CUDA_ERROR_UNKNOWN`
//! and `CUDA_ERROR_DEVICE_UNAVAILABLE` are not among them.

use std::ffi::{CStr, c_char, c_uint};
use std::ptr;

use super::abi::code;
use super::api::Api;
use crate::{DriverError, DriverResult};

const NO_NAME: &str = "no name known to this driver";

/// True for the codes after which the context, or the driver itself, never works again.
pub(super) fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        code::DEINITIALIZED
            | code::ECC_UNCORRECTABLE
            | code::NVLINK_UNCORRECTABLE
            | code::CONTAINED
            | code::ILLEGAL_ADDRESS
            | code::LAUNCH_TIMEOUT
            | code::CONTEXT_IS_DESTROYED
            | code::ASSERT
            | code::HARDWARE_STACK_ERROR
            ..=code::LAUNCH_FAILED
                | code::TENSOR_MEMORY_LEAK
                | code::MPS_CLIENT_TERMINATED
                | code::EXTERNAL_DEVICE
    )
}

impl Api {
    /// Returns the error of `code`, or `Ok` for success. `requested` is the size of an allocation.
    #[inline]
    pub(super) fn check(&self, call: &'static str, code: u32, requested: u64) -> DriverResult<()> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.error(call, code, requested)) }
    }

    #[cold]
    pub(super) fn error(&self, call: &'static str, code: u32, requested: u64) -> DriverError {
        match code {
            code::OUT_OF_MEMORY => DriverError::OutOfMemory { call, requested },
            code::NOT_SUPPORTED => DriverError::Unsupported { call },
            lost if is_sticky(lost) => {
                DriverError::DeviceLost { call, code, reason: self.description(code) }
            }
            _ => DriverError::Code { call, code, name: self.name(code) },
        }
    }

    /// The error of a failed pinned allocation. Freeing device memory would not help, so it is not [`DriverError::OutOfMemory`].
    #[cold]
    pub(super) fn host_memory_error(&self, code: u32, requested: usize) -> DriverError {
        const CALL: &str = "cuMemHostAlloc";
        if code == code::OUT_OF_MEMORY {
            let name = format!("{}, {requested} bytes of pinned host memory", self.name(code));
            return DriverError::Code { call: CALL, code, name };
        }
        self.error(CALL, code, requested as u64)
    }

    /// Returns the error of a device that could not be opened, or `Ok` if `call` succeeded.
    pub(super) fn check_open(&self, call: &'static str, code: u32) -> DriverResult<()> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.unavailable(call, code)) }
    }

    /// The error of a device that could not be opened because `call` returned `code`.
    #[cold]
    pub(super) fn unavailable(&self, call: &'static str, code: u32) -> DriverError {
        let remedy = match code {
            code::NO_DEVICE => NO_DEVICE_REMEDY,
            code::STUB_LIBRARY => {
                "take the toolkit's stubs folder out of the library path so that the driver's own libcuda is found"
            }
            code::SYSTEM_DRIVER_MISMATCH => {
                "libcuda and the kernel module are of different versions: reload the module or reboot"
            }
            code::COMPAT_NOT_SUPPORTED => {
                "take the CUDA compatibility package out of the library path: this GPU does not support it"
            }
            code::SYSTEM_NOT_READY => {
                "start the system's services for the GPU, such as nvidia-fabricmanager"
            }
            code::DEVICE_UNAVAILABLE => {
                "another process has the GPU to itself: end it, or change the compute mode with nvidia-smi"
            }
            code::OUT_OF_MEMORY => {
                "the card has no room for another context: see nvidia-smi for who uses it"
            }
            code::NOT_INITIALIZED => {
                "the process was forked after CUDA was started: open the device in the child only"
            }
            code::UNKNOWN => {
                "see nvidia-smi and the kernel log, and check that nvidia-uvm is loaded"
            }
            _ => "see nvidia-smi for the state of the driver, or use the simulated device",
        };
        DriverError::Unavailable {
            what: format!("{call} failed with driver code {code} ({})", self.name(code)),
            remedy: remedy.to_owned(),
        }
    }

    /// The driver's name for `code`.
    pub(super) fn name(&self, code: u32) -> String {
        self.error_text
            .and_then(|calls| text(calls.name, code))
            .unwrap_or_else(|| NO_NAME.to_owned())
    }

    /// The driver's name for `code`, with its explanation if the driver has one.
    fn description(&self, code: u32) -> String {
        let name = self.name(code);
        match self.error_text.and_then(|calls| text(calls.description, code)) {
            Some(description) => format!("{name}, {description}"),
            None => name,
        }
    }
}

pub(super) const NO_DEVICE_REMEDY: &str =
    "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the simulated device";

fn text(
    call: unsafe extern "C" fn(c_uint, *mut *const c_char) -> u32,
    code: u32,
) -> Option<String> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: the call takes any number as a code and writes one pointer to `text`.
    let answer = unsafe { call(code, &raw mut text) };
    if answer != code::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: on success the driver points at a NUL-terminated string that lives as long as the library.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
