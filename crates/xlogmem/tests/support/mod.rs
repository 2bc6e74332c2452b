//! The binary under test, and what its answers must look like.

// Each test binary uses a part of it.
#![allow(dead_code)]

use std::process::{Command, Output};

use serde_json::Value;

/// The binary under test, without the environment of whoever runs the tests.
///
/// `XLOGMEM_BIN` names it where the build's own path does not exist.
pub(crate) fn xlogmem() -> Command {
    let binary =
        std::env::var_os("XLOGMEM_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_xlogmem").into());
    let mut command = Command::new(binary);
    for name in ["", "_RESOURCE", "_BUDGET", "_LEDGER", "_QUOTA", "_LOG", "_GUARD", "_SANITIZER"] {
        command.env_remove(format!("XLOG_DEVICE{name}"));
    }
    command
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {} / {}", text(&output.stdout), text(&output.stderr))
    })
}

/// Exit status 2, one line on standard error that has all of `words`, and nothing else.
pub(crate) fn assert_refused(output: &Output, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    for word in words {
        assert!(error.contains(word), "{error} does not say {word}");
    }
}

/// The commands that a help names.
pub(crate) fn commands(help: &str) -> Vec<String> {
    let named = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let named = named.take_while(|line| !line.is_empty());
    // A description that goes on is indented further.
    let named = named.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    named.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}
