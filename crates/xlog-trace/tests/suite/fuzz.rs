//! A deterministic fuzzer: the committed corpus, mutated from seeds, into every reader.
//!
//! Runs so many inputs a reader; `XLOG_TRACE_FUZZ_SECONDS` for longer. A failure prints its seed, and
//! `XLOG_TRACE_SEED` replays it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use xlog_trace::{Action, Format, Names, Record};

use crate::support::{Random, any_record, encode};

#[path = "../../fuzz/entry.rs"]
mod entry;

/// How many mutated inputs each reader gets at least.
const INPUTS: u64 = 300;

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no corpus for {name}");
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn mutate(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let pick = |random: &mut Random| &corpus[random.below_u64(corpus.len() as u64) as usize];
    let mut bytes = pick(random).clone();
    for _ in 0..=random.below_u64(6) {
        let len = bytes.len().max(1) as u64;
        let at = (random.below_u64(len) as usize).min(bytes.len());
        let end = (at + random.below_u64(64) as usize).min(bytes.len());
        match random.below_u64(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below_u64(8),
            1 if at < bytes.len() => bytes[at] = random.next_u64() as u8,
            2 => drop(bytes.drain(at..end)),
            3 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            4 => bytes.truncate(at),
            5 => {
                let other = pick(random);
                let from = (random.below_u64(other.len() as u64 + 1) as usize).min(other.len());
                bytes.splice(at..at, other[from..].iter().copied().take(300));
            }
            6 => {
                let word = [0u64, 1, 80, 88, u64::MAX, 1 << 31, 1 << 20, 0x0a22_2c0d];
                let word = word[random.below_u64(8) as usize].to_le_bytes();
                let count = (1 + random.below_u64(8) as usize).min(bytes.len() - at);
                bytes[at..at + count].copy_from_slice(&word[..count]);
            }
            7 => {
                let text: &[u8] = [
                    &b"\""[..],
                    b"\"\"",
                    b",",
                    b"\n",
                    b"\r\n",
                    b"0x",
                    b"(nil)",
                    b"\x89XTRACE\n",
                    b"-",
                    b"99999999999999999999",
                ][random.below_u64(10) as usize];
                bytes.splice(at..at, text.iter().copied());
            }
            _ => bytes[at..end].iter_mut().for_each(|byte| *byte = random.next_u64() as u8),
        }
    }
    bytes
}

/// Makes the checksums of a mutated file right, so that what is behind them is reached.
fn repair(bytes: &mut [u8]) {
    let mut at = 0;
    while at + 36 <= bytes.len() {
        if !bytes[at..].starts_with(b"\x89XTRACE\n") {
            at += 1;
            continue;
        }
        let len = u32::from_le_bytes(bytes[at + 12..at + 16].try_into().unwrap()) as usize;
        let end = (at + 36).saturating_add(len).min(bytes.len());
        let crc = crc32fast::hash(&bytes[at + 36..end]).to_le_bytes();
        bytes[at + 28..at + 32].copy_from_slice(&crc);
        let crc = crc32fast::hash(&bytes[at..at + 32]).to_le_bytes();
        bytes[at + 32..at + 36].copy_from_slice(&crc);
        at = end;
    }
}

fn run(seed: u64, format: Option<Format>, corpus: &[Vec<u8>]) {
    let mut random = Random::new(seed);
    let mut bytes = mutate(&mut random, corpus);
    if format == Some(Format::Binary) && random.below_u64(3) > 0 {
        repair(&mut bytes);
    }
    let result = std::panic::catch_unwind(|| entry::check(format, &bytes));
    if let Err(panic) = result {
        let path = std::env::temp_dir().join(format!("xlog-trace-fuzz-{seed}"));
        let _ = std::fs::write(&path, &bytes);
        eprintln!("failed with XLOG_TRACE_SEED={seed}; the input is in {}", path.display());
        std::panic::resume_unwind(panic);
    }
}

fn fuzz(format: Option<Format>, names: &[&str]) {
    let corpus: Vec<Vec<u8>> = names.iter().flat_map(|name| corpus(name)).collect();
    for seed in &corpus {
        entry::check(format, seed);
    }
    if let Ok(seed) = std::env::var("XLOG_TRACE_SEED") {
        return run(seed.parse().unwrap(), format, &corpus);
    }
    let seconds =
        std::env::var("XLOG_TRACE_FUZZ_SECONDS").map_or(0.0, |text| text.parse().unwrap());
    let (started, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut runs = 0;
    while runs < INPUTS || started.elapsed() < limit {
        run(0xf022 + runs, format, &corpus);
        runs += 1;
    }
    println!("{runs} inputs in {:?}", started.elapsed());
}

#[test]
fn no_input_breaks_the_binary_reader() {
    fuzz(Some(Format::Binary), &["binary"]);
}

#[test]
fn no_input_breaks_the_csv_reader() {
    fuzz(Some(Format::Csv), &["csv"]);
}

#[test]
fn no_input_breaks_the_rmm_reader() {
    fuzz(Some(Format::RmmCsv), &["rmm"]);
}

#[test]
fn no_input_breaks_the_detection_of_formats() {
    fuzz(None, &["binary", "csv", "rmm"]);
}

/// Writes the corpus anew; run by hand when the formats change.
#[test]
#[ignore = "writes into the source tree"]
fn write_the_corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (folder, ending, format) in [
        ("binary", "xtrace", Format::Binary),
        ("csv", "csv", Format::Csv),
        ("rmm", "csv", Format::RmmCsv),
    ] {
        for (name, count, seed) in [("empty", 0, 1), ("one", 1, 2), ("few", 12, 3), ("many", 60, 4)]
        {
            let mut random = Random::new(seed);
            let mut names = Names::new();
            names.name_stream(0, "0x55d04c2bf3a0");
            let records: Vec<Record> =
                (0..count).map(|_| any_record(&mut random, &mut names)).collect();
            let path = root.join(folder).join(format!("{name}.{ending}"));
            std::fs::write(path, encode(format, &records, &names)).unwrap();
        }
        let pairs: Vec<Record> = (0..40)
            .map(|order| {
                let action = if order % 2 == 0 { Action::Allocate } else { Action::Deallocate };
                Record::new(action, 0, order, order * 1000)
                    .with_ptr(0x7f00_0000_0000 + order / 2 * 256)
                    .with_bytes(100)
                    .with_stream(order as u32 % 3)
            })
            .collect();
        let path = root.join(folder).join(format!("pairs.{ending}"));
        std::fs::write(path, encode(format, &pairs, &Names::new())).unwrap();
    }
}
