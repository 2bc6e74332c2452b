//! CUDA arrays. The driver does not report an array's memory, so its elements are charged.
//!
//! Sparse arrays and arrays that are mapped later have no memory of their own and are not charged.

use std::ffi::c_uint;

use crate::blocks::{Space, give, take, written};
use crate::driver::CuResult;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Flat {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Cubic {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`.
const UNBACKED: c_uint = 0x40 | 0x80;

impl Cubic {
    fn bytes(&self) -> u64 {
        self.bytes_of_level(0)
    }

    fn bytes_of_level(&self, level: u32) -> u64 {
        if self.flags & UNBACKED != 0 {
            return 0;
        }
        let size = |size: usize| ((size as u64).checked_shr(level).unwrap_or(0)).max(1);
        let elements =
            size(self.width).saturating_mul(size(self.height)).saturating_mul(size(self.depth));
        elements.saturating_mul(u64::from(self.channels.max(1)) * element_bytes(self.format))
    }
}

/// The bytes of one channel; 4 for formats that are not listed.
fn element_bytes(format: c_uint) -> u64 {
    match format {
        0x01 | 0x08 | 0xc0..=0xc2 | 0xc6..=0xc8 => 1,
        0x02 | 0x09 | 0x10 | 0xc3..=0xc5 | 0xc9..=0xcb => 2,
        _ => 4,
    }
}

/// `cuArrayCreate`.
pub(crate) fn create(
    real: unsafe extern "C" fn(*mut u64, *const Flat) -> CuResult,
    out: *mut u64,
    descriptor: *const Flat,
    caller: usize,
) -> CuResult {
    // SAFETY: the caller gave a descriptor, or null.
    let bytes = unsafe { descriptor.as_ref() }.map_or(0, |flat| {
        let &Flat { width, height, format, channels } = flat;
        Cubic { width, height, depth: 0, format, channels, flags: 0 }.bytes()
    });
    // SAFETY: the arguments are the caller's own.
    take(Space::Array, bytes, caller, || unsafe { real(out, descriptor) }, || written(out))
}

/// `cuArray3DCreate`.
pub(crate) fn create_cubic(
    real: unsafe extern "C" fn(*mut u64, *const Cubic) -> CuResult,
    out: *mut u64,
    descriptor: *const Cubic,
    caller: usize,
) -> CuResult {
    // SAFETY: the caller gave a descriptor, or null.
    let bytes = unsafe { descriptor.as_ref() }.map_or(0, Cubic::bytes);
    // SAFETY: the arguments are the caller's own.
    take(Space::Array, bytes, caller, || unsafe { real(out, descriptor) }, || written(out))
}

/// `cuMipmappedArrayCreate`.
pub(crate) fn create_mipmapped(
    real: unsafe extern "C" fn(*mut u64, *const Cubic, u32) -> CuResult,
    out: *mut u64,
    descriptor: *const Cubic,
    levels: u32,
    caller: usize,
) -> CuResult {
    // SAFETY: the caller gave a descriptor, or null.
    let bytes = unsafe { descriptor.as_ref() }.map_or(0, |cubic| {
        (0..levels.clamp(1, usize::BITS)).map(|level| cubic.bytes_of_level(level)).sum()
    });
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, descriptor, levels) };
    take(Space::MipmappedArray, bytes, caller, call, || written(out))
}

/// `cuArrayDestroy`.
pub(crate) fn destroy(
    real: unsafe extern "C" fn(u64) -> CuResult,
    array: u64,
    _caller: usize,
) -> CuResult {
    // SAFETY: the argument is the caller's own.
    give(Space::Array, array, None, || unsafe { real(array) })
}

/// `cuMipmappedArrayDestroy`.
pub(crate) fn destroy_mipmapped(
    real: unsafe extern "C" fn(u64) -> CuResult,
    array: u64,
    _caller: usize,
) -> CuResult {
    // SAFETY: the argument is the caller's own.
    give(Space::MipmappedArray, array, None, || unsafe { real(array) })
}
