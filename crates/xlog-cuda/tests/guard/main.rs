//! The debug guard: conformance, planted damage, clean programs, limits.

mod conformance;
mod damage;
mod programs;
mod support;
