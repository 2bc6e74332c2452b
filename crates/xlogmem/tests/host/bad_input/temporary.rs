//! Temporary files: a link planted in their place is not followed, and a signal that ends the command leaves none of them.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Place, Scratch, text, xlogmem};

/// Runs the command under a process id that is known before it begins: the shell plants the link `PREFIX-PID` and becomes the command.
fn run_beside_a_link(link_prefix: &str, target: &str, folder: &Path, arguments: &[&str]) -> Output {
    let command = xlogmem();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", r#"ln -s "$1" "$0-$$" && shift && exec "$@""#, link_prefix, target])
        .arg(command.get_program())
        .args(arguments)
        .env("TMPDIR", folder);
    for (name, _) in command.get_envs() {
        shell.env_remove(name);
    }
    shell.output().unwrap()
}

#[test]
fn a_link_planted_for_an_unfinished_output_is_not_followed() {
    let place = Place::new("planted-file");
    let victim = place.scratch.write("victim", "precious");
    for name in ["out.csv", "out.json", "out.html"] {
        let output = place.scratch.path(name);
        let arguments = match name {
            "out.html" => vec!["report", &place.log, "-o", &output],
            _ => vec!["convert", &place.log, &output],
        };
        let folder = place.scratch.folder();
        let done = run_beside_a_link(&format!("{output}.part"), &victim, folder, &arguments);
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        assert!(std::fs::read(&victim).unwrap() == b"precious", "{name} went through the link");
        assert!(Path::new(&output).symlink_metadata().unwrap().is_file(), "{name} is no file");
    }
}

/// A memory checker that runs the program and reports no error to its log.
///
/// A process of its own writes it: a file that is open for writing, also in a process that another test is starting, cannot be run.
fn checker(path: &str) -> String {
    let script = r#"#!/bin/sh
while :; do
    case $1 in
        --log-file=*) log=${1#--log-file=} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
"$@"
echo '========= ERROR SUMMARY: 0 errors' >"$log"
"#;
    let mut write = Command::new("sh");
    write.args(["-c", r#"printf %s "$1" >"$0" && chmod 755 "$0""#, path, script]);
    assert!(write.status().unwrap().success());
    path.to_owned()
}

#[test]
fn a_link_planted_for_a_temporary_folder_is_not_followed() {
    let scratch = Scratch::new("planted-folder");
    let victim = scratch.path("victim");
    std::fs::create_dir(&victim).unwrap();
    let prefix = scratch.path("xlogmem-certify");
    // The folder is for what a checker writes.
    let tools = Scratch::new("planted-folder-tools");
    let checker = checker(&tools.path("checker"));
    let arguments = ["certify", "--device", "sim", "--bug", "none", "--stack", "direct"];
    let arguments = [&arguments[..], &["--sanitizer", &checker]].concat();
    let done = run_beside_a_link(&prefix, &victim, scratch.folder(), &arguments);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert!(std::fs::symlink_metadata(&victim).unwrap().is_dir(), "the victim is gone");
    let through = std::fs::read_dir(&victim).unwrap().count();
    assert_eq!(through, 0, "files went through the link");
    let left: Vec<_> = scratch.names().into_iter().filter(|name| name != "victim").collect();
    let is_link = |name: &String| Path::new(&scratch.path(name)).is_symlink();
    assert!(left.len() == 1 && is_link(&left[0]), "only the planted link is left: {left:?}");
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn begin(temporary: &Path, arguments: &[&str]) -> Child {
    let mut command = xlogmem();
    command.args(arguments).env("TMPDIR", temporary);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Sends the signal; the process dies of it.
fn interrupt(mut child: Child, signal: Signal) {
    kill_process(Pid::from_child(&child), signal).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
}

#[test]
fn a_signal_that_ends_a_command_leaves_no_temporary_file() {
    let commands: [(&[&str], &str); 4] = [
        (&["generate", "llm", "--records", "100000000", "-o", "OUT.xtrace"], ".part-"),
        (&["certify", "--device", "sim", "--output", "OUT/deep"], "OUT"),
        (&["certify", "--device", "sim"], "xlogmem-certify-"),
        (&["bench", "--device", "sim"], "xlogmem-bench-"),
    ];
    for (arguments, prefix) in commands {
        for signal in [Signal::TERM, Signal::INT] {
            let scratch = Scratch::new("interrupted");
            let at = |word: &&str| match word.starts_with("OUT") {
                true => scratch.path(word),
                false => (*word).to_owned(),
            };
            let line: Vec<String> = arguments.iter().map(at).collect();
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            let child = begin(scratch.folder(), &line);
            until("it has begun to write", || {
                scratch.names().iter().any(|name| name.starts_with(prefix)).then_some(())
            });
            interrupt(child, signal);
            assert_eq!(scratch.names(), [""; 0], "{arguments:?} is interrupted by {signal:?}");
        }
    }
}

/// The processes that this one started, with their arguments.
fn children(parent: u32) -> Vec<(u32, Vec<String>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // After the name, which may have spaces: the state, then the parent.
        let after = stat.rsplit(')').next().unwrap_or_default();
        if after.split_whitespace().nth(1) == Some(&parent.to_string()) {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            found.push((pid, line.split('\0').map(str::to_owned).collect()));
        }
    }
    found
}

#[test]
fn a_signal_that_ends_a_command_ends_its_processes_and_removes_their_ledger() {
    let scratch = Scratch::new("interrupted-tenants");
    let arguments = ["run", "tenants", "--device", "sim", "--rounds", "1000000"];
    let child = begin(scratch.folder(), &arguments);
    let (workers, ledger) = until("its processes run", || {
        let workers = children(child.id());
        let ledger = workers.iter().find_map(|(_, line)| {
            let at = line.iter().position(|word| word == "--ledger")?;
            Some(PathBuf::from(line.get(at + 1)?))
        })?;
        (workers.len() == 3).then_some((workers, ledger))
    });
    assert!(ledger.exists(), "{}", ledger.display());
    interrupt(child, Signal::TERM);
    assert!(!ledger.parent().unwrap().exists(), "{} is left", ledger.display());
    for (pid, line) in workers {
        until("its processes are gone", || {
            let now = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // Its own, or none: the id may belong to somebody else by now, and a dead process has no arguments.
            (now != line.join("\0").into_bytes()).then_some(())
        });
    }
}
