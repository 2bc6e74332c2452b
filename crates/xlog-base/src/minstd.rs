//! The random generator of the public workloads: libstdc++'s `default_random_engine` and its bounded draw, bit for bit.

const MODULUS: u64 = (1 << 31) - 1;
/// The widest interval that one step covers.
const RANGE: u64 = MODULUS - 2;

/// The generator `x' = 16807 x mod (2^31 - 1)`.
///
/// ```
/// use xlog_base::Minstd;
///
/// let mut random = Minstd::new(1);
/// assert_eq!(random.draw(1, 2147483646), 16807);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Minstd(u64);

impl Minstd {
    /// Makes the generator of a seed. A multiple of the modulus counts as 1, as in C++.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(match seed % MODULUS {
            0 => 1,
            state => state,
        })
    }

    /// Returns the next number from 0 to 2^31 - 3.
    fn step(&mut self) -> u64 {
        self.0 = self.0 * 16807 % MODULUS;
        self.0 - 1
    }

    /// Returns a number from `low` to `high`, both included, or `low` if `high` is less.
    pub fn draw(&mut self, low: u64, high: u64) -> u64 {
        let width = high.saturating_sub(low);
        if width < RANGE {
            let bucket = RANGE / (width + 1);
            loop {
                let value = self.step();
                if value < (width + 1) * bucket {
                    return low + value / bucket;
                }
            }
        }
        if width == RANGE {
            return low + self.step();
        }
        loop {
            // Wrapping is part of the algorithm: a value that wrapped is below `upper` and is drawn again.
            let upper = (RANGE + 1).wrapping_mul(self.draw(0, width / (RANGE + 1)));
            let value = upper.wrapping_add(self.step());
            if value <= width && value >= upper {
                return low + value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_thousandth_value_is_the_one_the_standard_gives() {
        let mut random = Minstd::new(1);
        for _ in 0..9_999 {
            random.step();
        }
        assert_eq!(random.step() + 1, 1_043_618_065);
    }

    #[test]
    fn draws_stay_in_their_interval_whatever_its_width() {
        let mut random = Minstd::new(0);
        for high in [0, 1, 99, RANGE - 1, RANGE, RANGE + 1, (1 << 32) - 1, u64::MAX] {
            for _ in 0..200 {
                assert!(random.draw(0, high) <= high);
                assert!(random.draw(high / 2, high) >= high / 2);
            }
        }
        assert_eq!(random.draw(5, 5), 5);
        assert_eq!(random.draw(5, 4), 5);
    }
}
