//! What users meet at the command line: numbers, names, streams, terminals, defaults.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::scratch::{Scratch, good, page, run};
use crate::support::{assert_refused, json, text, xlogmem};
use serde_json::Value;
use xlog_testing::left_out;

/// A log of a thousand records or so.
fn log(scratch: &Scratch) -> String {
    let path = scratch.path("log.xtrace");
    good(&["generate", "datalog", "-o", &path, "--records", "1e3"]);
    path
}

#[test]
fn a_misspelt_name_is_answered_with_the_closest_one() {
    for (line, due) in [
        (&["dcotor"][..], "did you mean 'doctor'?"),
        (&["run", "jion"], "did you mean 'join'? Try 'xlogmem run --help'"),
        (&["summary", "log", "--jsn"], "did you mean '--json'? Try 'xlogmem summary --help'"),
        (&["certify", "--bug", "overflw"], "did you mean 'overflow'?"),
    ] {
        assert_refused(&run(line), &[due, "--help"]);
    }
    assert_refused(&run(&["xyzzy"]), &["xyzzy", "; try 'xlogmem --help'"]);
}

#[test]
fn counts_and_times_are_read_in_every_notation() {
    let scratch = Scratch::new("numbers");
    log(&scratch);
    let rounds = ["run", "handoff", "--device", "sim", "--rows", "1e2", "--rounds", "2e1"];
    assert_eq!(good(&rounds)["rounds"], 20);
    let ledgers = scratch.path("");
    for every in ["0.02", "0.02s", "20ms"] {
        let shown = run(&["top", "--json", "--every", every, "--ledger", &ledgers]);
        assert_eq!(shown.status.code(), Some(0), "{every}");
    }
    for (option, value, due) in [
        ("--streams", "1e3", "a whole number from 2 to 64"),
        ("--rounds", "1.5", "a whole number from 1 to 100000000"),
        ("--seed", "-1", "--seed"),
    ] {
        let line = format!("{option}={value}");
        assert_refused(&run(&["run", "handoff", &line]), &[option, value, due]);
    }
    assert_refused(&run(&["top", "--every", "5parsecs"]), &["5parsecs", "0.5s, 200ms or 2"]);
}

#[test]
fn a_dash_is_standard_input_and_output() {
    let scratch = Scratch::new("dash");
    let path = log(&scratch);
    let made = run(&["generate", "datalog", "-o", "-", "--to", "xtrace", "--records", "1e3"]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    assert_eq!(made.stdout, std::fs::read(&path).unwrap(), "nothing else is printed");
    let converted = run(&["convert", &path, "-", "--to", "csv"]);
    assert!(text(&converted.stdout).starts_with("thread,"));
    let drawn = run(&["report", &path, "--svg", "-"]);
    let picture = text(&drawn.stdout);
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"), "{picture}");

    let summary = good(&["summary", &path]);
    for line in [&["summary", "-", "--json"][..], &["diff", "-", "-"], &["report", "-"]] {
        let mut child = xlogmem();
        child.args(line).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&made.stdout).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line:?}: {}", text(&output.stderr));
        if line[0] == "summary" {
            assert_eq!(json(&output)["numbers"], summary["numbers"]);
        }
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let scratch = Scratch::new("head");
    let path = scratch.path("log.xtrace");
    good(&["generate", "datalog", "-o", &path, "--records", "2e4"]);
    for line in [
        &["convert", &path, "-", "--to", "csv"][..],
        &["generate", "datalog", "-o", "-", "--to", "csv", "--records", "2e4"],
        &["report", &path, "-o", "-"],
    ] {
        let mut child = xlogmem();
        let mut child =
            child.args(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = [0; 16];
        std::io::Read::read_exact(&mut child.stdout.take().unwrap(), &mut first).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{line:?}");
    }
}

#[test]
fn a_log_shows_its_threads_queries_and_call_times() {
    let scratch = Scratch::new("shown");
    let path = scratch.path("run.xtrace");
    let line = ["run", "handoff", "--device", "sim", "--rounds", "40", "--threads", "2"];
    good(&[&line[..], &["--log", &path]].concat());
    let numbers = &good(&["summary", &path])["numbers"];
    assert!(numbers["by_thread"].as_array().unwrap().len() >= 2, "{numbers:#}");
    let times = numbers["call_times"].as_array().unwrap();
    let allocate = times.iter().find(|row| row["action"] == "allocate").unwrap();
    let part = |name: &str| allocate[name].as_u64().unwrap();
    assert!(part("median_nanos") <= part("p99_nanos"), "{allocate:#}");
    assert!(part("p99_nanos") <= part("max_nanos") && part("max_nanos") > 0, "{allocate:#}");
    for command in ["summary", "report"] {
        let text = page(&[command, &path], 0);
        assert!(text.contains("By thread") && text.contains("Call times"), "{text}");
        assert!(text.contains("p50 ") && text.contains("p99 "), "{text}");
    }
    let sites = numbers["by_site"].as_array().unwrap();
    let named = |row: &Value| row["name"].as_str().unwrap().contains(".rs:");
    assert!(!sites.is_empty() && sites.iter().all(named), "{sites:#?}");
    assert!(page(&["summary", &path], 0).contains("By call site"));
    // A CSV log with two queries.
    let csv = scratch.path("run.csv");
    good(&["convert", &path, &csv]);
    let mut query = 0;
    let queried: Vec<String> = std::fs::read_to_string(&csv)
        .unwrap()
        .lines()
        .map(|line| {
            let mut cells: Vec<String> = line.split(',').map(str::to_owned).collect();
            if cells[2] == "allocate" {
                query += 1;
                cells[8] = (7 + query % 2).to_string();
            }
            cells.join(",") + "\n"
        })
        .collect();
    let queried = scratch.write("queries.csv", &queried.concat());
    let numbers = &good(&["summary", &queried])["numbers"];
    let mut names: Vec<_> = numbers["by_query"].as_array().unwrap().iter().collect();
    names.sort_by_key(|row| row["name"].as_str());
    assert_eq!((&names[0]["name"], &names[1]["name"]), (&"7".into(), &"8".into()));
    let sum = names.iter().map(|row| row["allocations"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(sum, numbers["total"]["allocations"]);
    assert!(page(&["summary", &queried], 0).contains("By query"));
    assert!(page(&["report", &queried], 0).contains("By query"));
    let changes = page(&["diff", &csv, &queried], 0);
    assert!(changes.contains("Peaks by query") && changes.contains("say the same"), "{changes}");
}

#[test]
fn a_report_fails_where_the_peak_is_above_the_budget() {
    let scratch = Scratch::new("over");
    let path = log(&scratch);
    assert_eq!(run(&["report", &path, "--budget", "1TiB"]).status.code(), Some(0));
    let out = scratch.path("page.html");
    for more in [&[][..], &["--json"], &["-o", &out]] {
        let over = run(&[&["report", &path, "--budget", "1KiB"], more].concat());
        assert_eq!(over.status.code(), Some(1), "{more:?}");
        assert!(text(&over.stderr).contains("is above the budget of 1 KiB"), "{more:?}");
        assert!(!over.stdout.is_empty(), "{more:?}: it is written all the same");
    }
    assert!(std::fs::metadata(&out).unwrap().len() > 10_000);
}

#[test]
fn a_comparison_is_in_words_and_times_are_in_units() {
    let scratch = Scratch::new("words");
    let path = log(&scratch);
    let text = page(&["replay", &path, "--device", "sim", "--compare", "pool,direct"], 0);
    let row = text.lines().find(|line| line.trim_start().starts_with("direct ")).unwrap();
    assert!(["faster", "slower", "1.00x"].iter().any(|word| row.contains(word)), "{row}");
    assert!(text.contains("p50 ") && text.contains("p99 ") && text.contains("max "), "{text}");
}

#[test]
fn the_pool_is_the_default_everywhere() {
    let scratch = Scratch::new("default");
    let path = log(&scratch);
    let small = ["--rounds", "5", "--device", "sim"];
    for command in ["handoff", "tenants"] {
        let report = good(&[&["run", command][..], &small].concat());
        assert_eq!(report["resource"], "pool", "{command}");
    }
    assert_eq!(good(&["replay", &path, "--device", "sim"])["runs"][0]["resource"], "pool");
}

#[test]
fn a_certificate_has_no_empty_table_and_explains_its_words() {
    let line = ["certify", "--device", "sim", "--bug", "overflow,leak", "--stack", "pool,guard"];
    let text = page(&line, 0);
    assert!(!text.contains("memcheck"), "{text}");
    let words = text.split("Words\n").nth(1).unwrap();
    for word in ["missed", "guard", "host"] {
        let explained = words.lines().filter(|line| line.trim_start().starts_with(word)).count();
        assert_eq!(explained, 1, "{word}: {text}");
    }
}

#[test]
fn a_run_joins_a_ledger_and_keeps_its_limit() {
    let scratch = Scratch::new("joined");
    let ledger = scratch.path("runs.ledger");
    good(&["ledger", "--ledger", &ledger, "--limit", "64MiB"]);
    for resource in ["pool", "async", "direct"] {
        let line = ["run", "churn", "--device", "sim", "--allocations", "200", "--ledger", &ledger];
        good(&[&line[..], &["--resource", resource, "--max", "64KiB"]].concat());
    }
    let shown = good(&["ledger", "--ledger", &ledger]);
    assert_eq!(shown["ledgers"][0]["used_bytes"], 0, "{shown:#}");
    // Another process has all of it.
    let key = xlog_cuda::ledger::DeviceKey::new("runs").unwrap();
    let config = xlog_cuda::ledger::LedgerConfig::new(key).with_directory(scratch.folder());
    let other = xlog_cuda::ledger::Ledger::open(config).unwrap();
    other.charge(64 << 20).unwrap();
    let refused = run(&["run", "join", "--device", "sim", "--rows", "1e3", "--ledger", &ledger]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("out of budget"), "{}", text(&refused.stderr));
}

#[test]
fn a_demo_starts_a_ledger_that_top_shows_and_removes_it() {
    let mut demo = xlogmem();
    demo.args(["demo", "--for", "40s", "--processes", "2"]).stdout(Stdio::piped());
    let mut demo = demo.spawn().unwrap();
    let lines = BufReader::new(demo.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.into_iter().find(|line| line.contains("--ledger")).unwrap();
    let path = line.split_whitespace().last().unwrap().to_owned();
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let shown = json(&run(&["top", "--json", "--every", "50ms", "--ledger", &path]));
        let processes = &shown["devices"][0]["processes"];
        let busy = |row: &&serde_json::Value| row["used_bytes"].as_u64() > Some(0);
        let rows = processes.as_array().map_or(0, |rows| rows.iter().filter(busy).count());
        if rows == 2 {
            break;
        }
        assert!(demo.try_wait().unwrap().is_none() && Instant::now() < until, "{shown:#}");
    }
    assert!(demo.wait().unwrap().success());
    assert!(!std::path::Path::new(&path).exists());
}

/// Runs a command on a terminal with the given number of columns and prints what it wrote.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
columns, argv = int(sys.argv[1]), sys.argv[2:]
child, master = pty.fork()
if child == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    os.environ["TERM"] = "xterm"
    os.execv(argv[0], argv)
while True:
    try:
        data = os.read(master, 65536)
    except OSError:
        break
    if not data:
        break
    sys.stdout.buffer.write(data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"#;

#[test]
fn on_a_terminal_an_error_is_printed_once_and_lines_have_its_width() {
    let scratch = Scratch::new("terminal");
    let path = log(&scratch);
    let line = ["replay", &path, "--device", "sim", "--budget", "1KiB"];
    let on_terminal = |columns: &str, line: &[&str]| {
        let mut python = Command::new("python3");
        python.args(["-c", TERMINAL, columns]).arg(xlogmem().get_program()).args(line);
        python.output()
    };
    let Ok(output) = on_terminal("200", &line) else {
        return left_out("the terminal of xlogmem replay", "python3 cannot be run");
    };
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    let times = shown.matches("operations failed; the first").count();
    assert_eq!(times, 1, "{shown}");
    // Where they go to two places, each has it.
    let apart = run(&line);
    assert!(text(&apart.stderr).contains("operations failed"));
    assert!(text(&apart.stdout).contains("operations"));
    let widest = |columns| {
        let output = on_terminal(columns, &["summary", &path]).unwrap();
        text(&output.stdout).lines().map(|line| line.trim_end().chars().count()).max().unwrap()
    };
    assert!(widest("64") <= 64);
    assert!(widest("200") > 64);
}

/// Runs `top` on a terminal, asks for its help, ends it, and prints what it wrote.
const TOP: &str = r#"
import fcntl, os, pty, select, struct, sys, termios, time
argv = sys.argv[1:]
child, master = pty.fork()
if child == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.environ["TERM"] = "xterm"
    os.execv(argv[0], argv)
seen = b""
def read_until(word):
    global seen
    until = time.time() + 120
    while word not in seen and time.time() < until:
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
    assert word in seen, (word, seen[-300:])
read_until(b"no process takes part")
os.write(master, b"h")
read_until(b"another process gets them on request")
os.write(master, b"q")
read_until(b"\x1b[?1049l")
os.waitpid(child, 0)
sys.stdout.buffer.write(seen)
"#;

#[test]
fn top_has_colours_unless_they_are_not_wanted_and_explains_itself() {
    let scratch = Scratch::new("colours");
    let ledger = scratch.path("shown.ledger");
    good(&["ledger", "--ledger", &ledger, "--limit", "64MiB"]);
    for (no_color, coloured) in [(None, true), (Some(""), true), (Some("1"), false)] {
        let mut python = Command::new("python3");
        python.args(["-c", TOP]).arg(xlogmem().get_program());
        python.args(["top", "--every", "100ms", "--ledger", &ledger]).env_remove("NO_COLOR");
        if let Some(value) = no_color {
            python.env("NO_COLOR", value);
        }
        let Ok(output) = python.output() else {
            return left_out("the colours of xlogmem top", "python3 cannot be run");
        };
        assert!(output.status.success(), "{}", text(&output.stderr));
        let seen = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(seen.contains("\u{1b}[38;5;"), coloured, "NO_COLOR {no_color:?}: {seen:?}");
    }
}

/// The result of a small churn with a budget from an option or from the environment.
fn churn(option: &[&str], variable: Option<&str>) -> Value {
    let mut command = xlogmem();
    command.args(["run", "churn", "--device", "sim", "--allocations", "50", "--json"]).args(option);
    command.env_remove("XLOG_DEVICE_BUDGET");
    command.envs(variable.map(|value| ("XLOG_DEVICE_BUDGET", value)));
    json(&command.output().unwrap())
}

#[test]
fn a_run_takes_its_budget_from_the_environment_and_as_a_share() {
    assert_eq!(churn(&[], None)["budget"], Value::Null);
    assert_eq!(churn(&[], Some("512MiB"))["budget"], 512 << 20);
    assert_eq!(churn(&["--budget", "1GiB"], Some("512MiB"))["budget"], 1 << 30);
    let whole = churn(&["--budget", "100%"], None)["budget"].as_u64().unwrap();
    assert!(whole >= 1 << 20, "{whole}");
    assert_eq!(churn(&["--budget", "50%"], None)["budget"], whole / 2);
    assert_eq!(churn(&[], Some("25%"))["budget"], whole / 4);
}

#[test]
fn a_log_that_cannot_be_written_is_one_error_with_its_path_once() {
    let line = ["run", "handoff", "--device", "sim", "--log", "/nonexist/x.xtrace"];
    let output = run(&line);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert_eq!(said.matches("/nonexist/x.xtrace").count(), 1, "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert!(said.contains("No such file"), "{said}");
}
