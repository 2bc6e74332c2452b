//! The analysis of one log for a report, in two passes.
//!
//! The first pass counts records and collects tags, streams and addresses. The second fills pictures of fixed size. Neither
//! holds the log: memory grows with the live blocks, up to a limit, the window that orders records, and the pictures.
use std::collections::{HashMap, HashSet};

use serde::Serialize;
use xlog_trace::{Header, NameId, Names, Ordered, Record, Source, Summary, TraceError};

use crate::address_map::{AddressMap, AddressMapBuilder, COLUMNS};
use crate::blocks::{Blocks, BlocksBuilder, KEPT};
use crate::input::{Input, ReadingReport, Trouble};
use crate::lanes::{Lanes, LanesBuilder};
use crate::lifetimes::Lifetimes;
use crate::lives::{Change, Life, Lives};
use crate::reserved_ranges::{RangeRow, ReservedRanges};
use crate::scan::{Demand, Scan};
use crate::segments::Segments;
use crate::timeline::{Timeline, TimelineBuilder};

/// The maximum number of tags shown by name; the rest are shown together.
const SHOWN_TAGS: usize = 14;
/// The maximum number of blocks at the peak, and of failures, listed.
const LISTED: usize = 50;

/// The memory of one tag at the peak, as it appears in JSON.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) tag: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

/// A failed allocation, as it appears in the page's data.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct FailedCall {
    pub(crate) time: u64,
    pub(crate) order: u64,
    pub(crate) bytes: u64,
    pub(crate) tag: String,
    /// Source location of the call; empty if the log lacks it.
    pub(crate) site: String,
    pub(crate) kind: String,
    pub(crate) message: String,
}

/// The analysis of a log. Times are nanoseconds since its first record.
#[derive(Debug)]
pub struct Analysis {
    /// The log as the user named it.
    pub log: String,
    /// The file name without its folder: reports are shared, but the folder is private.
    pub file: String,
    pub(crate) format: &'static str,
    pub(crate) header: Header,
    /// The counts and faults of reading it, and whether it is complete.
    pub reading: ReadingReport,
    /// Records that arrived too late to be ordered.
    pub(crate) late: u64,
    pub(crate) summary: Summary,
    /// Names of the timeline's series, none empty.
    pub(crate) tags: Vec<String>,
    /// The number of tags that the last series combines, if several.
    pub(crate) other_tags: usize,
    pub(crate) timeline: Timeline,
    pub(crate) peak_time: u64,
    pub(crate) peak_blocks: u64,
    pub(crate) holders: Vec<Holder>,
    pub(crate) largest_at_peak: Vec<Life>,
    pub(crate) segments: Segments,
    pub(crate) address_map: AddressMap,
    /// Reserved segments, those with the most bytes times time.
    pub(crate) reserved: Vec<RangeRow>,
    pub(crate) all_reserved: u64,
    /// The first bin of every column of the map and the lanes.
    pub(crate) column_bins: Vec<usize>,
    pub(crate) streams: Vec<String>,
    pub(crate) lanes: Lanes,
    pub(crate) lifetimes: Lifetimes,
    pub(crate) uses: u64,
    pub(crate) failed: Vec<FailedCall>,
    pub(crate) blocks: Blocks,
    /// Names of the tags and streams of the kept blocks.
    pub(crate) names: Names,
}

/// Analyses a log.
pub fn analyse(input: &Input<'_>, log: &str, demand: Demand) -> Result<Analysis, String> {
    let scan = Scan::read(input, log, demand)?;
    let mut met = HashSet::new();
    let names = scan.summary.by_tag.iter().map(|(name, _)| name);
    let mut tags: Vec<String> = names.filter(|name| met.insert(*name)).cloned().collect();
    let mut other_tags = 0;
    if tags.len() > SHOWN_TAGS + 1 {
        other_tags = tags.len() - SHOWN_TAGS;
        tags.truncate(SHOWN_TAGS);
        tags.push(format!("{other_tags} other tags"));
    }
    let shown: HashMap<String, u8> = tags
        .iter()
        .take(if other_tags > 0 { SHOWN_TAGS } else { tags.len() })
        .enumerate()
        .map(|(at, tag)| (tag.clone(), at as u8))
        .collect();
    let source = input.begin().map_err(Trouble::into_line)?;
    let mut filling = Filling::new(&scan, shown, tags.len());
    let mut source = Ordered::new(source);
    while let Some(record) =
        source.next_record().map_err(|error| input.blame(&error).into_line())?
    {
        let filled = filling.push(&record, source.names());
        filled.map_err(|error| input.blame(&error).into_line())?;
    }
    let filled = filling.finish();
    let holder = |(tag, bytes, blocks): (Option<NameId>, u64, u64)| Holder {
        tag: source.names().text_or_empty(tag).to_owned(),
        bytes,
        blocks,
    };
    let Scan { summary, segments, reading, header, late, format, uses, lane_names, .. } = scan;
    Ok(Analysis {
        log: log.to_owned(),
        file: std::path::Path::new(log)
            .file_name()
            .map_or_else(|| log.to_owned(), |name| name.to_string_lossy().into_owned()),
        format,
        header,
        reading: ReadingReport::new(&reading),
        late,
        summary,
        tags,
        other_tags,
        timeline: filled.timeline,
        peak_time: filled.peak.time,
        peak_blocks: filled.peak.blocks,
        holders: filled.peak.holders.into_iter().map(holder).collect(),
        largest_at_peak: filled.peak.largest,
        segments,
        address_map: filled.address_map,
        reserved: filled.reserved,
        all_reserved: filled.all_reserved,
        column_bins: filled.column_bins,
        streams: lane_names,
        lanes: filled.lanes,
        lifetimes: filled.lifetimes,
        uses,
        failed: filled.failed,
        blocks: filled.blocks,
        names: source.names().clone(),
    })
}

/// The state of the second pass.
struct Filling<'a> {
    scan: &'a Scan,
    shown: HashMap<String, u8>,
    others: u8,
    /// Series of the tags seen so far.
    places: HashMap<Option<NameId>, u8>,
    /// Memory of every tag, including those shown together.
    held: HashMap<Option<NameId>, (u64, u64)>,
    lives: Lives,
    blocks: u64,
    timeline: TimelineBuilder,
    map: AddressMapBuilder<'a>,
    reserved: ReservedRanges,
    lanes: LanesBuilder<'a>,
    lifetimes: Lifetimes,
    details: BlocksBuilder,
    bins_per_column: usize,
    column_bins: Vec<usize>,
    time: u64,
    peak: Option<Peak>,
    failed: Vec<FailedCall>,
}

struct Filled {
    timeline: Timeline,
    peak: Peak,
    address_map: AddressMap,
    reserved: Vec<RangeRow>,
    all_reserved: u64,
    column_bins: Vec<usize>,
    lanes: Lanes,
    lifetimes: Lifetimes,
    failed: Vec<FailedCall>,
    blocks: Blocks,
}

#[derive(Default)]
struct Peak {
    time: u64,
    blocks: u64,
    holders: Vec<(Option<NameId>, u64, u64)>,
    largest: Vec<Life>,
}

impl<'a> Filling<'a> {
    fn new(scan: &'a Scan, shown: HashMap<String, u8>, series: usize) -> Self {
        let records = scan.summary.records;
        let per_bin = records.div_ceil(crate::timeline::MAX_BINS as u64).max(1);
        let bins = records.div_ceil(per_bin) as usize;
        Self {
            scan,
            shown,
            others: series.saturating_sub(1) as u8,
            places: HashMap::new(),
            held: HashMap::new(),
            lives: Lives::default(),
            blocks: 0,
            timeline: TimelineBuilder::new(records, series),
            map: AddressMapBuilder::new(&scan.segments, series),
            reserved: ReservedRanges::default(),
            lanes: LanesBuilder::new(&scan.lanes, scan.lane_names.len()),
            lifetimes: Lifetimes::new(series),
            details: BlocksBuilder::new(KEPT),
            bins_per_column: bins.div_ceil(COLUMNS).max(1),
            column_bins: Vec::new(),
            time: 0,
            peak: None,
            failed: Vec::new(),
        }
    }

    fn push(&mut self, record: &Record, names: &Names) -> Result<(), TraceError> {
        let bin = self.timeline.next_bin();
        if bin / self.bins_per_column >= self.column_bins.len() {
            if !self.column_bins.is_empty() {
                self.end_column();
            }
            self.column_bins.push(bin);
        }
        // Concurrent calls may begin in another order than they end.
        self.time = self.time.max(record.time_nanos().saturating_sub(self.scan.first_time));
        if self.reserved.apply(record, self.time) {
            self.timeline.set_reserved(self.reserved.bytes());
            self.timeline.end_record(self.time);
            return Ok(());
        }
        let tag = self.place(record.tag(), names);
        let change = self.lives.apply(record, self.time, tag)?;
        let touched = match &change {
            Change::Died(life) | Change::Used(life) => Some(*life),
            _ => None,
        };
        self.lanes.record(record, touched.as_ref(), self.time);
        match change {
            Change::None => {}
            Change::Used(used) => self.details.used(&used, record, self.time),
            Change::Born(born) => self.born(&born, record),
            Change::Replaced { born, lost } => {
                self.died(&lost, None);
                self.born(&born, record);
            }
            Change::Died(died) => self.died(&died, Some(record)),
        }
        if record.is_failure() && self.failed.len() < LISTED {
            self.failed.push(self.failure(record, names));
        }
        self.timeline.end_record(self.time);
        if self.peak.is_none()
            && self.timeline.total() == self.scan.summary.total.peak_bytes
            && self.blocks > 0
        {
            self.peak = Some(self.at_peak());
        }
        Ok(())
    }

    fn place(&mut self, tag: Option<NameId>, names: &Names) -> u8 {
        let (shown, others) = (&self.shown, self.others);
        *self
            .places
            .entry(tag)
            .or_insert_with(|| shown.get(names.text_or_empty(tag)).copied().unwrap_or(others))
    }

    fn failure(&self, record: &Record, names: &Names) -> FailedCall {
        let failure = record.failure();
        let text = |id| names.text_or_empty(Some(id)).to_owned();
        FailedCall {
            time: self.time,
            order: record.order(),
            bytes: record.bytes().unwrap_or(0),
            tag: names.text_or_empty(record.tag()).to_owned(),
            site: names.text_or_empty(record.site()).to_owned(),
            kind: failure.map_or_else(|| "unknown".to_owned(), |failure| text(failure.kind)),
            message: failure.map_or_else(String::new, |failure| text(failure.message)),
        }
    }

    fn born(&mut self, life: &Life, record: &Record) {
        self.blocks += 1;
        let held = self.held.entry(life.name).or_default();
        *held = (held.0.saturating_add(life.bytes), held.1 + 1);
        self.timeline.born(life.tag, life.bytes);
        self.map.born(life);
        self.lifetimes.born(life);
        self.details.born(life, record);
    }

    fn died(&mut self, life: &Life, free: Option<&Record>) {
        self.blocks = self.blocks.saturating_sub(1);
        let held = self.held.entry(life.name).or_default();
        *held = (held.0.saturating_sub(life.bytes), held.1.saturating_sub(1));
        self.timeline.died(life.tag, life.bytes);
        self.map.died(life);
        self.lifetimes.died(life, self.time, true);
        self.details.ended(life, self.time, Some(self.time), free);
    }

    fn at_peak(&self) -> Peak {
        let mut holders: Vec<_> = self
            .held
            .iter()
            .filter(|(_, (_, blocks))| *blocks > 0)
            .map(|(tag, (bytes, blocks))| (*tag, *bytes, *blocks))
            .collect();
        holders.sort_unstable_by_key(|&(tag, bytes, _)| (std::cmp::Reverse(bytes), tag));
        let mut largest: Vec<Life> = self.lives.iter().copied().collect();
        largest.sort_unstable_by_key(|life| (std::cmp::Reverse(life.bytes), life.order));
        largest.truncate(LISTED);
        Peak { time: self.time, blocks: self.blocks, holders, largest }
    }

    fn end_column(&mut self) {
        self.map.end_column();
        self.lanes.end_column();
    }

    fn finish(mut self) -> Filled {
        self.end_column();
        for life in self.lives.iter() {
            self.lifetimes.died(life, self.time, false);
            self.details.ended(life, self.time, None, None);
        }
        let (reserved, all_reserved) = self.reserved.finish(self.time);
        Filled {
            reserved,
            all_reserved,
            timeline: self.timeline.finish(),
            peak: self.peak.unwrap_or_default(),
            address_map: self.map.finish(),
            column_bins: self.column_bins,
            lanes: self.lanes.finish(),
            lifetimes: self.lifetimes.finish(),
            failed: self.failed,
            blocks: self.details.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::input::Strict;
    use xlog_trace::{Action, Failure, Format, LogWriter, ServedBy, UseAccess};
    use xlog_workloads::Minstd;

    /// A live block of the model: bytes, tag, generation.
    type Block = (u64, String, Option<u64>);

    /// Random records with few addresses and many tags, so that missing records of every kind are frequent. Times and sizes
    /// reach the ends of their ranges.
    fn nonsense(seed: u64, names: &mut Names) -> Vec<Record> {
        let mut random = Minstd::new(seed);
        let actions = [1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 77].map(Action::from_code);
        let tags: Vec<NameId> = (0..40).map(|tag| names.intern(&format!("tag {tag}"))).collect();
        let failure = Failure { kind: names.intern("odd"), message: names.intern("<b>") };
        let extreme = [0, 1, u64::MAX / 2, u64::MAX - 1];
        let mut time = 0;
        let mut record = |order| {
            let action = actions[random.draw(0, 11) as usize];
            time += random.draw(0, 1000);
            let late = random.draw(0, 50) * random.draw(0, 1);
            let mut record =
                Record::new(action, random.draw(0, 1) as u32, order, time - late.min(time))
                    .with_process(random.draw(0, 1) as u32)
                    .with_ptr(random.draw(0, 6) * (1 << 20))
                    .with_served_by(ServedBy::from_code(random.draw(0, 9) as u8))
                    .with_access(UseAccess::Read);
            if random.draw(0, 40) == 0 {
                record = record.with_ptr(extreme[random.draw(0, 3) as usize]);
            }
            if random.draw(0, 9) > 0 {
                record = record.with_stream(random.draw(0, 40) as u32);
            }
            if action == Action::Allocate {
                record = record.with_bytes(random.draw(0, 1 << 20));
                record = record.with_tag(tags[random.draw(0, 39) as usize]);
            }
            if random.draw(0, 200) == 0 {
                record = record.with_bytes(extreme[random.draw(0, 1) as usize]);
            }
            if random.draw(0, 3) == 0 {
                record = record.with_generation(random.draw(0, 1));
            }
            if random.draw(0, 20) == 0 { record.with_failure(failure) } else { record }
        };
        (0..3000).map(&mut record).collect()
    }

    #[test]
    fn whatever_a_log_says_all_parts_of_a_report_agree_with_a_simple_count() {
        let path = std::env::temp_dir().join(format!("xlogmem-analysis-{}", std::process::id()));
        for seed in 1..40 {
            let mut names = Names::new();
            let records = nonsense(seed, &mut names);
            let mut writer = LogWriter::new(Format::Binary, &Header::new(), Vec::new());
            for record in &records {
                writer.write(record, &names).unwrap();
            }
            std::fs::write(&path, writer.finish().unwrap()).unwrap();
            let input = Input::new(&path, None, Strict(false));
            let analysis = analyse(&input, "log", Demand::Whole).unwrap();

            let mut live: BTreeMap<(u32, u32, u64), Block> = BTreeMap::new();
            let (mut totals, mut peak) = (Vec::new(), (0, BTreeMap::new()));
            for record in &records {
                let key = (record.process(), record.device(), record.ptr().unwrap());
                if !record.is_failure() && key.2 != 0 {
                    let tag = names.text_or_empty(record.tag()).to_owned();
                    let stale = live.get(&key).is_some_and(|(_, _, generation)| {
                        matches!((generation, record.generation()), (Some(a), Some(b)) if *a != b)
                    });
                    match record.action() {
                        Action::Allocate => {
                            live.insert(key, (record.charged_bytes(), tag, record.generation()));
                        }
                        Action::Deallocate if !stale => {
                            live.remove(&key);
                        }
                        _ => {}
                    }
                }
                let total: u64 = live.values().map(|(bytes, ..)| bytes).sum();
                totals.push(total);
                if total > peak.0 {
                    let mut held: BTreeMap<String, (u64, u64)> = BTreeMap::new();
                    for (bytes, tag, _) in live.values() {
                        let held = held.entry(tag.clone()).or_default();
                        *held = (held.0 + bytes, held.1 + 1);
                    }
                    peak = (total, held);
                }
            }
            let sums: Vec<u64> = (0..analysis.timeline.len())
                .map(|bin| analysis.timeline.stack(bin).iter().sum())
                .collect();
            assert_eq!(sums, totals, "seed {seed}");
            let holders = analysis.holders.iter().map(|h| (h.tag.clone(), (h.bytes, h.blocks)));
            assert_eq!(holders.collect::<BTreeMap<_, _>>(), peak.1, "seed {seed}");
            assert_eq!(analysis.tags.len(), SHOWN_TAGS + 1, "seed {seed}");
            let lanes = &analysis.lanes;
            let columns = analysis.column_bins.len();
            assert_eq!(lanes.columns.len(), columns * analysis.streams.len(), "seed {seed}");
            let map = &analysis.address_map;
            assert_eq!(map.fullness.len(), columns * map.rows, "seed {seed}");
            let calls: u64 = lanes.totals.iter().map(|lane| u64::from(lane.calls)).sum();
            let is_segment = |r: &&Record| matches!(r.action().code(), 7 | 8);
            let segments = records.iter().filter(is_segment).count() as u64;
            assert_eq!(calls, 3000 - segments, "seed {seed}");
            let reserved = analysis.timeline.reserved.iter().max().copied();
            assert_eq!(reserved, analysis.summary.reserved.map(|usage| usage.peak_bytes));
            let born: u64 = analysis.lifetimes.by_tag.iter().map(|tag| tag.blocks).sum();
            assert_eq!(born, analysis.summary.total.allocations, "seed {seed}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
