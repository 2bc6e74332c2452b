//! Tests of the allocation log, by hazard. Random cases print their seed; `XLOG_TRACE_SEED` replays one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod chrome;
mod damage;
mod forks_and_exits;
mod fuzz;
mod hostile;
mod import;
mod kill;
mod one_writer;
mod recorder;
mod recorder_failures;
mod rmm;
mod round_trip;
mod snapshot;
mod summary;
mod support;
// Which tools the tests may do without; it uses the standard library only.
#[path = "../../../xlog-testing/src/tools.rs"]
#[allow(dead_code, unreachable_pub)]
mod tools;
