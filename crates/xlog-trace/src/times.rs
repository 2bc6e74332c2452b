//! Durations of calls: count, sum, maximum, and a histogram with eight classes per power of two.

use serde::Serialize;
use xlog_base::FineHistogram;

/// Durations of one kind of call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallTimes {
    calls: u64,
    sum: u64,
    largest: u64,
    histogram: FineHistogram,
}

/// Mean, quantiles and maximum of call durations, as they appear in JSON.
#[derive(Serialize, Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct TimesReport {
    /// The number of calls.
    pub calls: u64,
    /// Their mean.
    pub mean_nanos: f64,
    /// The median.
    pub median_nanos: u64,
    /// The p99.
    pub p99_nanos: u64,
    /// The longest call.
    pub max_nanos: u64,
}

impl CallTimes {
    /// Adds a call.
    pub fn add(&mut self, nanos: u64) {
        self.calls += 1;
        self.sum += nanos;
        self.largest = self.largest.max(nanos);
        self.histogram.add(nanos);
    }

    /// Adds the calls of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.sum += other.sum;
        self.largest = self.largest.max(other.largest);
        self.histogram.merge(&other.histogram);
    }

    /// Returns the number of calls.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Returns the total duration.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the figures of all calls.
    pub fn report(&self) -> TimesReport {
        // A quantile is an upper bound of its class, so the maximum caps it.
        let at = |part: f64| self.histogram.quantile(part).min(self.largest);
        TimesReport {
            calls: self.calls,
            mean_nanos: if self.calls == 0 { 0.0 } else { self.sum as f64 / self.calls as f64 },
            median_nanos: at(0.5),
            p99_nanos: at(0.99),
            max_nanos: self.largest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_of_all_calls_of_all_threads() {
        let (mut times, mut other) = (CallTimes::default(), CallTimes::default());
        (1..=99).for_each(|nanos| times.add(nanos));
        other.add(1_000_000);
        times.merge(&other);
        let report = times.report();
        assert_eq!((report.calls, report.max_nanos), (100, 1_000_000));
        assert!((50..58).contains(&report.median_nanos), "{report:?}");
        assert!((99..112).contains(&report.p99_nanos), "{report:?}");
        assert_eq!(CallTimes::default().report().p99_nanos, 0);
    }
}
