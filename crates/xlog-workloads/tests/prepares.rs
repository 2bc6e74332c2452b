//! The order between kernels: silent with every preparation, reported without one that is needed.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use xlog_cuda::DeviceSpec;
use xlog_workloads::relational::fixpoint::Fixpoint;
use xlog_workloads::relational::join::Join;
use xlog_workloads::relational::sort::Sort;
use xlog_workloads::relational::{Omission, Session, SessionOptions, Workload};
use xlog_workloads::stack::{Stack, StackKind};

/// What a run under a seed came to.
struct Came {
    races: usize,
    missed_waits: u64,
    verified: bool,
    trace: Vec<(&'static str, usize)>,
    numbers: Vec<u64>,
    unprepared: u64,
}

fn run(work: &Workload, seed: u64, streams: usize, options: SessionOptions) -> Came {
    run_with(work, seed, StackKind::Async, streams, options)
}

fn run_with(
    work: &Workload,
    seed: u64,
    kind: StackKind,
    streams: usize,
    options: SessionOptions,
) -> Came {
    let stack = Stack::open(DeviceSpec::SimSeeded(seed), kind, None, streams).unwrap();
    let session = Session::open(&stack, streams, options).unwrap();
    // After a race the next synchronisation is an error, so a run with an omission may end early.
    let result = work.execute(&session, 0).and_then(|executed| executed.result.to_vec());
    let _ = stack.drain();
    Came {
        races: stack.device().races().len(),
        missed_waits: session.missed_waits(),
        verified: result.is_ok_and(|result| work.verify(&result, 1).wrong.is_none()),
        numbers: session.numbers(),
        unprepared: session.unprepared(),
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
            let came = run_with(&work, seed, kind, 3, SessionOptions::default());
            assert_eq!(came.races, 0, "{work:?} on sim:{seed} with {kind}");
            assert!(came.verified, "{work:?} on sim:{seed} with {kind}");
        }
    }
}

/// Leaves out each preparation of each launch in turn, as if it were not in the code: the kernel is queued without it, and the use is
/// opened and closed after that. Each is reported: the kernel touched what its launch had not prepared. And there is a race exactly when
/// the late preparation still finds something to wait for; where it finds nothing, the work before is on the same stream, or another
/// wait of that launch or of an earlier one covers it.
///
/// No host and no reuse of memory puts anything in order here: numbers that the host reads are those of a run before.
fn leave_out_each(work: &Workload, streams: usize) -> usize {
    let read = run(work, 5, streams, SessionOptions::default().with_trace());
    assert!(read.verified && read.races == 0 && read.unprepared == 0);
    let foretold =
        || SessionOptions::default().with_trace().with_foretold(read.numbers.clone().into());
    let whole = run(work, 5, streams, foretold());
    let name = format!("{} over {streams} streams", work.name());
    assert!(whole.verified && whole.races == 0 && whole.unprepared == 0, "{name}");
    let mut races = 0;
    for (launch, (kernel, buffers)) in whole.trace.iter().enumerate() {
        for buffer in 0..*buffers {
            let came = run(work, 5, streams, foretold().with_omission(Omission { launch, buffer }));
            let place = format!("{name}: {kernel}, launch {launch}, buffer {buffer}");
            assert!(came.unprepared > 0, "{place}: what it touches was not missed");
            let (found, missed) = (came.races, came.missed_waits);
            assert_eq!(found > 0, missed > 0, "{place}: {found} races, {missed} missing waits");
            races += usize::from(found > 0);
        }
    }
    races
}

#[test]
fn leaving_out_any_preparation_is_reported_and_is_a_race_exactly_when_a_wait_is_missing() {
    for work in works(40) {
        for streams in [2, 3, 5] {
            let races = leave_out_each(&work, streams);
            println!("{} over {streams} streams: {races} races", work.name());
            assert!(races >= 3, "{} over {streams} streams: {races}", work.name());
        }
    }
}
