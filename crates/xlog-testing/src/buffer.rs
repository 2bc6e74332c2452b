//! Device memory for a test.
//!
//! A buffer's memory is freed only after a wait for the whole device, so the calls here are safe; the tests check their order. On a GPU
//! that wait would not end while a gate is held: declare gates after buffers, so that they are dropped first.

use std::sync::Arc;

use xlog_cuda::{CudaDevice, DeviceStream, Result};

/// A block of device memory, freed on drop after a device-wide wait.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<CudaDevice>,
    ptr: u64,
    bytes: usize,
}

impl Buffer {
    /// Allocates `bytes` bytes.
    ///
    /// # Panics
    /// If the device has too little memory.
    #[must_use]
    pub fn new(device: &Arc<CudaDevice>, bytes: usize) -> Self {
        let ptr = device.driver().alloc(bytes).unwrap();
        Self { device: device.clone(), ptr, bytes }
    }

    /// Returns the address on the device.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns false: the device has no empty blocks.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Queues a fill of the whole buffer.
    pub fn fill(&self, stream: &DeviceStream, value: u8) -> Result<()> {
        // SAFETY: the range is this buffer, which is freed after a device-wide wait.
        unsafe { stream.memset(self.ptr, value, self.bytes) }
    }

    /// Queues a copy of `bytes` to the start of the buffer.
    pub fn write(&self, stream: &DeviceStream, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "{} bytes into {self:?}", bytes.len());
        // SAFETY: the range lies in this buffer, which is freed after a device-wide wait.
        unsafe { stream.copy_htod(self.ptr, bytes) }
    }

    /// Queues a copy of the whole buffer to the start of another.
    pub fn copy_to(&self, stream: &DeviceStream, other: &Self) -> Result<()> {
        assert!(self.bytes <= other.bytes, "{self:?} into {other:?}");
        // SAFETY: both ranges lie in their buffers, which are freed after a device-wide wait.
        unsafe { stream.copy_dtod(other.ptr, self.ptr, self.bytes) }
    }

    /// Reads the whole buffer, waiting for the stream.
    pub fn read(&self, stream: &DeviceStream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: the range is this buffer, and the call returns when the copy is done.
        unsafe { stream.copy_dtoh(&mut bytes, self.ptr)? };
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The error may be a race or a lost device that the test provoked and checks itself.
        let _ = self.device.synchronize();
        // SAFETY: the block is live and the device was waited for.
        let freed = unsafe { self.device.driver().free(self.ptr) };
        if let Err(error) = freed
            && !error.is_device_lost()
            && !std::thread::panicking()
        {
            panic!("freeing {self:?}: {error}");
        }
    }
}

/// Returns bytes that depend on `salt` and have no short period.
#[must_use]
pub fn pattern(bytes: usize, salt: u64) -> Vec<u8> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}
