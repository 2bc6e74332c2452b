//! Kernels that exercise the runtime, on a GPU and as equivalent closures on the simulated device.
//!
//! They keep a stream busy, write patterns, and verify them. [`host`] computes the same results on the CPU, so that every
//! result can be verified. All arithmetic is unsigned and wraps.

use std::sync::Arc;

use xlog_cuda::driver::Access;
use xlog_cuda::kernels::{CudaFunction, KernelArgument, KernelImage, LaunchShape};
use xlog_cuda::sim::{KernelArgs, KernelSlice, SimKernel};
use xlog_cuda::{CudaDevice, DeviceStream, Result, kernel_image};

/// The PTX of these kernels.
pub const IMAGE: KernelImage = kernel_image!("exercise");

const WORD: usize = size_of::<u32>();

/// The results of the kernels, computed on the CPU.
pub mod host {
    /// Returns word `at` of the pattern with this salt.
    #[must_use]
    pub fn word(salt: u32, at: u32) -> u32 {
        let mut x = at.wrapping_mul(0x9e37_79b9).wrapping_add(salt);
        x ^= x >> 16;
        x = x.wrapping_mul(0x85eb_ca6b);
        x ^= x >> 13;
        x = x.wrapping_mul(0xc2b2_ae35);
        x ^ (x >> 16)
    }

    /// Mixes two words.
    #[must_use]
    pub fn mix(left: u32, right: u32) -> u32 {
        left.rotate_left(5).wrapping_add(right.wrapping_mul(2_654_435_761))
    }

    /// Folds a sequence of words into one number that depends on their order.
    #[must_use]
    pub fn fold(words: impl Iterator<Item = u32>) -> u64 {
        (1_u64..)
            .step_by(2)
            .zip(words)
            .fold(0, |sum, (weight, word)| sum.wrapping_add(u64::from(word).wrapping_mul(weight)))
    }

    /// Returns the fold of two mixed patterns.
    #[must_use]
    pub fn mixed_sum(left: u32, right: u32, rows: usize) -> u64 {
        fold((0..rows as u32).map(|at| mix(word(left, at), word(right, at))))
    }
}

/// The kernels, loaded on one device.
///
/// ```
/// use std::sync::Arc;
/// use xlog_kernels::exercise::{Exercise, host};
/// use xlog_cuda::{CudaDevice, device_runtime::StreamPool};
///
/// let device = Arc::new(CudaDevice::open("sim")?);
/// let stream = StreamPool::with_defaults(device.clone()).default_stream()?;
/// let kernels = Exercise::load(&device)?;
/// let block = device.driver().alloc(8)?;
/// let mut bytes = [0; 8];
/// // SAFETY: the block is live and two words long until the copy has waited for the stream.
/// unsafe {
///     kernels.fill_pattern(&stream, block, 2, 7)?;
///     stream.copy_dtoh(&mut bytes, block)?;
///     device.driver().free(block)?;
/// }
/// assert_eq!(bytes[4..], host::word(7, 1).to_le_bytes());
/// # Ok::<(), xlog_cuda::XlogError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Exercise {
    /// `None` on a simulated device.
    cuda: Option<Arc<Functions>>,
}

#[derive(Debug)]
struct Functions {
    spin: CudaFunction,
    fill_pattern: CudaFunction,
    check_pattern: CudaFunction,
    mix: CudaFunction,
    fold: CudaFunction,
}

impl Exercise {
    /// Loads the kernels on a GPU; a simulated device needs none.
    pub fn load(device: &CudaDevice) -> Result<Self> {
        if device.sim().is_some() {
            return Ok(Self { cuda: None });
        }
        let module = IMAGE.load(device)?;
        Ok(Self {
            cuda: Some(Arc::new(Functions {
                spin: module.function("spin")?,
                fill_pattern: module.function("fill_pattern")?,
                check_pattern: module.function("check_pattern")?,
                mix: module.function("mix")?,
                fold: module.function("fold")?,
            })),
        })
    }

    /// Queues one thread that spins for `ticks` of the GPU's clock and then stores `value`.
    ///
    /// A simulated device has no such clock and stores immediately.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with the four bytes at `out`.
    pub unsafe fn spin(
        &self,
        stream: &DeviceStream,
        ticks: u64,
        out: u64,
        value: u32,
    ) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("spin", move |args| {
                args.bytes_mut(0).copy_from_slice(&value.to_le_bytes());
            });
            return stream.launch_sim(kernel.arg(out, WORD, Access::Write));
        };
        let arguments = [ticks.into(), out.into(), value.into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory.
        unsafe { stream.launch_cuda(&functions.spin, LaunchShape::SINGLE, &arguments) }
    }

    /// Queues a fill of `rows` words with the pattern of `salt`.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with `rows` words at `out`.
    pub unsafe fn fill_pattern(
        &self,
        stream: &DeviceStream,
        out: u64,
        rows: usize,
        salt: u32,
    ) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("fill_pattern", move |args| {
                for (at, word) in args.bytes_mut(0).chunks_exact_mut(WORD).enumerate() {
                    word.copy_from_slice(&host::word(salt, at as u32).to_le_bytes());
                }
            });
            return stream.launch_sim(kernel.arg(out, rows * WORD, Access::Write));
        };
        let arguments = [out.into(), (rows as u64).into(), salt.into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory.
        unsafe { launch_rows(stream, &functions.fill_pattern, rows, &arguments) }
    }

    /// Queues a comparison of `rows` words with the pattern of `salt`, and adds the number of differences to the word at `wrong`.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with `rows` words at `data`, which are read, and the word at `wrong`.
    pub unsafe fn check_pattern(
        &self,
        stream: &DeviceStream,
        data: u64,
        rows: usize,
        salt: u32,
        wrong: u64,
    ) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("check_pattern", move |args| {
                let differ = (0_u32..)
                    .zip(words(args.bytes(0)))
                    .filter(|(at, word)| *word != host::word(salt, *at))
                    .count();
                let counter = args.bytes_mut(1);
                let before = words(counter).next().unwrap_or(0);
                counter.copy_from_slice(&before.wrapping_add(differ as u32).to_le_bytes());
            });
            return stream.launch_sim(kernel.arg(data, rows * WORD, Access::Read).arg(
                wrong,
                WORD,
                Access::ReadWrite,
            ));
        };
        let arguments = [data.into(), (rows as u64).into(), salt.into(), wrong.into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory.
        unsafe { launch_rows(stream, &functions.check_pattern, rows, &arguments) }
    }

    /// Queues `out[i] = mix(left[i], right[i])` for `rows` words. The output must not overlap an input.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with `rows` words at each address; `left` and `right` are read.
    pub unsafe fn mix(
        &self,
        stream: &DeviceStream,
        out: u64,
        left: u64,
        right: u64,
        rows: usize,
    ) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let bytes = rows * WORD;
            let kernel = SimKernel::new("mix", mix_bytes)
                .arg(out, bytes, Access::Write)
                .arg(left, bytes, Access::Read)
                .arg(right, bytes, Access::Read);
            return stream.launch_sim(kernel);
        };
        let arguments = [out.into(), left.into(), right.into(), (rows as u64).into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory.
        unsafe { launch_rows(stream, &functions.mix, rows, &arguments) }
    }

    /// Queues a fold of `rows` words, which is added to the 64-bit number at `sum`.
    ///
    /// # Safety
    /// As for [`DeviceStream::memset`], with `rows` words at `data`, which are read, and the eight bytes at `sum`.
    pub unsafe fn fold(
        &self,
        stream: &DeviceStream,
        data: u64,
        rows: usize,
        sum: u64,
    ) -> Result<()> {
        let Some(functions) = &self.cuda else {
            let kernel = SimKernel::new("fold", |args| {
                let part = host::fold(words(args.bytes(0)));
                if let Ok(sum) = <&mut [u8; 8]>::try_from(args.bytes_mut(1)) {
                    *sum = u64::from_le_bytes(*sum).wrapping_add(part).to_le_bytes();
                }
            });
            return stream.launch_sim(kernel.arg(data, rows * WORD, Access::Read).arg(
                sum,
                size_of::<u64>(),
                Access::ReadWrite,
            ));
        };
        let arguments = [data.into(), (rows as u64).into(), sum.into()];
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory.
        unsafe { launch_rows(stream, &functions.fold, rows, &arguments) }
    }
}

/// # Safety
/// As for [`DeviceStream::launch_cuda`].
unsafe fn launch_rows(
    stream: &DeviceStream,
    kernel: &CudaFunction,
    rows: usize,
    arguments: &[KernelArgument],
) -> Result<()> {
    // SAFETY: the caller guarantees the arguments and access to the memory.
    unsafe { stream.launch_cuda(kernel, LaunchShape::for_rows(rows), arguments) }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<WORD>().0.iter().map(|word| u32::from_le_bytes(*word))
}

fn mix_bytes(args: &mut KernelArgs<'_>) {
    let [KernelSlice::Write(out), KernelSlice::Read(left), KernelSlice::Read(right)] =
        args.slices()
    else {
        return;
    };
    for ((out, left), right) in out.chunks_exact_mut(WORD).zip(words(left)).zip(words(right)) {
        out.copy_from_slice(&host::mix(left, right).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::host;

    #[test]
    fn patterns_of_two_salts_and_two_places_differ() {
        let words: Vec<u32> =
            (0..4).flat_map(|salt| (0..64).map(move |at| host::word(salt, at))).collect();
        let mut unique = words.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), words.len());
    }

    #[test]
    fn a_sum_sees_a_lost_word_and_two_words_that_changed_places() {
        let words = [5, 7, 11];
        let sum = host::fold(words.into_iter());
        assert_eq!(sum, 5 + 3 * 7 + 5 * 11);
        assert_ne!(sum, host::fold([7, 5, 11].into_iter()));
        assert_ne!(sum, host::fold([5, 0, 11].into_iter()));
    }
}
