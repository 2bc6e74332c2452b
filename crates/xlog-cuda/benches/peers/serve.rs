//! From a request to its rows: the table of the workloads.

use std::io::BufRead;

use crate::rows::{Options, Request, Rows, skipped};
use crate::threads::{self, Shape};
use crate::workloads::Maker;
use crate::{random, replay, streams, workloads};

fn measure<M: Maker>(rows: &Rows<'_>, maker: &M) -> Result<(), String> {
    let Request { workload, parameter, .. } = rows.request;
    match workload.as_str() {
        "pair" => workloads::pair(rows, maker),
        "holes" => workloads::among(rows, 2 * parameter, 4096, true, maker),
        "live" => workloads::among(rows, *parameter, 1024, false, maker),
        "threads" => threads::threads(rows, &Shape::apart(*parameter), maker),
        "threads-shared" => threads::threads(rows, &Shape::shared(*parameter), maker),
        "random" => random::random(rows, 100_000, maker),
        "random-10000" => random::random(rows, 10_000, maker),
        "random-1000" => random::random(rows, 1_000, maker),
        "small-uniform" => random::small(rows, false, maker),
        "small-log" => random::small(rows, true, maker),
        "handoff" => streams::handoff(rows, maker),
        "kernels-cold" => streams::kernels(rows, false, maker),
        "kernels-warm" => streams::kernels(rows, true, maker),
        "churn" => replay::churn(rows, maker),
        _ => {
            if let Some(kind) = workload.strip_prefix("replay-") {
                return replay::replay(rows, kind, maker);
            }
            let shape =
                workload.strip_prefix("shape-").and_then(|text| Shape::parse(text, *parameter));
            let shape = shape.ok_or_else(|| format!("unknown workload '{workload}'"))?;
            threads::threads(rows, &shape, maker)
        }
    }
}

/// Answers every request; `find` gives the maker of a variant. A row that fails says why and stops nothing.
pub fn serve<M: Maker>(options: &Options, peer: &str, find: impl Fn(&str) -> Result<M, String>) {
    let answer = |text: &str| match Request::parse(text) {
        Err(reason) => skipped(peer, "-", "-", 0, &reason),
        Ok(request) => {
            let rows = Rows { peer, request: &request, options };
            if let Err(reason) = find(&request.variant).and_then(|maker| measure(&rows, &maker)) {
                rows.skipped(&reason);
            }
        }
    };
    options.rows.iter().for_each(|row| answer(row));
    if options.serve {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            answer(&line);
            println!(".");
        }
    }
}
