//! `xlogmem run`: workloads whose results are verified.
//!
//! A workload measures first and judges afterwards: the result is one report, printed as text or as JSON.

mod arguments;
mod churn;
mod handoff;
mod log;
mod progress;
mod relational;
mod report;
mod tenants;

pub(crate) use arguments::StackArguments;
pub(crate) use churn::{ChurnArguments, churn};
pub(crate) use handoff::handoff;
pub(crate) use relational::{FixpointArguments, RelationalArguments, fixpoint, join, sort};
pub(crate) use tenants::{DemoArguments, TenantsArguments, demo, tenants};
