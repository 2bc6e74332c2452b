//! Verifies the contents of blocks just before they are freed.
//!
//! Every block has a number, which determines a pattern and a slot in a buffer that belongs to no resource. Both ends of
//! the block are written with the pattern and, before the free, copied to the slot in stream order. No thread waits, so
//! only the resource orders the work. The host compares at the end.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::Serialize;
use xlog_cuda::device_runtime::{DeviceBlock, DeviceStream};
use xlog_cuda::{CudaDevice, Result};

/// Bytes of a pattern, written at each end.
const END: u64 = 8;
/// Bytes of a block's slot in the buffer.
const PLACE: u64 = 2 * END;
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// A block whose contents differ from the pattern.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) block: u64,
    pub(super) end: &'static str,
    pub(super) expected: String,
    pub(super) found: String,
}

#[derive(Debug, Default)]
pub(super) struct Compared {
    pub(super) verified: u64,
    pub(super) wrong: u64,
    pub(super) first: Option<Wrong>,
}

/// The buffer, and how much of each slot is filled.
pub(super) struct Witness {
    device: Arc<CudaDevice>,
    buffer: u64,
    /// Bytes of each block's head in its slot, plus 128 if its tail is also there.
    filled: Vec<AtomicU8>,
    seed: u64,
}

impl Witness {
    pub(super) fn new(device: &Arc<CudaDevice>, blocks: u64, seed: u64) -> Result<Self> {
        let buffer = device.driver().alloc((blocks.max(1) * PLACE) as usize)?;
        let filled = (0..blocks).map(|_| AtomicU8::new(0)).collect();
        Ok(Self { device: Arc::clone(device), buffer, filled, seed })
    }

    fn pattern(&self, block: u64) -> [u8; END as usize] {
        // Odd multipliers and a fold make the patterns of neighbours differ in all bytes.
        let mixed = (block ^ self.seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
    }

    /// Queues the writes of both ends of a block of `bytes` bytes.
    pub(super) fn write(
        &self,
        number: u64,
        block: &DeviceBlock,
        bytes: u64,
        stream: &DeviceStream,
    ) -> Result<()> {
        let pattern = self.pattern(number);
        let head = pattern.get(..bytes.min(END) as usize).unwrap_or(&pattern);
        // SAFETY: the block is live and `bytes` long, and the caller orders this work before its free.
        unsafe {
            stream.copy_htod(block.ptr, head)?;
            if bytes >= PLACE {
                stream.copy_htod(block.ptr + bytes - END, &pattern)?;
            }
        }
        Ok(())
    }

    /// Queues the copies of both ends to the block's slot.
    pub(super) fn read(
        &self,
        number: u64,
        block: &DeviceBlock,
        bytes: u64,
        stream: &DeviceStream,
    ) -> Result<()> {
        let Some(filled) = self.filled.get(number as usize) else { return Ok(()) };
        let (place, head) = (self.buffer + number * PLACE, bytes.min(END));
        let has_tail = bytes >= PLACE;
        // SAFETY: as in `write`. The buffer lives until this is dropped, after the device has completed all work, and every number
        // has its own slot.
        unsafe {
            stream.copy_dtod(place, block.ptr, head as usize)?;
            if has_tail {
                stream.copy_dtod(place + END, block.ptr + bytes - END, END as usize)?;
            }
        }
        filled.store(head as u8 | u8::from(has_tail) << 7, Ordering::Relaxed);
        Ok(())
    }

    /// Compares all slots after the device has completed its work.
    pub(super) fn compare(&self) -> Result<Compared> {
        let pool = xlog_cuda::device_runtime::StreamPool::new(Arc::clone(&self.device), 1);
        let stream = pool.lease()?;
        let mut compared = Compared::default();
        let mut bytes = vec![0; CHUNK];
        for (chunk, filled) in self.filled.chunks(CHUNK / PLACE as usize).enumerate() {
            let from = self.buffer + (chunk * CHUNK) as u64;
            let some = filled.len() * PLACE as usize;
            let Some(part) = bytes.get_mut(..some) else { continue };
            // SAFETY: the range is within the buffer, and the device has completed the writes to it.
            unsafe { stream.copy_dtoh(part, from)? };
            let first = (chunk * (CHUNK / PLACE as usize)) as u64;
            for (at, (filled, place)) in
                filled.iter().zip(part.chunks_exact(PLACE as usize)).enumerate()
            {
                let filled = filled.load(Ordering::Relaxed);
                if filled != 0 {
                    self.compare_one(first + at as u64, filled, place, &mut compared);
                }
            }
        }
        Ok(compared)
    }

    fn compare_one(&self, block: u64, filled: u8, place: &[u8], compared: &mut Compared) {
        let pattern = self.pattern(block);
        let (head, tail) = place.split_at(END as usize);
        let length = usize::from(filled & 0x7f);
        let ends =
            [("head", head, length), ("tail", tail, usize::from(filled >> 7) * END as usize)];
        for (end, found, length) in ends {
            let (found, expected) = (&found[..length], &pattern[..length]);
            if found != expected {
                compared.wrong += 1;
                compared.first.get_or_insert_with(|| Wrong {
                    block,
                    end,
                    expected: hex(expected),
                    found: hex(found),
                });
                return;
            }
        }
        compared.verified += 1;
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // A lost device has already released the buffer; a drop cannot report an error.
        if self.device.synchronize().is_ok() {
            // SAFETY: the buffer is ours, freed once, and all work that used it has completed.
            let _ = unsafe { self.device.driver().free(self.buffer) };
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_cuda::StreamId;
    use xlog_cuda::device_runtime::{
        AllocTag, DeviceMemoryResource, DirectCudaResource, StreamPool,
    };

    #[test]
    fn one_changed_byte_at_either_end_is_found() {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        let resource = DirectCudaResource::new(Arc::clone(&device), 0);
        let pool = StreamPool::with_defaults(Arc::clone(&device));
        let stream = pool.lease().unwrap();
        let witness = Witness::new(&device, 8, 3).unwrap();
        let sizes = [4, 8, 15, 16, 1000];
        for (number, bytes) in sizes.into_iter().enumerate() {
            let tag = AllocTag::UNTAGGED;
            let block = resource.allocate(bytes as usize, StreamId::DEFAULT, tag).unwrap();
            witness.write(number as u64, &block, bytes, &stream).unwrap();
            let damage = match number {
                1 => Some(7),
                4 => Some(999),
                _ => None,
            };
            if let Some(at) = damage {
                // SAFETY: the block is live, and the stream orders this between the write and the read.
                unsafe { stream.memset(block.ptr + at, 0xee, 1).unwrap() };
            }
            witness.read(number as u64, &block, bytes, &stream).unwrap();
            resource.deallocate(block).unwrap();
        }
        device.synchronize().unwrap();
        let compared = witness.compare().unwrap();
        assert_eq!((compared.verified, compared.wrong), (3, 2));
        let first = compared.first.unwrap();
        assert_eq!((first.block, first.end), (1, "head"));
        assert!(first.found.ends_with("ee"), "{first:?}");
    }
}
