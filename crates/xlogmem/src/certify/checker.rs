//! compute-sanitizer: its location, the command line of a cell under it, and the parser of its report.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::plan::Stack;

const NAME: &str = "compute-sanitizer";

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Findings {
    /// The number of errors; `None` if the report is truncated.
    pub(super) errors: Option<u64>,
    /// The reported addresses.
    pub(super) addresses: Vec<u64>,
    /// The first error, in one line.
    pub(super) first: Option<String>,
}

/// Finds it on the path, or where CUDA toolkits are installed.
pub(super) fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(NAME));
    let mut toolkits: Vec<PathBuf> = std::fs::read_dir("/usr/local")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda"))
        })
        .collect();
    // The newest version first.
    toolkits.sort_unstable_by(|a, b| b.cmp(a));
    let installed = toolkits
        .into_iter()
        .flat_map(|toolkit| [toolkit.join("bin").join(NAME), toolkit.join(NAME).join(NAME)]);
    on_path.chain(installed).find(|candidate| candidate.is_file())
}

/// Returns the command that runs `program` under it, with the report in `log`.
pub(super) fn command(checker: &Path, program: &Path, stack: Stack, log: &Path) -> Command {
    let mut log_file = OsString::from("--log-file=");
    log_file.push(log);
    let mut command = Command::new(checker);
    command.args([
        "--tool=memcheck",
        "--nvtx=yes",
        // The program continues and reports its own detections.
        "--destroy-on-device-error=kernel",
        "--show-backtrace=no",
        "--report-api-errors=no",
    ]);
    if stack == Stack::Async {
        command.arg("--track-stream-ordered-races=all");
    }
    command.arg(log_file).arg(program);
    command
}

pub(super) fn parse(report: &str) -> Findings {
    let mut findings = Findings::default();
    let lines = report.lines().filter_map(|line| line.strip_prefix("=========")).map(str::trim);
    for line in lines {
        if let Some(rest) = line.strip_prefix("ERROR SUMMARY:") {
            let count = rest.split_whitespace().next().and_then(|word| word.parse().ok());
            findings.errors = count.or(findings.errors);
        } else if line.starts_with("Invalid ") || line.contains("stream-ordered") {
            findings.first.get_or_insert_with(|| line.to_owned());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let named = words.windows(2).filter_map(|pair| match pair {
            [word, address] if word.eq_ignore_ascii_case("address") => hexadecimal(address),
            ["to", address] if line.starts_with("Access to ") => hexadecimal(address),
            _ => None,
        });
        findings.addresses.extend(named);
    }
    findings
}

fn hexadecimal(word: &str) -> Option<u64> {
    let digits = word.trim_end_matches([',', '.', ':']).strip_prefix("0x")?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_one_stray_write_is_read() {
        let report = "\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 1 bytes
=========     at poke+0x60
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f24a00003e8 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f24a0000000 of size 1,000 bytes
=========
========= ERROR SUMMARY: 1 error
";
        // The wording depends on the release.
        let other = parse(&report.replace("Address 0x", "Access to 0x"));
        assert_eq!(other, parse(report));
        let findings = parse(report);
        assert_eq!((findings.errors, findings.addresses), (Some(1), vec![0x7f24_a000_03e8]));
        assert_eq!(findings.first.as_deref(), Some("Invalid __global__ write of size 1 bytes"));
    }

    #[test]
    fn a_clean_report_and_one_without_an_end_differ() {
        let clean = parse("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n");
        assert_eq!(clean, Findings { errors: Some(0), ..Findings::default() });
        assert_eq!(parse("========= COMPUTE-SANITIZER\n"), Findings::default());
        assert_eq!(parse("Address 0x12 of the program itself\n"), Findings::default());
    }
}
