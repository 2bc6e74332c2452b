//! Histograms of values by magnitude.

use std::ops::Index;

/// One class for each power of two: class `n` counts values of `n` significant bits (0, 1, 2-3, 4-7, ...).
pub type PowerHistogram = Histogram<0, 65>;

/// Eight classes for each power of two: the width of a class is at most an eighth of its values.
pub type FineHistogram = Histogram<3, 496>;

/// A histogram with `2^STEP_BITS` classes of equal width for each power of two.
///
/// ```
/// use xlog_base::PowerHistogram;
///
/// let mut sizes = PowerHistogram::default();
/// [0, 1, 2, 3, 1000].map(|size| sizes.add(size));
/// assert_eq!(sizes.rows().collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 2), (512, 1)]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Histogram<const STEP_BITS: u32, const CLASSES: usize>([u64; CLASSES]);

impl<const STEP_BITS: u32, const CLASSES: usize> Default for Histogram<STEP_BITS, CLASSES> {
    fn default() -> Self {
        Self([0; CLASSES])
    }
}

impl<const STEP_BITS: u32, const CLASSES: usize> Histogram<STEP_BITS, CLASSES> {
    const STEPS: u64 = 1 << STEP_BITS;

    #[inline]
    fn class_of(value: u64) -> usize {
        let bits = u64::BITS - value.leading_zeros();
        if STEP_BITS == 0 {
            return bits as usize;
        }
        match bits.checked_sub(STEP_BITS + 1) {
            None => value as usize,
            Some(shift) => (u64::from(shift) * Self::STEPS + (value >> shift)) as usize,
        }
    }

    /// The lower bound of a class, and its width.
    fn extent_of(class: usize) -> (u64, u64) {
        match (class as u64 / Self::STEPS).checked_sub(1) {
            None => (class as u64, 1),
            Some(shift) => ((Self::STEPS + class as u64 % Self::STEPS) << shift, 1 << shift),
        }
    }

    /// Counts a value.
    #[inline]
    pub fn add(&mut self, value: u64) {
        if let Some(count) = self.0.get_mut(Self::class_of(value)) {
            *count = count.saturating_add(1);
        }
    }

    /// Counts a value `times`.
    pub fn add_many(&mut self, value: u64, times: u64) {
        if let Some(count) = self.0.get_mut(Self::class_of(value)) {
            *count = count.saturating_add(times);
        }
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(&other.0) {
            *count = count.saturating_add(*more);
        }
    }

    /// Returns the index and the count of each class that is not empty.
    pub fn classes(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.0.iter().copied().enumerate().filter(|(_, count)| *count > 0)
    }

    /// Returns the lower bound and the count of each class that is not empty.
    pub fn rows(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.classes().map(|(class, count)| (Self::extent_of(class).0, count))
    }

    /// Returns the upper bound of the class that holds the quantile `part` (0 to 1); 0 without values.
    #[must_use]
    pub fn quantile(&self, part: f64) -> u64 {
        let total: u64 = self.0.iter().sum();
        let rank = ((total as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.classes().find(|(_, count)| {
            seen += count;
            seen >= rank
        });
        found.map_or(0, |(class, _)| {
            let (least, values) = Self::extent_of(class);
            least + (values - 1)
        })
    }
}

/// Returns the count of a class.
impl<const STEP_BITS: u32, const CLASSES: usize> Index<usize> for Histogram<STEP_BITS, CLASSES> {
    type Output = u64;

    fn index(&self, class: usize) -> &u64 {
        self.0.get(class).unwrap_or(&0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGES: [u64; 5] = [1 << 20, (1 << 30) + 12_345, u32::MAX as u64, 1 << 63, u64::MAX];

    #[test]
    fn every_value_lies_in_its_class_and_a_class_is_narrow() {
        for value in (0..2_000).chain(EDGES) {
            let (least, values) = FineHistogram::extent_of(FineHistogram::class_of(value));
            assert!(least <= value && value - least < values, "{value}: {least}, {values}");
            assert!(values == 1 || values <= value / 8, "{value}: {values}");
            let (least, values) = PowerHistogram::extent_of(PowerHistogram::class_of(value));
            assert!(least <= value && value - least < values, "{value}: {least}, {values}");
        }
        assert_eq!(
            (PowerHistogram::class_of(u64::MAX), FineHistogram::class_of(u64::MAX)),
            (64, 495)
        );
    }

    #[test]
    fn quantiles_are_of_everything_that_was_merged() {
        let (mut times, mut other) = (FineHistogram::default(), FineHistogram::default());
        (1..=99).for_each(|value| times.add(value));
        other.add(1_000_000);
        times.merge(&other);
        assert!((50..58).contains(&times.quantile(0.5)));
        assert!((99..112).contains(&times.quantile(0.99)));
        assert!(times.quantile(1.0) >= 1_000_000);
        assert_eq!(FineHistogram::default().quantile(0.99), 0);
    }
}
