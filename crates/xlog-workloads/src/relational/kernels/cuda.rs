//! The kernels of `kernels/relational.cu`, loaded on a GPU.

#![allow(unsafe_code)]

use xlog_cuda::kernels::{CudaFunction, KernelArgument, KernelImage, LaunchShape};
use xlog_cuda::{CudaDevice, DeviceStream, Result, kernel_image};

use super::super::{Column, TILE};
use super::{Kernels, SORT_TILE};

/// The PTX of these kernels.
pub const IMAGE: KernelImage = kernel_image!("relational");

/// Threads of a block, as the source has it.
const THREADS: u32 = 256;

/// Enough blocks for any GPU; the kernels step over what is left.
const MAX_BLOCKS: usize = 1 << 16;

/// The kernels, ready for one GPU.
#[derive(Debug)]
pub(super) struct Cuda {
    generate_keys: CudaFunction,
    generate_edges: CudaFunction,
    generate_numbers: CudaFunction,
    build_rows: CudaFunction,
    build_pairs: CudaFunction,
    count_rows: CudaFunction,
    count_pairs: CudaFunction,
    write_rows: CudaFunction,
    write_pairs: CudaFunction,
    sum_tiles: CudaFunction,
    scan_sums: CudaFunction,
    spread_sums: CudaFunction,
    insert_new: CudaFunction,
    rehash: CudaFunction,
    collect: CudaFunction,
    count_digits: CudaFunction,
    scatter_digits: CudaFunction,
}

impl Cuda {
    pub(super) fn load(device: &CudaDevice) -> Result<Self> {
        let module = IMAGE.load(device)?;
        Ok(Self {
            generate_keys: module.function("generate_keys")?,
            generate_edges: module.function("generate_edges")?,
            generate_numbers: module.function("generate_numbers")?,
            build_rows: module.function("build_rows")?,
            build_pairs: module.function("build_pairs")?,
            count_rows: module.function("count_rows")?,
            count_pairs: module.function("count_pairs")?,
            write_rows: module.function("write_rows")?,
            write_pairs: module.function("write_pairs")?,
            sum_tiles: module.function("sum_tiles")?,
            scan_sums: module.function("scan_sums")?,
            spread_sums: module.function("spread_sums")?,
            insert_new: module.function("insert_new")?,
            rehash: module.function("rehash")?,
            collect: module.function("collect")?,
            count_digits: module.function("count_digits")?,
            scatter_digits: module.function("scatter_digits")?,
        })
    }
}

fn at<T>(column: &Column<T>) -> KernelArgument {
    column.ptr().into()
}

fn len(rows: usize) -> KernelArgument {
    (rows as u64).into()
}

/// The places of a table are a power of two, so that this picks the bits of a place.
fn mask(table: &Column<u64>) -> KernelArgument {
    len(table.len().wrapping_sub(1))
}

/// A thread for each of `rows` rows, `each` rows of a block.
fn shape(rows: usize, each: usize) -> LaunchShape {
    let blocks = rows.div_ceil(each).clamp(1, MAX_BLOCKS) as u32;
    LaunchShape { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 }
}

fn rows(rows: usize) -> LaunchShape {
    shape(rows, THREADS as usize)
}

// Every launch below passes the arguments its kernel takes, in number, order and type; the caller of the trait answers for the
// memory and the order.
impl Kernels for Cuda {
    unsafe fn generate_keys(
        &self,
        stream: &DeviceStream,
        out: &Column<u32>,
        seed: u64,
        domain: u32,
    ) -> Result<()> {
        let arguments = [at(out), len(out.len()), seed.into(), domain.into()];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.generate_keys, rows(out.len()), &arguments) }
    }

    unsafe fn generate_edges(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
        vertices: u32,
    ) -> Result<()> {
        let arguments = [at(out), len(out.len()), seed.into(), vertices.into()];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.generate_edges, rows(out.len()), &arguments) }
    }

    unsafe fn generate_numbers(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
    ) -> Result<()> {
        let arguments = [at(out), len(out.len()), seed.into()];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.generate_numbers, rows(out.len()), &arguments) }
    }

    unsafe fn build_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(keys), len(keys.len()), at(table), mask(table)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.build_rows, rows(keys.len()), &arguments) }
    }

    unsafe fn build_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        table: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(pairs), len(pairs.len()), at(table), mask(table)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.build_pairs, rows(pairs.len()), &arguments) }
    }

    unsafe fn count_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(keys), len(keys.len()), at(table), mask(table), at(counts), at(sums)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.count_rows, shape(keys.len(), TILE), &arguments) }
    }

    unsafe fn count_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        many: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(pairs), len(many), at(table), mask(table), at(counts), at(sums)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.count_pairs, shape(many, TILE), &arguments) }
    }

    unsafe fn write_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()> {
        let arguments =
            [at(keys), len(keys.len()), at(table), mask(table), at(counts), at(sums), at(out)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.write_rows, shape(keys.len(), TILE), &arguments) }
    }

    unsafe fn write_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        many: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()> {
        let arguments =
            [at(pairs), len(many), at(table), mask(table), at(counts), at(sums), at(out)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.write_pairs, shape(many, TILE), &arguments) }
    }

    unsafe fn sum_tiles(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(counts), len(counts.len()), at(sums)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.sum_tiles, shape(counts.len(), TILE), &arguments) }
    }

    unsafe fn scan_sums(&self, stream: &DeviceStream, sums: &Column<u64>) -> Result<()> {
        let arguments = [at(sums), len(sums.len().saturating_sub(1))];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.scan_sums, rows(1), &arguments) }
    }

    unsafe fn spread_sums(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
        offsets: &Column<u32>,
    ) -> Result<()> {
        let arguments = [at(counts), len(counts.len()), at(sums), at(offsets)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.spread_sums, shape(counts.len(), TILE), &arguments) }
    }

    unsafe fn insert_new(
        &self,
        stream: &DeviceStream,
        values: &Column<u64>,
        set: &Column<u64>,
        fresh: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(values), len(values.len()), at(set), mask(set), at(fresh), at(count)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.insert_new, rows(values.len()), &arguments) }
    }

    unsafe fn rehash(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        larger: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(set), len(set.len()), at(larger), mask(larger)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.rehash, rows(set.len()), &arguments) }
    }

    unsafe fn collect(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        out: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(set), len(set.len()), at(out), at(count)];
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.collect, rows(set.len()), &arguments) }
    }

    unsafe fn count_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        counts: &Column<u32>,
    ) -> Result<()> {
        let arguments = [at(numbers), len(numbers.len()), shift.into(), at(counts)];
        let shape = shape(numbers.len(), SORT_TILE);
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.count_digits, shape, &arguments) }
    }

    unsafe fn scatter_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        offsets: &Column<u32>,
        out: &Column<u64>,
    ) -> Result<()> {
        let arguments = [at(numbers), len(numbers.len()), shift.into(), at(offsets), at(out)];
        let shape = shape(numbers.len(), SORT_TILE);
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { stream.launch_cuda(&self.scatter_digits, shape, &arguments) }
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
