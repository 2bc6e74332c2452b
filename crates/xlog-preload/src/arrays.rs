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
/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`: the depth is a number of layers or faces, which every level has.
const OF_LAYERS: c_uint = 0x01 | 0x04;

impl Cubic {
    fn bytes_of_level(&self, level: u32) -> u64 {
        if self.flags & UNBACKED != 0 {
            return 0;
        }
        let size = |size: usize| ((size as u64).checked_shr(level).unwrap_or(0)).max(1);
        let depth = match self.flags & OF_LAYERS {
            0 => size(self.depth),
            _ => self.depth.max(1) as u64,
        };
        let elements = size(self.width).saturating_mul(size(self.height)).saturating_mul(depth);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(depth: usize, flags: c_uint) -> u64 {
        let cubic = Cubic { width: 512, height: 512, depth, format: 0x20, channels: 1, flags };
        cubic_bytes(&raw const cubic, 10)
    }

    #[test]
    fn each_mip_level_halves_a_volume_in_three_dimensions_and_layers_in_two() {
        let flat: u64 = (0..10).map(|level| 4 << (2 * (9 - level))).sum();
        assert_eq!(bytes(1, 0), flat);
        assert_eq!(bytes(1024, 0x01), 1024 * flat);
        assert_eq!(bytes(6, 0x04), 6 * flat);
        assert!(bytes(1024, 0) < 1024 * flat * 9 / 10);
        assert_eq!(bytes(1024, 0x01 | 0x40), 0, "a sparse array has no memory of its own");
    }
}
