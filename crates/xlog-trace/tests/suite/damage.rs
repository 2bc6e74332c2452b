//! Files that were cut, overwritten or never were logs.

use xlog_trace::{
    Action, Format, InputPosition, Names, Reader, Record, Source, Strictness, TraceError, VERSION,
};

use crate::support::{Random, any_record, encode, for_seeds, read_all, reader, said};

fn sample(seed: u64, count: u64) -> (Vec<Record>, Names) {
    let mut random = Random::new(seed);
    let mut names = Names::new();
    let records = (0..count).map(|_| any_record(&mut random, &mut names)).collect();
    (records, names)
}

/// Reads what `with_format` finds, leniently.
fn salvage(format: Format, bytes: &[u8]) -> (Vec<crate::support::Said>, Reader) {
    let input = std::io::Cursor::new(bytes.to_vec());
    let mut reader = Reader::with_format(format, input, Strictness::Lenient).unwrap();
    (read_all(&mut reader), reader)
}

#[test]
fn a_binary_file_cut_anywhere_reads_back_to_its_last_complete_record() {
    let (records, names) = sample(1, 60);
    {
        let bytes = encode(Format::Binary, &records, &names);
        let mut before = 0;
        for cut in 0..bytes.len() {
            let (read, reader) = salvage(Format::Binary, &bytes[..cut]);
            let report = reader.report().clone();
            assert_eq!(report.skipped, 0, "cut at {cut}: {report}");
            assert!(read.len() >= before, "cut at {cut}");
            before = read.len();
            for (read, record) in read.iter().zip(&records) {
                assert_eq!(read.0, said(record, &names).0, "cut at {cut}");
            }
            assert!(!report.closed);
        }
        assert_eq!(before, records.len(), "the last cut is behind all records");
    }
    // All in one chunk: those before the cut are there, to the record.
    let records: Vec<Record> =
        (0..60).map(|order| Record::new(Action::Allocate, 0, order, 4).with_ptr(9)).collect();
    let bytes = encode(Format::Binary, &records, &names);
    let end = bytes.len() - (36 + 16);
    let start = end - 60 * 80;
    for cut in start..end {
        let (read, reader) = salvage(Format::Binary, &bytes[..cut]);
        assert_eq!(read.len(), (cut - start) / 80, "cut at {cut}");
        assert!(reader.report().truncated);
    }
}

#[test]
fn a_csv_file_cut_anywhere_reads_back_to_its_last_complete_line() {
    let (records, names) = sample(2, 20);
    let bytes = encode(Format::Csv, &records, &names);
    let header = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    let mut before = 0;
    for cut in header..bytes.len() {
        let (read, reader) = salvage(Format::Csv, &bytes[..cut]);
        assert!(read.len() >= before && read.len() <= records.len());
        before = read.len();
        for (read, record) in read.iter().zip(&records) {
            assert_eq!(read.0, said(record, &names).0, "cut at {cut}");
        }
        assert!(reader.report().skipped <= 2, "an open quote at most, cut at {cut}");
    }
}

#[test]
fn damage_in_the_middle_costs_what_it_touches_and_is_counted() {
    for_seeds(60, |seed| {
        let mut random = Random::new(seed);
        // Distinct devices make short chunks.
        let records: Vec<Record> = (0..400)
            .map(|order| Record::new(Action::Allocate, (order / 10) as u32, order, 1).with_ptr(7))
            .collect();
        let good = encode(Format::Binary, &records, &Names::new());
        let mut bytes = good.clone();
        let at = 100 + random.below_u64(good.len() as u64 - 300) as usize;
        let len = 1 + random.below_u64(40) as usize;
        match random.below_u64(3) {
            0 => bytes[at..at + len].iter_mut().for_each(|byte| *byte ^= 0x5a),
            1 => drop(bytes.drain(at..at + len)),
            _ => drop(bytes.splice(at..at, std::iter::repeat_n(0xee, len))),
        }
        let (read, reader) = salvage(Format::Binary, &bytes);
        let lost = records.len() - read.len();
        assert!((1..=30).contains(&lost), "{lost} records lost by {len} bytes at {at}");
        let report = reader.report();
        assert!(report.skipped >= 1 && report.skipped_bytes > 0, "{report}");
        assert!(report.first_bad.is_some());
        let mut orders: Vec<u64> = read.iter().map(|(record, _)| record.order()).collect();
        assert!(orders.is_sorted());
        orders.dedup();
        assert_eq!(orders.len(), read.len());
        for (record, _) in &read {
            assert_eq!(*record, records[record.order() as usize]);
        }
    });
}

#[test]
fn a_strict_reader_stops_at_the_first_damage_and_says_where() {
    let records: Vec<Record> =
        (0..100).map(|order| Record::new(Action::Allocate, order as u32 / 10, order, 1)).collect();
    let mut bytes = encode(Format::Binary, &records, &Names::new());
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    let mut reader = reader(&bytes, Strictness::Strict);
    let mut good = 0;
    let error = loop {
        match reader.next_record() {
            Ok(Some(_)) => good += 1,
            Ok(None) => panic!("the damage was not seen"),
            Err(error) => break error,
        }
    };
    let TraceError::Bad(bad) = error else { panic!("{error}") };
    assert_eq!(bad.good_records, good);
    let InputPosition::Byte(place) = bad.position else { panic!("{bad}") };
    assert!(place as usize <= at && at < place as usize + 2000, "{bad}, damage at {at}");
    assert!(reader.next_record().unwrap().is_none(), "it has stopped");
}

#[test]
fn bad_lines_are_skipped_and_counted_or_named() {
    let text = "action,pointer,bytes\n\
                allocate,0x10,1\n\
                allocate,0x10\n\
                frobnicate,0x10,1\n\
                allocate,16,1\n\
                allocate,0x10,-1\n\
                allocate,0x20,99999999999999999999\n\
                allocate,\"0x10,1\n\
                deallocate,0x10,1\n";
    let mut lenient = reader(text.as_bytes(), Strictness::Lenient);
    assert_eq!(read_all(&mut lenient).len(), 2);
    let report = lenient.report();
    assert_eq!((report.records, report.skipped), (2, 6));
    let bad = report.first_bad.clone().unwrap();
    assert_eq!(
        bad.to_string(),
        "line 3: expected 3 fields, as in the header line, found 2 in `allocate,0x10` \
         (1 records before it are good)"
    );
    let mut strict = reader(text.as_bytes(), Strictness::Strict);
    assert!(strict.next_record().unwrap().is_some());
    let TraceError::Bad(found) = strict.next_record().unwrap_err() else { panic!() };
    assert_eq!(found, bad);
}

#[test]
fn one_stray_quote_does_not_swallow_the_file() {
    let mut text = String::from("action,pointer,tag\n");
    for index in 0..5000 {
        let quote = if index == 17 || index == 40 { "\"" } else { "" };
        text.push_str(&format!("allocate,0x{index:x},{quote}tag\n"));
    }
    let mut reader = reader(text.as_bytes(), Strictness::Lenient);
    assert_eq!(read_all(&mut reader).len(), 4998);
    assert_eq!(reader.report().skipped, 2);
}

#[test]
fn what_is_no_log_is_refused_by_name() {
    for text in ["", "hello\n", "\u{0}\u{0}\u{0}", "a,b,c\n1,2,3\n", "{\"traceEvents\":[]}"] {
        let error = Reader::from_stream(
            std::io::Cursor::new(text.as_bytes().to_vec()),
            Strictness::Lenient,
        )
        .unwrap_err();
        assert!(matches!(error, TraceError::UnknownFormat { .. }), "{text:?}: {error}");
    }
    let error = Reader::open("/nonexistent/log.xtrace").unwrap_err();
    assert!(error.to_string().contains("/nonexistent/log.xtrace"), "{error}");
}

#[test]
fn a_newer_version_is_refused_and_newer_chunks_are_passed_over() {
    let record = Record::new(Action::Allocate, 0, 1, 2);
    let good = encode(Format::Binary, &[record], &Names::new());
    // The header chunk: 36 bytes of frame, then the version.
    let mut newer = good.clone();
    newer[36] = VERSION as u8 + 1;
    let payload_len = u32::from_le_bytes(newer[12..16].try_into().unwrap()) as usize;
    let payload_crc = crc(&newer[36..36 + payload_len]).to_le_bytes();
    newer[28..32].copy_from_slice(&payload_crc);
    let frame_crc = crc(&newer[..32]).to_le_bytes();
    newer[32..36].copy_from_slice(&frame_crc);
    let error = Reader::from_stream(std::io::Cursor::new(newer), Strictness::Lenient).unwrap_err();
    assert!(
        matches!(error, TraceError::NewerVersion { found, .. } if found == VERSION + 1),
        "{error}"
    );
    // A chunk of an unknown kind in front of the records.
    let mut extended = good.clone();
    let mut chunk = good[..36].to_vec();
    chunk[8] = 200;
    chunk[12..16].copy_from_slice(&4u32.to_le_bytes());
    chunk[28..32].copy_from_slice(&crc(b"what").to_le_bytes());
    let frame_crc = crc(&chunk[..32]).to_le_bytes();
    chunk[32..36].copy_from_slice(&frame_crc);
    chunk.extend_from_slice(b"what");
    extended.splice(36 + payload_len..36 + payload_len, chunk);
    let mut reader = reader(&extended, Strictness::Strict);
    assert_eq!(read_all(&mut reader).len(), 1);
}

/// CRC-32 as in zip files, bit by bit: an implementation apart from the one under test.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |mut crc, &byte| {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
        crc
    })
}
