//! RMM's log goes through unchanged.

use xlog_trace::{
    Action, Failure, Format, Header, LogWriter, Names, Record, Source, Strictness, convert,
};

use crate::support::{Random, any_number, for_seeds, reader};

const LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    140236,23:59:59.999998,allocate,0x7f1c00000000,1024,0\n\
    140236,23:59:59.999999,allocate,0x7f1c00000400,1,0x1\n\
    140237,00:00:00.000001,free,0x7f1c00000000,1024,0x55d04c2bf3a0\n\
    140237,00:00:00.000002,allocate failure,(nil),1125899906842624,0x2\n\
    140237,00:00:00.000003,allocate failure,0x0,5,0x55d04c2bf3a0\n\
    140237,00:00:01.000000,allocate,(nil),0,0x55d04c2bf3a1\n";

fn through(formats: &[Format], text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for &format in formats {
        let mut out = Vec::new();
        let mut reader = reader(&bytes, Strictness::Strict);
        let converted = convert(&mut reader, format, &mut out).unwrap();
        assert_eq!(converted.left_out, 0);
        bytes = out;
    }
    String::from_utf8(bytes).unwrap()
}

#[test]
fn an_rmm_log_exports_byte_for_byte_also_through_our_formats() {
    assert_eq!(through(&[Format::RmmCsv], LOG), LOG);
    assert_eq!(through(&[Format::Binary, Format::RmmCsv], LOG), LOG);
    assert_eq!(through(&[Format::Csv, Format::RmmCsv], LOG), LOG);
    assert_eq!(through(&[Format::Csv, Format::Binary, Format::Csv, Format::RmmCsv], LOG), LOG);
}

#[test]
fn an_rmm_log_of_any_content_exports_byte_for_byte() {
    for_seeds(30, |seed| {
        let mut random = Random::new(seed);
        let mut text = String::from("Thread,Time,Action,Pointer,Size,Stream\n");
        let mut micros = random.below_u64(86_400_000_000);
        for _ in 0..random.below_u64(500) {
            micros = (micros + random.below_u64(10_000_000)) % 86_400_000_000;
            let seconds = micros / 1_000_000;
            let (action, pointer) = match random.below_u64(5) {
                0 => ("allocate failure", "(nil)".to_owned()),
                1 | 2 => ("free", format!("{:#x}", any_number(&mut random))),
                _ => ("allocate", format!("{:#x}", any_number(&mut random))),
            };
            let stream = match random.below_u64(3) {
                0 => "0".to_owned(),
                1 => format!("0x{:x}", 1 + random.below_u64(2)),
                _ => format!("0x55d04c2b{:04x}", random.below_u64(20)),
            };
            text.push_str(&format!(
                "{},{:02}:{:02}:{:02}.{:06},{action},{pointer},{},{stream}\n",
                any_number(&mut random),
                seconds / 3600,
                seconds / 60 % 60,
                seconds % 60,
                micros % 1_000_000,
                any_number(&mut random),
            ));
        }
        for formats in [&[Format::RmmCsv][..], &[Format::Binary, Format::RmmCsv]] {
            assert_eq!(through(formats, &text), text);
        }
    });
}

#[test]
fn handles_become_distinct_streams_and_midnight_is_passed() {
    let mut reader = reader(LOG.as_bytes(), Strictness::Strict);
    let records: Vec<Record> = reader.by_ref().map(Result::unwrap).collect();
    let streams: Vec<u32> = records.iter().map(|record| record.stream().unwrap()).collect();
    assert_eq!(streams, [0, 1, 3, 2, 3, 4], "hex handles are not all zero");
    assert_eq!(reader.names().stream_name(3), Some("0x55d04c2bf3a0"));
    assert!(records.is_sorted_by_key(Record::time_nanos), "the day is carried");
    assert_eq!(records[1].time_nanos() + 2000, records[2].time_nanos());
    let actions: Vec<Action> = records.iter().map(Record::action).collect();
    use Action::{Allocate, AllocateFailure, Deallocate};
    assert_eq!(
        actions,
        [Allocate, Allocate, Deallocate, AllocateFailure, AllocateFailure, Allocate]
    );
    assert!(records[3].is_failure() && !records[0].is_failure());
    assert_eq!((records[3].ptr(), records[4].ptr()), (None, Some(0)));
}

#[test]
fn our_log_exports_to_rmm_without_what_rmm_has_no_word_for() {
    let mut names = Names::new();
    let failure = Failure { kind: names.intern("OutOfBudget"), message: names.intern("no, \"x\"") };
    // 1970-01-01 01:02:03.
    let header = Header::new().with_epoch_unix_nanos(3_723_000_000_000);
    let mut writer = LogWriter::new(Format::RmmCsv, &header, Vec::new());
    let base = |action| Record::new(action, 0, 0, 4_000).with_thread(9).with_stream(5);
    for record in [
        base(Action::Allocate).with_ptr(0x100).with_bytes(7),
        base(Action::Allocate).with_bytes(8).with_failure(failure),
        base(Action::UsePrepare).with_ptr(0x100),
        base(Action::Deallocate).with_ptr(0x100).with_bytes(7).with_failure(failure),
        base(Action::Deallocate).with_ptr(0x100).with_bytes(7).with_stream(0),
    ] {
        writer.write(&record, &names).unwrap();
    }
    assert_eq!((writer.written(), writer.left_out()), (3, 2));
    assert_eq!(
        String::from_utf8(writer.finish().unwrap()).unwrap(),
        "Thread,Time,Action,Pointer,Size,Stream\n\
         9,01:02:03.000004,allocate,0x100,7,0x5\n\
         9,01:02:03.000004,allocate failure,(nil),8,0x5\n\
         9,01:02:03.000004,free,0x100,7,0\n"
    );
}

#[test]
fn bad_rmm_lines_name_their_field() {
    for (line, expected) in [
        ("x,00:00:00.000000,allocate,0x1,1,0", "a decimal thread id as field 1"),
        ("1,25:00:00.000000,allocate,0x1,1,0", "a time of day like `12:34:56.123456` as field 2"),
        ("1,00:00:00.0,allocate,0x1,1,0", "a time of day"),
        ("1,00:00:00.000000,alloc,0x1,1,0", "`allocate`, `free` or `allocate failure` as field 3"),
        ("1,00:00:00.000000,allocate,1,1,0", "a pointer like `0x7f00` or `(nil)` as field 4"),
        ("1,00:00:00.000000,allocate,0x1,0x1,0", "a decimal size as field 5"),
        ("1,00:00:00.000000,allocate,0x1,1,s", "a stream like `0` or `0x55d0` as field 6"),
        ("1,00:00:00.000000,allocate,0x1,1", "the 6 fields of"),
    ] {
        let text = format!("Thread,Time,Action,Pointer,Size,Stream\n{line}\n");
        let error = reader(text.as_bytes(), Strictness::Strict).next_record().unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&format!("line 2: expected {expected}")), "{line}: {error}");
    }
}
