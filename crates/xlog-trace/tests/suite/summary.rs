//! The summary agrees with a simple model.

use std::collections::HashMap;

use xlog_trace::{Action, Failure, Format, Names, Record, ServedBy, Source, Strictness, Summary};

use crate::support::{Random, encode, for_seeds, reader};

#[test]
fn totals_peaks_and_leaks_agree_with_a_model() {
    for_seeds(20, |seed| {
        let mut random = Random::new(seed);
        let mut names = Names::new();
        let tags: Vec<_> = (0..3).map(|index| names.intern(&format!("tag {index}"))).collect();
        // The model: live blocks by address, with size and tag.
        let mut live: HashMap<u64, (u64, usize)> = HashMap::new();
        let (mut now, mut peak, mut peak_order, mut total) = (0, 0, 0, 0);
        let mut tag_now = [0u64; 3];
        let mut tag_peak = [0u64; 3];
        let mut records = Vec::new();
        for order in 0..2000 {
            let base = |action| Record::new(action, 0, order, order * 10).with_stream(1);
            if live.is_empty() || random.below_u64(100) < 55 {
                let tag = random.below_u64(3) as usize;
                let size = 1 + random.below_u64(1 << 20);
                let ptr = (order + 1) * 256;
                live.insert(ptr, (size, tag));
                now += size;
                total += size;
                tag_now[tag] += size;
                tag_peak[tag] = tag_peak[tag].max(tag_now[tag]);
                if now > peak {
                    (peak, peak_order) = (now, order);
                }
                let record = base(Action::Allocate).with_ptr(ptr).with_bytes(size / 2);
                records.push(record.with_granted(size).with_tag(tags[tag]));
            } else {
                let mut addresses: Vec<u64> = live.keys().copied().collect();
                addresses.sort_unstable();
                let ptr = addresses[random.below_u64(addresses.len() as u64) as usize];
                let (size, tag) = live.remove(&ptr).unwrap();
                now -= size;
                tag_now[tag] -= size;
                records.push(base(Action::Deallocate).with_ptr(ptr));
            }
        }
        let bytes = encode(Format::Binary, &records, &names);
        let summary = Summary::of(&mut reader(&bytes, Strictness::Strict)).unwrap();
        assert_eq!(summary.records, 2000);
        assert_eq!((summary.total.peak_bytes, summary.peak_order), (peak, peak_order));
        assert_eq!((summary.total.live_bytes, summary.total.total_bytes), (now, total));
        assert_eq!(summary.total.live_blocks as usize, live.len());
        assert_eq!(summary.by_stream.len(), 1);
        assert_eq!(summary.by_stream[0].1, summary.total);
        assert_eq!(summary.by_device[&0], summary.total);
        assert!(summary.by_tag.is_sorted_by(|a, b| a.1.peak_bytes >= b.1.peak_bytes));
        for (name, usage) in &summary.by_tag {
            let tag: usize = name.strip_prefix("tag ").unwrap().parse().unwrap();
            assert_eq!((usage.peak_bytes, usage.live_bytes), (tag_peak[tag], tag_now[tag]));
        }
        let mut leaks: Vec<u64> = live.values().map(|(size, _)| *size).collect();
        leaks.sort_unstable_by(|a, b| b.cmp(a));
        leaks.truncate(xlog_trace::MAX_LISTED_LEAKS);
        let found: Vec<u64> = summary.leaks.iter().map(|leak| leak.block.charged).collect();
        assert_eq!(found, leaks);
        assert_eq!((summary.unknown_frees, summary.missing_frees), (0, 0));
    });
}

#[test]
fn odd_histories_are_counted_not_believed() {
    let mut names = Names::new();
    let failure = Failure { kind: names.intern("OutOfBudget"), message: names.intern("x") };
    let base = |action, order| Record::new(action, 0, order, 100 + order);
    let records = [
        // A block whose free is missing, then one at its address.
        base(Action::Allocate, 0).with_ptr(256).with_bytes(10).with_generation(1),
        base(Action::Allocate, 1).with_ptr(256).with_bytes(20).with_generation(2),
        // A stale free, a free of nothing, a refused free.
        base(Action::Deallocate, 2).with_ptr(256).with_generation(1),
        base(Action::Deallocate, 3).with_ptr(512),
        base(Action::Deallocate, 4).with_ptr(256).with_generation(2).with_failure(failure),
        // Failures of both kinds.
        base(Action::Allocate, 5).with_bytes(99).with_failure(failure),
        base(Action::AllocateFailure, 6).with_bytes(99),
        base(Action::Allocate, 7).with_ptr(1024).with_bytes(0).with_served_by(ServedBy::Grown),
    ];
    let bytes = encode(Format::Binary, &records, &names);
    let summary = Summary::of(&mut reader(&bytes, Strictness::Strict)).unwrap();
    assert_eq!((summary.missing_frees, summary.unknown_frees), (1, 2));
    assert_eq!((summary.total.live_bytes, summary.total.live_blocks), (20, 2));
    assert_eq!((summary.total.allocations, summary.total.frees), (3, 0));
    assert_eq!(summary.total.failures, 3);
    assert_eq!(summary.failures["OutOfBudget"], 2);
    assert_eq!(summary.failures["unknown"], 1);
    assert_eq!((summary.sizes[0], summary.sizes[4], summary.sizes[5]), (1, 1, 1));
    assert_eq!(summary.paths[&ServedBy::Grown], 1);
    assert_eq!(summary.actions[&Action::Deallocate], 3);
    assert_eq!(summary.time_nanos, Some((100, 107)));
    assert_eq!(summary.leaks[0].age_nanos, 6);
}

/// Two records that show as one label are one row, whatever the order of a hash table.
#[test]
fn no_tag_and_an_empty_tag_are_one_account() {
    let mut names = Names::new();
    let empty = names.intern("");
    let records = [
        Record::new(Action::Allocate, 0, 1, 1).with_ptr(0x1000).with_bytes(100),
        Record::new(Action::Allocate, 0, 2, 2).with_ptr(0x2000).with_bytes(50).with_tag(empty),
        Record::new(Action::Deallocate, 0, 3, 3).with_ptr(0x1000),
    ];
    for format in [Format::Binary, Format::Csv] {
        let bytes = encode(format, &records, &names);
        let summary = Summary::of(&mut reader(&bytes, Strictness::Strict)).unwrap();
        let rows: Vec<_> = summary
            .by_tag
            .iter()
            .map(|(tag, usage)| {
                (tag.as_str(), usage.allocations, usage.peak_bytes, usage.live_bytes)
            })
            .collect();
        assert_eq!(rows, [("", 2, 150, 50)], "{format}");
    }
}

#[test]
fn a_header_line_in_the_middle_begins_a_log_with_its_own_columns() {
    let text = "action,pointer,bytes\nallocate,0x1000,7\naction,pointer,bytes\nallocate,0x2000,8\n\
                thread,ACTION,bytes,pointer,tag\n3,allocate,9,0x3000,rows\n";
    let mut reader = reader(text.as_bytes(), Strictness::Strict);
    let all = crate::support::read_all(&mut reader);
    let sizes: Vec<_> = all.iter().map(|said| said.0.bytes()).collect();
    assert_eq!(sizes, [Some(7), Some(8), Some(9)]);
    assert_eq!(all[2].1[0].as_deref(), Some("rows"));
}

/// A header line that an older reader takes for that of a concatenated log.
#[test]
fn a_csv_log_ends_with_the_number_of_its_dropped_records() {
    let ended = |dropped| {
        let mut bytes = Vec::new();
        let mut encoder = xlog_trace::encoder(Format::Csv);
        encoder.begin(&xlog_trace::Header::new(), &mut bytes);
        let record = Record::new(Action::Allocate, 0, 1, 1).with_ptr(4096).with_bytes(7);
        encoder.record(&record, &Names::new(), &mut bytes);
        encoder.end(1, dropped, &mut bytes);
        bytes
    };
    let text = String::from_utf8(ended(17)).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[2], lines[0].replace("stack", "dropped_records=17"));
    assert_eq!(lines[0].matches(',').count(), lines[2].matches(',').count());
    // Alone, and before and behind another log.
    let logs = [ended(17), [ended(0), ended(17)].concat(), [ended(17), ended(4)].concat()];
    for (log, expected) in logs.iter().zip([(1, 17), (2, 17), (2, 21)]) {
        let mut log = reader(log, Strictness::Strict);
        let summary = Summary::of(&mut log).unwrap();
        assert_eq!((summary.records, log.report().dropped_at_source), expected);
        assert!(log.report().is_incomplete());
    }
}

/// A log of `xlogmem run join`, written before logs had segments.
const OLD: &[u8] = include_bytes!("logs/join-0.1.xtrace");

#[test]
fn a_log_from_before_segments_reads_as_it_did() {
    let mut log = reader(OLD, Strictness::Strict);
    let summary = Summary::of(&mut log).unwrap();
    assert_eq!((summary.records, log.report().records), (139, 139));
    let (total, tag) = (summary.total, &summary.by_tag[0]);
    assert_eq!((total.allocations, total.frees, total.failures), (18, 18, 0));
    assert_eq!((total.peak_bytes, total.peak_blocks, summary.peak_order), (65_792, 5, 29));
    assert_eq!((tag.0.as_str(), tag.1.peak_bytes), ("join table", 32 << 10));
    assert_eq!((summary.by_stream.len(), summary.by_site.len()), (4, 1));
    assert_eq!(summary.reserved, None);
}

#[test]
fn reserved_memory_is_counted_beside_allocated_memory() {
    let record = |action, order, ptr: u64, bytes: u64| {
        Record::new(action, 0, order, order).with_ptr(ptr << 20).with_bytes(bytes << 20)
    };
    let records = [
        record(Action::SegmentTake, 1, 100, 32),
        record(Action::Allocate, 2, 100, 8),
        record(Action::SegmentTake, 3, 200, 16),
        record(Action::Allocate, 4, 200, 10),
        record(Action::Deallocate, 5, 200, 10),
        record(Action::SegmentReturn, 6, 200, 16),
        record(Action::SegmentTake, 7, 300, 64),
        record(Action::SegmentReturn, 8, 332, 32),
        record(Action::Deallocate, 9, 100, 8),
    ];
    for format in [Format::Binary, Format::Csv] {
        let log = encode(format, &records, &Names::new());
        let summary = Summary::of(&mut reader(&log, Strictness::Strict)).unwrap();
        assert_eq!((summary.total.allocations, summary.total.peak_bytes >> 20), (2, 18));
        assert_eq!((summary.unknown_frees, summary.leaks.len()), (0, 0));
        let reserved = summary.reserved.unwrap();
        assert_eq!((reserved.takes, reserved.returns), (3, 2));
        let bytes = [reserved.peak_bytes, reserved.at_peak_bytes, reserved.end_bytes];
        assert_eq!(bytes.map(|bytes| bytes >> 20), [96, 48, 64], "{format:?}");
    }
    // RMM's log has no segments.
    let log = encode(Format::RmmCsv, &records, &Names::new());
    let summary = Summary::of(&mut reader(&log, Strictness::Strict)).unwrap();
    assert_eq!((summary.reserved, summary.total.peak_bytes >> 20), (None, 18));
}
