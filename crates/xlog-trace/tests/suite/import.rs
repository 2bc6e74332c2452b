//! PyTorch's memory snapshots as logs: what they say is kept, and no file can run code, hang the reader or make it panic.

use std::process::Command;

use xlog_trace::export::write_torch_snapshot;
use xlog_trace::import::{PickleError, SnapshotError, SnapshotRead, convert_torch_snapshot};
use xlog_trace::{
    Action, Format, Names, Reader, Record, Reserved, Source, Strictness, Summary, TraceError,
};

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
            "0 segment_take 20971520 at 0x7f5c00000000 on 0: ",
            "5000 allocate 4194304 at 0x7f5c00000000 on 0: attention (model.py:41)",
            "9000 allocate 1048576 at 0x7f5c00400000 on 1: loss (train.py:88)",
            "21000 deallocate 4194304 at 0x7f5c00000000 on 0: attention (model.py:41)",
            "25000 deallocate 512 at 0x7f5c00800000 on 0: ",
            "30000 allocate failed 1099511627776 at 0x0 on 0: loss (train.py:88)",
        ]
    );
    let (read, mut log) = import(HISTORY).unwrap();
    assert_eq!((read.records, read.left_out, read.live_before), (8, 2, 2));
    assert_eq!(log.header().epoch_unix_nanos, 1_700_000_000_000_000_000);
    let summary = Summary::of(&mut log).unwrap();
    assert_eq!((summary.total.live_bytes, summary.total.failures), (1_048_576 + 500, 1));
    assert_eq!((summary.unknown_frees, summary.missing_frees), (0, 0));
    let reserved = summary.reserved.unwrap();
    assert_eq!((reserved.peak_bytes, reserved.end_bytes), (20 << 20, 20 << 20));
}

#[test]
fn a_history_has_call_sites_and_whole_stacks() {
    let (_, mut log) = import(HISTORY).unwrap();
    let summary = Summary::of(&mut log).unwrap();
    let sites: Vec<&str> = summary.by_site.iter().map(|(site, _)| site.as_str()).collect();
    assert_eq!(sites, ["/home/user/train/model.py:41", "/home/user/train/train.py:88"]);
    let (frames, usage) = &summary.by_stack[0];
    assert!(
        frames.iter().any(|frame| &**frame == "attention (/home/user/train/model.py:41)"),
        "{frames:?}"
    );
    assert!(frames.len() > 1 && usage.peak_bytes == 4 << 20, "{frames:?}");
}

#[test]
fn segments_of_before_the_recording_and_parts_of_them_are_followed() {
    let script = "
import pickle, sys
def e(action, addr, size): return {'action': action, 'addr': addr << 20, 'size': size << 20, 'stream': 0}
def s(addr, size): return {'device': 0, 'address': addr << 20, 'total_size': size << 20, 'stream': 0, 'blocks': []}
trace = [e('segment_free', 100, 20), e('segment_map', 200, 40), e('segment_unmap', 220, 10), e('segment_alloc', 300, 2)]
segments = [s(200, 20), s(230, 10), s(300, 2), s(400, 8)]
pickle.dump({'segments': segments, 'device_traces': [trace]}, open(sys.argv[1], 'wb'), protocol=4)
";
    let scratch = Scratch::new("snapshot-segments");
    let path = scratch.path("segments.pickle");
    let run = Command::new("python3").args(["-c", script]).arg(&path).status();
    if !run.is_ok_and(|status| status.success()) {
        return left_out("segments of a snapshot", "python3 does not run");
    }
    let (_, mut log) = import(&std::fs::read(&path).unwrap()).unwrap();
    let mut reserved = Reserved::default();
    let mut held = Vec::new();
    while let Some(record) = log.next_record().unwrap() {
        assert!(reserved.apply(&record, |_| {}));
        held.push(reserved.bytes() >> 20);
    }
    // 100 to 120 and 400 to 408 were there before; the first is returned.
    assert_eq!(held, [20, 28, 8, 48, 38, 40]);
    let ranges: Vec<_> = reserved.ranges().map(|r| (r.start >> 20, r.bytes >> 20)).collect();
    assert_eq!(ranges, [(200, 20), (230, 10), (300, 2), (400, 8)]);
}

#[test]
fn an_exported_call_site_and_stack_come_back() {
    let mut names = Names::new();
    let frames = ["load (src/load.rs:7)", "main"].map(|frame| names.intern(frame));
    let record = Record::new(Action::Allocate, 0, 0, 0).with_ptr(1 << 21).with_bytes(512);
    let record = record.with_tag(names.intern("rows")).with_site(names.intern("src/load.rs:7"));
    let record = record.with_stack(names.intern_stack(&frames)).with_stream(0).with_query_id(3);
    let log = encode(Format::Binary, &[record], &names);
    let mut pickle = Vec::new();
    write_torch_snapshot(|| Ok(reader(&log, Strictness::Strict)), &mut pickle).unwrap();
    let (_, mut log) = import(&pickle).unwrap();
    let read = log.next_record().unwrap().unwrap();
    let names = log.names();
    assert_eq!(names.text_or_empty(read.tag()), "rows");
    assert_eq!(names.text_or_empty(read.site()), "src/load.rs:7");
    let frames: Vec<&str> = names.stack_texts(read.stack()).collect();
    assert_eq!(frames, ["load (src/load.rs:7)", "main"]);
}

#[test]
fn a_state_without_a_history_is_read_as_its_live_blocks() {
    assert_eq!(
        lines(STATE),
        [
            "0 segment_take 20971520 at 0x7f5c00000000 on 0: ",
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
