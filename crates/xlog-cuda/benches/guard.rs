//! What a guard adds to the allocation and the free of a block on a pool.
//!
//!     cargo bench -p xlog-cuda --bench guard -- [--gate]
//!
//! The device is what `XLOG_DEVICE` names, or else the simulated one, whose figures say little. Batches of all variants take turns, so that
//! a change of clock or of load meets all of them; the slow ones take one turn in nine. Each batch is compared with the mean of those
//! beside it of two runtimes without a guard, whose own ratios say how far two that are the same differ; the ratio is the median, the
//! time the fastest twentieth. What samples so rarely that it meets no block shows what the question alone costs.
//! `--gate` ends with status 1 when one block in 100 000 between guard pages costs more than 5 %.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use xlog_cuda::device_runtime::{
    AllocTag, GuardSetting, LedgerSetting, ResourceKind, RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::{CudaDevice, DeviceSpec};

const BATCHES: usize = 400;
/// Turns after which all runtimes are made anew: where their records lie decides a few hundredths of what a block costs.
const TURNS: usize = 40;
/// Turns between two of a slow variant.
const SELDOM: usize = 9;
const BAR: f64 = 1.05;
/// Guard, blocks in a batch, and their size. The first ones take every turn.
const VARIANTS: [(&str, usize, usize); 9] = [
    ("off", 100_000, 1024),
    ("sampled:100000", 100_000, 1024),
    ("off", 100_000, 1024),
    ("sampled:1000000000", 100_000, 1024),
    ("sampled:1000", 20_000, 1024),
    ("canary", 500, 1024),
    ("canary", 500, 1 << 20),
    ("sync", 100, 1024),
    ("pages", 50, 1024),
];

/// The variants that take every turn.
const QUICK: usize = 4;

struct Variant {
    runtime: XlogDeviceRuntime,
    pairs: usize,
    bytes: usize,
    times: Vec<f64>,
}

fn runtime(device: &Arc<CudaDevice>, guard: &str) -> XlogDeviceRuntime {
    let guard: GuardSetting = guard.parse().unwrap();
    let config = RuntimeConfig::default()
        .with_resource(ResourceKind::Pool)
        .with_budget("1GiB".parse().unwrap())
        .with_ledger(LedgerSetting::Off)
        .with_guard(guard);
    XlogDeviceRuntime::with_config(device.clone(), &config).unwrap()
}

impl Variant {
    /// Nanoseconds of one block, from allocation to free.
    fn batch(&mut self) {
        let start = Instant::now();
        for _ in 0..self.pairs {
            let given =
                self.runtime.allocate(black_box(self.bytes), StreamId::DEFAULT, AllocTag("bench"));
            self.runtime.deallocate(black_box(given.unwrap())).unwrap();
        }
        self.times.push(start.elapsed().as_nanos() as f64 / self.pairs as f64);
        // What a batch left behind is not the next one's.
        self.runtime.reap_pending().unwrap();
    }

    fn best(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_unstable_by(f64::total_cmp);
        times[times.len() / 20]
    }

    /// What a block costs beside one without a guard, of which every `step`th turn was beside this.
    fn ratio(&self, base: &[f64], step: usize) -> f64 {
        let beside = base.iter().step_by(step);
        let mut ratios: Vec<f64> =
            self.times.iter().zip(beside).map(|(own, base)| own / base).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }
}

fn main() -> ExitCode {
    let gate = std::env::args().any(|argument| argument == "--gate");
    let spec = DeviceSpec::from_environment().unwrap().unwrap_or(DeviceSpec::Sim);
    let device = Arc::new(CudaDevice::open_spec(spec).unwrap());
    let is_simulated = device.sim().is_some();
    let mut variants: Vec<_> = VARIANTS
        .iter()
        .map(|&(guard, pairs, bytes)| {
            // A simulated device takes a hundred times as long for what it queues.
            let pairs = if is_simulated { (pairs / 10).max(10) } else { pairs };
            (guard, Variant { runtime: runtime(&device, guard), pairs, bytes, times: Vec::new() })
        })
        .collect();
    let batches = if is_simulated { BATCHES / 40 } else { BATCHES };
    for turn in 0..batches {
        if turn % TURNS == TURNS - 1 {
            for (guard, variant) in &mut variants {
                variant.runtime = runtime(&device, guard);
            }
        }
        let all = turn % SELDOM == 0;
        let due = if all { variants.len() } else { QUICK };
        let due = &mut variants[..due];
        // What comes after a slow one finds the caches full of it, so nobody always does.
        match turn % 2 {
            0 => due.iter_mut().for_each(|(_, variant)| variant.batch()),
            _ => due.iter_mut().rev().for_each(|(_, variant)| variant.batch()),
        }
    }
    println!("device {}, pool, allocate and free, nanoseconds", device.spec());
    let off: Vec<_> = variants.iter().filter(|(guard, _)| *guard == "off").collect();
    let mean = |turn| off.iter().map(|(_, one)| one.times[turn]).sum::<f64>() / off.len() as f64;
    let base: Vec<f64> = (0..batches).map(mean).collect();
    let mut passed = true;
    for (at, (guard, variant)) in variants.iter().enumerate() {
        let step = if at < QUICK { 1 } else { SELDOM };
        let (best, ratio) = (variant.best(), variant.ratio(&base, step));
        println!("{guard:>18} {:>9} bytes {best:>12.1}   x {ratio:.3}", variant.bytes);
        if *guard == "sampled:100000" {
            passed = ratio <= BAR;
        }
    }
    match gate && !passed {
        true => {
            println!("sampling costs more than {:.0} %", (BAR - 1.0) * 100.0);
            ExitCode::FAILURE
        }
        false => ExitCode::SUCCESS,
    }
}
