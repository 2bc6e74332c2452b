//! `xlogmem demo`: processes that share a ledger for a while, to be observed by `top`, `ledger` and the Python client.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use xlog_cuda::DeviceSpec;
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
use xlog_report::escape;

use super::watch::Scratch;
use super::{TenantsArguments, spawn};
use crate::Output;
use crate::cli::Refusal;
use crate::size::{count, duration};

/// The limit that the processes share.
const LIMIT: u64 = 256 << 20;

/// The arguments of `demo`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 shown; 2 the command line was refused, or no process could be started."
)]
pub(crate) struct DemoArguments {
    /// How long it goes on, such as 30s or 10min
    #[arg(long = "for", value_name = "TIME", default_value = "1min", value_parser = duration(0.1..=86_400.0))]
    time: Duration,

    /// The number of processes that share the ledger
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count::<u32>(1..=16))]
    processes: u32,
}

/// Runs `demo`, on simulated devices. The ledger is removed at the end.
pub(crate) fn demo(arguments: &DemoArguments) -> Result<Output, Refusal> {
    let failed = |error: &dyn std::fmt::Display| Refusal::Line(format!("demo: {error}"));
    let scratch = Scratch::new().map_err(|error| failed(&error))?;
    let path = scratch.ledger();
    let directory = path.parent().map(ToOwned::to_owned).unwrap_or_default();
    let key = DeviceKey::new("tenants").map_err(|error| failed(&error))?;
    let config = LedgerConfig::new(key).with_directory(directory.clone()).with_limit(LIMIT);
    drop(Ledger::open(config).map_err(|error| failed(&error))?);
    let tenants = TenantsArguments {
        device: None,
        processes: arguments.processes,
        tenants: 2,
        budget: String::new(),
        rounds: 100_000_000,
        resource: "pool".to_owned(),
        seed: 1,
        pressure: false,
        json: false,
        worker: None,
        holder: None,
        ledger: None,
    };
    let started = spawn(DeviceSpec::Sim, LIMIT, &tenants, &path).map_err(|error| failed(&error))?;
    let workers: Vec<_> = started
        .into_iter()
        .map(|(worker, output)| {
            // The output is drained, since a full pipe would block the process.
            std::thread::spawn(move || {
                output.map(|mut output| std::io::copy(&mut output, &mut std::io::sink()))
            });
            worker
        })
        .collect();
    let text = format!(
        "{} processes share a ledger for {:?}. Watch them from another terminal:\n\n  xlogmem top --ledger {}\n",
        arguments.processes,
        arguments.time,
        directory.display()
    );
    let mut stdout = std::io::stdout().lock();
    // Without a reader the demo is pointless.
    let shown = stdout.write_all(escape::lines(&text).as_bytes()).and_then(|()| stdout.flush());
    drop(stdout);
    if shown.is_ok() {
        std::thread::sleep(arguments.time);
    }
    drop(workers);
    Ok(Output { text: String::new(), failure: None, ..Output::default() })
}
