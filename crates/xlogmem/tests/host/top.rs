//! `xlogmem top` as its users meet it: one picture, and a terminal that is given back as it was.

#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, LedgerSetting, ResourceKind, RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig, LedgerView, Quota};
use xlog_testing::left_out;

const MIB: u64 = 1 << 20;

/// A private directory, removed with what is in it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("xlogmem-top-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        Self(path)
    }

    fn ledger(&self, name: &str) -> Ledger {
        let config = LedgerConfig::new(DeviceKey::new("sim-one").unwrap()).with_name(name);
        Ledger::open(config.with_directory(&self.0).with_limit(64 * MIB).with_chunk(0)).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn top(place: &Path, arguments: &[&str]) -> Output {
    xlogmem().arg("top").arg("--ledger").arg(place).args(arguments).output().unwrap()
}

#[test]
fn one_picture_has_bytes_peaks_and_rates_sorted_as_asked() {
    let place = Place::new("once");
    let (small, large) = (place.ledger("small"), place.ledger("large"));
    small.charge(8 * MIB).unwrap();
    large.charge(16 * MIB).unwrap();
    small.charge(24 * MIB).unwrap();
    small.release(24 * MIB).unwrap();
    let picture = json(&top(&place.0, &["--json", "--every", "0.05"]));
    assert_eq!((&picture["schema"], &picture["ok"]), (&1.into(), &true.into()));
    assert!(picture["seconds"].as_f64().unwrap() >= 0.05);
    let device = &picture["devices"][0];
    assert_eq!(
        (&device["device"], &device["limit_bytes"]),
        (&"sim-one".into(), &(64 * MIB).into())
    );
    let rows = device["processes"].as_array().unwrap();
    let shown: Vec<_> = rows.iter().map(|row| (&row["name"], &row["used_bytes"])).collect();
    let (eight, sixteen) = ((8 * MIB).into(), (16 * MIB).into());
    assert_eq!(shown, [(&"large".into(), &sixteen), (&"small".into(), &eight)]);
    assert_eq!(rows[1]["peak_bytes"], 32 * MIB);
    assert_eq!(rows[0]["bytes_per_second"], 0.0);
    assert_eq!(rows[0]["pid"], std::process::id());

    let page = top(&place.0, &["--once", "--every", "0.05", "--sort", "peak"]);
    assert_eq!(page.status.code(), Some(0));
    let page = text(&page.stdout);
    let at = |word: &str| page.find(word).unwrap_or_else(|| panic!("no {word} in\n{page}"));
    assert!(at("small") < at("large"), "{page}");
    assert!(page.contains("38 % of 64 MiB"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
}

#[test]
fn quotas_have_a_column_where_a_process_has_one() {
    let place = Place::new("quotas");
    let (one, two) = (place.ledger("one"), place.ledger("two"));
    one.charge(8 * MIB).unwrap();
    two.charge(4 * MIB).unwrap();
    let page = |place: &Path| text(&top(place, &["--once", "--every", "0.01"]).stdout).to_owned();
    let heading =
        |page: &str| page.lines().any(|line| line.contains("pid") && line.contains("limit"));
    assert!(!heading(&page(&place.0)), "no process has a quota");
    let quota = Quota::limited_to(16 * MIB).with_guaranteed(12 * MIB).with_name("job 7");
    one.set_quota(&quota).unwrap();
    let shown = page(&place.0);
    assert!(heading(&shown), "{shown}");
    assert!(
        shown.lines().any(|line| line.contains("16 MiB") && line.contains("one [job 7]")),
        "{shown}"
    );
    assert!(shown.contains("4 MiB kept free for guaranteed shares"), "{shown}");
    assert!(
        shown.contains("caches of frameworks, which no other process gets on request"),
        "{shown}"
    );
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    let rows = json(&top(&place.0, &["--json", "--every", "0.01"]));
    let row = &rows["devices"][0]["processes"][0];
    assert_eq!(
        (&row["quota_bytes"], &row["guaranteed_bytes"]),
        (&(16 * MIB).into(), &(12 * MIB).into())
    );
    assert_eq!(row["quota_name"], "job 7");
}

/// The driver's management library, as far as `top` uses it: one GPU, whose processes and bytes come from the environment.
const FAKE_NVML: &str = r#"
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
static unsigned long long number(const char *name) { return strtoull(getenv(name), 0, 10); }
int nvmlInit_v2(void) { return getenv("FAKE_NVML_FAILS") ? 999 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) { *card = &free; return strcmp(uuid, "GPU-fake") ? 6 : 0; }
int nvmlDeviceGetMemoryInfo(void *card, unsigned long long *memory) { memory[0] = 1ull << 36; memory[2] = number("FAKE_NVML_USED"); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, Process *out) {
    unsigned needed = 70;
    if (*count < needed) { *count = needed; return 7; }
    *count = needed;
    memset(out, 0, needed * sizeof *out);
    for (unsigned i = 0; i < needed; i++) { out[i].pid = 4000000 + i; out[i].used = ~0ull; }
    out[69].pid = number("FAKE_NVML_PID");
    out[69].used = number("FAKE_NVML_BYTES");
    return 0;
}
"#;

#[test]
fn contexts_and_modules_are_shown_apart_where_the_driver_tells() {
    let place = Place::new("contexts");
    let fake = place.0.join("fake");
    std::fs::create_dir_all(&fake).unwrap();
    std::fs::write(fake.join("nvml.c"), FAKE_NVML).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(fake.join("libnvidia-ml.so.1"));
    match compiler.arg(fake.join("nvml.c")).status() {
        Ok(status) => assert!(status.success()),
        Err(error) => return left_out("contexts of processes in top", &format!("cc: {error}")),
    }
    let ledgers = place.0.join("ledgers");
    let config = LedgerConfig::new(DeviceKey::new("GPU-fake").unwrap()).with_name("train");
    let config = config.with_directory(&ledgers).with_limit(640 * MIB).with_chunk(0);
    let (one, two) = (Ledger::open(config.clone()).unwrap(), Ledger::open(config).unwrap());
    one.charge(64 * MIB).unwrap();
    two.charge(32 * MIB).unwrap();
    let run = |arguments: &[&str], environment: &[(&str, &str)]| {
        let mut command = xlogmem();
        command.args(["top", "--ledger"]).arg(&ledgers).args(["--every", "0.01"]);
        command.args(arguments).env("LD_LIBRARY_PATH", &fake);
        command.env("FAKE_NVML_PID", std::process::id().to_string());
        command.env("FAKE_NVML_BYTES", (512 * MIB).to_string());
        command.env("FAKE_NVML_USED", (700 * MIB).to_string());
        command.envs(environment.iter().copied()).output().unwrap()
    };
    let picture = json(&run(&["--json"], &[]));
    let device = &picture["devices"][0];
    assert_eq!(device["card_used_bytes"], 700 * MIB);
    assert_eq!(device["uncounted_bytes"], (700 - 96) * MIB);
    let contexts: Vec<_> =
        device["processes"].as_array().unwrap().iter().map(|row| &row["context_bytes"]).collect();
    // The process has two entries: what is not counted is shown once.
    assert_eq!(contexts, [&Value::from((512 - 96) * MIB), &Value::Null]);
    let page = run(&["--once"], &[]);
    let page = text(&page.stdout);
    assert!(page.contains("contexts and modules 416 MiB, not counted"), "{page}");
    assert!(page.contains("700 MiB in use on the GPU, 604 MiB not counted"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    // A process that the driver does not list, a library that does not work, and none at all.
    let unlisted = json(&run(&["--json"], &[("FAKE_NVML_PID", "4000069")]));
    let without = [
        json(&run(&["--json"], &[("FAKE_NVML_FAILS", "1")])),
        json(&run(&["--json"], &[("LD_LIBRARY_PATH", "/nonexistent")])),
    ];
    assert_eq!(unlisted["devices"][0]["processes"][0]["context_bytes"], Value::Null);
    for picture in without {
        assert_eq!(picture["devices"][0]["processes"][0]["context_bytes"], Value::Null);
        assert_eq!(picture["devices"][0]["card_used_bytes"], Value::Null);
    }
}

/// By how much the ledger grows at a time.
const STEP: u64 = 64 << 10;

#[test]
fn a_rate_is_the_growth_between_two_looks() {
    let place = Place::new("rate");
    let ledger = place.ledger("grower");
    // No test can say when the process takes its two looks: the ledger grows in equal steps until it has ended, and what grew between
    // the looks is a number of steps. Runs whose steps all lie outside of the two are repeated.
    let grown = |_| {
        let mut child = xlogmem()
            .args(["top", "--json", "--every", "0.3", "--ledger"])
            .arg(&place.0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut steps = 0;
        while child.try_wait().unwrap().is_none() {
            if ledger.charge(STEP).is_ok() {
                steps += 1;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        ledger.release(steps * STEP).unwrap();
        let picture = json(&child.wait_with_output().unwrap());
        let row = &picture["devices"][0]["processes"][0];
        let rate = row["bytes_per_second"].as_f64().unwrap();
        let grown = rate * picture["seconds"].as_f64().unwrap() / STEP as f64;
        assert!((grown - grown.round()).abs() < 1e-3, "{grown} steps: {picture:#}");
        assert!((0.0..=steps as f64).contains(&grown.round()), "{grown} of {steps}: {picture:#}");
        grown.round() as u64
    };
    assert!((0..100).map(grown).any(|steps| steps > 0), "no growth was seen");
}

/// Holds memory of the ledger in this directory until its input ends. A process of another test.
#[test]
#[ignore = "a process that other tests start"]
fn child_holds_memory() {
    let Some(directory) = std::env::var_os("XLOGMEM_TEST_LEDGER") else { return };
    let config = LedgerConfig::new(DeviceKey::new("sim-one").unwrap()).with_name("child");
    let ledger = Ledger::open(config.with_directory(directory).with_chunk(0)).unwrap();
    ledger.charge(4 * MIB).unwrap();
    println!("\nholding");
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn what_a_killed_process_left_is_neither_use_nor_pressure() {
    let place = Place::new("killed");
    let creator = place.ledger("creator");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "top::child_holds_memory"])
        .env("XLOGMEM_TEST_LEDGER", &place.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "holding"));
    assert!(creator.charge(61 * MIB).is_err(), "which sets the pressure word");
    child.kill().unwrap();
    child.wait().unwrap();
    let device = json(&top(&place.0, &["--json", "--every", "0.02"]))["devices"][0].clone();
    assert_eq!((&device["dead_bytes"], &device["pressure"]), (&(4 * MIB).into(), &false.into()));
    let page = top(&place.0, &["--once", "--every", "0.02"]);
    let page = text(&page.stdout);
    for part in [" 0 % of 64 MiB", "4 MiB left by dead processes", "child (dead)"] {
        assert!(page.contains(part), "{part} is missing in {page}");
    }
    assert!(!page.contains("under pressure"), "{page}");
}

#[test]
fn processes_are_seen_while_they_live() {
    let place = Place::new("live");
    let _creator = place.ledger("creator");
    let mut children: Vec<_> = (0..2)
        .map(|_| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "--nocapture", "top::child_holds_memory"])
                .env("XLOGMEM_TEST_LEDGER", &place.0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let said = lines.by_ref().map_while(Result::ok).find(|line| line == "holding");
            assert!(said.is_some(), "a child ended early");
            (child, lines)
        })
        .collect();
    let rows = || {
        let picture = json(&top(&place.0, &["--json", "--every", "0.02", "--sort", "pid"]));
        picture["devices"][0]["processes"].as_array().cloned().unwrap_or_default()
    };
    let seen = rows();
    for (child, _) in &children {
        let row = seen.iter().find(|row| row["pid"] == child.id()).unwrap();
        assert_eq!((&row["name"], &row["used_bytes"]), (&"child".into(), &(4 * MIB).into()));
    }
    for (child, _) in &mut children {
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(rows().len(), 1, "only the creator is left");
}

/// Holds memory under two tags until it is killed. A process of another test.
#[test]
#[ignore = "a process that other tests start"]
fn child_holds_tags() {
    let Some(ledger) = std::env::var_os("XLOGMEM_TEST_LEDGER") else { return };
    let first = std::env::var("XLOGMEM_TEST_TAG").unwrap();
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let config = RuntimeConfig::default().with_resource(ResourceKind::Pool);
    let config = config.with_ledger(LedgerSetting::File(ledger.into()));
    let runtime = XlogDeviceRuntime::with_config(device, &config).unwrap();
    let hold = |bytes: u64, tag: &str| {
        runtime.allocate(bytes as usize, StreamId::DEFAULT, AllocTag::intern(tag)).unwrap()
    };
    let blocks = [hold(3 * MIB, &first), hold(MIB, "scratch"), hold(2 * MIB, "gone")];
    let [first, scratch, gone] = blocks;
    runtime.deallocate(gone).unwrap();
    println!("\nholding");
    let _ = std::io::stdin().read_line(&mut String::new());
    runtime.deallocate(first).unwrap();
    runtime.deallocate(scratch).unwrap();
}

#[test]
fn tags_are_told_by_living_processes_while_somebody_looks() {
    let place = Place::new("tags");
    let creator = place.ledger("creator");
    let start = |tag: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "top::child_holds_tags"])
            .env("XLOGMEM_TEST_LEDGER", creator.path())
            .env("XLOGMEM_TEST_TAG", tag)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.by_ref().map_while(Result::ok).find(|line| line == "holding");
        assert!(said.is_some(), "a child ended early");
        (child, lines)
    };
    let (mut one, one_lines) = start("weights");
    let (mut other, other_lines) = start("\u{1b}[2Jkey-value cache pages");
    // Nobody looks: nobody tells.
    std::thread::sleep(Duration::from_millis(500));
    let quiet = LedgerView::open(creator.path()).unwrap().snapshot().unwrap();
    assert_eq!(quiet.slots.len(), 3);
    assert!(quiet.slots.iter().all(|slot| slot.tags.is_none()), "{quiet:?}");

    let rows = |every: &str| {
        let picture = json(&top(&place.0, &["--json", "--every", every]));
        picture["devices"][0]["processes"].as_array().cloned().unwrap_or_default()
    };
    let of = |rows: &[Value], pid: u32| {
        rows.iter().find(|row| row["pid"] == pid).cloned().unwrap_or(Value::Null)
    };
    // A process has its turn every 200 ms, on a machine with time for it.
    let mut seen = Vec::new();
    for _ in 0..240 {
        seen = rows("0.5");
        let has_tags = |pid| of(&seen, pid)["tags"].as_array().is_some_and(|tags| !tags.is_empty());
        if has_tags(one.id()) && has_tags(other.id()) {
            break;
        }
    }
    let tags = |row: &Value| -> Vec<(String, u64)> {
        let tags = row["tags"].as_array().unwrap().iter();
        let pair =
            |tag: &Value| (tag["tag"].as_str().unwrap().to_owned(), tag["bytes"].as_u64().unwrap());
        tags.map(pair).collect()
    };
    let named = |name: &str, bytes| (name.to_owned(), bytes);
    assert_eq!(
        tags(&of(&seen, one.id())),
        [named("weights", 3 * MIB), named("scratch", MIB)],
        "what holds nothing is not there"
    );
    assert_eq!(
        tags(&of(&seen, other.id())),
        [named("?[2Jkey-value cach…", 3 * MIB), named("scratch", MIB)],
        "cut, and without what steers a terminal"
    );
    assert!(of(&seen, one.id())["tags_age_seconds"].as_f64().is_some());
    // A process that tells none has none.
    let keeper = of(&seen, std::process::id());
    assert_eq!((tags(&keeper), &keeper["tags_age_seconds"]), (vec![], &Value::Null));
    let page = top(&place.0, &["--once", "--every", "0.5"]);
    let page = text(&page.stdout);
    assert!(page.contains("weights 3 MiB, scratch 1 MiB"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");

    one.kill().unwrap();
    one.wait().unwrap();
    drop(one_lines);
    let dead = of(&rows("0.05"), one.id());
    assert_eq!((&dead["alive"], tags(&dead)), (&false.into(), vec![]), "{dead}");
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    drop(other_lines);
    creator.reclaim_dead().unwrap();
    let left = rows("0.05");
    assert_eq!(left.len(), 1, "only the creator is left: {left:?}");
}

#[test]
fn live_cached_and_pending_have_columns_and_a_silent_process_is_marked() {
    let place = Place::new("parts");
    let (plain, parts) = (place.ledger("plain"), place.ledger("io"));
    plain.charge(8 * MIB).unwrap();
    parts.charge(24 * MIB).unwrap();
    parts.publish_memory(12 * MIB, 4 * MIB);
    let picture = json(&top(&place.0, &["--json", "--every", "0.02"]));
    let device = &picture["devices"][0];
    assert_eq!(
        (&device["cached_bytes"], &device["pending_bytes"]),
        (&(12 * MIB).into(), &(4 * MIB).into())
    );
    assert_eq!(device["history"].as_array().unwrap().len(), 2);
    let rows = device["processes"].as_array().unwrap();
    let figures =
        |row: &Value| ["live_bytes", "cached_bytes", "pending_bytes"].map(|name| row[name].clone());
    assert_eq!(figures(&rows[0]), [8 * MIB, 12 * MIB, 4 * MIB].map(Value::from));
    assert_eq!(figures(&rows[1]), [Value::Null, Value::Null, Value::Null]);
    // Another process asks, and nobody listens here.
    assert!(!plain.request_cached(60 * MIB - 8 * MIB, Duration::ZERO));
    let page = top(&place.0, &["--once", "--every", "0.02"]);
    let page = text(&page.stdout);
    for part in ["live", "cached", "pending", "12 MiB cached", "io (silent)"] {
        assert!(page.contains(part), "{part} is missing in {page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    let slots = xlogmem().args(["ledger", "--ledger"]).arg(&place.0).output().unwrap();
    let slots = text(&slots.stdout);
    assert!(slots.contains("8 MiB live, 12 MiB cached, 4 MiB pending; does not answer"), "{slots}");
}

#[test]
fn damaged_tags_are_not_shown_and_harm_nothing() {
    let place = Place::new("damaged-tags");
    let ledger = place.ledger("teller");
    ledger.charge(MIB).unwrap();
    ledger.publish_tags([("weights", MIB), ("scratch", 512)]);
    let look = || {
        let output = top(&place.0, &["--json", "--every", "0.01"]);
        assert_eq!(output.status.code(), Some(0));
        let row = json(&output)["devices"][0]["processes"][0].clone();
        assert_eq!((&row["name"], &row["used_bytes"]), (&"teller".into(), &MIB.into()));
        row["tags"].as_array().unwrap().len()
    };
    assert_eq!(look(), 2);
    let file = std::fs::File::options().write(true).open(ledger.path()).unwrap();
    let at = 4096 + 128 * u64::from(ledger.slot()) + 64;
    for noise in [&[0xff; 64][..], b"\x1b[2J\x07", &[0; 64]] {
        ledger.publish_tags([("weights", MIB), ("scratch", 512)]);
        assert_eq!(look(), 2);
        std::os::unix::fs::FileExt::write_all_at(&file, noise, at).unwrap();
        assert_eq!(look(), 0, "{noise:?}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_in_one_line() {
    let place = Place::new("refused");
    assert_refused(&top(&place.0, &["--once", "--every", "0"]), &["--every", "0.01"]);
    assert_refused(&top(&place.0, &["--once", "--sort", "size"]), &["size", "used, peak"]);
    assert_refused(&top(&place.0, &[]), &["terminal", "--once"]);
    let none = top(&place.0, &["--once", "--every", "0.01"]);
    assert!(text(&none.stdout).starts_with("no ledger in"), "{none:?}");
    std::fs::write(place.0.join("bad.ledger"), "nonsense").unwrap();
    let bad = top(&place.0, &["--json", "--every", "0.01"]);
    assert_eq!((bad.status.code(), &json(&bad)["ok"]), (Some(1), &false.into()));
}

/// Runs the binary on a terminal of its own, presses keys, and says what became of the terminal. How it is ended: a key, or a signal.
const TERMINAL: &str = r#"
import fcntl, os, pty, re, select, signal, struct, sys, termios, time
end, argv = sys.argv[1], sys.argv[2:]
master, slave = pty.openpty()
def size(rows, columns):
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
size(24, 90)
before = termios.tcgetattr(slave)
child = os.fork()
if child == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(slave, fd)
    os.environ["TERM"] = "xterm"
    os.execv(argv[0], argv)
seen = b""
def read_until(word, what):
    global seen
    until = time.time() + 120
    start = len(seen)
    while time.time() < until:
        if word in seen[start:]:
            return
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
    sys.exit(f"{what}: no {word!r} in {seen[start:]!r}")
read_until(b"sorted by used", "first picture")
read_until(b"holder", "the process")
assert termios.tcgetattr(slave) != before, "the terminal is not raw"
os.write(master, b"s")
read_until(b"sorted by peak", "after s")
os.write(master, b"p")
read_until(b"(paused)", "after p")
os.write(master, b"\x1b[B")
read_until(b"sorted by peak", "after an arrow")
size(10, 40)
os.kill(child, signal.SIGWINCH)
read_until(b"sorted by peak", "after a change of size")
drawn = seen[seen.rindex(b"xlogmem top"):]
line = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"\n", drawn).split(b"\n")[0]
assert len(line) <= 40, line
if end == "key":
    os.write(master, b"q")
else:
    os.kill(child, getattr(signal, end))
read_until(b"\x1b[?1049l", "leaving the screen")
status = None
until = time.time() + 120
while status is None and time.time() < until:
    done, state = os.waitpid(child, os.WNOHANG)
    if done:
        status = state
    elif select.select([master], [], [], 0.05)[0]:
        seen += os.read(master, 65536)
assert status == 0, status
assert b"\x1b[?1049h" in seen and b"\x1b[?25l" in seen, "no screen of its own"
assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is hidden"
assert termios.tcgetattr(slave) == before, "the terminal is not as it was"
"#;

#[test]
fn the_terminal_is_as_it_was_however_it_ends() {
    let place = Place::new("terminal");
    let holder = place.ledger("holder");
    holder.charge(MIB).unwrap();
    for end in ["key", "SIGTERM", "SIGHUP", "SIGINT"] {
        let command = xlogmem();
        let mut python = Command::new("python3");
        python.args(["-c", TERMINAL, end]).arg(command.get_program());
        python.args(["top", "--every", "0.2", "--ledger"]).arg(&place.0);
        let Ok(output) = python.output() else {
            return left_out("the terminal of xlogmem top", "python3 cannot be run");
        };
        assert!(output.status.success(), "{end}: {}", text(&output.stderr));
    }
}
