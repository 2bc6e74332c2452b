//! The debug guard: conformance, planted damage, clean programs, limits.

mod capture;
mod conformance;
mod damage;
mod fault_sweep;
mod faults;
mod misuse;
mod pages;
mod programs;
mod runtime;
mod support;
