//! `xlogmem run join`, `fixpoint` and `sort` as their users meet them: the binary, its output and its exit status.

use std::process::Output;

use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_testing::specs;

const WORKLOADS: [&str; 3] = ["join", "fixpoint", "sort"];

fn run(workload: &str, arguments: &[&str]) -> Output {
    xlogmem().args(["run", workload]).args(arguments).output().unwrap()
}

/// A run that must be good.
fn good(workload: &str, arguments: &[&str]) -> Value {
    let output = run(workload, &[arguments, &["--json"]].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    assert_eq!((&report["ok"], &report["error"]), (&true.into(), &Value::Null));
    assert_eq!(report["workload"], workload);
    assert_eq!(report["runs_verified"], report["runs"]);
    assert_eq!(report["rows_out"], report["rows_expected"]);
    assert_eq!(report["races"].as_array().unwrap().len(), 0);
    assert_eq!((&report["bytes_left"], &report["failed_frees"]), (&0.into(), &0.into()));
    report
}

#[test]
fn every_workload_is_right_on_every_test_device() {
    for workload in WORKLOADS {
        for spec in specs() {
            let report = good(workload, &["--device", &spec, "--rows", "5000", "--repeat", "2"]);
            assert_eq!(report["selection"]["spec"], spec.as_str());
            assert!(report["rows_out"].as_u64().unwrap() > 5000, "{report:#}");
            // Nearly every buffer is used on a stream that did not allocate it.
            assert!(report["waits_inserted"].as_u64().unwrap() > 5, "{report:#}");
            assert!(report["pool"]["grown"].as_u64().unwrap() > 0, "{report:#}");
            assert!(report["rows_per_second"].as_f64().unwrap() > 0.0);
            assert_eq!(report["rounds"].is_null(), workload != "fixpoint");
        }
    }
}

#[test]
fn the_corners_of_rows_streams_and_threads_are_right_too() {
    let device = &specs()[0];
    for workload in WORKLOADS {
        for arguments in [
            ["--rows", "1", "--streams", "1", "--threads", "1", "--resource", "pool"],
            ["--rows", "2", "--streams", "2", "--threads", "3", "--resource", "async"],
            ["--rows", "1024", "--streams", "64", "--threads", "2", "--resource", "pool"],
            ["--rows", "4097", "--streams", "3", "--threads", "4", "--resource", "async"],
        ] {
            good(workload, &[&["--device", device][..], &arguments].concat());
        }
    }
    // A fixpoint goes round more than a few times.
    let report = good("fixpoint", &["--device", device, "--rows", "3000"]);
    assert!(report["rounds"].as_u64().unwrap() > 10, "{report:#}");
}

#[test]
fn a_fixpoint_as_a_graph_is_right_on_every_test_device() {
    for spec in specs() {
        for rows in ["1", "700", "2000"] {
            let arguments =
                ["--graph", "--device", &spec, "--rows", rows, "--repeat", "2", "--json"];
            let output = run("fixpoint", &arguments);
            let report = json(&output);
            assert_eq!(output.status.code(), Some(0), "{report:#}");
            for program in ["graph", "kernels", "exact"] {
                assert_eq!(report[program]["runs_verified"], 2, "{report:#}");
                assert!(report[program]["bytes"].as_u64().unwrap() > 0, "{report:#}");
            }
            assert!(report["recaptures"].as_u64().is_some(), "{report:#}");
            // A batch of rounds is one launch.
            let launches = |program: &str| report[program]["launches"].as_u64().unwrap();
            assert!(launches("graph") * 4 < launches("kernels"), "{report:#}");
            let memory = report["bytes_over_kernels"].as_f64().unwrap();
            assert!((0.95..1.05).contains(&memory), "{report:#}");
            assert_eq!(text(&output.stderr), "");
            let driver = report["driver_bytes"].as_u64().unwrap();
            assert!(driver == 0 || !spec.starts_with("sim"), "{report:#}");
            assert_eq!(report["bytes_left"], 0, "{report:#}");
        }
    }
}

#[test]
fn logical_threads_of_a_seed_are_right_and_repeat() {
    for workload in WORKLOADS {
        let run = || {
            let arguments = ["--device", "sim:9", "--rows", "700", "--threads", "3"];
            let mut report = good(workload, &arguments);
            let fields = report.as_object_mut().unwrap();
            // All but the times.
            fields.retain(|name, _| !name.contains("second"));
            report
        };
        assert_eq!(run(), run());
    }
}

#[test]
fn a_budget_holds_and_one_that_is_too_small_is_exit_status_one() {
    for workload in WORKLOADS {
        let device = &specs()[0];
        let report = good(workload, &["--device", device, "--rows", "20000", "--budget", "64MiB"]);
        assert_eq!(report["budget"], 64 << 20);
        assert!(report["peak_bytes"].as_u64().unwrap() <= 64 << 20);
        let output =
            run(workload, &["--device", device, "--rows", "20000", "--budget", "64KiB", "--json"]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
        let report = json(&output);
        assert_eq!((&report["ok"], &report["bytes_left"]), (&false.into(), &0.into()));
    }
}

#[test]
fn the_text_says_what_was_found_in_eighty_columns() {
    for workload in WORKLOADS {
        let spec = &specs()[0];
        let output = run(workload, &["--device", spec, "--rows", "1e3", "--seed", "4711"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let page = text(&output.stdout);
        assert!(page.ends_with(&format!("{spec}: every result equals the host's\n")), "{page}");
        for part in [
            "4711\n",
            "rate",
            "rows/s",
            "allocations",
            "served from",
            "fragmentation",
            "peak",
            "no limit",
            "elided",
            "verified            3 of 3",
        ] {
            assert!(page.contains(part), "{page} does not have {part}");
        }
        for line in page.lines() {
            assert!(line.chars().count() <= 80, "{line}");
            assert_eq!(line, line.trim_end(), "space at the end of a line");
        }
        for option in ["-h", "--help"] {
            let help = run(workload, &[option]);
            assert_eq!(help.status.code(), Some(0));
            let page = text(&help.stdout);
            assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
        }
    }
}

#[test]
fn a_logged_run_can_be_summarised() {
    let folder = std::env::temp_dir().join(format!("xlogmem-relational-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for workload in ["join", "fixpoint", "sort", "churn"] {
        let log = folder.join(format!("{workload}.xtrace"));
        let log = log.to_str().unwrap();
        let size = match workload {
            "churn" => ["--allocations", "500"],
            _ => ["--rows", "500"],
        };
        let output = run(workload, &[&["--device", "sim:4", "--log", log][..], &size].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let summary = xlogmem().args(["summary", log]).output().unwrap();
        assert_eq!(summary.status.code(), Some(0), "{}", text(&summary.stderr));
        let words = format!("{workload} ");
        let tagged = workload == "churn" || text(&summary.stdout).contains(&words);
        assert!(tagged, "{}", text(&summary.stdout));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    for workload in WORKLOADS {
        for (option, value) in [
            ("--rows", "0"),
            ("--rows", "-5"),
            ("--rows", "1.5"),
            ("--rows", "1e10"),
            ("--rows", "many"),
            ("--streams", "0"),
            ("--streams", "65"),
            ("--threads", "0"),
            ("--repeat", "0"),
            ("--seed", "x"),
            ("--budget", "4 gallons"),
            ("--budget", "0"),
            ("--resource", "fast"),
            ("--log", "/nowhere/a.xtrace"),
            ("--log", "a.txt"),
        ] {
            let assigned = format!("{option}={value}");
            let output = run(workload, &["--device", "sim", &assigned]);
            assert_refused(&output, &[option, value]);
        }
        assert_refused(&run(workload, &["--device", "gpu"]), &["\"gpu\"", "sim:SEED"]);
        let words = ["--resource direct", "tracks no uses", "async or pool"];
        assert_refused(&run(workload, &["--device", "sim", "--resource", "direct"]), &words);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_exit_status_one_and_every_field_is_there() {
    for workload in WORKLOADS {
        let good = good(workload, &["--device", "sim", "--rows", "10"]);
        let output = run(workload, &["--device", "cuda:99", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        let bad = json(&output);
        assert!(bad["error"].as_str().unwrap().contains("cuda:99"), "{bad:#}");
        let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(fields(&good), fields(&bad));
    }
}
