//! Resources and the order they keep: the conformance suite, named hazards, random programs against a model, counted calls
//! and faults.

mod capture;
mod captures_beside;
mod conformance;
mod counted_calls;
mod decorators;
mod driver_faults;
mod hazards;
mod hazards_threads;
mod many_streams;
mod metered;
mod ordering_model;
mod pinned_buffer;
mod pinned_host;
mod pool;
mod pool_joins;
mod pool_pending;
mod pool_remaps;
mod pool_steals;
mod support;
mod unannounced;
