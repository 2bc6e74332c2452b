//! Variants that take turns, so that a change of clock or of load meets all of them, and what is compared: medians, with the spread.

use std::time::{Duration, Instant};

use xlog_cuda::Result;

/// The maximum number of operations in a batch.
const MAX_BATCH: usize = 4096;

/// Something to time.
pub(super) struct Variant<'a> {
    name: String,
    /// So many operations; what is timed.
    work: Box<dyn FnMut(usize) -> Result<()> + 'a>,
    /// After each batch, and not timed: waits for what the batch queued.
    settle: Box<dyn FnMut() -> Result<()> + 'a>,
}

impl<'a> Variant<'a> {
    pub(super) fn new(
        name: impl Into<String>,
        work: impl FnMut(usize) -> Result<()> + 'a,
        settle: impl FnMut() -> Result<()> + 'a,
    ) -> Self {
        Self { name: name.into(), work: Box::new(work), settle: Box::new(settle) }
    }

    /// Nanoseconds per operation of one batch.
    fn batch(&mut self, count: usize) -> Result<f64> {
        let start = Instant::now();
        (self.work)(count)?;
        let passed = start.elapsed();
        (self.settle)()?;
        Ok(passed.as_nanos() as f64 / count as f64)
    }

    /// How many operations take about as long as a batch should.
    fn size(&mut self, long: Duration) -> Result<usize> {
        // The first of all takes memory from the device, and any one may meet a neighbour.
        self.batch(1)?;
        let mut count = 1;
        while count < MAX_BATCH {
            let cost = self.batch(count)?.min(self.batch(count)?);
            if cost * count as f64 >= long.as_nanos() as f64 {
                break;
            }
            count *= 2;
        }
        Ok(count)
    }
}

/// The measurement of a variant, in nanoseconds per operation.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) median: f64,
    /// The quarter of the batches that were fastest, and slowest, end here.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    pub(super) rounds: usize,
    pub(super) batch: Duration,
}

/// Lets the variants take turns. In every round another one begins; the first tenth of the rounds warms up.
pub(super) fn take_turns(effort: Effort, mut variants: Vec<Variant<'_>>) -> Result<Vec<Sample>> {
    let mut counts = Vec::with_capacity(variants.len());
    for variant in &mut variants {
        counts.push(variant.size(effort.batch)?);
    }
    let mut times = vec![Vec::with_capacity(effort.rounds); variants.len()];
    let warm_up = effort.rounds / 10 + 1;
    for round in 0..warm_up + effort.rounds {
        for turn in 0..variants.len() {
            let at = (turn + round) % variants.len();
            let (Some(variant), Some(&count)) = (variants.get_mut(at), counts.get(at)) else {
                continue;
            };
            let cost = variant.batch(count)?;
            if round >= warm_up
                && let Some(times) = times.get_mut(at)
            {
                times.push(cost);
            }
        }
    }
    let named = variants.into_iter().map(|variant| variant.name);
    Ok(named.zip(times).map(|(name, times)| sample(name, times)).collect())
}

fn sample(name: String, mut times: Vec<f64>) -> Sample {
    times.sort_unstable_by(f64::total_cmp);
    let at = |part: usize| times.get(times.len() * part / 4).copied().unwrap_or(f64::NAN);
    Sample { name, median: at(2), low: at(1), high: at(3) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn variants_take_turns_and_are_settled_after_every_batch() {
        let (log, settled) = (RefCell::new(Vec::new()), Cell::new(0));
        let variant = |name: &'static str, pause: u64| {
            let log = &log;
            Variant::new(
                name,
                move |count| {
                    log.borrow_mut().push(name);
                    std::thread::sleep(Duration::from_micros(pause) * count as u32);
                    Ok(())
                },
                || {
                    settled.set(settled.get() + 1);
                    Ok(())
                },
            )
        };
        let effort = Effort { rounds: 5, batch: Duration::from_micros(50) };
        let samples = take_turns(effort, vec![variant("fast", 50), variant("slow", 500)]).unwrap();
        let turns: Vec<_> = log.borrow().iter().rev().take(4).rev().copied().collect();
        assert!(
            turns == ["fast", "slow", "slow", "fast"] || turns == ["slow", "fast", "fast", "slow"]
        );
        assert_eq!(settled.get(), log.borrow().len());
        assert!(samples[0].median < samples[1].median, "{samples:?}");
        assert!(samples.iter().all(|sample| sample.low <= sample.median));
        assert!(samples.iter().all(|sample| sample.median <= sample.high));
    }
}
