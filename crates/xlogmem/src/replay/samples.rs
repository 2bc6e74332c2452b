//! Memory over a replay: live bytes, reserved bytes, and the fragmentation of the free part.
//!
//! A sample is taken every fixed number of operations, between calls and outside their times. With several threads, it
//! shows the state when that operation was done, whatever the other threads were doing.
use serde::Serialize;
use xlog_report::plot;
use xlog_report::text_report::{TextReport, size};
use xlog_workloads::stack::Stack;

/// The number of samples; one more follows at the end.
const SAMPLES: usize = 128;
/// The maximum number of columns of a plot.
const COLUMNS: usize = 64;
const HEIGHT: usize = 4;

#[derive(Serialize, Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// The number of operations before it.
    pub(super) operation: usize,
    pub(super) live_bytes: u64,
    /// `null` if the driver does not report it.
    pub(super) reserved_bytes: Option<u64>,
    /// The part of the free memory outside the largest range; `null` without a pool.
    pub(super) fragmentation: Option<f64>,
    pub(super) free_ranges: Option<usize>,
}

/// Returns the number of operations between samples.
pub(super) fn step(operations: usize) -> usize {
    operations.div_ceil(SAMPLES).max(1)
}

impl Sample {
    /// Takes a sample of `stack`.
    pub(super) fn measure(operation: usize, live_bytes: u64, stack: &Stack) -> Self {
        let pool = stack.snapshot();
        Self {
            operation,
            live_bytes,
            reserved_bytes: stack.reserved(),
            fragmentation: pool.as_ref().map(|pool| pool.fragmentation()),
            free_ranges: pool.as_ref().map(|pool| pool.free_ranges),
        }
    }
}

/// Returns the maximum of the samples in each column.
fn columns(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> Vec<f64> {
    let width = samples.len().min(COLUMNS);
    let column = |at: usize| {
        let (from, to) = (at * samples.len() / width, (at + 1) * samples.len() / width);
        let part = samples.get(from..to.max(from + 1)).unwrap_or(&[]);
        part.iter().map(&value).fold(0.0, f64::max)
    };
    (0..width).map(column).collect()
}

/// Adds the plots of a run, from its first operation to its last.
pub(super) fn render(page: &mut TextReport, samples: &[Sample]) {
    if samples.len() < 2 {
        return;
    }
    let bytes = |value: fn(&Sample) -> u64| -> Vec<u64> {
        let wide = columns(samples, |sample| value(sample) as f64);
        wide.into_iter().map(|bytes| bytes as u64).collect()
    };
    let live = bytes(|sample| sample.live_bytes);
    let reserved = bytes(|sample| sample.reserved_bytes.unwrap_or(0));
    let top = live.iter().chain(&reserved).copied().max().unwrap_or(0).max(1);
    let known = samples.iter().any(|sample| sample.reserved_bytes.is_some());
    for (what, values) in [("live", Some(live)), ("reserved", known.then_some(reserved))] {
        let Some(values) = values else { continue };
        let looks = format!("up to {} at {} moments", most(&values), samples.len());
        page.line(&format!("{what} over time"), &looks);
        for line in plot::rows(&values, top, HEIGHT, None) {
            page.row(&line);
        }
    }
    if samples.iter().any(|sample| sample.fragmentation.is_some()) {
        let parts = columns(samples, |sample| sample.fragmentation.unwrap_or(0.0));
        let highest = parts.iter().copied().fold(0.0, f64::max);
        page.line("fragmentation", &format!("over time, up to {:.1} %", highest * 100.0));
        let scaled = parts.iter().map(|part| (part * 1000.0) as u64).collect::<Vec<_>>();
        for (line, label) in
            plot::rows(&scaled, 1000, HEIGHT, None).iter().zip(["100 %", "", "", "0 %"])
        {
            let cells: String = line.chars().skip(12).collect();
            page.row(&format!("{label:>10}  {cells}"));
        }
    }
}

fn most(values: &[u64]) -> String {
    size(values.iter().copied().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_in_a_column_and_the_highest_is_shown() {
        for count in [2, 63, 64, 65, 129] {
            let sample = |operation| Sample {
                operation,
                live_bytes: u64::from(operation == count - 1) * 7,
                reserved_bytes: None,
                fragmentation: None,
                free_ranges: None,
            };
            let samples: Vec<Sample> = (0..count).map(sample).collect();
            let shown = columns(&samples, |sample| sample.live_bytes as f64);
            assert_eq!(shown.len(), count.min(COLUMNS));
            assert_eq!(shown.last(), Some(&7.0), "{count} samples");
        }
    }
}
