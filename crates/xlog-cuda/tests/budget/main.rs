//! The budget: its limit, its books under threads, its ladder, scopes and reservations, and the suite that every resource passes.

mod beside_captures;
mod books;
mod conformance;
mod device_waits;
mod double_free;
mod ladder;
mod limits;
mod oom_text;
mod physical;
mod reservations;
mod scopes;
mod support;
mod waiting;
