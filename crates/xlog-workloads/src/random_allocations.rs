//! RMM's random allocations benchmark, step for step.

use super::{Minstd, Run, RunCounts, Target};

/// The limit of requested bytes: 16000 MiB.
pub const CAP_BYTES: u64 = 16_000 << 20;

/// Blocks of uniform size. While there are fewer than requested, 73 of 100 steps allocate; all other steps free a random block.
///
/// ```
/// use xlog_workloads::{Nothing, RandomAllocations};
///
/// let counts = RandomAllocations::new(1000, 1 << 20).run(&mut Nothing)?;
/// assert_eq!(counts.check, 0x0a01_169c_41d5_b10b);
/// # Ok::<(), std::convert::Infallible>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RandomAllocations {
    /// The maximum number of allocated blocks; the loop has twice as many steps.
    pub allocations: u64,
    /// Sizes are drawn from 1 to this.
    pub max_bytes: u64,
    /// The limit of requested bytes.
    pub cap_bytes: u64,
    /// The seed of the generator.
    pub seed: u64,
}

impl RandomAllocations {
    /// Returns the published workload, with its seed and its limit.
    #[must_use]
    pub fn new(allocations: u64, max_bytes: u64) -> Self {
        Self { allocations, max_bytes, cap_bytes: CAP_BYTES, seed: 1 }
    }

    xlog_base::setters! {
        /// Sets the seed.
        with_seed(seed: u64) { seed: seed }
    }

    /// Runs the workload. A refused request becomes a free.
    pub fn run<T: Target>(&self, target: &mut T) -> Result<RunCounts, T::Error> {
        let mut run = Run::new(target);
        let outcome = self.steps(&mut run);
        run.end(outcome)
    }

    fn steps<T: Target>(&self, run: &mut Run<'_, T>) -> Result<(), T::Error> {
        let mut random = Minstd::new(self.seed);
        for _ in 0..self.allocations.saturating_mul(2) {
            let size = random.draw(1, self.max_bytes);
            let wanted = run.live.is_empty()
                || (random.draw(0, 99) < 73
                    && run.counts.allocations < self.allocations
                    && run.bytes + size < self.cap_bytes);
            if !(wanted && run.allocate(size)?) {
                run.free(random.draw(0, self.allocations - 1))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nothing;

    fn check(rows: &[(u64, u64, u64, u64, u64)]) {
        for &(allocations, mib, peak_blocks, peak_bytes, fnv) in rows {
            let Ok(counts) = RandomAllocations::new(allocations, mib << 20).run(&mut Nothing);
            let found = (counts.peak_blocks, counts.peak_bytes, counts.check);
            assert_eq!(found, (peak_blocks, peak_bytes, fnv), "{allocations}, {mib} MiB");
            assert_eq!(counts.failures, 0);
        }
    }

    #[test]
    fn the_published_check_values_come_out() {
        check(&[
            (1_000, 1, 638, 323_760_572, 0x0a01_169c_41d5_b10b),
            (1_000, 64, 528, 16_777_102_043, 0x42dd_1852_40e2_338e),
            (1_000, 4096, 15, 16_775_344_215, 0xf33f_6e23_9df3_e016),
            (10_000, 1, 6_204, 3_254_545_443, 0xb481_79f7_7193_0716),
            (10_000, 256, 167, 16_777_171_549, 0xa0e1_5ceb_7379_d680),
            (100_000, 1, 36_071, 16_777_215_997, 0xe20b_4cec_1688_e184),
            (100_000, 4, 9_714, 16_777_215_986, 0x1c19_b69f_5585_7e88),
            (100_000, 4096, 19, 16_777_201_659, 0x0114_dd31_6b70_ed04),
        ]);
    }

    /// A target with room for a few blocks.
    struct Few(usize);

    impl Target for Few {
        type Block = ();
        type Error = std::convert::Infallible;

        fn allocate(&mut self, _bytes: u64) -> Result<Option<()>, Self::Error> {
            let room = self.0.checked_sub(1);
            self.0 = room.unwrap_or(0);
            Ok(room.map(|_| ()))
        }

        fn free(&mut self, (): ()) -> Result<(), Self::Error> {
            self.0 += 1;
            Ok(())
        }
    }

    #[test]
    fn a_request_that_fails_becomes_a_free_and_all_is_given_back() {
        let mut few = Few(10);
        let Ok(counts) = RandomAllocations::new(1_000, 1 << 20).run(&mut few);
        assert!(counts.failures > 0 && counts.peak_blocks == 10, "{counts:?}");
        assert_eq!(few.0, 10);
        let Ok(counts) = RandomAllocations::new(100, 8).run(&mut Few(0));
        assert_eq!((counts.allocations, counts.failures), (0, 200));
    }
}
