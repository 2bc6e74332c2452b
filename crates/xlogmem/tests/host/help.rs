//! The command line as it presents itself: help, completions, manual pages, and what every JSON report has.

use std::process::Command;

use crate::scratch::Scratch;
use crate::support::{assert_refused, commands, json, text, xlogmem};

/// Calls `see` with the help of every command, long and short.
fn for_each_help(path: &[String], see: &mut impl FnMut(&[String], &str)) {
    for flag in ["--help", "-h"] {
        let output = xlogmem().args(path).arg(flag).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{path:?} {flag}");
        let help = text(&output.stdout);
        see(path, help);
        if flag == "--help" {
            for command in commands(help) {
                let longer: Vec<String> = path.iter().cloned().chain([command]).collect();
                for_each_help(&longer, see);
            }
        }
    }
}

#[test]
fn every_help_fits_eighty_columns() {
    let mut seen = Vec::new();
    for_each_help(&[], &mut |path, help| {
        seen.push(path.join(" "));
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{path:?}: {} columns: {line}", line.len());
        }
    });
    for command in ["", "doctor", "ledger", "top", "run handoff", "replay", "bench", "man"] {
        assert!(seen.iter().any(|path| path == command), "{command} is not in {seen:?}");
    }
}

#[test]
fn completions_know_the_commands_and_the_shell_takes_them() {
    let scratch = Scratch::new("completions");
    for (shell, file) in [("bash", "xlogmem.bash"), ("zsh", "_xlogmem"), ("fish", "xlogmem.fish")] {
        let output = xlogmem().args(["completions", shell]).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let script = text(&output.stdout);
        for word in ["doctor", "top", "tenants", "once"] {
            assert!(script.contains(word), "{shell} knows no {word}");
        }
        let mut to_file = xlogmem();
        to_file.args(["completions", shell, "--output"]).arg(scratch.path(""));
        assert_eq!(to_file.output().unwrap().status.code(), Some(0));
        let path = scratch.path(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), script);
        // Only where there is that shell.
        if let Ok(checked) = Command::new(shell).arg("-n").arg(&path).output() {
            assert!(checked.status.success(), "{shell}: {}", text(&checked.stderr));
        }
    }
    let refused = xlogmem().args(["completions", "tcsh"]).output().unwrap();
    assert_refused(&refused, &["tcsh", "bash, zsh or fish"]);
    let nowhere = scratch.path("not/there");
    let refused =
        xlogmem().args(["completions", "bash", "--output"]).arg(&nowhere).output().unwrap();
    assert_refused(&refused, &["--output", "not/there"]);
}

#[test]
fn there_is_a_manual_page_of_every_command() {
    let scratch = Scratch::new("man");
    let output = xlogmem().arg("man").output().unwrap();
    let page = text(&output.stdout);
    assert!(page.contains(".TH xlogmem 1") && page.contains("xlogmem\\-doctor(1)"), "{page}");
    let directory = scratch.path("");
    let written = xlogmem().args(["man", "--output"]).arg(&directory).output().unwrap();
    assert_eq!(written.status.code(), Some(0));
    for name in ["xlogmem.1", "xlogmem-top.1", "xlogmem-run.1", "xlogmem-run-churn.1"] {
        let page = std::fs::read_to_string(scratch.path(name)).unwrap_or_else(|error| {
            panic!("{name}: {error}");
        });
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
    }
    let refused = xlogmem().args(["man", "--output"]).arg(scratch.path("not/there")).output();
    assert_refused(&refused.unwrap(), &["--output", "not/there"]);
}

#[test]
fn every_json_report_has_the_same_envelope() {
    let scratch = Scratch::new("envelope");
    let log = scratch.path("log.xtrace");
    let csv = scratch.path("log.csv");
    let none = scratch.path("ledgers");
    let device = ["--device", "sim"];
    let lines: [Vec<&str>; 9] = [
        vec!["generate", "llm", "--records", "2000", "--output", &log],
        vec!["doctor", "--device", "sim"],
        vec!["ledger", "--ledger", &none],
        vec!["top", "--ledger", &none, "--every", "0.01"],
        vec!["summary", &log],
        vec!["convert", &log, &csv],
        vec!["replay", &log, "--device", "sim"],
        [vec!["run", "handoff", "--rounds", "10"], device.to_vec()].concat(),
        [vec!["bench", "--quick"], device.to_vec()].concat(),
    ];
    for line in lines {
        let output = xlogmem().args(&line).arg("--json").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line:?}: {}", text(&output.stderr));
        let report = json(&output);
        assert!(report["schema"].is_u64(), "{line:?} has no schema: {report}");
        assert_eq!(report["ok"], true, "{line:?}: {report}");
        assert!(report.get("error").is_some_and(|error| error.is_null()), "{line:?}: {report}");
    }
    let missing = scratch.path("missing.xtrace");
    let output = xlogmem().args(["summary", &missing, "--json"]).output().unwrap();
    assert_refused(&output, &["missing.xtrace"]);
}

#[test]
fn sizes_are_read_the_same_everywhere() {
    let scratch = Scratch::new("sizes");
    let log = scratch.path("log.xtrace");
    let made = xlogmem().args(["generate", "llm", "--records", "100", "--output", &log]).output();
    assert_eq!(made.unwrap().status.code(), Some(0));
    let ledger = scratch.path("a.ledger");
    let places: [&[&str]; 5] = [
        &["ledger", "--ledger", &ledger, "--limit"],
        &["replay", &log, "--device", "sim", "--budget"],
        &["run", "churn", "--device", "sim", "--allocations", "10", "--budget"],
        &["run", "churn", "--device", "sim", "--allocations", "10", "--max"],
        &["run", "tenants", "--device", "sim", "--processes", "1", "--rounds", "1", "--budget"],
    ];
    for line in places {
        for bad in ["4G", "-1", "0", "many", "1e99"] {
            let output = xlogmem().args(line).arg(bad).output().unwrap();
            assert_refused(&output, &[bad]);
        }
    }
    // A budget of each notation that lets everything pass.
    for good in ["4GiB", "5120MB", "8e9"] {
        let output = xlogmem().args(places[1]).arg(good).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{good}: {}", text(&output.stderr));
    }
}

/// The sections of a page by the words of their headings, each with its text.
fn sections(page: &str) -> Vec<(Vec<String>, String)> {
    let mut found: Vec<(Vec<String>, String)> = Vec::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let name = heading.split(':').next().unwrap();
            found.push((name.split(' ').map(str::to_owned).collect(), String::new()));
        } else if let Some((_, text)) = found.last_mut() {
            text.push_str(line);
            text.push('\n');
        }
    }
    found
}

/// The long options in a text.
fn options(text: &str) -> std::collections::BTreeSet<String> {
    let starts = text.match_indices("--").filter(|(at, _)| !text[..*at].ends_with('-'));
    let names = starts.map(|(at, _)| {
        let name = text[at + 2..].chars();
        name.take_while(|c| c.is_ascii_lowercase() || *c == '-').collect::<String>()
    });
    names.filter(|name| name.len() > 1 && !name.starts_with('-')).collect()
}

/// The options that a help lists, without what it says of them.
fn listed(help: &str) -> std::collections::BTreeSet<String> {
    let lines = help.lines().map(str::trim_start);
    let lines = lines.filter(|line| line.starts_with("--") || line.starts_with("-o, --"));
    lines.flat_map(|line| options(line.split("  ").next().unwrap())).collect()
}

#[test]
fn every_option_is_in_the_section_of_its_command_and_every_documented_one_is_there() {
    let pages = concat!(
        include_str!("../../../../docs/xlogmem.md"),
        include_str!("../../../../docs/xlogmem-tools.md")
    );
    let sections = sections(pages);
    let mut all = std::collections::BTreeSet::new();
    for_each_help(&[], &mut |path, help| {
        let here = listed(help);
        all.extend(here.iter().cloned());
        let Some(command) = path.last().filter(|_| commands(help).is_empty()) else { return };
        let mut of_command = sections.iter().filter(|(heading, _)| heading.contains(command));
        let (_, own) = of_command.next().unwrap_or_else(|| panic!("{path:?} has no section"));
        let shared = sections.iter().filter(|(heading, _)| match path.len() {
            1 => heading[0] == "JSON",
            _ => heading[0] == "Options",
        });
        let text = shared.fold(own.clone(), |text, (_, shared)| text + shared);
        let mut documented = options(&text);
        // Of every command that has a device, said once for all of them.
        documented.insert("device".to_owned());
        let missing: Vec<_> = here.difference(&documented).collect();
        assert!(missing.is_empty(), "{path:?}: {missing:?} are in no section of it");
    });
    // The options of every command, and `--help` itself.
    all.insert("help".to_owned());
    let documented = options(pages);
    let wrong: Vec<_> = documented.difference(&all).filter(|name| *name != "release").collect();
    assert!(wrong.is_empty(), "{wrong:?} are documented, and no command has them");
    assert!(all.len() > 40 && all.contains("guard") && all.contains("no-verify"), "{all:?}");
}
