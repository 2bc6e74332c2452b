//! The activity of each stream over time, and the blocks that moved between streams.
//!
//! A handover is a use or a free of a block on another stream than its last one, where the runtime inserts a wait unless
//! it is already ordered. A wait is an allocation that the log records as served by waiting. All handovers are counted;
//! every n-th is kept as an arrow.
use std::collections::{BTreeMap, HashMap};

use xlog_trace::{Action, Record, ServedBy};

use crate::lives::Life;

/// The maximum number of lanes; if there are more streams, the last lane combines the rest.
pub(crate) const MAX_LANES: usize = 32;
/// The maximum number of arrows.
const MAX_ARROWS: usize = 4096;

/// Counts of one lane, or of one of its columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneCounts {
    pub(crate) calls: u32,
    pub(crate) handovers: u32,
    pub(crate) waits: u32,
}

/// A handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrow {
    pub(crate) time: u64,
    pub(crate) from: u8,
    pub(crate) to: u8,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Lanes {
    /// Column by column, all lanes of each.
    pub(crate) columns: Vec<LaneCounts>,
    pub(crate) totals: Vec<LaneCounts>,
    pub(crate) arrows: Vec<Arrow>,
    /// One handover in this number is drawn as an arrow.
    pub(crate) arrow_step: u64,
    /// The number of handovers from lane to lane.
    pub(crate) handovers: BTreeMap<(u8, u8), u64>,
}

/// Builds lanes, record by record.
#[derive(Debug)]
pub(crate) struct LanesBuilder<'a> {
    lanes: &'a HashMap<Option<u32>, u8>,
    count: usize,
    column: Vec<LaneCounts>,
    made: Lanes,
    seen: u64,
}

impl<'a> LanesBuilder<'a> {
    /// `lanes` maps streams to lanes; other streams share the last of `count`.
    pub(crate) fn new(lanes: &'a HashMap<Option<u32>, u8>, count: usize) -> Self {
        Self {
            lanes,
            count,
            column: vec![LaneCounts::default(); count],
            made: Lanes {
                totals: vec![LaneCounts::default(); count],
                arrow_step: 1,
                ..Lanes::default()
            },
            seen: 0,
        }
    }

    fn lane(&self, stream: Option<u32>) -> u8 {
        self.lanes.get(&stream).copied().unwrap_or(self.count.saturating_sub(1) as u8)
    }

    /// Adds a record. `touched` is its block before the record, if that is live.
    pub(crate) fn record(&mut self, record: &Record, touched: Option<&Life>, time: u64) {
        let lane = self.lane(record.stream());
        self.count(lane, |counts| counts.calls += 1);
        let waited = matches!(record.served_by(), ServedBy::Waited | ServedBy::Reaped);
        if record.action() == Action::Allocate && waited {
            self.count(lane, |counts| counts.waits += 1);
        }
        let Some(life) = touched.filter(|_| record.stream().is_some()) else { return };
        if life.last_stream.is_none() || life.last_stream == record.stream() {
            return;
        }
        let from = self.lane(life.last_stream);
        self.count(lane, |counts| counts.handovers += 1);
        *self.made.handovers.entry((from, lane)).or_default() += 1;
        if self.seen.is_multiple_of(self.made.arrow_step) {
            if self.made.arrows.len() >= MAX_ARROWS {
                let mut at = 0;
                self.made.arrows.retain(|_| {
                    at += 1;
                    at % 2 == 1
                });
                self.made.arrow_step *= 2;
            }
            if self.seen.is_multiple_of(self.made.arrow_step) {
                self.made.arrows.push(Arrow { time, from, to: lane });
            }
        }
        self.seen += 1;
    }

    fn count(&mut self, lane: u8, change: impl Fn(&mut LaneCounts)) {
        for counts in [&mut self.column, &mut self.made.totals] {
            if let Some(counts) = counts.get_mut(lane as usize) {
                change(counts);
            }
        }
    }

    pub(crate) fn end_column(&mut self) {
        self.made.columns.append(&mut self.column);
        self.column = vec![LaneCounts::default(); self.count];
    }

    pub(crate) fn finish(self) -> Lanes {
        self.made
    }
}

/// Assigns a lane to each of the busiest streams, by stream number, and names the lanes.
pub(crate) fn assign(
    activity: &HashMap<Option<u32>, u64>,
    name: impl Fn(Option<u32>) -> String,
) -> (HashMap<Option<u32>, u8>, Vec<String>) {
    let mut streams: Vec<(Option<u32>, u64)> = activity.iter().map(|(s, n)| (*s, *n)).collect();
    streams.sort_unstable_by_key(|&(stream, calls)| (std::cmp::Reverse(calls), stream));
    let others = streams.len() > MAX_LANES;
    streams.truncate(if others { MAX_LANES - 1 } else { MAX_LANES });
    streams.sort_unstable_by_key(|&(stream, _)| stream);
    let mut names: Vec<String> = streams.iter().map(|(stream, _)| name(*stream)).collect();
    let lanes = streams.iter().enumerate().map(|(at, (stream, _))| (*stream, at as u8)).collect();
    if others {
        names.push(format!("{} other streams", activity.len() - (MAX_LANES - 1)));
    }
    (lanes, names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(stream: u32) -> Life {
        Life {
            process: 0,
            device: 0,
            ptr: 1,
            bytes: 1,
            extent: 1,
            tag: 0,
            name: None,
            stream: Some(stream),
            generation: None,
            order: 0,
            born: 0,
            last_use: None,
            last_stream: Some(stream),
        }
    }

    #[test]
    fn every_handover_is_counted_and_the_kept_ones_are_spread_evenly() {
        let lanes = HashMap::from([(Some(1), 0), (Some(2), 1)]);
        let mut builder = LanesBuilder::new(&lanes, 2);
        let many = 3 * MAX_ARROWS as u64;
        for time in 0..many {
            let record = Record::new(Action::UsePrepare, 0, time, time).with_stream(2);
            builder.record(&record, Some(&touched(1)), time);
            builder.record(&record, Some(&touched(2)), time);
        }
        builder.end_column();
        let made = builder.finish();
        assert_eq!(made.handovers, BTreeMap::from([((0, 1), many)]));
        assert_eq!(
            (made.totals[1].calls, made.totals[1].handovers),
            (2 * many as u32, many as u32)
        );
        assert!(made.arrows.len() <= MAX_ARROWS && made.arrow_step == 4);
        for (at, arrow) in made.arrows.iter().enumerate() {
            assert_eq!(arrow.time, at as u64 * 4);
        }
    }

    #[test]
    fn the_busiest_streams_have_lanes_and_the_rest_share_one() {
        let activity = (0..100).map(|stream| (Some(stream), u64::from(stream))).collect();
        let (lanes, names) = assign(&activity, |stream| format!("{stream:?}"));
        assert_eq!((names.len(), lanes.len()), (MAX_LANES, MAX_LANES - 1));
        assert_eq!((lanes.get(&Some(99)), lanes.get(&Some(1))), (Some(&30), None));
        assert_eq!(names.last().map(String::as_str), Some("69 other streams"));
    }
}
