//! The kernels of the relational workloads: CUDA on a GPU, closures on a simulated device.
//!
//! Each kernel lists its arguments once. On a GPU they are passed to the CUDA kernel of that name. On a simulated device, the
//! buffers are the declared ranges of a closure with the same algorithm, so the race detector sees the accesses of a GPU.
//!
//! Lengths are those of the buffers. A tile has `TILE` rows, and sums of tiles have one more element for their total. A hash
//! table has a power of two of slots, of which at least one is `EMPTY`.

#![allow(unsafe_code)]

mod calls;
pub mod rounds;
mod twins;

use std::collections::BTreeMap;

use xlog_cuda::device_runtime::Access;
use xlog_cuda::kernels::{CudaFunction, KernelArgument, KernelImage, LaunchShape};
use xlog_cuda::sim::{KernelArgs, SimKernel};
use xlog_cuda::{CudaDevice, DeviceStream, Result, XlogError, kernel_image};

use super::touched::touch;
use super::{Column, address};

/// The PTX of these kernels.
pub const IMAGE: KernelImage = kernel_image!("relational");

/// Numbers per thread block of the sort.
pub const SORT_TILE: usize = 4096;

/// Values of a digit.
pub const DIGITS: usize = 256;

/// Threads per block, as in the CUDA source.
const THREADS: u32 = 256;

/// Enough blocks for any GPU; the kernels loop over the remaining rows.
const MAX_BLOCKS: usize = 1 << 16;

/// One argument of a kernel.
#[derive(Clone, Copy)]
enum Argument {
    Buffer { ptr: u64, bytes: usize, access: Access },
    Number(KernelArgument),
}

fn buffer<T>(column: &Column<T>, access: Access) -> Argument {
    Argument::Buffer { ptr: address(column), bytes: column.size_bytes(), access }
}

fn reads<T>(column: &Column<T>) -> Argument {
    buffer(column, Access::Read)
}

/// Returns the argument that reads the first `len` elements.
fn reads_first(column: &Column<u64>, len: usize) -> Argument {
    let bytes = column.size_bytes().min(len * size_of::<u64>());
    Argument::Buffer { ptr: address(column), bytes, access: Access::Read }
}

fn writes<T>(column: &Column<T>) -> Argument {
    buffer(column, Access::Write)
}

fn updates<T>(column: &Column<T>) -> Argument {
    buffer(column, Access::ReadWrite)
}

fn scalar(number: impl Into<KernelArgument>) -> Argument {
    Argument::Number(number.into())
}

fn length(rows: usize) -> Argument {
    scalar(rows as u64)
}

/// Returns the mask that maps a hash to a slot of the table, whose length is a power of two.
fn mask(table: &Column<u64>) -> Argument {
    length(table.len().wrapping_sub(1))
}

/// A launch over `rows` rows, of which a thread block takes `tile` at a time.
#[derive(Clone, Copy)]
struct Grid {
    rows: usize,
    tile: usize,
}

impl Grid {
    /// One thread per row.
    fn rows(rows: usize) -> Self {
        Self { rows, tile: THREADS as usize }
    }

    /// One block per `tile` rows.
    fn tiles(rows: usize, tile: usize) -> Self {
        Self { rows, tile }
    }

    fn shape(self) -> LaunchShape {
        let blocks = self.rows.div_ceil(self.tile).clamp(1, MAX_BLOCKS) as u32;
        LaunchShape { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 }
    }
}

/// The kernels, loaded on one device. No output of a kernel overlaps an input.
///
/// # Safety
/// Every kernel requires that the buffers belong to the stream's device and have the stated length, that the caller orders the
/// launch with all other work on them, and that a table has an empty slot for every inserted value.
#[derive(Debug)]
pub struct Kernels {
    /// CUDA functions by name; `None` on a simulated device, which needs none.
    functions: Option<BTreeMap<&'static str, CudaFunction>>,
}

impl Kernels {
    /// Loads the kernels on a device.
    pub fn load(device: &CudaDevice) -> Result<Self> {
        if device.sim().is_some() {
            return Ok(Self { functions: None });
        }
        let module = IMAGE.load(device)?;
        let functions = calls::NAMES
            .iter()
            .chain(rounds::NAMES)
            .map(|name| Ok((*name, module.function(name)?)))
            .collect::<Result<BTreeMap<_, _>>>()?;
        Ok(Self { functions: Some(functions) })
    }

    /// Queues the CUDA kernel `name`, or its closure on a simulated device.
    ///
    /// # Safety
    /// `arguments` are those of the kernel in number, order and type; for the rest see [`Kernels`].
    unsafe fn launch<const N: usize>(
        &self,
        stream: &DeviceStream,
        name: &'static str,
        grid: Grid,
        arguments: [Argument; N],
        twin: impl Fn(&mut KernelArgs<'_>) + Send + Sync + 'static,
    ) -> Result<()> {
        if let Some(functions) = &self.functions {
            let function = functions
                .get(name)
                .ok_or_else(|| XlogError::Kernel(format!("there is no kernel '{name}'")))?;
            let arguments = arguments.map(|argument| match argument {
                Argument::Buffer { ptr, .. } => ptr.into(),
                Argument::Number(number) => number,
            });
            // SAFETY: the caller guarantees the arguments, access to the memory and its order.
            return unsafe { stream.launch_cuda(function, grid.shape(), &arguments) };
        }
        let mut kernel = SimKernel::repeatable(name, twin);
        for argument in arguments {
            if let Argument::Buffer { ptr, bytes, access } = argument {
                touch(ptr, bytes, access);
                kernel = kernel.arg(ptr, bytes, access);
            }
        }
        stream.launch_sim(kernel)
    }
}

#[cfg(test)]
mod tests {
    use xlog_testing::kernels::{Kernel, assert_complete, assert_loadable, assert_stamped};

    use super::IMAGE;

    #[test]
    fn the_ptx_was_built_from_the_source_beside_it_for_the_oldest_driver() {
        let source = include_str!("../../../kernels/relational.cu");
        let kernels = [Kernel { name: IMAGE.name(), ptx: IMAGE.ptx(), source }];
        assert_complete(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"), &kernels);
        assert_stamped(&kernels);
        assert_loadable(&kernels);
    }
}
