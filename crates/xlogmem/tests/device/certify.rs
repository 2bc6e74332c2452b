//! `xlogmem certify` as its users meet it.

use crate::scratch::{Scratch, bad, good, page, run};
use crate::support::assert_refused;
use serde_json::Value;

fn cell<'a>(report: &'a Value, bug: &str, stack: &str, checker: bool) -> &'a Value {
    let cells = report["cells"].as_array().unwrap();
    let same = |cell: &&Value| {
        (&cell["bug"], &cell["stack"], &cell["checker"])
            == (&bug.into(), &stack.into(), &checker.into())
    };
    cells.iter().find(same).unwrap_or_else(|| panic!("there is no cell {bug} under {stack}"))
}

/// Who noticed first.
fn by(cell: &Value) -> &str {
    cell["caught"][0]["by"].as_str().unwrap_or_else(|| panic!("nobody noticed: {cell:#}"))
}

#[test]
fn every_promise_is_kept_on_the_simulated_device() {
    for device in ["sim", "sim:3"] {
        let report = good(&["certify", "--device", device]);
        assert_eq!((&report["schema"], &report["checker"]), (&1.into(), &Value::Null));
        assert_eq!(report["cells"].as_array().unwrap().len(), 2 * 8 * 6);
        for stack in ["direct", "async", "pool", "guard", "nvtx", "pages"] {
            assert_eq!(cell(&report, "none", stack, false)["verdict"], "clean");
            for bug in ["double-free", "leak"] {
                assert_eq!(by(cell(&report, bug, stack, false)), "host", "{bug} under {stack}");
            }
            assert_eq!(by(cell(&report, "missing-wait", stack, false)), "race");
            assert_eq!(cell(&report, "overflow", stack, true)["verdict"], "unavailable");
        }
        for (bug, offset, words) in [
            ("overflow", 1000, "bytes behind a block were written: 1 damaged"),
            ("underflow", -1, "bytes before a block were written: 1 damaged"),
            ("write-after-free", 10, "a freed block was written: 1 damaged"),
        ] {
            let cell = cell(&report, bug, "guard", false);
            assert_eq!((by(cell), &cell["offset"]), ("guard", &offset.into()));
            let said = cell["caught"][0]["detail"].as_str().unwrap();
            let place = format!("offset {offset} of 1000 bytes (victim)");
            assert!(said.contains(words) && said.contains(&place), "{said}");
        }
        assert_eq!(cell(&report, "overflow", "pool", false)["verdict"], "missed");
        assert_eq!(cell(&report, "overflow", "nvtx", false)["verdict"], "unavailable");
        assert_eq!(by(cell(&report, "write-after-free", "pages", false)), "fault");
        assert_eq!(by(cell(&report, "use-before-allocation", "pool", false)), "race");
        let nothing_to_notice = cell(&report, "use-before-allocation", "direct", false);
        assert_eq!(nothing_to_notice["verdict"], "unavailable");
    }
}

#[test]
fn the_page_is_the_one_in_the_documentation() {
    let shown = page(&["certify", "--device", "sim"], 0);
    let documented = include_str!("../../../../docs/sanitizer.md");
    for line in shown.lines() {
        assert!(documented.contains(line), "docs/sanitizer.md does not show\n{line}");
    }
}

/// A compute-sanitizer that runs the program and writes this shell text's output as its report.
#[cfg(unix)]
fn fake(scratch: &Scratch, name: &str, report: &str) -> String {
    let script = format!(
        r#"#!/bin/sh
while :; do
    case $1 in
        --log-file=*) log=${{1#--log-file=}} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
said=$("$@")
printf '%s\n' "$said"
address=$(printf '%s\n' "$said" | sed -n 's/.*"address":\([0-9]*\).*/\1/p')
complain() {{
    printf '========= Invalid __global__ write of size 1 bytes\n'
    printf '=========     Address 0x%x is out of bounds\n' "$1"
    printf '========= ERROR SUMMARY: 1 error\n'
}}
none() {{ echo '========= ERROR SUMMARY: 0 errors'; }}
case "$*" in *overflow*) bug=true ;; *) bug=false ;; esac
{{ {report}; }} >"$log"
"#
    );
    // A process of its own writes it: a file that is open for writing, also in a process that another test is starting, cannot be run.
    let path = scratch.path(name);
    let mut write = std::process::Command::new("sh");
    write.args(["-c", r#"printf %s "$1" >"$0" && chmod 755 "$0""#, &path, &script]);
    assert!(write.status().unwrap().success());
    path
}

#[test]
#[cfg(unix)]
fn what_compute_sanitizer_says_decides_the_cells_under_it() {
    let scratch = Scratch::new("certify");
    let kept = scratch.path("kept");
    let certify = |tool: &str| {
        let tool = tool.to_owned();
        ["certify", "--device", "sim", "--bug", "none,overflow", "--stack", "direct,nvtx"]
            .map(str::to_owned)
            .into_iter()
            .chain(["--output".to_owned(), kept.clone(), "--sanitizer".to_owned(), tool])
            .collect::<Vec<_>>()
    };
    let exact = fake(&scratch, "exact", r#"if $bug; then complain "$address"; else none; fi"#);
    let arguments = certify(&exact);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let report = good(&arguments);
    for stack in ["direct", "nvtx"] {
        let cell = cell(&report, "overflow", stack, true);
        assert_eq!((&cell["promised"], &cell["exact"]), (&true.into(), &true.into()));
        assert!(cell["caught"].as_array().unwrap().iter().any(|by| by["by"] == "memcheck"));
    }
    let log = std::fs::read_to_string(scratch.path("kept/overflow-nvtx-memcheck.log")).unwrap();
    assert!(log.contains("Invalid __global__ write"), "{log}");
    let said = std::fs::read_to_string(scratch.path("kept/overflow-nvtx-memcheck.txt")).unwrap();
    assert!(said.contains("\"address\""), "{said}");

    let wrong = r#"if $bug; then complain $((address + 1)); else none; fi"#;
    for (name, script, words) in [
        ("beside", wrong, ["overflow by 1 byte under +NVTX", "memcheck?"]),
        ("deaf", "none", ["overflow by 1 byte under +NVTX", "MISSED"]),
        ("alarmed", r#"complain "$address""#, ["no bug under direct", "ALARM"]),
        ("broken", "true", ["no bug under direct", "no complete report"]),
    ] {
        let arguments = certify(&fake(&scratch, name, script));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        bad(&arguments, &words);
    }
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    for (arguments, words) in [
        (["--bug", "typo"], ["--bug", "write-after-free"]),
        (["--stack", "heap"], ["--stack", "nvtx"]),
        (["--sanitizer", "/nowhere/tool"], ["/nowhere/tool", "no file"]),
        (["--device", "gpu"], ["\"gpu\"", "sim:SEED"]),
    ] {
        assert_refused(&run(&[&["certify"][..], &arguments].concat()), &words);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_exit_status_one() {
    let report = bad(&["certify", "--device", "cuda:99"], &["cuda:99"]);
    assert_eq!(report["cells"], Value::Array(Vec::new()));
}
