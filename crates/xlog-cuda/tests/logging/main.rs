//! The log, the statistics and what they promise: sinks, order, exact counts, conformance of both decorators.

mod answers;
mod conformance;
mod history;
mod leaks;
mod metrics;
mod records;
mod segments;
mod sinks;
mod sites;
mod spans;
mod stacks;
mod statistics;
mod statistics_model;
mod support;
