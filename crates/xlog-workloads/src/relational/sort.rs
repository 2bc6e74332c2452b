//! A radix sort of 64-bit numbers, from the lowest digit to the highest.
//!
//! Each of the eight passes counts the digits of every tile, sums the counts on the device, and scatters the numbers. Counts,
//! sums, offsets and the previous pass's numbers are dropped as soon as the last launch that needs them is queued. The host
//! reads nothing.

use xlog_cuda::Result;

use super::kernels::{DIGITS, SORT_TILE};
use super::numbers::seed_for;
use super::{Column, Session, Verdict, host, tile_sums};

/// Bits of a number, and of a digit.
const BITS: u32 = u64::BITS;
const DIGIT_BITS: u32 = 8;

/// Numbers to sort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sort {
    /// The count of numbers, from 1 to [`MAX_ROWS`](super::MAX_ROWS).
    pub rows: usize,
    /// Their seed.
    pub seed: u64,
}

impl Sort {
    /// Returns the seed of the numbers.
    pub fn number_seed(&self) -> u64 {
        seed_for(self.seed, 3)
    }

    /// Runs the sort, each step on the next stream of the session from step `first` on. Returns the numbers, which the device may
    /// still be writing.
    #[allow(unsafe_code)]
    pub fn run(&self, session: &Session<'_>, first: usize) -> Result<Column<u64>> {
        let stream = session.stream(first);
        let mut numbers = session.alloc::<u64>(stream, self.rows, "sort numbers")?;
        session
            .launch("generate_numbers", stream)
            .write(&numbers)
            .moves(numbers.size_bytes())
            // SAFETY: the launch names the buffer.
            .run(|kernels, stream| unsafe {
                kernels.generate_numbers(stream, &numbers, self.number_seed())
            })?;
        for (pass, shift) in (0..BITS).step_by(DIGIT_BITS as usize).enumerate() {
            // An odd number of steps per pass, so that passes start on different streams of an even number.
            numbers = self.pass(session, first + 1 + 5 * pass, &numbers, shift)?;
        }
        Ok(numbers)
    }

    /// Moves the numbers into a new buffer, sorted by one digit.
    #[allow(unsafe_code)]
    fn pass(
        &self,
        session: &Session<'_>,
        step: usize,
        numbers: &Column<u64>,
        shift: u32,
    ) -> Result<Column<u64>> {
        let stream = |more: usize| session.stream(step + more);
        let tiles = self.rows.div_ceil(SORT_TILE);
        let counts = session.alloc::<u32>(stream(0), tiles * DIGITS, "sort counts")?;
        session
            .launch("count_digits", stream(0))
            .read(numbers)
            .write(&counts)
            .moves(numbers.size_bytes() + counts.size_bytes())
            .run(|kernels, stream| {
                // SAFETY: there is a count for every digit of every tile, and the launch names all its buffers.
                unsafe { kernels.count_digits(stream, numbers, shift, &counts) }
            })?;

        let sums = session.alloc::<u64>(stream(1), tile_sums(counts.len()), "sort sums")?;
        session
            .launch("sum_tiles", stream(1))
            .read(&counts)
            .write(&sums)
            .moves(counts.size_bytes() + sums.size_bytes())
            // SAFETY: there is a sum for every tile, and the launch names all its buffers.
            .run(|kernels, stream| unsafe { kernels.sum_tiles(stream, &counts, &sums) })?;
        session.scan_sums(stream(2), &sums)?;
        let offsets = session.alloc::<u32>(stream(3), counts.len(), "sort offsets")?;
        session
            .launch("spread_sums", stream(3))
            .read(&counts)
            .read(&sums)
            .write(&offsets)
            .moves(counts.size_bytes() * 2 + sums.size_bytes())
            .run(|kernels, stream| {
                // SAFETY: there is an offset for every count, and the launch names all its buffers.
                unsafe { kernels.spread_sums(stream, &counts, &sums, &offsets) }
            })?;
        drop((counts, sums));

        let out = session.alloc::<u64>(stream(4), self.rows, "sort numbers")?;
        session.sample_pool();
        session
            .launch("scatter_digits", stream(4))
            .read(numbers)
            .read(&offsets)
            .write(&out)
            .moves(numbers.size_bytes() * 2 + offsets.size_bytes())
            .run(|kernels, stream| {
                // SAFETY: offsets are distinct and within the buffer, and the launch names all its buffers.
                unsafe { kernels.scatter_digits(stream, numbers, shift, &offsets, &out) }
            })?;
        Ok(out)
    }

    /// Compares numbers with those that the host generates and sorts, on `threads` threads.
    pub fn verify(&self, numbers: &[u64], threads: usize) -> Verdict {
        let wrong = host::sorted::examine(self, numbers, threads).err();
        Verdict { rows: numbers.len() as u64, expected: self.rows as u64, wrong }
    }
}
