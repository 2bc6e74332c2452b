//! Memory queries, lowered to the limit: frameworks size themselves by them and print them when memory runs out.

use crate::blocks::after_success;
use crate::driver::CuResult;
use crate::state::state;

/// `cuMemGetInfo`.
pub(crate) fn memory(
    free: *mut usize,
    total: *mut usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    after_success(call, || {
        let state = state()?;
        let account = state.account(state.driver.current_device()?)?;
        lower(total, account.limit());
        lower(free, account.available());
        Some(())
    })
}

/// `cuDeviceTotalMem`.
pub(crate) fn total(bytes: *mut usize, device: i32, call: impl FnOnce() -> CuResult) -> CuResult {
    after_success(call, || {
        let account = state()?.account(u32::try_from(device).ok()?)?;
        lower(bytes, account.limit());
        Some(())
    })
}

/// Lowers the value that the driver wrote to `limit`.
fn lower(value: *mut usize, limit: Option<u64>) {
    // SAFETY: the driver wrote to the caller's pointer and reported success; a caller may pass null for a value it does not want.
    let value = unsafe { value.as_mut() };
    if let (Some(value), Some(limit)) = (value, limit) {
        *value = (*value).min(usize::try_from(limit).unwrap_or(usize::MAX));
    }
}
