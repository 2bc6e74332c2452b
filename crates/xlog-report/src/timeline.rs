//! Memory over time by tag, at a resolution that follows the records.
//!
//! A bin is a fixed number of consecutive records, so bursts keep their detail and quiet times cost nothing. A log with
//! no more records than bins is kept exactly. A bin keeps its lowest total, and all tags at the moment of its highest
//! total, so no peak is lost.

/// The maximum number of bins.
pub(crate) const MAX_BINS: usize = 1 << 15;

/// The bins of a log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    /// The number of series.
    pub(crate) series: usize,
    /// When each bin begins, in nanoseconds since the first record.
    pub(crate) starts: Vec<u64>,
    /// Bytes of all series at the highest moment of each bin, bin by bin.
    pub(crate) stacks: Vec<u64>,
    /// The lowest total of each bin.
    pub(crate) lows: Vec<u64>,
    /// The maximum reserved bytes of each bin.
    pub(crate) reserved: Vec<u64>,
    /// The time of the last record.
    pub(crate) end: u64,
}

impl Timeline {
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// Returns the series of a bin at its highest moment.
    pub(crate) fn stack(&self, bin: usize) -> &[u64] {
        let from = bin.saturating_mul(self.series);
        self.stacks.get(from..from.saturating_add(self.series)).unwrap_or(&[])
    }

    /// Returns the maximum reserved bytes in each of `width` equal time steps.
    pub(crate) fn reserved_columns(&self, width: usize) -> Vec<u64> {
        let bytes = |bin: usize| self.reserved.get(bin).copied().unwrap_or(0);
        self.highest_bins(width, bytes).into_iter().map(bytes).collect()
    }

    /// Returns the bin with the highest total in each of `width` equal time steps.
    pub(crate) fn columns(&self, width: usize) -> Vec<usize> {
        self.highest_bins(width, |bin| self.stack(bin).iter().sum())
    }

    /// Returns, for each of `width` equal time steps, the first bin with the largest value.
    fn highest_bins(&self, width: usize, value: impl Fn(usize) -> u64) -> Vec<usize> {
        let edge = |at: usize| (u128::from(self.end) * at as u128 / width.max(1) as u128) as u64;
        let mut first = 0;
        (0..width)
            .map(|column| {
                let (from, to) = (edge(column), edge(column + 1));
                // The bin that began before the step extends into it.
                while self.starts.get(first + 1).is_some_and(|&start| start <= from) {
                    first += 1;
                }
                let within = (first + 1..self.len())
                    .take_while(|&bin| self.starts.get(bin).is_some_and(|&start| start < to));
                within.fold(first, |best, bin| if value(bin) > value(best) { bin } else { best })
            })
            .collect()
    }
}

/// Builds a timeline, record by record.
#[derive(Debug)]
pub(crate) struct TimelineBuilder {
    made: Timeline,
    per_bin: u64,
    in_bin: u64,
    live: Vec<u64>,
    total: u64,
    highest: u64,
    reserved: u64,
}

impl TimelineBuilder {
    /// Creates a builder for a log of this number of records and series.
    pub(crate) fn new(records: u64, series: usize) -> Self {
        let per_bin = records.div_ceil(MAX_BINS as u64).max(1);
        Self {
            made: Timeline { series, ..Timeline::default() },
            per_bin,
            in_bin: per_bin,
            live: vec![0; series],
            total: 0,
            highest: 0,
            reserved: 0,
        }
    }

    pub(crate) fn born(&mut self, series: u8, bytes: u64) {
        if let Some(live) = self.live.get_mut(series as usize) {
            *live = live.saturating_add(bytes);
        }
        self.total = self.total.saturating_add(bytes);
    }

    pub(crate) fn died(&mut self, series: u8, bytes: u64) {
        if let Some(live) = self.live.get_mut(series as usize) {
            *live = live.saturating_sub(bytes);
        }
        self.total = self.total.saturating_sub(bytes);
    }

    /// Sets the reserved bytes, in use or not.
    pub(crate) fn set_reserved(&mut self, bytes: u64) {
        self.reserved = bytes;
    }

    /// Returns the live bytes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bin of the next record.
    pub(crate) fn next_bin(&self) -> usize {
        self.made.len() - usize::from(self.in_bin < self.per_bin && self.made.len() > 0)
    }

    /// Ends a record, whose changes have been applied.
    pub(crate) fn end_record(&mut self, time: u64) {
        self.made.end = time;
        if self.in_bin >= self.per_bin {
            self.in_bin = 0;
            self.made.starts.push(time);
            self.made.stacks.extend_from_slice(&self.live);
            self.made.lows.push(self.total);
            self.made.reserved.push(self.reserved);
            self.highest = self.total;
        } else if self.total > self.highest {
            self.highest = self.total;
            let from = self.made.stacks.len().saturating_sub(self.made.series);
            if let Some(stack) = self.made.stacks.get_mut(from..) {
                stack.copy_from_slice(&self.live);
            }
        }
        if let Some(low) = self.made.lows.last_mut() {
            *low = (*low).min(self.total);
        }
        if let Some(reserved) = self.made.reserved.last_mut() {
            *reserved = (*reserved).max(self.reserved);
        }
        self.in_bin += 1;
    }

    pub(crate) fn finish(self) -> Timeline {
        self.made
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlog_workloads::Minstd;

    /// Makes random steps of two series; also returns the totals after each record.
    fn walk(records: u64, seed: u64) -> (Timeline, Vec<(u64, u64)>) {
        let mut random = Minstd::new(seed);
        let mut builder = TimelineBuilder::new(records, 2);
        let (mut live, mut time, mut total, mut totals) = (Vec::new(), 0, 0, Vec::new());
        for _ in 0..records {
            if live.is_empty() || random.draw(0, 2) > 0 {
                let block = (random.draw(0, 1) as u8, random.draw(1, 1000));
                builder.born(block.0, block.1);
                live.push(block);
                total += block.1;
            } else {
                let at = random.draw(0, live.len() as u64 - 1) as usize;
                let (series, bytes) = live.swap_remove(at);
                builder.died(series, bytes);
                total -= bytes;
            }
            time += random.draw(0, 5);
            builder.end_record(time);
            totals.push((time, total));
        }
        (builder.finish(), totals)
    }

    #[test]
    fn a_short_log_is_kept_exactly() {
        let (timeline, totals) = walk(500, 7);
        assert_eq!(timeline.len(), totals.len());
        for (bin, (time, total)) in totals.iter().enumerate() {
            let sum: u64 = timeline.stack(bin).iter().sum();
            assert_eq!((timeline.starts[bin], sum, timeline.lows[bin]), (*time, *total, *total));
        }
    }

    #[test]
    fn no_peak_and_no_low_of_a_long_log_is_lost() {
        for seed in [1, 2, 3] {
            let (timeline, totals) = walk(3 * MAX_BINS as u64 + 11, seed);
            assert!(timeline.len() <= MAX_BINS);
            for (bin, run) in totals.chunks(4).enumerate() {
                let sum: u64 = timeline.stack(bin).iter().sum();
                let totals = run.iter().map(|total| total.1);
                assert_eq!(Some(sum), totals.clone().max(), "seed {seed}, bin {bin}");
                assert_eq!(Some(timeline.lows[bin]), totals.min(), "seed {seed}, bin {bin}");
                assert_eq!(timeline.starts[bin], run[0].0, "seed {seed}, bin {bin}");
            }
        }
    }

    #[test]
    fn columns_of_a_picture_show_the_peak() {
        let (timeline, totals) = walk(5000, 9);
        let peak = totals.iter().map(|total| total.1).max();
        for width in [1, 7, 64, 1000] {
            let columns = timeline.columns(width);
            assert_eq!(columns.len(), width);
            let sums = columns.iter().map(|&bin| timeline.stack(bin).iter().sum::<u64>());
            assert_eq!(sums.max(), peak, "width {width}");
        }
    }
}
