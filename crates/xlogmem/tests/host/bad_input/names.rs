//! Names that would command the terminal, hide text or forge a line reach no output of any command.

use std::os::unix::fs::PermissionsExt;

use super::{COMMANDS, FILES, Place, READERS, Scratch, run, text, xlogmem};
use crate::logs::limited;
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};

/// An escape sequence, its C1 form, DEL, overrides of direction, zero width, and a line of its own.
const EVIL: &str = "ev\u{1b}[2Jil\u{9b}31m\u{7f}\r\u{202e}txt\u{2066}\u{200b}\u{ad}\nforged: yes";

/// As a field of CSV.
fn log() -> String {
    format!(
        "\
thread,time,action,pointer,bytes,stream,tag,error_kind,error_message,stream_name
7,1000,allocate,0x7f0000000000,1000,1,\"{EVIL}\",,,\"{EVIL}\"
7,2000,use_prepare,0x7f0000000000,,2,,,,\"{EVIL}\"
7,2500,use_finish,0x7f0000000000,,2,,,,
7,4000,allocate,0x7f0000001000,500,1,rows,,,
7,5000,deallocate,0x7f0000000000,1000,1,\"{EVIL}\",,,
7,6000,allocate,,99999999,1,\"{EVIL}\",\"{EVIL}\",\"{EVIL}\",
7,9000,allocate,0x7f0000000000,64,2,\"{EVIL}\",,,
"
    )
}

#[track_caller]
fn assert_harmless(what: &str, shown: &str) {
    let is_harmful = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || "\u{202e}\u{2066}\u{200b}\u{ad}\u{2028}".contains(c)
    };
    let found: Vec<char> = shown.chars().filter(|c| is_harmful(*c)).collect();
    assert!(found.is_empty(), "{what} lets {found:?} through:\n{shown:?}");
    // A long value goes on in further lines, which are indented under it; titles and labels are not.
    let forged =
        shown.lines().any(|line| line.starts_with("forged") || line.starts_with("  forged"));
    assert!(!forged, "{what} lets a name make a line:\n{shown}");
}

/// Runs it for people and as JSON.
fn show(arguments: &[&str]) {
    for arguments in [arguments.to_vec(), [arguments, &["--json"]].concat()] {
        let output = run(&arguments);
        let what = format!("{arguments:?}");
        assert_harmless(&what, text(&output.stdout));
        assert_harmless(&what, text(&output.stderr));
    }
}

#[test]
fn no_name_commands_the_terminal_in_any_command() {
    let place = Place::new("evil-names");
    let (plain, named) = (place.scratch.write("evil.csv", &log()), format!("{EVIL}.csv"));
    let named = place.scratch.write(&named, &log());
    for line in READERS {
        for log in [&plain, &named] {
            let line = place.line(line, log, "");
            show(&line.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
    for written in ["OUT.html", "OUT.svg"] {
        let page = std::fs::read_to_string(place.scratch.path(written)).unwrap();
        assert!(page.contains("ev\\u001b"), "{written} does not show the name at all");
        assert_harmless(written, &page);
    }
    // What is refused is named.
    for (command, arguments) in COMMANDS {
        let words = command.split(' ').chain(arguments.iter().copied());
        show(&words.chain([EVIL]).collect::<Vec<_>>());
    }
    let output = place.scratch.path(EVIL);
    show(&["generate", "llm", "--records", "10", "-o", &format!("{output}.csv")]);
    show(&["report", &plain, "-o", &format!("{output}.html")]);
    show(&["convert", &plain, &format!("{output}.json")]);
    for (line, format) in FILES {
        let line = place.line(line, &plain, &format!("{output}.{format}"));
        show(&line.iter().map(String::as_str).collect::<Vec<_>>());
    }
    for log in [format!("{output}.xtrace"), format!("/nonexistent/{EVIL}/run.xtrace")] {
        show(&["run", "churn", "--device", "sim:1", "--allocations", "1", "--log", &log]);
        show(&["exec", "--log", &log, "--", "true"]);
    }
}

#[test]
fn no_name_of_a_log_on_a_full_disk_commands_the_terminal() {
    let scratch = Scratch::new("evil-full");
    let log = scratch.path(&format!("{EVIL}.xtrace"));
    let churn = ["run", "churn", "--device", "sim:1", "--allocations", "5000", "--log", &log];
    let output = limited("-f 8", &churn).output().unwrap();
    let errors = text(&output.stderr);
    assert!(errors.contains("xlog-trace: writing ") && errors.contains("ev\\u001b"), "{errors:?}");
    assert_harmless("a full disk", errors);
}

#[test]
fn no_name_in_a_ledger_commands_the_terminal() {
    let scratch = Scratch::new("evil-ledger");
    std::fs::set_permissions(scratch.folder(), PermissionsExt::from_mode(0o700)).unwrap();
    let config = LedgerConfig::new(DeviceKey::new("sim-one").unwrap());
    let config = config.with_directory(scratch.folder()).with_limit(1 << 20).with_name(EVIL);
    let ledger = Ledger::open(config).unwrap();
    ledger.charge(1 << 10).unwrap();
    ledger.publish_tags([(EVIL, 1 << 10)]);
    // A file that is no ledger is named with its folder.
    let damaged = scratch.path("damaged\nforged: yes");
    std::fs::create_dir(&damaged).unwrap();
    std::fs::set_permissions(&damaged, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::write(format!("{damaged}/sim-one.ledger"), "nonsense").unwrap();
    for folder in [scratch.path(""), damaged] {
        show(&["top", "--once", "--every", "0.05", "--ledger", &folder]);
        show(&["ledger", "--ledger", &folder]);
        for arguments in [&["doctor", "--device", "sim"][..], &["run", "join", "--rows", "10"]] {
            let mut command = xlogmem();
            let output = command.args(arguments).env("XLOG_DEVICE_LEDGER", &folder).output();
            let output = output.unwrap();
            assert_harmless(&format!("{arguments:?}"), text(&output.stdout));
            assert_harmless(&format!("{arguments:?}"), text(&output.stderr));
        }
    }
}
