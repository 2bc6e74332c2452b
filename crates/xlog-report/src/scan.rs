//! The first pass over a log: sums, touched addresses, and the streams that get lanes.
//!
//! It refuses a log without records, and one that is less complete than demanded.
use std::collections::HashMap;

use xlog_trace::{Action, Header, Names, Ordered, ReadReport, Source, Summarizer, Summary};

use crate::input::{Input, ReadingReport, Trouble, Watched};
use crate::lanes;
use crate::segments::{SegmentBuilder, Segments};

/// The maximum number of streams counted separately.
const MAX_STREAMS: usize = 1 << 16;

pub(crate) struct Scan {
    pub(crate) summary: Summary,
    pub(crate) first_time: u64,
    pub(crate) segments: Segments,
    pub(crate) uses: u64,
    pub(crate) lane_names: Vec<String>,
    pub(crate) lanes: HashMap<Option<u32>, u8>,
    pub(crate) reading: ReadReport,
    pub(crate) late: u64,
    pub(crate) format: &'static str,
    pub(crate) header: Header,
}

impl Scan {
    /// Reads a log to its end.
    pub(crate) fn read(input: &Input<'_>, log: &str, demand: Demand) -> Result<Self, String> {
        let source: Watched = input.begin().map_err(Trouble::into_line)?;
        let format = source.format().name();
        let mut source = Ordered::new(source);
        let (mut summarizer, mut segments) = (Summarizer::new(), SegmentBuilder::default());
        let (mut streams, mut uses) = (HashMap::new(), 0);
        while let Some(record) =
            source.next_record().map_err(|error| input.blame(&error).into_line())?
        {
            let counted = summarizer.push(&record, source.names());
            counted.map_err(|error| input.blame(&error).into_line())?;
            if matches!(record.action(), Action::SegmentTake | Action::SegmentReturn) {
                // Segments belong to no stream. The map also includes parts that no block touched.
                if let (Action::SegmentTake, Some(ptr)) = (record.action(), record.ptr()) {
                    let bytes = record.bytes().unwrap_or(0);
                    segments.add(record.process(), record.device(), ptr, bytes);
                }
                continue;
            }
            if streams.len() < MAX_STREAMS || streams.contains_key(&record.stream()) {
                *streams.entry(record.stream()).or_default() += 1;
            }
            match (record.action(), record.ptr().filter(|ptr| *ptr != 0)) {
                (Action::Allocate, Some(ptr)) if !record.is_failure() => {
                    let bytes = record.charged_bytes().max(record.bytes().unwrap_or(0));
                    segments.add(record.process(), record.device(), ptr, bytes);
                }
                (Action::UsePrepare | Action::UseFinish, _) => uses += 1,
                _ => {}
            }
        }
        let reading = source.report().clone();
        check(log, &reading, demand)?;
        let (lanes, lane_names) =
            lanes::assign(&streams, |stream| stream_name(stream, source.names()));
        let summary = summarizer.finish(source.names());
        Ok(Self {
            format,
            first_time: summary.time_nanos.map_or(0, |(first, _)| first),
            segments: segments.finish(),
            uses,
            lanes,
            lane_names,
            late: source.late(),
            header: source.header().clone(),
            summary,
            reading,
        })
    }
}

/// How complete a log must be for a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Demand {
    /// Damaged and truncated logs are accepted.
    Partial,
    /// Undamaged logs are accepted, even if records were dropped or the log was not closed.
    Whole,
    /// Only complete logs are accepted.
    Complete,
}

impl Demand {
    /// Returns the demand of the options `--partial` and `--strict`.
    pub fn new(partial: bool, strict: bool) -> Self {
        match (partial, strict) {
            (_, true) => Self::Complete,
            (true, _) => Self::Partial,
            _ => Self::Whole,
        }
    }
}

/// Refuses a log without records, and one that is less complete than demanded.
pub fn check(log: &str, reading: &ReadReport, demand: Demand) -> Result<(), String> {
    if reading.records == 0 {
        return Err(format!("{log}: it has no records; expected an allocation log with some"));
    }
    if demand == Demand::Partial {
        return Ok(());
    }
    if reading.skipped == 0 && !reading.truncated {
        let refusal = ReadingReport::new(reading).refusal(log);
        return refusal.filter(|_| demand == Demand::Complete).map_or(Ok(()), Err);
    }
    let what = match (&reading.first_bad, reading.truncated) {
        (Some(bad), _) => format!("{} bad places, the first at {bad}", reading.skipped),
        (None, true) => "it is cut off at the end".to_owned(),
        (None, false) => format!("{} bad places", reading.skipped),
    };
    Err(format!(
        "{log}: {what}; {} records are good, and --partial goes on with them",
        reading.records
    ))
}

pub(crate) fn stream_name(stream: Option<u32>, names: &Names) -> String {
    match stream {
        None => "no stream".to_owned(),
        Some(id) => match names.stream_name(id) {
            Some(name) => format!("stream {id} ({name})"),
            None => format!("stream {id}"),
        },
    }
}
