//! Parts that the benches share: their arguments, their table of goals, and their device.
#![allow(dead_code, unreachable_pub)]

use std::process::ExitCode;
use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::sim::SimDevice;

/// The command line of a bench.
#[derive(Default)]
pub struct Arguments {
    /// Whether a missed goal ends the bench with status 1.
    pub gate: bool,
    /// Whether `peer,variant,workload,parameter,value,unit` is printed instead of a table.
    pub csv: bool,
    /// The spec of the device.
    pub device: Option<String>,
    /// Only rows whose name contains it are measured.
    pub filter: Option<String>,
}

impl Arguments {
    /// Parses the command line; `accepted` names the flags of this bench, as its message has them.
    pub fn parse(bench: &str, accepted: &str) -> Result<Self, ExitCode> {
        let mut parsed = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--gate" => parsed.gate = true,
                "--csv" if accepted.contains("--csv") => parsed.csv = true,
                "--device" if accepted.contains("--device") => parsed.device = arguments.next(),
                // Cargo passes it to every bench.
                "--bench" => {}
                flag if flag.starts_with('-') => {
                    eprintln!(
                        "{bench}: unknown argument '{flag}'; accepted are {accepted} and a filter"
                    );
                    return Err(ExitCode::from(2));
                }
                text => parsed.filter = Some(text.to_owned()),
            }
        }
        Ok(parsed)
    }

    /// Whether a row is to be measured.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    /// The status of the bench after `missed` goals were missed.
    pub fn status(&self, bench: &str, missed: usize) -> ExitCode {
        if self.gate && missed > 0 {
            eprintln!("{bench}: {missed} bars missed");
            return ExitCode::FAILURE;
        }
        ExitCode::SUCCESS
    }
}

/// A table of figures, some with a goal.
pub struct Table {
    pub arguments: Arguments,
    /// Columns of the names, and of the figures that have a goal.
    pub widths: (usize, usize),
    pub missed: usize,
}

impl Table {
    pub fn wants(&self, name: &str) -> bool {
        self.arguments.wants(name)
    }

    /// Prints a figure; `bar` is a value and the maximum that it may have.
    pub fn row(&mut self, name: &str, figure: &str, bar: Option<(f64, f64)>) {
        let (names, figures) = self.widths;
        match bar {
            None => println!("{name:<names$} {figure}"),
            Some((value, bar)) => {
                let met = value <= bar;
                self.missed += usize::from(!met);
                let verdict = if met { "met" } else { "MISSED" };
                println!("{name:<names$} {figure:<figures$} goal <= {bar:<8} {verdict}");
            }
        }
    }
}

/// A GPU where there is one, unless another device is asked for.
pub fn device(spec: Option<&str>) -> Arc<CudaDevice> {
    if let Some(spec) = spec {
        return Arc::new(CudaDevice::open(spec).unwrap());
    }
    if let Ok(gpu) = CudaDevice::open("cuda:0") {
        return Arc::new(gpu);
    }
    Arc::new(CudaDevice::from_driver(SimDevice::open(Default::default()).unwrap()))
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}
