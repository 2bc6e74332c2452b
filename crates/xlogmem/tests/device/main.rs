//! Commands that use a device, as their users meet them: the binary, its output and its exit status. Also run on GPUs.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../scratch/mod.rs"]
mod scratch;
#[path = "../support/mod.rs"]
mod support;

mod bench;
mod certify;
mod churn;
mod doctor;
mod handoff;
mod incomplete_logs;
mod ledger;
mod relational;
mod replay;
mod tenants;
mod usability;
