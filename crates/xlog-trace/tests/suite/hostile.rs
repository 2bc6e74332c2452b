//! Input made to hurt is read in little memory and in little time.

use std::io::{BufReader, Read};
use std::time::{Duration, Instant};

use xlog_trace::{Format, Reader, Source, Strictness};

use crate::support::{child, child_argument};

/// Lines or bytes without end, cut at this size.
const SIZE: u64 = 8 << 20;

fn endless(pattern: &'static [u8]) -> impl Read + Send {
    struct Endless(&'static [u8], usize);
    impl Read for Endless {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            for byte in out.iter_mut() {
                *byte = self.0[self.1 % self.0.len()];
                self.1 += 1;
            }
            Ok(out.len())
        }
    }
    Endless(pattern, 0).take(SIZE)
}

/// Resident memory at its highest, in KiB; none where the system does not say.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
#[ignore = "the body of a child process"]
fn child_that_reads() {
    if child_argument().is_none() {
        return;
    }
    let header = "thread,time,action,pointer,bytes,stream,device,tag\n";
    let rmm = "Thread,Time,Action,Pointer,Size,Stream\n";
    let cases: [(Format, &str, &'static [u8]); 7] = [
        (Format::Binary, "", b"\0"),
        (Format::Binary, "", b"\x89XTRACE\n"),
        (Format::Csv, header, b"x"),
        (Format::Csv, header, b"\"\n"),
        (Format::Csv, header, b","),
        (Format::RmmCsv, rmm, b"\""),
        (Format::RmmCsv, rmm, b"1,00:00:00.000000,allocate,0x1,1,0x5\n"),
    ];
    for (format, head, pattern) in cases {
        let before = peak_kib();
        let started = Instant::now();
        let input = BufReader::new(head.as_bytes().chain(endless(pattern)));
        let mut reader = Reader::with_format(format, input, Strictness::Lenient).unwrap();
        while reader.next_record().unwrap().is_some() {}
        assert!(started.elapsed() < Duration::from_secs(120), "{format} {pattern:?}");
        if let (Some(before), Some(after)) = (before, peak_kib()) {
            assert!(after - before < 16 << 10, "{} KiB for {format} {pattern:?}", after - before);
        }
    }
    // Ever new names and streams: the tables fill up and the reader goes on.
    let before = peak_kib();
    let mut text = String::from("action,pointer,tag\n");
    let long = "x".repeat(1000);
    for index in 0..100_000 {
        text.push_str(&format!("allocate,0x{index:x},{long}{index}\n"));
    }
    let input = std::io::Cursor::new(text.into_bytes());
    let mut reader = Reader::from_stream(input, Strictness::Lenient).unwrap();
    while reader.next_record().unwrap().is_some() {}
    assert_eq!(reader.report().records, 100_000);
    assert!(reader.names().lost() > 0);
    if let (Some(before), Some(after)) = (before, peak_kib()) {
        // The text itself is 100 MB of it, twice while the string grows.
        assert!(after - before < 300 << 10, "{} KiB", after - before);
    }
}

#[test]
fn hostile_input_is_read_in_little_memory() {
    let output = child("hostile::child_that_reads", "run").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
}

#[test]
fn nested_frames_with_false_checksums_do_not_multiply_the_work() {
    // A sound frame that claims a megabyte, over and over: each could be the start of a chunk.
    let mut bytes = Vec::new();
    let frame = frame_of(3, 80, 1 << 20, 0xdead_beef);
    while bytes.len() < 4 << 20 {
        bytes.extend_from_slice(&frame);
    }
    // None of them is cut off by the end of the file.
    bytes.resize(bytes.len() + (2 << 20), 0);
    let input = std::io::Cursor::new(bytes);
    let mut reader = Reader::with_format(Format::Binary, input, Strictness::Lenient).unwrap();
    while reader.next_record().unwrap().is_some() {}
    // Each place is a payload whose checksum was computed: a bounded number of megabytes.
    let places = reader.report().skipped;
    assert!((1..1000).contains(&places), "{places} payloads were checked");
}

fn frame_of(kind: u16, record_bytes: u16, payload: u32, payload_crc: u32) -> Vec<u8> {
    let mut frame = b"\x89XTRACE\n".to_vec();
    frame.extend_from_slice(&kind.to_le_bytes());
    frame.extend_from_slice(&record_bytes.to_le_bytes());
    frame.extend_from_slice(&payload.to_le_bytes());
    frame.extend_from_slice(&[0; 12]);
    frame.extend_from_slice(&payload_crc.to_le_bytes());
    let crc = crc32fast::hash(&frame);
    frame.extend_from_slice(&crc.to_le_bytes());
    frame
}
