//! Tests that need a tool other than the Rust toolchain: node, Python, strace, another shell.
//!
//! If the tool is missing, the test is skipped, and one line on standard error names it. With `XLOG_TEST_TOOLS=required`, as CI sets it, a
//! missing tool is a failure.
//!
//! Crates below `xlog-testing` include this file by its path, so it uses only the standard library.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// The environment variable that makes tools `required` or `optional` (the default).
pub const TEST_TOOLS_VARIABLE: &str = "XLOG_TEST_TOOLS";

/// Reports a test, or a part of one, that is skipped because a tool is missing; once per part and process.
///
/// # Panics
/// If `XLOG_TEST_TOOLS` is `required`, or neither that nor `optional`.
pub fn left_out(part: &str, missing: &str) {
    let line = format!("left out: {part}: {missing}");
    match std::env::var(TEST_TOOLS_VARIABLE).as_deref() {
        Err(_) | Ok("optional") => {}
        Ok("required") => panic!("{line}; {TEST_TOOLS_VARIABLE}=required"),
        Ok(other) => {
            panic!("{TEST_TOOLS_VARIABLE}: \"{other}\" is neither \"required\" nor \"optional\"")
        }
    }
    static REPORTED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut reported = REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !reported.contains(&line) {
        // Not by `eprintln`: the test harness shows its output only for failing tests.
        let _ = writeln!(std::io::stderr(), "{line}");
        reported.push(line);
    }
}
