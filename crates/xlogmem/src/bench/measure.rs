//! Interleaved measurement of variants, so that changes of clock and load affect all of them. Reports medians and spread.

use std::time::{Duration, Instant};

use xlog_cuda::Result;

/// The maximum number of operations in a batch.
const MAX_BATCH: usize = 4096;

pub(super) struct Variant<'a> {
    name: String,
    /// The timed work: performs this number of operations.
    work: Box<dyn FnMut(usize) -> Result<()> + 'a>,
    /// The untimed end of a batch: waits for the work it queued.
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

    /// Returns the nanoseconds per operation of one batch.
    fn batch(&mut self, count: usize) -> Result<f64> {
        let start = Instant::now();
        (self.work)(count)?;
        let passed = start.elapsed();
        (self.settle)()?;
        Ok(passed.as_nanos() as f64 / count as f64)
    }

    /// Returns the number of operations whose time is about `long`.
    fn size(&mut self, long: Duration) -> Result<usize> {
        // The first batch reserves device memory. Other load may slow down any batch, so the faster of two counts.
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

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) median: f64,
    /// The lower and upper quartile.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// The duration of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    pub(super) rounds: usize,
    pub(super) batch: Duration,
}

/// Interleaves the variants; every round starts with another one. The first tenth of the rounds warms up.
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
