//! Small blocks: thousands of live scalars, counters and short columns.

use std::str::FromStr;

use super::{Minstd, Run, RunCounts, Target};

/// The distribution of sizes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Sizes {
    /// All sizes are equally likely.
    #[default]
    Uniform,
    /// All powers of two are equally likely.
    LogUniform,
}

impl Sizes {
    /// Returns its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::LogUniform => "log-uniform",
        }
    }
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "uniform" => Ok(Self::Uniform),
            "log-uniform" => Ok(Self::LogUniform),
            _ => Err("expected uniform or log-uniform".to_owned()),
        }
    }
}

/// Draws a size from `low` to `high`, inclusive.
pub fn draw_size(random: &mut Minstd, sizes: Sizes, low: u64, high: u64) -> u64 {
    match sizes {
        Sizes::Uniform => random.draw(low, high),
        Sizes::LogUniform => {
            let part = random.draw(0, 1 << 30) as f64 / (1_u64 << 30) as f64;
            let low_log = (low as f64).ln();
            let size = (low_log + part * ((high as f64).ln() - low_log)).exp();
            (size as u64).clamp(low, high.max(low))
        }
    }
}

/// Allocates a number of blocks, then ten random frees or allocations per block, never exceeding that number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SmallBlocks {
    /// The maximum number of live blocks.
    pub blocks: u64,
    /// The minimum size.
    pub min_bytes: u64,
    /// The maximum size.
    pub max_bytes: u64,
    /// The distribution of sizes.
    pub sizes: Sizes,
    /// The seed of the generator.
    pub seed: u64,
}

impl SmallBlocks {
    /// Returns a workload with blocks of 4 B to 4 KiB.
    #[must_use]
    pub fn new(blocks: u64, sizes: Sizes) -> Self {
        Self { blocks, min_bytes: 4, max_bytes: 4096, sizes, seed: 1 }
    }

    xlog_base::setters! {
        /// Sets the seed.
        with_seed(seed: u64) { seed: seed }
    }

    /// Sets the maximum size.
    #[must_use]
    pub fn with_max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self.min_bytes = self.min_bytes.min(bytes);
        self
    }

    /// Runs the workload. A refused request is skipped.
    pub fn run<T: Target>(&self, target: &mut T) -> Result<RunCounts, T::Error> {
        let mut run = Run::new(target);
        let outcome = self.steps(&mut run);
        run.end(outcome)
    }

    fn steps<T: Target>(&self, run: &mut Run<'_, T>) -> Result<(), T::Error> {
        let mut random = Minstd::new(self.seed);
        let size =
            |random: &mut Minstd| draw_size(random, self.sizes, self.min_bytes, self.max_bytes);
        for _ in 0..self.blocks {
            let bytes = size(&mut random);
            run.allocate(bytes)?;
        }
        for _ in 0..self.blocks.saturating_mul(10) {
            let live = run.live.len() as u64;
            if live > 0 && random.draw(0, 1) == 0 {
                run.free(random.draw(0, live - 1))?;
            } else if live < self.blocks {
                let bytes = size(&mut random);
                run.allocate(bytes)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nothing;

    #[test]
    fn sizes_stay_in_bounds_and_are_spread_as_their_name_says() {
        let mut random = Minstd::new(1);
        let mut median = |sizes| {
            let mut drawn: Vec<_> =
                (0..10_001).map(|_| draw_size(&mut random, sizes, 4, 4096)).collect();
            drawn.sort_unstable();
            assert!(drawn[0] >= 4 && drawn[10_000] <= 4096);
            assert!(drawn[0] < 20 && drawn[10_000] > 4000);
            drawn[5_000]
        };
        assert!((1_900..2_200).contains(&median(Sizes::Uniform)));
        // The median of log-uniform sizes from 2^2 to 2^12 is about 2^7.
        assert!((110..150).contains(&median(Sizes::LogUniform)));
    }

    #[test]
    fn the_same_seed_is_the_same_sequence_and_another_is_not() {
        let run = |seed| {
            let Ok(counts) =
                SmallBlocks::new(500, Sizes::Uniform).with_seed(seed).run(&mut Nothing);
            counts
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3).check, run(4).check);
        assert_eq!(run(3).peak_blocks, 500);
        assert!(run(3).allocations > 2_000, "{:?}", run(3));
    }
}
