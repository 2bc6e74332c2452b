//! The order between kernels: silent with every preparation, reported without one that is needed.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use xlog_cuda::DeviceSpec;
use xlogmem::relational::fixpoint::Fixpoint;
use xlogmem::relational::join::Join;
use xlogmem::relational::sort::Sort;
use xlogmem::relational::{Omission, Session, SessionOptions, Workload};
use xlogmem::stack::{Stack, StackKind};

/// What a run under a seed came to.
struct Came {
    races: usize,
    missed_waits: u64,
    verified: bool,
    trace: Vec<(&'static str, usize)>,
}

fn run(work: &Workload, seed: u64, kind: StackKind, options: SessionOptions) -> Came {
    let stack = Stack::open(DeviceSpec::SimSeeded(seed), kind, None, 3).unwrap();
    let session = Session::open(&stack, 3, options).unwrap();
    // After a race the next synchronisation is an error, so a run with an omission may end early.
    let result = work.execute(&session, 0).and_then(|executed| executed.result.to_vec());
    let _ = stack.settle();
    Came {
        races: stack.device().races().len(),
        missed_waits: session.missed_waits(),
        verified: result.is_ok_and(|result| work.verify(&result, 1).wrong.is_none()),
        trace: session.trace().iter().map(|one| (one.kernel, one.buffers)).collect(),
    }
}

fn works(rows: usize) -> [Workload; 3] {
    [
        Workload::Join(Join { rows, seed: 3 }),
        Workload::Fixpoint(Fixpoint { rows, seed: 3 }),
        Workload::Sort(Sort { rows, seed: 3 }),
    ]
}

#[test]
fn the_detector_is_silent_under_two_hundred_schedules() {
    for work in works(60) {
        for seed in 0..200 {
            let kind = if seed % 2 == 0 { StackKind::Pool } else { StackKind::Async };
            let came = run(&work, seed, kind, SessionOptions::default());
            assert_eq!(came.races, 0, "{work:?} on sim:{seed} with {kind}");
            assert!(came.verified, "{work:?} on sim:{seed} with {kind}");
        }
    }
}

/// Leaves out each preparation of each launch in turn. The kernel is queued without it; what the preparation then still finds to wait
/// for is what the kernel should have waited for. There must be a race exactly when there is such a wait: a preparation that finds
/// none was not needed, because the work before it is on the same stream, or because another wait of that stream covers it.
#[test]
fn leaving_out_a_preparation_is_reported_exactly_when_it_was_needed() {
    for work in works(12) {
        let whole = run(&work, 5, StackKind::Async, SessionOptions::default().with_trace());
        assert!(whole.verified && whole.races == 0);
        let mut needed: BTreeMap<(&str, usize), [u32; 2]> = BTreeMap::new();
        for (launch, (kernel, buffers)) in whole.trace.iter().enumerate() {
            for buffer in 0..*buffers {
                let omission = Omission { launch, buffer };
                let options = SessionOptions::default().with_omission(omission);
                let came = run(&work, 5, StackKind::Async, options);
                let place = format!("{} launch {launch} ({kernel}), buffer {buffer}", work.name());
                assert_eq!(
                    came.races > 0,
                    came.missed_waits > 0,
                    "{place}: {} races, {} waits",
                    came.races,
                    came.missed_waits
                );
                needed.entry((kernel, buffer)).or_default()[usize::from(came.races > 0)] += 1;
            }
        }
        println!("{}: {needed:?}", work.name());
        let reported: u32 = needed.values().map(|[_, reported]| reported).sum();
        assert!(reported >= 5, "{}: {needed:?}", work.name());
    }
}
