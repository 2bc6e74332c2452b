//! The kernels of the relational workloads: one trait, real CUDA on a GPU, and twins on a simulated device.
//!
//! The twins run the same algorithm over the same buffers and declare exactly the ranges their CUDA kernels touch, so that the race
//! detector knows what a GPU would do. Lengths are those of the buffers; `TILE` rows are a tile, and sums of tiles have one place
//! more, which takes their total. A hash table has a power of two of places, of which at least one is `EMPTY`.

mod cuda;
mod simulated;

use xlog_cuda::{CudaDevice, DeviceStream, Result};

use super::Column;
pub use cuda::IMAGE;

/// What the kernels do. No output overlaps an input.
///
/// # Safety
/// Of every call: the buffers are of the stream's device and at least as long as is said there, and the caller orders the launch
/// against all other work on them; a table has an empty place for everything that is put into it.
#[allow(unsafe_code, clippy::missing_safety_doc, clippy::too_many_arguments)]
pub trait Kernels: Send + Sync {
    /// `out[i] =` the key of row `i`.
    unsafe fn generate_keys(
        &self,
        stream: &DeviceStream,
        out: &Column<u32>,
        seed: u64,
        domain: u32,
    ) -> Result<()>;

    /// `out[i] =` the edge of row `i`.
    unsafe fn generate_edges(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
        vertices: u32,
    ) -> Result<()>;

    /// `out[i] =` the number of row `i`.
    unsafe fn generate_numbers(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
    ) -> Result<()>;

    /// Puts each key with its row into the table, the key in the high half.
    unsafe fn build_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
    ) -> Result<()>;

    /// Puts each pair into the table, under its high half.
    unsafe fn build_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        table: &Column<u64>,
    ) -> Result<()>;

    /// `counts[i] =` how many entries the table has for key `i`; `sums[t] =` the sum of tile `t`.
    unsafe fn count_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()>;

    /// `counts[i] =` how many entries the table has for the low half of pair `i`, of the first `len` pairs; `sums[t] =` the sum of
    /// tile `t`.
    unsafe fn count_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        len: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()>;

    /// The matches of `count_rows`, each tile from where its sum says: the row in the table in the high half, the row of the key
    /// in the low one.
    unsafe fn write_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()>;

    /// The matches of `count_pairs`, each tile from where its sum says: the high half of the pair, and the low one of the entry.
    unsafe fn write_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        len: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()>;

    /// `sums[t] =` the sum of `counts` over tile `t`.
    unsafe fn sum_tiles(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()>;

    /// Each sum becomes that of all before it; the last place becomes the total.
    unsafe fn scan_sums(&self, stream: &DeviceStream, sums: &Column<u64>) -> Result<()>;

    /// `offsets[i] =` the sum of all counts before `i`, by the sums of the tiles.
    unsafe fn spread_sums(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
        offsets: &Column<u32>,
    ) -> Result<()>;

    /// Puts each value that the set does not have into it, and at the end of `fresh`, of which `count` says how many it has.
    unsafe fn insert_new(
        &self,
        stream: &DeviceStream,
        values: &Column<u64>,
        set: &Column<u64>,
        fresh: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()>;

    /// Puts everything of a set into a larger one.
    unsafe fn rehash(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        larger: &Column<u64>,
    ) -> Result<()>;

    /// Lists a set; `count`, which is 0 before, says how many there are.
    unsafe fn collect(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        out: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()>;

    /// `counts[digit][tile] =` how many numbers of the tile have that digit, eight bits from `shift` on.
    unsafe fn count_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        counts: &Column<u32>,
    ) -> Result<()>;

    /// Moves each number to where the offset of its digit in its tile says, in the order they have.
    unsafe fn scatter_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        offsets: &Column<u32>,
        out: &Column<u64>,
    ) -> Result<()>;
}

/// How many numbers a block of threads of the sort takes.
pub const SORT_TILE: usize = 4096;

/// How many values a digit has.
pub const DIGITS: usize = 256;

/// The kernels for a device.
pub fn load(device: &CudaDevice) -> Result<Box<dyn Kernels>> {
    if device.sim().is_some() {
        return Ok(Box::new(simulated::Simulated));
    }
    Ok(Box::new(cuda::Cuda::load(device)?))
}
