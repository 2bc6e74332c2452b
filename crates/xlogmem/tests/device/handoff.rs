//! `xlogmem run handoff` as its users meet it: the binary, its output and its exit status.

use std::process::Output;

use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_testing::specs;

fn handoff(arguments: &[&str]) -> Output {
    xlogmem().args(["run", "handoff"]).args(arguments).output().unwrap()
}

/// A run that must be good.
fn good(arguments: &[&str]) -> Value {
    let output = handoff(&[arguments, &["--json"]].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    assert_eq!((&report["ok"], &report["error"]), (&true.into(), &Value::Null));
    assert_eq!(report["rounds_verified"], report["rounds"]);
    assert_eq!((&report["rounds_wrong"], &report["first_wrong"]), (&0.into(), &Value::Null));
    assert_eq!(report["races"].as_array().unwrap().len(), 0);
    assert_eq!((&report["bytes_left"], &report["failed_frees"]), (&0.into(), &0.into()));
    report
}

#[test]
fn every_test_device_verifies_every_round() {
    for spec in specs() {
        let report = good(&["--device", &spec, "--rounds", "50", "--rows", "1000"]);
        assert_eq!((&report["schema"], &report["workload"]), (&1.into(), &"handoff".into()));
        assert_eq!(report["selection"]["spec"], spec.as_str());
        assert_eq!((&report["rounds"], &report["rows"]), (&50.into(), &1000.into()));
        // Two inputs, an output and a sum in each round.
        assert_eq!(report["blocks"], 200);
        // In each round the second and the third stream follow another.
        assert!(report["edges"].as_u64().unwrap() >= 50, "{report:#}");
        assert!(report["waits_inserted"].as_u64().unwrap() >= 50, "{report:#}");
        assert!(report["bytes_peak"].as_u64().unwrap() >= 12_000, "{report:#}");
        assert!(report["seconds"].as_f64().unwrap() > 0.0);
        assert!(report["rows_per_second"].as_f64().unwrap() > 0.0);
        assert_eq!(report["driver_calls"].is_u64(), spec.starts_with("sim"), "{report:#}");
    }
}

#[test]
fn the_corners_of_streams_threads_and_rows_are_verified_too() {
    let device = &specs()[0];
    for arguments in [
        ["--streams", "2", "--threads", "1", "--rounds", "20", "--rows", "1"],
        ["--streams", "64", "--threads", "3", "--rounds", "100", "--rows", "33"],
        ["--streams", "3", "--threads", "8", "--rounds", "3", "--rows", "5000"],
        ["--streams", "2", "--threads", "5", "--rounds", "400", "--rows", "7"],
    ] {
        good(&[&["--device", device][..], &arguments].concat());
    }
}

#[test]
fn one_seed_of_the_simulated_device_is_one_run() {
    let run = || {
        let arguments = ["--device", "sim:11", "--rounds", "40", "--rows", "100", "--threads", "3"];
        let mut report = good(&arguments);
        // All but the time.
        let fields = report.as_object_mut().unwrap();
        fields.remove("seconds");
        fields.remove("rows_per_second");
        report
    };
    assert_eq!(run(), run());
}

#[test]
fn the_text_says_what_the_json_says_in_eighty_columns() {
    let spec = &specs()[0];
    let arguments = ["--device", spec, "--rounds", "30", "--rows", "64", "--seed", "4711"];
    let report = good(&arguments);
    let output = handoff(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = text(&output.stdout);
    assert!(page.ends_with(&format!("{spec}: every round verified\n")), "{page}");
    let blocks = format!("blocks              {}\n", report["blocks"]);
    for part in ["30 rounds of 64 rows", "4711\n", "edges", "elided", "driver calls", &blocks] {
        assert!(page.contains(part), "{page} does not have {part}");
    }
    for line in page.lines() {
        assert!(line.chars().count() <= 80, "{line}");
        assert_eq!(line, line.trim_end(), "space at the end of a line");
    }
}

#[test]
fn a_resource_that_tracks_no_uses_is_refused_with_the_one_that_does() {
    let words = ["--resource direct", "tracks no uses", "--resource async"];
    assert_refused(&handoff(&["--resource", "direct", "--device", "sim"]), &words);
    let pooled =
        json(&handoff(&["--resource", "pool", "--device", "sim", "--rounds", "50", "--json"]));
    assert_eq!((&pooled["ok"], &pooled["resource"]), (&true.into(), &"pool".into()), "{pooled:#}");
    for resource in ["fast", ""] {
        let quoted = format!("{resource:?}");
        assert_refused(&handoff(&["--resource", resource]), &["--resource", &quoted, "async"]);
    }
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    for (option, value) in [
        ("--streams", "1"),
        ("--streams", "65"),
        ("--threads", "0"),
        ("--rounds", "0"),
        ("--rows", "0"),
        ("--rows", "268435457"),
        ("--seed", "x"),
    ] {
        assert_refused(&handoff(&["--device", "sim", option, value]), &[option, value, "--help"]);
    }
    assert_refused(&handoff(&["--device", "gpu"]), &["\"gpu\"", "sim:SEED"]);
    assert_refused(&handoff(&["--nonsense"]), &["--nonsense"]);
    assert_refused(&xlogmem().arg("run").output().unwrap(), &["--help"]);
    assert_refused(&xlogmem().args(["run", "marathon"]).output().unwrap(), &["marathon"]);
}

#[test]
fn a_gpu_that_is_not_there_is_exit_status_one_and_every_field_is_there() {
    let good = good(&["--device", "sim", "--rounds", "1", "--rows", "1"]);
    let output = handoff(&["--device", "cuda:99", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    let bad = json(&output);
    assert_eq!(bad["ok"], false);
    assert!(bad["error"].as_str().unwrap().contains("cuda:99"), "{bad:#}");
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&good), fields(&bad));
    let page = handoff(&["--device", "cuda:99"]);
    assert_eq!(page.status.code(), Some(1));
    assert!(text(&page.stdout).contains("cuda:99"));
}

#[test]
fn the_environment_names_the_device_and_help_fits_a_terminal() {
    let mut command = xlogmem();
    command.args(["run", "handoff", "--rounds", "2", "--rows", "4", "--json"]);
    let report = json(&command.env("XLOG_DEVICE", "sim:5").output().unwrap());
    assert_eq!(report["selection"]["spec"], "sim:5");
    assert_eq!(report["selection"]["source"], "environment");
    for arguments in
        [&["run", "--help"][..], &["run", "handoff", "--help"], &["run", "handoff", "-h"]]
    {
        let output = xlogmem().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        let page = text(&output.stdout);
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    }
}

#[test]
fn a_logged_run_can_be_summarised_and_replayed() {
    let folder = std::env::temp_dir().join(format!("xlogmem-handoff-log-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["handoff.xtrace", "handoff.csv"] {
        let log = folder.join(name);
        let log = log.to_str().unwrap();
        good(&[
            "--device",
            "sim:4",
            "--resource",
            "pool",
            "--rounds",
            "50",
            "--rows",
            "1000",
            "--log",
            log,
        ]);
        let summary = xlogmem().args(["summary", log, "--json"]).output().unwrap();
        assert_eq!(summary.status.code(), Some(0), "{}", text(&summary.stderr));
        assert!(text(&summary.stdout).contains("200"), "{}", text(&summary.stdout));
        let arguments = ["replay", log, "--device", "sim", "--resource", "async"];
        let replay = xlogmem().args(arguments).output().unwrap();
        assert_eq!(replay.status.code(), Some(0), "{}", text(&replay.stderr));
    }
    let bad = handoff(&["--device", "sim", "--rounds", "5", "--log", "/tmp/handoff.txt"]);
    assert_refused(&bad, &["--log", "/tmp/handoff.txt", ".xtrace or .csv"]);
    std::fs::remove_dir_all(&folder).unwrap();
}
