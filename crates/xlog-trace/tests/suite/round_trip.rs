//! What is written is read back, whatever it is.

use xlog_trace::{Action, Format, Header, LogWriter, Names, Ordered, Record, Source, Strictness};

use crate::support::{Random, any_record, encode, for_seeds, read_all, reader, said};

fn round_trip(format: Format) {
    for_seeds(30, |seed| {
        let mut random = Random::new(seed);
        let mut names = Names::new();
        for stream in 0..random.below_u64(4) {
            names.name_stream(stream as u32, &format!("0x55{stream:x}"));
        }
        let records: Vec<Record> =
            (0..random.below_u64(3000)).map(|_| any_record(&mut random, &mut names)).collect();
        let bytes = encode(format, &records, &names);
        let mut reader = reader(&bytes, Strictness::Strict);
        assert_eq!(reader.format(), format);
        let read = read_all(&mut reader);
        assert_eq!(read.len(), records.len());
        for (index, (read, record)) in read.iter().zip(&records).enumerate() {
            assert_eq!(*read, said(record, &names), "record {index}");
        }
        assert_eq!((reader.report().skipped, reader.report().truncated), (0, false));
    });
}

#[test]
fn every_record_survives_the_binary_format() {
    round_trip(Format::Binary);
}

#[test]
fn every_record_survives_csv() {
    round_trip(Format::Csv);
}

#[test]
fn names_of_streams_survive_both_formats() {
    let mut names = Names::new();
    names.name_stream(7, "0x55aa");
    let records = [
        Record::new(Action::Allocate, 0, 0, 0).with_stream(7).with_ptr(1),
        Record::new(Action::Allocate, 0, 1, 0).with_stream(8).with_ptr(2),
    ];
    for format in [Format::Binary, Format::Csv] {
        let mut reader = reader(&encode(format, &records, &names), Strictness::Strict);
        read_all(&mut reader);
        assert_eq!(reader.names().stream_name(7), Some("0x55aa"));
        assert_eq!(reader.names().stream_name(8), None);
    }
}

#[test]
fn the_header_survives_the_binary_format_and_csv_keeps_wall_clock_time() {
    let header = Header::new()
        .with_process(42)
        .with_epoch_unix_nanos(1_700_000_000_000_000_000)
        .with_device_name("a device, \"quoted\"");
    let record = Record::new(Action::Deallocate, 1, 9, 77);
    for format in [Format::Binary, Format::Csv] {
        let mut writer = LogWriter::new(format, &header, Vec::new());
        writer.write(&record, &Names::new()).unwrap();
        let mut reader = reader(&writer.finish().unwrap(), Strictness::Strict);
        let read = reader.next_record().unwrap().unwrap();
        assert_eq!(reader.header().unix_nanos(read.time_nanos()), 1_700_000_000_000_000_077);
        if format == Format::Binary {
            assert_eq!(*reader.header(), header);
        }
    }
}

#[test]
fn logs_put_together_read_as_one_with_their_own_names_and_clocks() {
    let mut bytes = Vec::new();
    for (epoch, tag) in [(1000, "first"), (5000, "second")] {
        let mut names = Names::new();
        let tag = names.intern(tag);
        let header = Header::new().with_epoch_unix_nanos(epoch);
        let mut writer = LogWriter::new(Format::Binary, &header, Vec::new());
        writer.write(&Record::new(Action::Allocate, 0, 0, 10).with_tag(tag), &names).unwrap();
        bytes.extend(writer.finish().unwrap());
    }
    let mut reader = reader(&bytes, Strictness::Strict);
    let mut seen = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        let tag = reader.names().text_or_empty(record.tag()).to_owned();
        seen.push((tag, reader.header().unix_nanos(record.time_nanos())));
    }
    assert_eq!(seen, [("first".to_owned(), 1010), ("second".to_owned(), 5010)]);
}

#[test]
fn csv_is_read_by_the_names_of_its_columns() {
    let text = "note,Pointer,ACTION,size\nx,0x10,allocate,4096\n\ny,,reap_pending,\n";
    let mut reader = reader(text.as_bytes(), Strictness::Strict);
    let first = reader.next_record().unwrap().unwrap();
    assert_eq!((first.ptr(), first.bytes(), first.stream()), (Some(16), Some(4096), None));
    let second = reader.next_record().unwrap().unwrap();
    assert_eq!((second.action(), second.ptr(), second.order()), (Action::ReapPending, None, 1));
    assert!(reader.next_record().unwrap().is_none());
}

#[test]
fn a_known_csv_line_reads_as_documented() {
    let mut names = Names::new();
    let tag = names.intern("join, left");
    let record = Record::new(Action::Allocate, 1, 12, 34)
        .with_thread(5)
        .with_ptr(0x7f00)
        .with_bytes(100)
        .with_stream(2)
        .with_tag(tag)
        .with_query_id(8)
        .with_granted(256);
    let text = String::from_utf8(encode(Format::Csv, &[record], &names)).unwrap();
    assert_eq!(
        text,
        "thread,time,action,pointer,bytes,stream,device,tag,query_id,granted,alignment,generation,\
         order,latency_nanos,path,access,process,error_kind,error_message,stream_name,site,\
         stack\n\
         5,34,allocate,0x7f00,100,2,1,\"join, left\",8,256,,,12,0,unknown,,0,,,,,\n"
    );
}

#[test]
fn threads_written_one_after_the_other_come_back_as_one_history() {
    for_seeds(5, |seed| {
        let mut random = Random::new(seed);
        let mut threads = vec![Vec::new(); 4];
        for order in 0..4000 {
            let thread = random.below_u64(4);
            threads[thread as usize]
                .push(Record::new(Action::Allocate, 0, order, 0).with_thread(thread));
        }
        // Turns of up to 100 records, as a writer takes them.
        let mut records = Vec::new();
        while threads.iter().any(|thread| !thread.is_empty()) {
            for thread in &mut threads {
                let turn = (random.below_u64(100) as usize).min(thread.len());
                records.extend(thread.drain(..turn));
            }
        }
        let bytes = encode(Format::Binary, &records, &Names::new());
        let mut ordered = Ordered::new(reader(&bytes, Strictness::Strict));
        let mut next = 0;
        while let Some(record) = ordered.next_record().unwrap() {
            assert_eq!(record.order(), next);
            next += 1;
        }
        assert_eq!((next, ordered.late()), (4000, 0));
        let mut narrow = Ordered::with_window(reader(&bytes, Strictness::Strict), 2);
        while narrow.next_record().unwrap().is_some() {}
        assert!(narrow.late() > 0, "a window of two cannot order turns of a hundred");
    });
}

#[test]
fn a_text_of_many_lines_stays_one_csv_record() {
    let mut names = Names::new();
    let text = "line\n".repeat(300);
    let tag = names.intern(&text);
    let records = [Record::new(Action::Allocate, 0, 0, 0).with_tag(tag).with_ptr(1); 3];
    let read = read_all(&mut reader(&encode(Format::Csv, &records, &names), Strictness::Strict));
    assert_eq!(read.len(), 3);
    let kept = read[0].1[0].as_deref().unwrap();
    assert_eq!(kept.replace('\n', " "), text.replace('\n', " "), "breaks became spaces");
    assert_eq!(kept.matches('\n').count(), 19);
}

/// Kind and bytes of one record of each chunk of a binary log.
fn chunks(mut bytes: &[u8]) -> Vec<(u16, u16)> {
    let mut chunks = Vec::new();
    while bytes.len() >= 36 {
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let payload = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
        chunks.push((number(8), number(10)));
        bytes = &bytes[36 + payload..];
    }
    chunks
}

#[test]
fn records_grow_only_where_a_log_has_call_sites() {
    let mut names = Names::new();
    let plain = Record::new(Action::Allocate, 0, 0, 0).with_ptr(1).with_tag(names.intern("rows"));
    let without = encode(Format::Binary, &[plain, plain], &names);
    assert_eq!(chunks(&without), [(1, 0), (2, 0), (3, 80), (5, 0)]);
    let at = plain.with_site(names.intern("src/a.rs:1"));
    let with = encode(Format::Binary, &[plain, at, plain], &names);
    assert_eq!(chunks(&with), [(1, 0), (2, 0), (3, 80), (2, 0), (3, 88), (5, 0)]);
    let mut reader = reader(&with, Strictness::Strict);
    let sites: Vec<_> =
        read_all(&mut reader).into_iter().map(|(_, texts)| texts[4].clone()).collect();
    assert_eq!(sites, [None, Some("src/a.rs:1".to_owned()), None]);
}
