//! Tests of both forms on the simulated devices.

#![allow(clippy::unwrap_used)]

use xlog_testing::specs;

use super::super::SessionOptions;
use super::super::numbers::seed_for;
use super::*;
use crate::stack::{Stack, StackKind, StackOptions};

const ROWS: usize = 900;

/// Edges and a seed: 38 rounds, some of which have more than 1024 pairs.
const MANY_PAIRS: (usize, u64) = (1000, 29 << 8);

/// The state after three runs.
#[derive(PartialEq, Eq, Debug)]
struct Left {
    captures: u32,
    capacity: Capacity,
    batch: usize,
    reads: Vec<u32>,
}

/// Runs `work` with a program on its own device; checks that no memory is left and no race occurred.
fn with_program<R>(
    (spec, kind, form): (&str, StackKind, Form),
    (rows, capacity): (usize, Capacity),
    work: impl FnOnce(&mut FixedFixpoint<'_>) -> R,
) -> R {
    let _turn = xlog_testing::turn(spec);
    let options = StackOptions { streams: 4, ..StackOptions::new(kind) };
    let stack = Stack::build(spec.parse().unwrap(), options).unwrap();
    let result = {
        let session = Session::open(&stack, 1, SessionOptions::default()).unwrap();
        work(&mut FixedFixpoint::new(&session, rows, form, capacity).unwrap())
    };
    stack.drain().unwrap();
    assert_eq!(stack.runtime().bytes_outstanding(), 0);
    assert!(stack.device().races().is_empty(), "{:?}", stack.device().races());
    result
}

/// Runs the program and verifies its result.
fn verified(program: &mut FixedFixpoint<'_>, work: Fixpoint) -> FixedRun {
    let found = program.run(&work).unwrap();
    let verdict = work.verify(&found.result.to_vec().unwrap(), 1);
    assert_eq!(verdict.wrong, None, "{:?}", program.form);
    found
}

/// Runs the program on three graphs.
fn closures(spec: &str, kind: StackKind, form: Form, capacity: Capacity) -> Left {
    with_program((spec, kind, form), (ROWS, capacity), |program| {
        let mut reads = Vec::new();
        for seed in 1..4 {
            let found = verified(program, Fixpoint { rows: ROWS, seed });
            assert!(found.rounds > 2);
            assert!(program.batch >= found.rounds as usize, "{found:?}");
            reads.push(found.reads);
        }
        let (captures, capacity) = (program.captures().0, program.capacity());
        Left { captures, capacity, batch: program.batch, reads }
    })
}

#[test]
fn both_forms_find_the_closure_and_what_does_not_fit_is_captured_again() {
    for spec in specs() {
        for kind in [StackKind::Pool, StackKind::Async] {
            let fitting = Capacity::for_edges(ROWS);
            let [graph, kernels] =
                [Form::Graph, Form::Kernels].map(|form| closures(&spec, kind, form, fitting));
            assert_eq!((kernels.captures, kernels.capacity), (0, fitting));
            assert_eq!(graph.capacity, fitting);
            // Both forms read equally often: once per run as soon as a batch holds a whole run.
            assert_eq!((graph.batch, &graph.reads), (kernels.batch, &kernels.reads));
            assert!(graph.batch > BATCH && graph.reads[0] > 1, "{graph:?}");
            assert!(graph.reads.contains(&1), "{graph:?}");
            let lengthened = graph.reads.iter().filter(|reads| **reads > 1).count();
            assert_eq!(graph.captures as usize, 1 + lengthened);

            // The capacity holds the edges, but not the closure.
            let small = Capacity { pairs: 1024, set: 2048 };
            for form in [Form::Graph, Form::Kernels] {
                let left = closures(&spec, kind, form, small);
                assert!(left.capacity.set > small.set, "{left:?}");
                assert!(left.captures > graph.captures || form == Form::Kernels, "{left:?}");
            }
        }
    }
}

#[test]
fn a_run_goes_on_in_further_batches_and_the_first_one_grows() {
    let work = Fixpoint { rows: MANY_PAIRS.0, seed: seed_for(1, MANY_PAIRS.1) };
    let fitting = Capacity { pairs: 2048, set: 1 << 16 };
    for spec in specs() {
        for form in [Form::Graph, Form::Kernels] {
            with_program((&spec, StackKind::Pool, form), (work.rows, fitting), |program| {
                let found = verified(program, work);
                let rounds = found.rounds as usize;
                assert!(rounds > 2 * BATCH, "two further batches, {rounds} rounds");
                assert_eq!(found.reads as usize, rounds.div_ceil(BATCH));
                assert_eq!(program.batch, rounds.next_multiple_of(BATCH_STEP));
                let queued = rounds.next_multiple_of(BATCH) + found.reads as usize - 1;
                let launches = match form {
                    Form::Graph => found.reads as usize,
                    Form::Kernels => 2 + queued,
                };
                assert_eq!(found.launches, 2 + launches, "edges, batches, collect");

                let (captures, batch) = (program.captures().0, program.batch);
                assert_eq!(captures, if form == Form::Graph { 2 } else { 0 });
                let again = verified(program, work);
                assert_eq!((again.rounds, again.reads), (found.rounds, 1));
                let launches = if form == Form::Graph { 1 } else { 2 + batch };
                assert_eq!(again.launches, 2 + launches);
                // A capacity that suffices does not grow.
                assert_eq!((program.captures().0, program.batch), (captures, batch));
                assert_eq!(program.capacity(), fitting);
            });
        }
    }
}

#[test]
fn pairs_that_do_not_fit_in_the_middle_of_a_batch_double_the_capacities() {
    let work = Fixpoint { rows: MANY_PAIRS.0, seed: seed_for(1, MANY_PAIRS.1) };
    // All edges fit, and the set has space for everything; only the pairs of a later round exceed the capacity.
    let small = Capacity { pairs: 1024, set: 1 << 16 };
    for spec in specs() {
        for kind in [StackKind::Pool, StackKind::Async] {
            for form in [Form::Graph, Form::Kernels] {
                with_program((&spec, kind, form), (work.rows, small), |program| {
                    let found = verified(program, work);
                    assert_eq!(program.capacity(), small.doubled());
                    // One read finds the overflow; the others belong to the run that fits.
                    let rounds = found.rounds as usize;
                    assert_eq!(found.reads as usize, 1 + rounds.div_ceil(BATCH));
                    let captures = if form == Form::Graph { 3 } else { 0 };
                    assert_eq!(program.captures().0, captures, "new, larger, longer");
                    assert_eq!(verified(program, work).reads, 1);
                });
            }
        }
    }
}

#[test]
fn edges_that_do_not_fit_double_the_capacities() {
    let work = Fixpoint { rows: ROWS, seed: 1 };
    let small = Capacity { pairs: 256, set: 1 << 14 };
    for form in [Form::Graph, Form::Kernels] {
        with_program(("sim", StackKind::Pool, form), (ROWS, small), |program| {
            let _ = verified(program, work);
            assert_eq!(program.capacity(), small.doubled().doubled());
        });
    }
}

#[test]
fn a_batch_ends_with_the_rounds_and_stays_between_its_bounds() {
    for (rounds, batch) in [(0, 16), (16, 16), (17, 24), (40, 40), (511, 512), (9999, 512)] {
        assert_eq!(batch_for(rounds), batch);
        assert_eq!(batch % 2, 0);
    }
}

#[test]
fn runs_of_several_programs_are_in_flight_at_once() {
    const PROGRAMS: u64 = 4;
    for spec in specs() {
        for form in [Form::Graph, Form::Kernels] {
            let _turn = xlog_testing::turn(&spec);
            let options = StackOptions { streams: 4, ..StackOptions::new(StackKind::Pool) };
            let stack = Stack::build(spec.parse().unwrap(), options).unwrap();
            let open = |_| Session::open(&stack, 1, SessionOptions::default()).unwrap();
            let sessions: Vec<_> = (0..PROGRAMS).map(open).collect();
            let make = |session| {
                FixedFixpoint::new(session, ROWS, form, Capacity::for_edges(ROWS)).unwrap()
            };
            let mut programs: Vec<_> = sessions.iter().map(make).collect();
            for round in 0..2 {
                let works: Vec<_> = (0..PROGRAMS)
                    .map(|program| Fixpoint { rows: ROWS, seed: 1 + round * PROGRAMS + program })
                    .collect();
                for (program, work) in programs.iter_mut().zip(&works) {
                    program.begin(work).unwrap();
                    assert!(program.begin(work).is_err(), "one run of a program at a time");
                }
                for (program, work) in programs.iter_mut().zip(&works) {
                    let found = program.finish().unwrap();
                    let verdict = work.verify(&found.result.to_vec().unwrap(), 1);
                    assert_eq!(verdict.wrong, None, "{form:?}");
                    assert!(program.finish().is_err(), "nothing is in flight");
                }
            }
            drop(programs);
            drop(sessions);
            stack.drain().unwrap();
            assert_eq!(stack.runtime().bytes_outstanding(), 0);
            assert!(stack.device().races().is_empty(), "{:?}", stack.device().races());
        }
    }
}
