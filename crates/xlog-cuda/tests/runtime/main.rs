//! The runtime, its typed buffers and launches.

mod adopted;
mod composition;
mod copies;
mod enlisted;
mod graphs;
mod launch;
mod memory_manager;
mod open;
mod runtime;
mod safe_code;
mod singleton;
mod support;
mod tracked_only;
mod unread_races;
mod views;
