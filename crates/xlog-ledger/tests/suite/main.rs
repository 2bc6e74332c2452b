//! The integration tests of the ledger, one module per kind of hazard.

#![cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cells;
mod damage;
mod limits;
mod openers;
mod places;
mod pressure;
mod processes;
mod python;
mod quotas;
mod roles;
mod support;
mod system_calls;
mod tags;
mod threads;
mod upgrade;
mod vanished;
mod worker;
// Which tools the tests may do without; it uses the standard library only.
#[path = "../../../xlog-testing/src/tools.rs"]
#[allow(dead_code, unreachable_pub)]
mod tools;
