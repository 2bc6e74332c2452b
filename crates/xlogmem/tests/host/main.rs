//! Commands that use no device, as their users meet them: the binary, its output and its exit status; the report in a browser.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../scratch/mod.rs"]
mod scratch;
#[path = "../support/mod.rs"]
mod support;

mod bad_input;
mod browser;
mod exec;
mod help;
mod logs;
mod report;
mod top;
