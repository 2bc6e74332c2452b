//! `xlogmem ledger` as its users meet it: the binary, its output and its exit status.

#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};

const MIB: u64 = 1 << 20;

/// A private directory, removed with what is in it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("xlogmem-ledger-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        Self(path)
    }

    fn ledger(&self, key: &str, limit: u64) -> Ledger {
        let config = LedgerConfig::new(DeviceKey::new(key).unwrap()).with_name("holder");
        Ledger::open(config.with_directory(&self.0).with_limit(limit).with_chunk(0)).unwrap()
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn ledger(place: &Path, arguments: &[&str]) -> Output {
    xlogmem().arg("ledger").arg("--ledger").arg(place).args(arguments).output().unwrap()
}

#[test]
fn where_there_is_no_ledger_it_says_so_and_that_is_no_failure() {
    let place = Place::new("none");
    for path in
        [place.path().to_owned(), place.path().join("absent"), place.path().join("a.ledger")]
    {
        let output = ledger(&path, &[]);
        assert_eq!(output.status.code(), Some(0));
        let said = text(&output.stdout);
        assert!(
            said.starts_with("no ledger in") && said.contains(path.to_str().unwrap()),
            "{said}"
        );
        let report = json(&ledger(&path, &["--json"]));
        assert_eq!((&report["ok"], &report["ledgers"]), (&true.into(), &Value::Array(Vec::new())));
    }
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "looking creates nothing");
}

#[test]
fn it_shows_who_holds_what_by_flag_and_by_environment() {
    let place = Place::new("holders");
    let (one, two) = (place.ledger("GPU-one", 64 * MIB), place.ledger("GPU-two", MIB));
    one.charge(16 * MIB).unwrap();
    let report = json(&ledger(place.path(), &["--json"]));
    assert_eq!(report["schema"], 1);
    let first = &report["ledgers"][0];
    assert_eq!(first["device"], "GPU-one");
    assert_eq!(first["limit_bytes"], 64 * MIB);
    assert_eq!(
        (&first["used_bytes"], &first["free_bytes"]),
        (&(16 * MIB).into(), &(48 * MIB).into())
    );
    let slot = &first["slots"][0];
    assert_eq!((&slot["pid"], &slot["name"]), (&std::process::id().into(), &"holder".into()));
    assert_eq!((&slot["alive"], &slot["used_bytes"]), (&true.into(), &(16 * MIB).into()));
    assert_eq!(report["ledgers"][1]["device"], "GPU-two");

    let page = ledger(place.path(), &[]);
    let page = text(&page.stdout);
    for part in ["GPU-one", "64 MiB", "16 MiB", "holder", "2 ledgers"] {
        assert!(page.contains(part), "{part} is missing in {page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= 80 && line == line.trim_end()));

    let mut command = xlogmem();
    command.args(["ledger", "--json"]).env("XLOG_DEVICE_LEDGER", one.path());
    let report = json(&command.output().unwrap());
    assert_eq!(report["ledgers"].as_array().unwrap().len(), 1);
    drop(two);
}

#[test]
fn the_quota_of_a_process_is_changed_while_it_runs_and_shown() {
    let place = Place::new("quotas");
    let (one, two) = (place.ledger("GPU-one", 64 * MIB), place.ledger("GPU-two", 32 * MIB));
    let process = std::process::id().to_string();
    let change = |path: &Path, rest: &[&str]| {
        let arguments: Vec<&str> = ["--process", &process].iter().chain(rest).copied().collect();
        let output = ledger(path, &arguments);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    // In every ledger of the folder; a share is of each one's limit.
    let page =
        change(place.path(), &["--quota", "25%", "--guarantee", "4MiB", "--quota-name", "job 7"]);
    assert!(page.contains("quota (job 7): at most 16 MiB, 4 MiB guaranteed"), "{page}");
    let quota = |ledger: &Ledger| ledger.quota().unwrap();
    assert_eq!((quota(&one).limit, quota(&two).limit), (Some(16 * MIB), Some(8 * MIB)));
    one.charge(16 * MIB).unwrap();
    assert!(one.charge(1).is_err());
    // What is not given stays.
    change(one.path(), &["--quota", "none"]);
    assert_eq!((quota(&one).limit, quota(&one).guaranteed), (None, 4 * MIB));
    assert_eq!(quota(&two).limit, Some(8 * MIB));
    one.charge(40 * MIB).unwrap();
    change(one.path(), &["--quota", "20MiB", "--guarantee", "none"]);
    assert!(one.charge(1).is_err(), "56 MiB are in use");
    let shown = json(&ledger(one.path(), &["--json"]));
    let slot = &shown["ledgers"][0]["slots"][0];
    assert_eq!((&slot["quota_bytes"], &slot["guaranteed_bytes"]), (&(20 * MIB).into(), &0.into()));
    assert_eq!(slot["quota_name"], "job 7");
}

#[test]
fn a_quota_that_cannot_be_set_is_refused_with_the_reason() {
    let place = Place::new("no-quotas");
    let one = place.ledger("GPU-one", 64 * MIB);
    let process = std::process::id().to_string();
    let refused = |arguments: &[&str], part: &str| {
        assert_refused(&ledger(place.path(), arguments), &[part]);
    };
    refused(&["--process", "1", "--quota", "1MiB"], "no living process of that id");
    refused(&["--process", &process], "needs --quota, --guarantee or --quota-name");
    refused(&["--process", &process, "--quota", "much"], "--quota");
    refused(&["--process", &process, "--guarantee", "65MiB"], "cannot be guaranteed");
    refused(
        &["--process", &process, "--quota", "1MiB", "--guarantee", "2MiB"],
        "at most the quota",
    );
    refused(&["--quota", "1MiB"], "--process");
    assert!(one.quota().unwrap().is_empty());
}

#[test]
fn what_the_dead_left_is_shown_and_reclaimed_on_request() {
    let place = Place::new("dead");
    let keeper = place.ledger("gpu", 512 * MIB);
    // A process that holds memory and is killed.
    let mut child = xlogmem()
        .args(["run", "tenants", "--device", "sim", "--processes", "1", "--tenants", "1"])
        .args(["--rounds", "100000000", "--budget", "512MiB", "--worker", "0", "--ledger"])
        .arg(keeper.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It holds something once it speaks.
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();

    let report = json(&ledger(keeper.path(), &["--json"]));
    let slots = report["ledgers"][0]["slots"].as_array().unwrap();
    let dead: Vec<_> = slots.iter().filter(|slot| slot["alive"] == false).collect();
    assert_eq!(dead.len(), 1, "{report:#}");
    assert!(text(&ledger(keeper.path(), &[]).stdout).contains("dead"));
    assert!(dead[0]["used_bytes"].as_u64().unwrap() > 0);

    let report = json(&ledger(keeper.path(), &["--reclaim", "--json"]));
    let found = &report["ledgers"][0];
    assert_eq!(found["reclaimed"]["slots"], 1, "{report:#}");
    assert!(found["reclaimed"]["bytes"].as_u64().unwrap() > 0);
    assert_eq!((&found["used_bytes"], &found["free_bytes"]), (&0.into(), &(512 * MIB).into()));
    assert_eq!(found["slots"].as_array().unwrap().len(), 1, "the keeper alone");
}

#[test]
fn the_limit_of_all_is_set_and_a_named_file_is_created() {
    let place = Place::new("limit");
    let path = place.path().join("team.ledger");
    let report = json(&ledger(&path, &["--limit", "64MiB", "--json"]));
    assert_eq!(report["ledgers"][0]["limit_bytes"], 64 * MIB);
    assert_eq!(report["ledgers"][0]["slots"].as_array().unwrap().len(), 0);
    let report = json(&ledger(&path, &["--limit", "1GiB", "--json"]));
    assert_eq!(report["ledgers"][0]["limit_bytes"], 1024 * MIB);
}

#[test]
fn watching_prints_once_per_look() {
    let place = Place::new("watch");
    let _held = place.ledger("gpu", MIB);
    let output = ledger(place.path(), &["--watch", "--count", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for line in lines {
        let report: Value = serde_json::from_str(line).unwrap();
        assert_eq!(report["ledgers"][0]["device"], "gpu");
    }
}

#[test]
fn a_damaged_ledger_is_exit_status_one_and_does_not_hide_the_others() {
    let place = Place::new("damaged");
    let _good = place.ledger("good", MIB);
    std::fs::write(place.path().join("bad.ledger"), "nonsense").unwrap();
    let output = ledger(place.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["ok"], false);
    assert!(report["ledgers"][0]["error"].as_str().unwrap().contains("bad.ledger"));
    assert_eq!(report["ledgers"][1]["device"], "good");
    assert_eq!(text(&output.stderr).lines().count(), 1);
    // Named by itself it cannot be looked at at all.
    assert_refused(&ledger(&place.path().join("bad.ledger"), &[]), &["bad.ledger"]);
}

#[test]
fn bad_arguments_are_refused_in_one_line_that_names_them() {
    let place = Place::new("refused");
    assert_refused(&ledger(&place.path().join("a b.ledger"), &[]), &["a b.ledger", "device key"]);
    assert_refused(&ledger(place.path(), &["--limit", "1GiB"]), &["--limit", "directory"]);
    let file = place.path().join("a.ledger");
    assert_refused(&ledger(&file, &["--limit", "4 apples"]), &["4 apples", "4GiB"]);
    assert_refused(&ledger(&file, &["--limit", "50%"]), &["50%", "32GiB"]);
    assert_refused(&ledger(&file, &["--count", "2"]), &["--watch"]);
    let mut command = xlogmem();
    command.arg("ledger").env("XLOG_DEVICE_LEDGER", "here");
    assert_refused(&command.output().unwrap(), &["XLOG_DEVICE_LEDGER", "here", "absolute"]);
}

#[test]
fn help_shows_examples_and_fits_a_terminal() {
    let output = xlogmem().args(["ledger", "--help"]).output().unwrap();
    let page = text(&output.stdout);
    assert!(page.contains("Examples:") && page.contains("xlogmem ledger --reclaim"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
}
