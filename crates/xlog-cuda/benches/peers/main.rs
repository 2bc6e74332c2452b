//! Ours, and cudarc, on the workloads of the comparison with other allocators (docs/benchmarks.md).
//!
//!     cargo bench -p xlog-cuda --bench peers -- [--peer xlog|cudarc] [--device SPEC] [--seconds S] [--plans DIR]
//!                                               (--serve | VARIANT:WORKLOAD:PARAMETER ...)
//!
//! `bench/peers/run` asks for the rows and sets them beside those of the other peers. Without a row it measures the pair of 1 KiB
//! through every variant of ours.

#![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]

mod cudarc_peer;
mod generators;
mod ours;
mod random;
mod replay;
mod rows;
mod serve;
mod streams;
mod threads;
mod workloads;

use std::process::ExitCode;

use cudarc::driver::CudaContext;
use cudarc_peer::CudarcMaker;
use ours::OursMaker;
use rows::Options;

fn main() -> ExitCode {
    let mut options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(reason) => {
            eprintln!(
                "peers: {reason}; accepted are --peer xlog or cudarc, --device SPEC, --seconds S (above 0), --plans DIR, \
                 --serve, and rows as VARIANT:WORKLOAD:PARAMETER"
            );
            return ExitCode::from(2);
        }
    };
    let peer = options.peer.clone().unwrap_or_else(|| "xlog".to_owned());
    let outcome = match peer.as_str() {
        "xlog" => ours::open(&options.device).map(|device| {
            if options.rows.is_empty() && !options.serve {
                options.rows = ours::VARIANTS.map(|variant| format!("{variant}:pair:1024")).into();
            }
            serve::serve(&options, "xlog", |variant| OursMaker::find(&device, variant));
        }),
        "cudarc" => cudarc_context().map(|context| {
            serve::serve(&options, "cudarc", |variant| CudarcMaker::find(&context, variant));
        }),
        other => Err(format!("there is no peer '{other}'; accepted are xlog and cudarc")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{peer}: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// The first GPU, as cudarc opens it. Without a driver library cudarc panics, so ours is asked first.
fn cudarc_context() -> Result<std::sync::Arc<CudaContext>, String> {
    ours::open("cuda:0")?;
    CudaContext::new(0).map_err(|error| error.to_string())
}
