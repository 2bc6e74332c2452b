//! `xlogmem doctor` as its users meet it: the binary, its output and its exit status.

use std::os::unix::fs::DirBuilderExt;
use std::process::{Output, Stdio};

use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
use xlog_testing::specs;

fn doctor(arguments: &[&str]) -> Output {
    xlogmem().arg("doctor").args(arguments).output().unwrap()
}

#[test]
fn every_test_device_is_described_and_checked() {
    for spec in specs() {
        let output = doctor(&["--device", &spec, "--json"]);
        let report = json(&output);
        assert_eq!(output.status.code(), Some(0), "{report:#}");
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
        assert_eq!(report["schema"], 1);
        assert_eq!(report["ok"], true);
        assert_eq!(report["error"], Value::Null);
        assert_eq!(report["xlog_version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(report["selection"]["spec"], spec.as_str());
        assert_eq!(report["selection"]["source"], "flag");
        let device = &report["device"];
        let simulated = spec.starts_with("sim");
        assert_eq!(device["kind"], if simulated { "simulated" } else { "cuda" });
        assert!(!device["name"].as_str().unwrap().is_empty());
        assert!(device["uuid"].as_str().unwrap().starts_with("GPU-"));
        let (total, free) = (&device["memory_total_bytes"], &device["memory_free_bytes"]);
        assert!(free.as_u64().unwrap() <= total.as_u64().unwrap());
        assert!(device["allocation_alignment_bytes"].as_u64().unwrap() >= 256);
        assert_eq!(report["check"]["ok"], true);
        if !simulated {
            assert!(report["cuda"]["gpu_count"].as_u64().unwrap() > 0);
            assert!(report["cuda"]["driver_api_version"].is_string());
        }
    }
}

#[test]
fn the_json_has_every_field_also_when_a_device_cannot_be_opened() {
    let fields =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let good = json(&doctor(&["--device", "sim", "--json"]));
    let bad = json(&doctor(&["--device", "cuda:99", "--json"]));
    assert_eq!(fields(&good), fields(&bad));
    for part in ["selection", "cuda"] {
        assert_eq!(fields(&good[part]), fields(&bad[part]));
    }
    let device = [
        "kind",
        "ordinal",
        "name",
        "uuid",
        "memory_total_bytes",
        "memory_free_bytes",
        "compute_capability",
        "multiprocessors",
        "async_pools",
        "virtual_memory",
        "granularity_bytes",
        "allocation_alignment_bytes",
        "least_priority",
        "greatest_priority",
    ];
    for field in device {
        assert!(!good["device"][field].is_null(), "{field}");
    }
    assert!(bad["device"].is_null() && bad["check"].is_null());
}

#[test]
fn the_limit_that_rules_and_the_state_of_the_ledger_are_shown() {
    let asked = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = xlogmem();
        command.args(["doctor", "--device", "sim"]).args(arguments);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let report = json(&asked(&[], &["--json"]));
    assert_eq!(report["limit"]["ruled_by"], "device total less reserve");
    assert_eq!(report["limit"]["effective_bytes"], 31_u64 << 30);
    assert_eq!(report["ledger"]["state"], "off");

    let budget = ("XLOG_DEVICE_BUDGET", "25%");
    let report = json(&asked(&[budget], &["--json"]));
    assert_eq!(report["limit"]["ruled_by"], "configuration");
    assert_eq!(report["limit"]["effective_bytes"], 8_u64 << 30);

    let directory = std::env::temp_dir().join(format!("xlogmem-doctor-{}", std::process::id()));
    let place = directory.to_str().unwrap();
    let variables = [budget, ("XLOG_DEVICE_LEDGER", place)];
    let report = json(&asked(&variables, &["--json"]));
    assert_eq!(report["ledger"]["state"], "absent");
    assert_eq!(report["ledger"]["limit_bytes"], 8_u64 << 30);
    assert!(!directory.exists(), "the doctor changes nothing");
    let page = asked(&variables, &[]);
    let page = text(&page.stdout);
    for part in ["8 GiB, by configuration", "sim-0.ledger", "not there yet"] {
        assert!(page.contains(part), "{part} is missing in {page}");
    }

    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("sim-0.ledger"), "nonsense").unwrap();
    let output = asked(&variables, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!((&report["ledger"]["state"], &report["ok"]), (&"refused".into(), &false.into()));
    assert!(report["error"].as_str().unwrap().contains("sim-0.ledger"), "{report:#}");
    std::fs::remove_dir_all(&directory).unwrap();

    let output = asked(&[("XLOG_DEVICE_BUDGET", "lots")], &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("XLOG_DEVICE_BUDGET"), "{}", text(&output.stderr));
}

/// A directory of mode 0700, removed with what is in it.
struct Place(std::path::PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("xlogmem-doctor-{name}-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0).unwrap();
        names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Exit status 1, and an error that has all of `words`.
fn assert_would_be_refused(variables: &[(&str, &str)], words: &[&str]) {
    let mut command = xlogmem();
    command.args(["doctor", "--device", "sim", "--json"]).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let report = json(&output);
    assert_eq!((output.status.code(), &report["ok"]), (Some(1), &false.into()), "{variables:?}");
    let error = report["error"].as_str().unwrap();
    for word in words {
        assert!(error.contains(word), "{variables:?}: {error} does not say {word}");
    }
}

#[test]
fn it_does_not_say_works_where_the_ledger_cannot_be_created() {
    let place = Place::new("ledger");
    let (missing, file) = (place.path("missing/place"), place.path("file"));
    std::fs::write(&file, "").unwrap();
    for named in [&missing, &file, &format!("{file}/place")] {
        assert_would_be_refused(&[("XLOG_DEVICE_LEDGER", named)], &[named]);
    }
    let named = place.path("new");
    let tiny = [("XLOG_DEVICE_LEDGER", named.as_str()), ("XLOG_DEVICE_BUDGET", "1")];
    assert_would_be_refused(&tiny, &["limit", "1 bytes"]);
    assert_eq!(place.names(), ["file"], "something was left behind");
}

#[test]
fn it_does_not_say_works_where_the_ledger_has_no_room() {
    let place = Place::new("full");
    let config = LedgerConfig::new(DeviceKey::new("sim-0").unwrap());
    let config = config.with_directory(&place.0).with_limit(64 << 20);
    let ledger = Ledger::open(config).unwrap();
    let named = place.path("");
    let variables = [("XLOG_DEVICE_LEDGER", named.as_str())];
    ledger.charge(64 << 20).unwrap();
    assert_would_be_refused(&variables, &["fails its check"]);
    std::fs::remove_file(ledger.path()).unwrap();
    assert_would_be_refused(&variables, &["sim-0.ledger", "in use"]);
    drop(ledger);
    let mut command = xlogmem();
    let output = command.args(["doctor", "--device", "sim"]).envs(variables).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(place.names().is_empty(), "{:?}", place.names());
}

#[test]
fn it_does_not_say_works_where_the_log_cannot_be_opened_and_spoils_none() {
    let place = Place::new("log");
    let log = place.path("missing/run.csv");
    assert_would_be_refused(&[("XLOG_DEVICE_LOG", &log)], &[&log]);
    let (existing, fresh) = (place.path("kept.csv"), place.path("fresh.csv"));
    std::fs::write(&existing, "kept\n").unwrap();
    for log in [&existing, &fresh] {
        let mut command = xlogmem();
        command.args(["doctor", "--device", "sim"]).env("XLOG_DEVICE_LOG", log);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "kept\n");
    assert_eq!(place.names(), ["kept.csv"]);
    let writer = xlog_cuda::device_runtime::open_log(existing.as_ref(), 0).unwrap();
    assert_would_be_refused(&[("XLOG_DEVICE_LOG", &existing)], &[&existing]);
    drop(writer);
}

#[test]
fn it_does_not_say_works_where_nothing_can_be_allocated() {
    assert_would_be_refused(&[("XLOG_DEVICE_BUDGET", "1")], &["fails its check"]);
}

#[test]
fn the_text_says_what_the_json_says_in_eighty_columns() {
    for spec in specs() {
        let report = json(&doctor(&["--device", &spec, "--json"]));
        let output = doctor(&["--device", &spec]);
        assert_eq!(output.status.code(), Some(0));
        let page = text(&output.stdout);
        for pointer in ["/selection/spec", "/device/name", "/device/uuid", "/xlog_version"] {
            let value = report.pointer(pointer).unwrap().as_str().unwrap();
            assert!(page.contains(value), "{page} does not have {pointer} = {value}");
        }
        assert!(page.contains("granularity") && page.contains("GPUs"), "{page}");
        assert!(page.ends_with(&format!("{spec} works\n")), "{page}");
        for line in page.lines() {
            // A path is not broken, however long it is.
            assert!(line.chars().count() <= 80 || line.contains('/'), "{line}");
            assert_eq!(line, line.trim_end(), "space at the end of a line");
        }
    }
}

#[test]
fn without_flag_and_environment_it_takes_a_gpu_or_says_that_there_is_none() {
    let output = doctor(&["--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    let gpus = report["cuda"]["gpu_count"].as_u64().unwrap();
    if gpus > 0 {
        assert_eq!(report["selection"]["source"], "gpu");
        assert_eq!(report["selection"]["spec"], "cuda:0");
    } else {
        assert_eq!(report["selection"]["source"], "fallback");
        assert_eq!(report["selection"]["spec"], "sim");
        assert!(report["selection"]["reason"].as_str().unwrap().contains("no GPU"));
        let missing = &report["missing"][0];
        assert!(!missing["what"].as_str().unwrap().is_empty());
        assert!(!missing["remedy"].as_str().unwrap().is_empty());
        let page = doctor(&[]);
        assert!(text(&page.stdout).contains("no GPU"), "{}", text(&page.stdout));
        assert!(text(&page.stdout).contains("how to get it"));
    }
}

#[test]
fn the_environment_decides_and_the_flag_decides_over_it() {
    let asked = |arguments: &[&str]| {
        let mut command = xlogmem();
        command.args(["doctor", "--json"]).args(arguments).env("XLOG_DEVICE", "sim:7");
        json(&command.output().unwrap())["selection"].clone()
    };
    let selection = asked(&[]);
    assert_eq!(
        (&selection["spec"], &selection["source"]),
        (&"sim:7".into(), &"environment".into())
    );
    assert!(selection["reason"].as_str().unwrap().contains("XLOG_DEVICE"));
    let selection = asked(&["--device", "sim:8"]);
    assert_eq!((&selection["spec"], &selection["source"]), (&"sim:8".into(), &"flag".into()));
}

#[test]
fn a_bad_spec_is_refused_in_one_line_that_names_it() {
    for spec in ["cuda:x", "sim:-1", "", "gpu", "cuda:", " sim", "sim:99999999999999999999"] {
        let quoted = format!("{spec:?}");
        assert_refused(&doctor(&["--device", spec]), &[&quoted, "sim:SEED", "cuda:N"]);
        assert_refused(&doctor(&["--device", spec, "--json"]), &[&quoted]);
        let output = xlogmem().arg("doctor").env("XLOG_DEVICE", spec).output().unwrap();
        assert_refused(&output, &[&quoted, "XLOG_DEVICE"]);
    }
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    for arguments in [
        &["doctor", "--devise", "sim"][..],
        &["doctor", "--device"],
        &["doctor", "extra"],
        &["doctor", "--json", "--json"],
        &["surgeon"],
        &["--nonsense"],
        &[],
    ] {
        assert_refused(&xlogmem().args(arguments).output().unwrap(), &["xlogmem", "--help"]);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_exit_status_one() {
    for arguments in [&["--device", "cuda:99"][..], &["--device", "cuda:99", "--json"]] {
        let output = doctor(arguments);
        assert_eq!(output.status.code(), Some(1));
        let error = text(&output.stderr);
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains("cuda:99"), "{error}");
        assert!(text(&output.stdout).contains("cuda:99"));
    }
    let report = json(&doctor(&["--device", "cuda:99", "--json"]));
    assert_eq!(report["ok"], false);
    assert!(report["error"].as_str().unwrap().contains("cuda:99"));
}

#[test]
fn help_and_version_go_to_standard_output_and_fit_a_terminal() {
    for arguments in [&["--help"][..], &["doctor", "--help"], &["-h"], &["--version"]] {
        let output = xlogmem().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty());
        let page = text(&output.stdout);
        assert!(page.lines().count() >= 1 && page.lines().all(|line| line.chars().count() <= 80));
    }
    assert!(text(&xlogmem().arg("--help").output().unwrap().stdout).contains("doctor"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = xlogmem()
        .args(["doctor", "--device", "sim"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}
