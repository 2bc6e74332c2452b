//! CUDA arrays. The driver does not report an array's memory, so its elements are charged.
//!
//! Sparse arrays and arrays that are mapped later have no memory of their own and are not charged.

use std::ffi::c_uint;

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

/// The bytes that `cuArrayCreate` is charged.
pub(crate) fn flat_bytes(descriptor: *const Flat) -> u64 {
    // SAFETY: the caller gave a descriptor, or null.
    unsafe { descriptor.as_ref() }.map_or(0, |flat| {
        let &Flat { width, height, format, channels } = flat;
        Cubic { width, height, depth: 0, format, channels, flags: 0 }.bytes_of_level(0)
    })
}

/// The bytes that `cuMipmappedArrayCreate` is charged; with one level, those of `cuArray3DCreate`.
pub(crate) fn cubic_bytes(descriptor: *const Cubic, levels: u32) -> u64 {
    // SAFETY: the caller gave a descriptor, or null.
    unsafe { descriptor.as_ref() }.map_or(0, |cubic| {
        (0..levels.clamp(1, usize::BITS)).map(|level| cubic.bytes_of_level(level)).sum()
    })
}
