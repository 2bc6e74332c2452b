//! How long calls took: count, sum, largest, and a histogram of eight steps to each power of two.

use serde::Serialize;

const STEPS: u64 = 8;

/// Times of one kind of call, of one thread.
#[derive(Clone, Debug)]
pub(super) struct Times {
    calls: u64,
    sum: u64,
    largest: u64,
    histogram: Vec<u64>,
}

/// The same in the shape of its JSON.
#[derive(Serialize, Clone, Copy, Debug, Default)]
pub(super) struct TimesReport {
    pub(super) calls: u64,
    pub(super) mean_nanos: f64,
    pub(super) median_nanos: u64,
    pub(super) p99_nanos: u64,
    pub(super) max_nanos: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self { calls: 0, sum: 0, largest: 0, histogram: vec![0; 64 * STEPS as usize] }
    }
}

impl Times {
    pub(super) fn add(&mut self, nanos: u64) {
        self.calls += 1;
        self.sum += nanos;
        self.largest = self.largest.max(nanos);
        if let Some(bucket) = self.histogram.get_mut(bucket_of(nanos)) {
            *bucket += 1;
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.sum += other.sum;
        self.largest = self.largest.max(other.largest);
        for (sum, part) in self.histogram.iter_mut().zip(&other.histogram) {
            *sum += part;
        }
    }

    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    pub(super) fn report(&self) -> TimesReport {
        let at = |part: f64| {
            let rank = ((self.calls as f64 * part).ceil() as u64).max(1);
            let mut seen = 0;
            let bucket = self.histogram.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            // No more than the largest: the last bucket is not full.
            bucket.map_or(0, |bucket| top_of(bucket).min(self.largest))
        };
        TimesReport {
            calls: self.calls,
            mean_nanos: if self.calls == 0 { 0.0 } else { self.sum as f64 / self.calls as f64 },
            median_nanos: at(0.5),
            p99_nanos: at(0.99),
            max_nanos: self.largest,
        }
    }
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < STEPS {
        return nanos as usize;
    }
    let power = u64::from(nanos.ilog2());
    let step = (nanos >> (power - 3)) - STEPS;
    ((power - 2) * STEPS + step) as usize
}

/// The largest value of a bucket.
fn top_of(bucket: usize) -> u64 {
    let (power, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    if power == 0 { step } else { ((STEPS + step + 1) << (power - 1)) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_at_most_the_top_of_its_bucket_and_near_it() {
        for value in (0..2_000).chain([1 << 20, (1 << 30) + 12_345, u64::from(u32::MAX)]) {
            let top = top_of(bucket_of(value));
            assert!(top >= value && top - value <= value / 8, "{value}: {top}");
        }
    }

    #[test]
    fn the_report_is_of_all_calls_of_all_threads() {
        let (mut times, mut other) = (Times::default(), Times::default());
        (1..=99).for_each(|nanos| times.add(nanos));
        other.add(1_000_000);
        times.merge(&other);
        let report = times.report();
        assert_eq!((report.calls, report.max_nanos), (100, 1_000_000));
        assert!((50..58).contains(&report.median_nanos), "{report:?}");
        assert!((99..112).contains(&report.p99_nanos), "{report:?}");
        assert_eq!(Times::default().report().p99_nanos, 0);
    }
}
