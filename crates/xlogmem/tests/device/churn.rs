//! `xlogmem run churn` as its users meet it.

use crate::scratch::{bad, good, page, run};
use crate::support::assert_refused;
use serde_json::Value;
use xlog_testing::specs;

const WORKLOADS: [&str; 3] = ["rmm-random", "small-blocks", "threads"];

fn churn(arguments: &[&str]) -> Value {
    let report = good(&[&["run", "churn"], arguments].concat());
    assert_eq!((&report["blocks_wrong"], &report["overlaps"]), (&0.into(), &0.into()));
    assert_eq!((&report["bytes_left"], &report["frees"]), (&0.into(), &report["allocations"]));
    assert_eq!(report["races"].as_array().unwrap().len(), 0);
    report
}

#[test]
fn every_workload_is_verified_by_every_resource_on_every_test_device() {
    for spec in specs() {
        for workload in WORKLOADS {
            for resource in ["direct", "async", "pool"] {
                let report = churn(&[
                    "--device",
                    &spec,
                    "--workload",
                    workload,
                    "--resource",
                    resource,
                    "--allocations",
                    "60",
                    "--max",
                    "64KiB",
                    "--streams",
                    "3",
                ]);
                assert_eq!((&report["schema"], &report["workload"]), (&1.into(), &workload.into()));
                assert_eq!(report["blocks_verified"], report["allocations"]);
                assert_eq!(report["failures"], 0);
                assert!(report["reserved_ratio"].as_f64().unwrap() >= 1.0, "{report:#}");
                assert_eq!(report["pool"].is_object(), resource == "pool");
                assert_eq!(report["check"].is_string(), workload != "threads");
                assert_eq!(report["check"], report["check_expected"]);
            }
        }
    }
}

#[test]
fn rmms_workload_has_the_published_peak_and_check_value() {
    let report = churn(&["--device", &specs()[0], "--allocations", "1000", "--max", "1MiB"]);
    assert_eq!(report["check"], "0a01169c41d5b10b");
    assert_eq!(report["peak_requested_bytes"], 323_760_572);
    assert_eq!(report["allocations"], 1000);
    let pool = &report["pool"];
    let served: u64 = ["magazine", "own", "covered", "completed", "grown", "waited"]
        .iter()
        .map(|path| pool[path].as_u64().unwrap())
        .sum();
    assert_eq!(served, 1000, "{pool:#}");
    assert!((0.0..=1.0).contains(&pool["fragmentation_at_peak"].as_f64().unwrap()));
    assert!(pool["free_ranges_at_end"].as_u64().unwrap() > 0, "looked at before all is freed");
}

#[test]
fn a_budget_makes_requests_fail_and_the_workload_goes_on() {
    for workload in ["rmm-random", "threads"] {
        let report = churn(&[
            "--device",
            "sim",
            "--workload",
            workload,
            "--allocations",
            "300",
            "--budget",
            "8MiB",
        ]);
        assert!(report["failures"].as_u64().unwrap() > 0, "{report:#}");
        assert!(report["peak_requested_bytes"].as_u64().unwrap() <= 8 << 20, "{report:#}");
        assert_eq!(report["check_expected"], Value::Null);
    }
    let few = ["run", "churn", "--device", "sim", "--max", "2GiB", "--allocations", "10"];
    let text = run(&[&few[..], &["--budget", "1GiB"]].concat());
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains(" of 20 requests were refused"), "{text}");
    let words = ["no request was served"];
    bad(&["run", "churn", "--device", "sim", "--allocations", "10", "--budget", "1"], &words);
}

#[test]
fn one_seed_of_the_simulated_device_is_one_churn() {
    let run = |seed: &str| {
        let mut report = churn(&[
            "--device",
            "sim:5",
            "--workload",
            "threads",
            "--allocations",
            "300",
            "--seed",
            seed,
            "--sizes",
            "log-uniform",
        ]);
        // All but the time.
        let fields = report.as_object_mut().unwrap();
        for field in ["seconds", "allocate_nanos", "free_nanos"] {
            fields.remove(field);
        }
        report
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1")["peak_requested_bytes"], run("2")["peak_requested_bytes"]);
}

#[test]
fn without_verification_nothing_is_claimed_of_the_blocks() {
    let arguments = ["run", "churn", "--device", "sim", "--allocations", "50", "--no-verify"];
    let report = good(&arguments);
    assert_eq!((&report["verify"], &report["blocks_verified"]), (&false.into(), &0.into()));
    assert!(page(&arguments, 0).ends_with("the blocks were not looked at\n"));
    let text = page(&[&arguments[..6], &["--verify"]].concat(), 0);
    assert!(text.ends_with("sim: every block verified\n"), "{text}");
    for part in ["served from", "fragmentation", "peak reserved", "check value", "50 blocks"] {
        assert!(text.contains(part), "{text} does not have {part}");
    }
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    let churn =
        |arguments: &[&str]| run(&[&["run", "churn", "--device", "sim"], arguments].concat());
    for (arguments, words) in [
        (["--workload", "dance"], &["--workload", "\"dance\"", "small-blocks"][..]),
        (["--resource", "fast"], &["--resource", "\"fast\"", "pool"]),
        (["--sizes", "odd"], &["--sizes", "\"odd\"", "log-uniform"]),
        (["--max", "0"], &["--max", "\"0\""]),
        (["--max", "big"], &["--max", "\"big\"", "512MB"]),
        (["--budget", "-1"], &["--budget"]),
        (["--allocations", "0"], &["--allocations", "0"]),
        (["--streams", "65"], &["--streams", "65"]),
        (["--threads", "0"], &["--threads", "0"]),
        (["--threads", "4"], &["--threads", "--workload threads"]),
        (["--seed", "x"], &["--seed", "x"]),
    ] {
        assert_refused(&churn(&arguments), words);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_exit_status_one_and_every_field_is_there() {
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let good = churn(&["--device", "sim", "--allocations", "5"]);
    let failed = bad(&["run", "churn", "--device", "cuda:99"], &["cuda:99"]);
    assert_eq!(fields(&good), fields(&failed));
}
