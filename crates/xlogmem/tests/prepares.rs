//! The order between kernels: silent with every preparation, reported without one that is needed.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

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

/// Preparations that may insert a wait although the host has already put the work in order: it has read a number back, and so
/// waited for the kernel that made it and for all that kernel followed. The runtime is not told of that.
const HOST_ORDERED: [(&str, usize); 13] = [
    // After the total of the matches was read: keys, table, counts and sums are complete.
    ("write_rows", 0),
    ("write_rows", 1),
    ("write_rows", 2),
    ("write_rows", 3),
    ("write_pairs", 0),
    ("write_pairs", 1),
    ("write_pairs", 2),
    ("write_pairs", 3),
    // After the number of new pairs was read: the pairs are complete, and so is what was put into the set with them. Parts of one round
    // follow each other through the set without a word from the host.
    ("copy", 0),
    ("count_pairs", 0),
    ("insert_new", 1),
    ("rehash", 0),
    ("collect", 0),
];

/// Leaves out each preparation of each launch in turn. The kernel is queued without it; what the preparation then still finds to wait
/// for is what the kernel should have waited for. There must be a race exactly when there is such a wait, except after the host has
/// waited itself: a preparation that finds none was not needed, because the work before it is on the same stream, or because
/// another wait of that stream covers it.
#[test]
fn leaving_out_a_preparation_is_reported_exactly_when_it_was_needed() {
    for work in works(40) {
        let whole = run(&work, 5, StackKind::Async, SessionOptions::default().with_trace());
        assert!(whole.verified && whole.races == 0);
        let mut wrong = Vec::new();
        let mut reported = 0;
        for (launch, (kernel, buffers)) in whole.trace.iter().enumerate() {
            for buffer in 0..*buffers {
                let options = SessionOptions::default().with_omission(Omission { launch, buffer });
                let came = run(&work, 5, StackKind::Async, options);
                reported += usize::from(came.races > 0);
                let by_host = came.races == 0 && HOST_ORDERED.contains(&(*kernel, buffer));
                if (came.races > 0) != (came.missed_waits > 0) && !by_host {
                    let (races, waits) = (came.races, came.missed_waits);
                    wrong.push(format!(
                        "{kernel}, launch {launch}, buffer {buffer}: {races} races, {waits} waits"
                    ));
                }
            }
        }
        println!("{}: {reported} of the preparations are needed", work.name());
        assert!(wrong.is_empty(), "{}: {wrong:#?}", work.name());
        assert!(reported >= 3, "{}: {reported}", work.name());
    }
}
