//! PyTorch's memory snapshots as logs: what they say is kept, and no file can run code, hang the reader or make it panic.

use std::process::Command;

use xlog_trace::export::write_torch_snapshot;
use xlog_trace::import::{PickleError, SnapshotError, SnapshotRead, convert_torch_snapshot};
use xlog_trace::{Action, Format, Names, Reader, Record, Source, Strictness, Summary, TraceError};

use crate::support::{Random, Scratch, encode, reader};
use crate::tools::left_out;

/// Written by `snapshots/make.py` with Python's pickle: a history of one device, and a state without a history.
const HISTORY: &[u8] = include_bytes!("snapshots/history.pickle");
const STATE: &[u8] = include_bytes!("snapshots/state.pickle");

fn import(bytes: &[u8]) -> Result<(SnapshotRead, Reader), TraceError> {
    let mut log = Vec::new();
    let read = convert_torch_snapshot(bytes, &mut log)?;
    Ok((read, reader(&log, Strictness::Strict)))
}

/// Action, bytes, address, stream and tag of each record.
fn lines(bytes: &[u8]) -> Vec<String> {
    let (_, mut log) = import(bytes).unwrap();
    let mut lines = Vec::new();
    while let Some(record) = log.next_record().unwrap() {
        let failed = if record.is_failure() { " failed" } else { "" };
        lines.push(format!(
            "{} {}{failed} {} at {:#x} on {}: {}",
            record.time_nanos(),
            record.action(),
            record.bytes().unwrap(),
            record.ptr().unwrap_or(0),
            record.stream().unwrap(),
            log.names().text_or_empty(record.tag())
        ));
    }
    lines
}

#[test]
fn a_history_is_read_with_places_in_the_program_as_tags() {
    assert_eq!(
        lines(HISTORY),
        [
            "0 allocate 512 at 0x7f5c00800000 on 0: allocated before the recording",
            "0 allocate 500 at 0x7f5c00800800 on 0: allocated before the recording",
            "0 allocate 4194304 at 0x7f5c00000000 on 0: attention (model.py:41)",
            "4000 allocate 1048576 at 0x7f5c00400000 on 1: loss (train.py:88)",
            "16000 deallocate 4194304 at 0x7f5c00000000 on 0: attention (model.py:41)",
            "20000 deallocate 512 at 0x7f5c00800000 on 0: ",
            "25000 allocate failed 1099511627776 at 0x0 on 0: loss (train.py:88)",
        ]
    );
    let (read, mut log) = import(HISTORY).unwrap();
    assert_eq!((read.records, read.left_out, read.live_before), (7, 3, 2));
    assert_eq!(log.header().epoch_unix_nanos, 1_700_000_000_000_005_000);
    let summary = Summary::of(&mut log).unwrap();
    assert_eq!((summary.total.live_bytes, summary.total.failures), (1_048_576 + 500, 1));
    assert_eq!((summary.unknown_frees, summary.missing_frees), (0, 0));
}

#[test]
fn a_state_without_a_history_is_read_as_its_live_blocks() {
    assert_eq!(
        lines(STATE),
        [
            "0 allocate 1048576 at 0x7f5c00400000 on 0: loss (train.py:88)",
            "0 allocate 500 at 0x7f5c00800800 on 0: allocated before the recording",
        ]
    );
}

#[test]
fn every_protocol_of_python_gives_the_same_records() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/snapshots/make.py");
    let scratch = Scratch::new("snapshot-protocols");
    for protocol in 2..=5 {
        let path = scratch.path(&format!("{protocol}.pickle"));
        let run = Command::new("python3").arg(script).arg(&path).arg(protocol.to_string()).status();
        if !run.is_ok_and(|status| status.success()) {
            return left_out("snapshots of every protocol", "python3 does not run");
        }
        assert_eq!(lines(&std::fs::read(&path).unwrap()), lines(HISTORY), "protocol {protocol}");
    }
}

#[test]
fn an_exported_log_comes_back() {
    let mut names = Names::new();
    let tag = names.intern("rows");
    let records: Vec<Record> = (0..40)
        .map(|order| {
            let action = if order % 4 == 3 { Action::Deallocate } else { Action::Allocate };
            let slot = if order % 4 == 3 { order - 1 } else { order };
            Record::new(action, 0, order, order * 1000)
                .with_ptr(0x10_0000 * (slot + 1))
                .with_bytes(100 + slot)
                .with_stream(0)
                .with_tag(tag)
        })
        .collect();
    let log = encode(Format::Binary, &records, &names);
    let mut snapshot = Vec::new();
    write_torch_snapshot(|| Ok(reader(&log, Strictness::Strict)), &mut snapshot).unwrap();
    let (read, mut back) = import(&snapshot).unwrap();
    assert_eq!((read.records, read.live_before), (40, 0));
    for record in &records {
        let found = back.next_record().unwrap().unwrap();
        let said = |record: &Record| (record.action(), record.ptr(), record.bytes());
        assert_eq!(said(&found), said(record));
        assert_eq!(back.names().text_or_empty(found.tag()), "rows");
    }
}

#[test]
fn opcodes_that_run_code_are_refused_by_name_and_place() {
    for (pickle, name, offset) in [
        (&b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R."[..], "GLOBAL", 2),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL", 14),
        (b"\x80\x04N)R.", "REDUCE", 4),
        (b"\x80\x02N}b.", "BUILD", 4),
        (b"\x80\x02(ios\nsystem\n.", "INST", 3),
        (b"\x80\x02N)\x81.", "NEWOBJ", 4),
        (b"\x80\x02NQ.", "BINPERSID", 3),
        (b"\x80\x02I1\n.", "INT", 2),
        (b"\x80\x05\xff.", "0xff", 2),
    ] {
        match import(pickle) {
            Err(TraceError::Snapshot(SnapshotError::Pickle(PickleError::Refused {
                name: found,
                offset: at,
            }))) => assert_eq!((found.as_str(), at), (name, offset)),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn a_cut_snapshot_is_an_error_at_every_byte() {
    for snapshot in [HISTORY, STATE] {
        for end in 0..snapshot.len() {
            assert!(import(&snapshot[..end]).is_err(), "cut at {end}");
        }
    }
}

#[test]
fn no_mutation_panics_or_gives_more_records_than_bytes() {
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let mut bytes = if seed % 2 == 0 { HISTORY.to_vec() } else { STATE.to_vec() };
        for _ in 0..=random.below_u64(4) {
            let at = random.below_u64(bytes.len() as u64) as usize;
            match random.below_u64(4) {
                0 => bytes[at] = random.next_u64() as u8,
                1 => bytes[at] ^= 1 << random.below_u64(8),
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, b"(lte}]udhj\x94\x85as0129\x8a\x8b"[at % 20]),
            }
        }
        if let Ok((read, mut log)) = import(&bytes) {
            assert!(read.records <= bytes.len() as u64, "seed {seed}");
            let mut records = 0;
            while log.next_record().unwrap().is_some() {
                records += 1;
            }
            assert_eq!(records, read.records, "seed {seed}");
        }
    }
}

fn refused(pickle: &[u8]) -> String {
    import(pickle).map(|(read, _)| read).unwrap_err().to_string()
}

#[test]
fn a_small_file_cannot_take_much_memory_or_time() {
    // A place of the memo far beyond the others.
    let error = refused(b"\x80\x04Nr\xff\xff\xff\x7f.");
    assert!(error.contains("LONG_BINPUT at byte 3: more than"), "{error}");
    // A text that is longer than the file.
    assert!(
        refused(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.").contains("cut off at byte 2")
    );
    // Marks without an end.
    let error = refused(&[&b"\x80\x04"[..], &[b'('; 5000]].concat());
    assert!(error.contains("open marks"), "{error}");
    // One list that holds itself.
    assert!(refused(b"\x80\x04]\x94h\x00a.").contains("expected a dict"));
    // One trace that stands for a thousand devices, with one entry that stands for a thousand.
    let mut bomb = b"\x80\x02}X\x0d\0\0\0device_traces]q\x00]q\x01}q\x02".to_vec();
    bomb.extend_from_slice(b"(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0sizeK\x01uq\x030h\x01(");
    bomb.extend_from_slice(&b"h\x02".repeat(1000));
    bomb.extend_from_slice(b"e00(");
    bomb.extend_from_slice(&b"h\x01".repeat(1000));
    bomb.extend_from_slice(b"es.");
    let error = refused(&bomb);
    assert!(error.contains("each entry once"), "{error}");
}

#[test]
fn a_pickle_of_something_else_says_what_is_missing() {
    assert!(refused(b"\x80\x04K\x01.").contains("`segments` and `device_traces`"));
    let error = refused(b"\x80\x02}X\x0d\0\0\0device_tracesK\x01s.");
    assert!(error.contains("a list of lists"), "{error}");
}
