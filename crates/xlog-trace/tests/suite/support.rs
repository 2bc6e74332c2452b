//! Seeds, random records, and records compared by what they say.

use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use xlog_base::Random;
use xlog_trace::{
    Action, Failure, Format, Header, LogWriter, NameId, Names, Reader, Record, ServedBy, Source,
    Strictness, UseAccess,
};

/// A number of any magnitude, the ends included.
pub(crate) fn any_number(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        _ => random.next_u64() >> random.below(64),
    }
}

/// The seeds of a property test: one from the environment, or `count` from a fixed start.
pub(crate) fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("XLOG_TRACE_SEED") {
        Ok(seed) => vec![seed.parse().expect("XLOG_TRACE_SEED is a decimal number")],
        Err(_) => (0..count).map(|index| 0x5eed + index).collect(),
    }
}

/// Runs a case for each seed and names the seed of the one that fails.
pub(crate) fn for_seeds(count: u64, case: impl Fn(u64)) {
    for seed in seeds(count) {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(seed)));
        if let Err(panic) = result {
            eprintln!("failed with XLOG_TRACE_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

const TEXTS: &[&str] = &[
    "join",
    "hash table",
    "",
    "a,b",
    "say \"hi\"",
    "two\nlines",
    "cr\r",
    "\r\n",
    "ünïcödé",
    "=1+1",
    " lead",
    "(nil)",
    "\u{0}",
    "#",
];

/// A record with any mixture of fields.
pub(crate) fn any_record(random: &mut Random, names: &mut Names) -> Record {
    let mut text = |random: &mut Random| -> NameId {
        if random.one_in(4) {
            names.intern(&format!("name-{}", random.below_u64(50)))
        } else {
            names.intern(TEXTS[random.below_u64(TEXTS.len() as u64) as usize])
        }
    };
    let action = Action::from_code(match random.below_u64(4) {
        0 => random.next_u64() as u8,
        _ => 1 + random.below_u64(6) as u8,
    });
    let device =
        if random.one_in(3) { any_number(random) as u32 } else { random.below_u64(2) as u32 };
    let mut record = Record::new(action, device, any_number(random), any_number(random) >> 1)
        .with_thread(any_number(random))
        .with_process(if random.one_in(8) { random.next_u64() as u32 } else { 4711 })
        .with_latency_nanos(any_number(random))
        .with_served_by(ServedBy::from_code(random.below_u64(12) as u8));
    if random.one_in(2) {
        record = record.with_ptr(any_number(random));
    }
    if random.one_in(2) {
        record = record.with_bytes(any_number(random));
    }
    if random.one_in(2) {
        record = record.with_granted(any_number(random));
    }
    if random.one_in(2) {
        record = record.with_stream(any_number(random) as u32);
    }
    if random.one_in(2) {
        record = record.with_generation(any_number(random));
    }
    if random.one_in(2) {
        record = record.with_query_id(any_number(random));
    }
    if random.one_in(2) {
        record = record.with_alignment(1 << random.below_u64(64));
    }
    if random.one_in(2) {
        record = record.with_tag(text(random));
    }
    if random.one_in(3) {
        let access = [UseAccess::Read, UseAccess::Write, UseAccess::ReadWrite];
        record = record.with_access(access[random.below_u64(3) as usize]);
    }
    if random.one_in(4) {
        record = record.with_failure(Failure { kind: text(random), message: text(random) });
    }
    if random.one_in(3) {
        record = record.with_site(names.intern(&format!("src/a b.rs:{}", random.below(9))));
    }
    if random.one_in(8) {
        let frames: Vec<NameId> = (0..random.below(5))
            .map(|_| names.intern(&format!("f{} (src/a.rs:{})", random.below(9), random.below(9))))
            .collect();
        record = record.with_stack(names.intern_stack(&frames));
    }
    record
}

/// What a record says, with its strings spelled out: equal in every file that holds it.
pub(crate) type Said = (Record, [Option<String>; 6]);

pub(crate) fn said(record: &Record, names: &Names) -> Said {
    let spell = |id: NameId| names.text(id).expect("a name of this table").to_owned();
    let texts = [
        record.tag().map(spell),
        record.failure().map(|failure| spell(failure.kind)),
        record.failure().map(|failure| spell(failure.message)),
        record.stream().and_then(|stream| names.stream_name(stream)).map(str::to_owned),
        record.site().map(spell),
        record.stack().map(|stack| names.stack_texts(Some(stack)).collect::<Vec<_>>().join(";")),
    ];
    (plain(record), texts)
}

/// The record with its names made comparable across tables.
fn plain(record: &Record) -> Record {
    let mut names = Names::new();
    let one = names.intern("x");
    let mut record = *record;
    if record.tag().is_some() {
        record = record.with_tag(one);
    }
    if record.failure().is_some() {
        record = record.with_failure(Failure { kind: one, message: one });
    }
    if record.site().is_some() {
        record = record.with_site(one);
    }
    if record.stack().is_some() {
        record = record.with_stack(names.intern_stack(&[one]));
    }
    record
}

pub(crate) fn encode(format: Format, records: &[Record], names: &Names) -> Vec<u8> {
    let mut writer = LogWriter::new(format, &Header::new(), Vec::new());
    for record in records {
        writer.write(record, names).unwrap();
    }
    writer.finish().unwrap()
}

pub(crate) fn reader(bytes: &[u8], strictness: Strictness) -> Reader {
    Reader::from_stream(std::io::Cursor::new(bytes.to_vec()), strictness).unwrap()
}

pub(crate) fn read_all(source: &mut impl Source) -> Vec<Said> {
    let mut all = Vec::new();
    while let Some(record) = source.next_record().unwrap() {
        all.push(said(&record, source.names()));
    }
    all
}

/// A directory that is removed with its contents.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("xlog-trace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// This test program again, running one ignored test as a child's body.
pub(crate) fn child(body: &str, argument: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", body, "--nocapture", "--test-threads=1"])
        .env("XLOG_TRACE_CHILD", argument);
    command
}

/// The argument of a child's body; none when it was not started as one.
pub(crate) fn child_argument() -> Option<String> {
    std::env::var("XLOG_TRACE_CHILD").ok()
}
