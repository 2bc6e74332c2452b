//! The page of `xlogmem report` in a real browser without a window.
//!
//! `scripts/browser` installs the browser with npm. Where there is none, or with `XLOG_BROWSER=none`, these tests are left out and say so;
//! `XLOG_TEST_TOOLS=required` demands it.
//! With `XLOG_SCREENSHOTS=FOLDER` they leave their pictures there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::scratch::{Scratch, run};
use crate::support::text;
use serde_json::Value;
use xlog_testing::left_out;

/// One browser at a time: each takes much memory.
static TURN: Mutex<()> = Mutex::new(());

fn browser() -> Option<String> {
    if std::env::var("XLOG_BROWSER").is_ok_and(|browser| browser == "none") {
        left_out("the report in a browser", "XLOG_BROWSER is none");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/browser");
    let missing = match Command::new(&script).output() {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => {
            return Some(text(&output.stdout).trim().to_owned());
        }
        Ok(output) => text(&output.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(error) => format!("{}: {error}", script.display()),
    };
    left_out("the report in a browser", &missing);
    None
}

fn make(arguments: &[&str]) {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
}

/// Runs all checks on a page; returns its text.
fn check(browser: &str, page: &str, name: &str, has_segments: bool) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser/check.mjs");
    let mut command = Command::new("node");
    command.arg(script).args([browser, page]);
    if let Some(folder) = std::env::var_os("XLOG_SCREENSHOTS") {
        command.arg(PathBuf::from(folder)).arg(name);
    }
    let output = command.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    assert_eq!(report["wrong"], Value::Array(Vec::new()), "{page}");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut figures = report["figures"].clone();
    assert_eq!(figures["reserved"], has_segments, "{page}");
    println!(
        "{name}: {}, first picture after {} ms, complete after {} ms, {} ms a step of zoom, {} named parts",
        figures["browser"],
        figures["first_picture_ms"],
        figures["complete_ms"],
        figures["zoom_step_ms"],
        figures["named"]
    );
    figures["text"].take()
}

#[test]
fn a_million_records_are_drawn_soon_and_moved_through_by_keys() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(browser) = browser() else { return };
    let scratch = Scratch::new("browser-million");
    let (log, page) = (scratch.path("llm.xtrace"), scratch.path("llm.html"));
    make(&["generate", "llm", "-o", &log, "--records", "1000000"]);
    make(&["report", &log, "-o", &page, "--budget", "3GiB"]);
    let text = check(&browser, &page, "llm", false);
    let text = text.as_str().unwrap();
    for part in ["kv page", "weights attention", "Every block was freed", "no records of uses"] {
        assert!(text.contains(part), "the page does not say {part}");
    }
}

/// Tags and messages that would be markup or scripts if they were not texts; uses, failures and leaks.
const HOSTILE: &str = "\
thread,time,action,pointer,bytes,stream,tag,error_kind,error_message,stream_name
1,1000,allocate,0x100000,4096,1,<img src=x onerror=window.pwned=1>,,,<b>one</b>
1,2000,allocate,0x200000,8192,2,</script><script>window.pwned=2</script>,,,
1,3000,use_prepare,0x100000,,2,,,,
1,4000,use_finish,0x100000,,2,,,,
1,5000,allocate,,99999999,2,@DATA@ @SCRIPT@,out_of_memory,<script>window.pwned=3</script>,
1,6000,deallocate,0x100000,4096,3,<img src=x onerror=window.pwned=1>,,,
1,9000,allocate,0x300000,16,3,\"quotes \"\" and 'more' & \u{2028}\",,,
";

#[test]
fn what_a_log_says_is_shown_and_never_run() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(browser) = browser() else { return };
    let scratch = Scratch::new("browser-hostile");
    let (log, page) = (scratch.write("<i>log&.csv", HOSTILE), scratch.path("hostile.html"));
    make(&["report", &log, "-o", &page]);
    let text = check(&browser, &page, "hostile", false);
    let text = text.as_str().unwrap();
    for part in [
        "<img src=x onerror=window.pwned=1>",
        "</script><script>window.pwned=2</script>",
        "@DATA@ @SCRIPT@",
        "<script>window.pwned=3</script>",
        "quotes \" and 'more' & \\u2028",
        "stream 1 (<b>one</b>)",
    ] {
        assert!(text.contains(part), "the page does not say {part}: {text}");
    }
}

#[test]
fn streams_uses_and_another_log_are_on_the_page() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(browser) = browser() else { return };
    let scratch = Scratch::new("browser-uses");
    let (log, other, page) =
        (scratch.path("uses.xtrace"), scratch.path("other.xtrace"), scratch.path("uses.html"));
    for (log, rounds) in [(&log, "300"), (&other, "200")] {
        make(&["run", "handoff", "--device", "sim:1", "--rounds", rounds, "--log", log]);
    }
    make(&["report", &log, "-o", &page, "--compare", &other]);
    let text = check(&browser, &page, "uses", true);
    let text = text.as_str().unwrap();
    for part in [
        "Held idle, by tag",
        "Handovers to it",
        "other.xtrace",
        "Own peaks by tag",
        "Call sites",
        "handoff/",
    ] {
        assert!(text.contains(part), "the page does not say {part}");
    }
}

#[test]
fn reserved_memory_is_beside_allocated_memory_with_its_segments() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(browser) = browser() else { return };
    let scratch = Scratch::new("browser-reserved");
    let (log, page) = (scratch.path("churn.xtrace"), scratch.path("churn.html"));
    make(&["run", "churn", "--device", "sim:3", "--allocations", "300", "--log", &log]);
    make(&["report", &log, "-o", &page]);
    let text = check(&browser, &page, "reserved", true);
    let text = text.as_str().unwrap();
    for part in ["Segments as a table", "is reserved and free", " reserved;"] {
        assert!(text.contains(part), "the page does not say {part}");
    }
}

#[test]
fn a_memory_snapshot_of_pytorch_is_a_page_with_places_in_the_program() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(browser) = browser() else { return };
    let scratch = Scratch::new("browser-torch");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../xlog-trace/tests/suite/snapshots");
    let (snapshot, page) = (format!("{folder}/history.pickle"), scratch.path("torch.html"));
    make(&["report", &snapshot, "-o", &page]);
    let text = check(&browser, &page, "torch", true);
    let text = text.as_str().unwrap();
    for part in [
        "attention (model.py:41)",
        "loss (train.py:88)",
        "123456 bytes were free",
        "/home/user/train/train.py:88",
        "Stack of the allocation",
        "attention (/home/user/train/model.py:41)",
    ] {
        assert!(text.contains(part), "the page does not say {part}");
    }
}
