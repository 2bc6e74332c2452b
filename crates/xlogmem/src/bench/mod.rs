//! `xlogmem bench`: the cost of operations on this machine, relative to their parts.
//!
//! On a simulated device the figures show the runtime's overhead only: its memory and its race detector are not a GPU's.

mod figures;
mod measure;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use xlog_cuda::{CudaDevice, DeviceSpec};
use xlog_report::text_report::TextReport;

use crate::Output;
use crate::cli::Refusal;
use crate::doctor::{Cuda, select};
use crate::temporary::Folder;
use figures::Group;
use measure::Effort;

const SCHEMA: u32 = 1;

/// The arguments of `bench`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 measured, 1 the device failed, 2 the command line was refused."
)]
pub(crate) struct BenchArguments {
    /// The device: cuda:N, sim, or sim:SEED.
    ///
    /// Without it: what XLOG_DEVICE says, else the first GPU, else the simulated device.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,

    /// Fewer and shorter rounds: a second or two, and figures to be taken with care
    #[arg(long)]
    quick: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The report of the benches, as it appears in JSON. Fields may be added; none changes without a new `schema` number.
#[derive(Serialize, Debug)]
struct Report {
    schema: u32,
    ok: bool,
    /// The reason why not, in one line.
    error: Option<String>,
    machine: Machine,
    /// The number of rounds per median.
    rounds: usize,
    groups: Vec<Row>,
}

#[derive(Serialize, Debug)]
struct Machine {
    cpu: Option<String>,
    cores: usize,
    device: String,
    device_name: Option<String>,
    /// The CUDA version of the driver; `None` for a simulated device.
    driver_api_version: Option<String>,
    xlog_version: &'static str,
    /// Whether the build is optimized; otherwise the figures mean little.
    is_optimized: bool,
}

#[derive(Serialize, Debug)]
struct Row {
    name: String,
    variants: Vec<Figure>,
}

#[derive(Serialize, Debug)]
struct Figure {
    name: String,
    median_nanos: f64,
    /// The lower quartile of the batches; `high_nanos` is the upper one.
    low_nanos: f64,
    high_nanos: f64,
    /// The median relative to that of the first variant.
    ratio: f64,
}

/// Runs the command. It refuses a bad device spec; a failure of the device is part of the output.
pub(crate) fn run(arguments: &BenchArguments) -> Result<Output, Refusal> {
    let selection = select(arguments.device.as_deref(), &Cuda::find())?;
    let effort = match arguments.quick {
        true => Effort { rounds: 15, batch: Duration::from_micros(100) },
        false => Effort { rounds: 101, batch: Duration::from_micros(500) },
    };
    let report = measure(selection.spec, effort);
    Ok(Output::of(&report, arguments.json, Report::render, report.error.clone()))
}

fn measure(spec: DeviceSpec, effort: Effort) -> Report {
    let scratch = Folder::create("xlogmem-bench-").map_err(|error| error.to_string());
    // On a terminal, each progress line on standard error replaces the previous one.
    let is_seen = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let progress = |what: &str| {
        if is_seen {
            eprint!("\r\x1b[Kmeasuring: {what}");
        }
    };
    let groups = scratch.and_then(|scratch| {
        figures::measure(spec, effort, scratch.path(), progress).map_err(|error| error.to_string())
    });
    if is_seen {
        eprint!("\r\x1b[K");
    }
    let (groups, error) = match groups {
        Ok(groups) => (groups, None),
        Err(error) => (Vec::new(), Some(format!("{spec}: {error}"))),
    };
    Report {
        schema: SCHEMA,
        ok: error.is_none(),
        error,
        machine: Machine::detect(spec),
        rounds: effort.rounds,
        groups: groups.into_iter().map(Row::new).collect(),
    }
}

impl Machine {
    fn detect(spec: DeviceSpec) -> Self {
        let properties = CudaDevice::open_spec(spec).ok().map(|device| device.properties().clone());
        let version = properties.as_ref().map(|properties| properties.driver_version);
        let version = version.filter(|_| matches!(spec, DeviceSpec::Cuda(_)));
        Self {
            cpu: cpu(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            device: spec.to_string(),
            device_name: properties.map(|properties| properties.name),
            driver_api_version: version.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
            xlog_version: env!("CARGO_PKG_VERSION"),
            is_optimized: !cfg!(debug_assertions),
        }
    }

    fn render(&self, page: &mut TextReport) {
        page.title("Machine");
        let cpu = self.cpu.as_deref().unwrap_or("unknown");
        page.line("cpu", &format!("{cpu}, {} cores", self.cores));
        let name = self.device_name.as_deref().unwrap_or("unknown");
        let driver = self.driver_api_version.as_ref();
        let driver = driver.map_or_else(String::new, |version| format!(", CUDA {version}"));
        page.line("device", &format!("{} ({name}){driver}", self.device));
        let build = if self.is_optimized { "optimized" } else { "NOT optimized: use --release" };
        page.line("xlog", &format!("{}, {build}", self.xlog_version));
    }
}

/// Returns the processor's name, if the system reports it.
fn cpu() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

impl Row {
    fn new(group: Group) -> Self {
        let first = group.samples.first().map_or(f64::NAN, |sample| sample.median);
        let variants = group.samples.into_iter().map(|sample| Figure {
            name: sample.name,
            median_nanos: sample.median,
            low_nanos: sample.low,
            high_nanos: sample.high,
            ratio: sample.median / first,
        });
        Self { name: group.name, variants: variants.collect() }
    }
}

impl Report {
    fn render(&self) -> String {
        let mut page = TextReport::default();
        self.machine.render(&mut page);
        for group in &self.groups {
            page.title(&group.name);
            for figure in &group.variants {
                page.row(&format!(
                    "{:<24}{:>12.1} ns   {:>10.1} to {:<10.1} {:>7.2}x",
                    figure.name,
                    figure.median_nanos,
                    figure.low_nanos,
                    figure.high_nanos,
                    figure.ratio
                ));
            }
        }
        match &self.error {
            Some(error) => page.close(error),
            None => page.close(&format!(
                "medians of {} rounds in which the variants took turns, the middle half of them, and the ratio to the \
                 first",
                self.rounds
            )),
        }
    }
}
