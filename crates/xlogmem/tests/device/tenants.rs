//! `xlogmem run tenants` as its users meet it.

#![cfg(target_os = "linux")]

use std::process::Output;

use crate::support::{assert_refused, json, text, xlogmem};

fn tenants(arguments: &[&str]) -> Output {
    xlogmem().args(["run", "tenants"]).args(arguments).output().unwrap()
}

fn device() -> String {
    std::env::var("XLOG_TEST_DEVICE").unwrap_or_else(|_| "sim".to_owned())
}

#[test]
fn every_resource_keeps_the_limit_of_all_processes() {
    for resource in ["async", "pool", "direct"] {
        let device = device();
        let arguments = ["--device", &device, "--resource", resource, "--rounds", "120", "--json"];
        let output = tenants(&arguments);
        let report = json(&output);
        assert_eq!(output.status.code(), Some(0), "{resource}: {report:#}");
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
        assert_eq!((&report["schema"], &report["ok"]), (&1.into(), &true.into()));
        assert_eq!((&report["violations"], &report["left_bytes"]), (&0.into(), &0.into()));
        let number = |field: &str| report[field].as_u64().unwrap();
        assert!(number("highest_bytes") <= number("limit_bytes") && number("samples") > 0);
        let outcomes = report["outcomes"].as_array().unwrap();
        assert_eq!(outcomes.len(), 3);
        for outcome in outcomes {
            assert_eq!((&outcome["wrong"], &outcome["left_bytes"]), (&0.into(), &0.into()));
        }
        let verified: u64 = outcomes.iter().map(|one| one["verified"].as_u64().unwrap()).sum();
        assert!(verified > 0, "{report:#}");
    }
}

#[test]
fn the_text_has_a_row_for_each_process_and_fits_a_terminal() {
    let device = device();
    let output = tenants(&["--device", &device, "--processes", "2", "--rounds", "40"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = text(&output.stdout);
    for part in ["limit of all", "verified", "\n  0 ", "\n  1 ", "\n  all ", "everything came back"]
    {
        assert!(page.contains(part), "{part} is missing in {page}");
    }
    assert!(
        page.lines().all(|line| line.chars().count() <= 80 && line == line.trim_end()),
        "{page}"
    );
}

#[test]
fn a_limit_that_nothing_fits_is_exit_status_one() {
    let output = tenants(&["--device", "sim", "--budget", "1MiB", "--rounds", "5", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["ok"], false);
    assert!(report["error"].as_str().unwrap().contains("raise --budget"), "{report:#}");
    assert_eq!(text(&output.stderr).lines().count(), 1);
}

#[test]
fn cached_memory_of_another_process_is_had_and_a_stopped_one_is_named() {
    let device = device();
    let output = tenants(&["--device", &device, "--pressure", "--json"]);
    let report = json(&output);
    assert_eq!(report["schema"], 1);
    assert_eq!(report["timed"], !device.starts_with("sim"));
    let cases = report["cases"].as_array().unwrap();
    let seen: Vec<_> =
        cases.iter().map(|case| (case["state"].as_str().unwrap(), &case["served"])).collect();
    let (yes, no) = (&true.into(), &false.into());
    assert_eq!(seen, [("idle", yes), ("busy", yes), ("killed", yes), ("stopped", no)]);
    let limit = report["limit_bytes"].as_u64().unwrap();
    for case in cases {
        assert!(case["cached_bytes"].as_u64().unwrap() >= limit / 2, "{case:#}");
        // On a busy GPU a case may take longer than its goal.
        let problem = case["problem"].as_str();
        let is_late = |text: &str| report["timed"] == true && text.starts_with("took ");
        assert!(problem.is_none_or(is_late), "{case:#}");
        assert!(case["milliseconds"].as_f64().unwrap() > 0.0);
    }
    let is_ok = cases.iter().all(|case| case["problem"].is_null());
    assert_eq!(report["ok"], is_ok);
    assert_eq!(output.status.code(), Some(i32::from(!is_ok)), "{report:#}");
    let refusal = cases[3]["refusal"].as_str().unwrap();
    assert!(refusal.contains(" cached (does not answer)"), "{refusal}");
}

#[test]
fn bad_arguments_are_refused_in_one_line_that_names_them() {
    assert_refused(&tenants(&["--budget", "4 apples"]), &["--budget", "4 apples", "4GiB"]);
    assert_refused(&tenants(&["--resource", "Pool"]), &["--resource", "Pool", "\"pool\""]);
    assert_refused(&tenants(&["--device", "gpu"]), &["gpu", "sim:SEED"]);
    assert_refused(&tenants(&["--processes", "0"]), &["0", "--processes"]);
    assert_refused(&tenants(&["--tenants", "65"]), &["65", "--tenants"]);
    assert_refused(&tenants(&["--worker", "1"]), &["--ledger"]);
    let output = tenants(&["--device", "cuda:99"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cuda:99"));
}

#[test]
fn help_shows_examples_and_fits_a_terminal() {
    let output = xlogmem().args(["run", "tenants", "--help"]).output().unwrap();
    let page = text(&output.stdout);
    assert!(page.contains("Examples:") && !page.contains("--worker"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
}
