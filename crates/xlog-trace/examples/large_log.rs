//! Makes a log of many records, converts it to every format and sums it up; prints times and memory.
//!
//! `cargo run --release -p xlog-trace --example large_log -- [RECORDS] [DIRECTORY]`

use std::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Instant;

use xlog_base::Random;
use xlog_trace::export::{write_chrome_trace, write_torch_snapshot};
use xlog_trace::{
    Action, Format, Header, LogWriter, Names, Ordered, Reader, Record, ServedBy, Summary, convert,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let records: u64 = arguments.next().map_or(Ok(10_000_000), |text| text.parse())?;
    let directory = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let path = |ending: &str| directory.join(format!("large-{}.{ending}", std::process::id()));
    let (xtrace, csv, rmm) = (path("xtrace"), path("csv"), path("rmm.csv"));
    let (json, pickle) = (path("json"), path("pickle"));
    println!("{:<28} {:>8} {:>12} {:>10}", "step", "s", "bytes", "peak MiB");

    step("write xtrace", &xtrace, || generate(&xtrace, records))?;
    step("convert to csv", &csv, || change(&xtrace, Format::Csv, &csv))?;
    step("convert to rmm csv", &rmm, || change(&xtrace, Format::RmmCsv, &rmm))?;
    step("read csv, write xtrace", &xtrace, || change(&csv, Format::Binary, &xtrace))?;
    step("export chrome json", &json, || {
        write_chrome_trace(&mut Reader::open(&xtrace)?, out(&json)?)?;
        Ok(())
    })?;
    step("export torch snapshot", &pickle, || {
        write_torch_snapshot(|| Reader::open(&xtrace), out(&pickle)?)?;
        Ok(())
    })?;
    let mut summary = None;
    step("summarise xtrace", &xtrace, || {
        summary = Some(Summary::of(&mut Reader::open(&xtrace)?)?);
        Ok(())
    })?;
    step("summarise xtrace, ordered", &xtrace, || {
        summary = Some(Summary::of(&mut Ordered::new(Reader::open(&xtrace)?))?);
        Ok(())
    })?;
    if let Some(summary) = summary {
        println!(
            "{} records, peak {} bytes in {} blocks, {} left alive",
            summary.records,
            summary.total.peak_bytes,
            summary.total.peak_blocks,
            summary.total.live_blocks
        );
    }
    for file in [xtrace, csv, rmm, json, pickle] {
        std::fs::remove_file(file)?;
    }
    Ok(())
}

fn step(
    name: &str,
    file: &Path,
    work: impl FnOnce() -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let started = Instant::now();
    work()?;
    let seconds = started.elapsed().as_secs_f64();
    let bytes = std::fs::metadata(file)?.len();
    println!("{name:<28} {seconds:>8.2} {bytes:>12} {:>10}", peak_mib());
    Ok(())
}

fn out(path: &Path) -> std::io::Result<BufWriter<File>> {
    Ok(BufWriter::new(File::create(path)?))
}

fn change(from: &Path, format: Format, to: &Path) -> Result<(), Box<dyn Error>> {
    // A file may be converted onto itself by way of another name.
    let next = to.with_extension("next");
    convert(&mut Reader::open(from)?, format, out(&next)?)?;
    std::fs::rename(next, to)?;
    Ok(())
}

/// Allocations and frees of up to 10,000 live blocks, under 20 tags, on 8 streams.
fn generate(path: &Path, records: u64) -> Result<(), Box<dyn Error>> {
    let mut names = Names::new();
    let tags: Vec<_> = (0..20).map(|index| names.intern(&format!("operator {index}"))).collect();
    let header = Header::of_this_process().with_device_name("made up");
    let mut writer = LogWriter::new(Format::Binary, &header, File::create(path)?);
    let mut live: Vec<Record> = Vec::new();
    let mut random = Random::new(1);
    let mut random = |limit: u64| random.below_u64(limit);
    for order in 0..records {
        let time = order * 250;
        let record = if live.is_empty() || (live.len() < 10_000 && random(100) < 52) {
            let bytes = 1 + random(1 << 20);
            let slot = order % (1 << 20);
            let tag = tags[random(20) as usize];
            let record = Record::new(Action::Allocate, 0, order, time)
                .with_thread(random(16))
                .with_stream(random(8) as u32)
                .with_ptr(0x7f00_0000_0000 + slot * (1 << 20))
                .with_bytes(bytes)
                .with_granted(bytes.next_multiple_of(256))
                .with_alignment(256)
                .with_generation(order)
                .with_query_id(order / 1000)
                .with_tag(tag)
                .with_latency_nanos(40 + random(100))
                .with_served_by(ServedBy::Magazine);
            live.push(record);
            record
        } else {
            let block = live.swap_remove(random(live.len() as u64) as usize);
            Record::new(Action::Deallocate, 0, order, time)
                .with_thread(block.thread())
                .with_stream(block.stream().unwrap_or(0))
                .with_ptr(block.ptr().unwrap_or(0))
                .with_bytes(block.bytes().unwrap_or(0))
                .with_generation(block.generation().unwrap_or(0))
                .with_latency_nanos(30)
        };
        writer.write(&record, &names)?;
    }
    writer.finish()?;
    Ok(())
}

/// Resident memory at its highest, where the system tells.
fn peak_mib() -> String {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
            let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
            Some((kib >> 10).to_string())
        })
        .unwrap_or_else(|| "?".to_owned())
}
