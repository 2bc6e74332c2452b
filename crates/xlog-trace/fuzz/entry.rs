// What every fuzzer of the readers does with an input: shared by the cargo-fuzz targets and by the
// deterministic fuzzer in the tests. Included by path; returns normally for every input, or panics.

use std::io::Cursor;

use xlog_trace::export::{write_chrome_trace, write_torch_snapshot};
use xlog_trace::{Format, LogWriter, Reader, Record, Source, Strictness, Summary, TraceError};

type Spelled = (Record, Vec<String>);

fn open(format: Option<Format>, data: &[u8], strictness: Strictness) -> Result<Reader, TraceError> {
    let input = Cursor::new(data.to_vec());
    match format {
        Some(format) => Reader::with_format(format, input, strictness),
        None => Reader::from_stream(input, strictness),
    }
}

/// All records up to the end or the first error, with their strings spelled out; and whether there
/// was an error.
fn records(reader: &mut Reader) -> (Vec<Spelled>, bool) {
    let mut all = Vec::new();
    loop {
        let record = match reader.next_record() {
            Ok(Some(record)) => record,
            Ok(None) => return (all, false),
            Err(_) => return (all, true),
        };
        let names = reader.names();
        let failure = record.failure();
        let ids = [record.tag(), failure.map(|f| f.kind), failure.map(|f| f.message)];
        let texts = ids.into_iter().flatten();
        let texts = texts.map(|id| names.text(id).expect("a name of the reader").to_owned());
        all.push((record, texts.collect()));
    }
}

/// What a record says apart from its strings, whose numbers differ from file to file.
fn plain(record: &Record) -> impl PartialEq + std::fmt::Debug {
    (
        (record.action(), record.device(), record.order(), record.time_nanos(), record.thread()),
        (record.process(), record.stream(), record.ptr(), record.bytes(), record.granted()),
        (record.alignment(), record.query_id(), record.generation(), record.latency_nanos()),
        (record.served_by(), record.access(), record.tag().is_some(), record.failure().is_some()),
    )
}

fn assert_same(a: &[Spelled], b: &[Spelled]) {
    for ((a, a_texts), (b, b_texts)) in a.iter().zip(b) {
        assert_eq!(plain(a), plain(b));
        assert_eq!(a_texts, b_texts);
    }
}

/// Reads `data` as `format` (or finds it out) in every way there is, and checks what must hold.
#[allow(unreachable_pub)]
pub fn check(format: Option<Format>, data: &[u8]) {
    let Ok(mut lenient) = open(format, data, Strictness::Lenient) else { return };
    let (found, stopped) = records(&mut lenient);
    assert!(found.len() <= data.len(), "more records than bytes");
    assert_eq!(lenient.report().records, found.len() as u64);

    // A strict reader gives the same records up to the first thing that is wrong.
    if let Ok(mut strict) = open(format, data, Strictness::Strict) {
        let (prefix, _) = records(&mut strict);
        assert!(prefix.len() <= found.len());
        assert_same(&prefix, &found);
    }

    // What was read can be written and read again.
    let mut again = open(format, data, Strictness::Lenient).expect("as before");
    let mut writer = LogWriter::new(Format::Binary, again.header(), Vec::new());
    while let Ok(Some(record)) = again.next_record() {
        writer.write(&record, again.names()).expect("writing to memory");
    }
    let bytes = writer.finish().expect("writing to memory");
    let mut copy = open(Some(Format::Binary), &bytes, Strictness::Strict).expect("our own file");
    let (copied, failed) = records(&mut copy);
    assert!(!failed && copied.len() == found.len());
    assert_same(&copied, &found);

    // And everything else can be done with it; what stopped the reader (a newer version in the
    // middle) stops the others, and nothing else does.
    let reopen = || open(format, data, Strictness::Lenient);
    let done = |result: Result<(), TraceError>| assert_eq!(result.is_err(), stopped, "{result:?}");
    let mut source = reopen().expect("as before");
    done(write_chrome_trace(&mut source, std::io::sink()).map(drop));
    done(write_torch_snapshot(reopen, std::io::sink()).map(drop));
    done(Summary::of(&mut reopen().expect("as before")).map(drop));
    for format in [Format::Csv, Format::RmmCsv] {
        let mut source = reopen().expect("as before");
        done(xlog_trace::convert(&mut source, format, std::io::sink()).map(drop));
    }
}
