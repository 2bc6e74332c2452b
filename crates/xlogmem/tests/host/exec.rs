//! `exec`: the status, the environment and the signals of a program, and a CUDA program on a fake driver.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::scratch::Scratch;
use crate::support::{assert_refused, json, text, xlogmem};

fn exec(scratch: &Scratch, options: &[&str], program: &[&str]) -> Output {
    let mut command = xlogmem();
    command.env("TMPDIR", scratch.folder()).env("XDG_CACHE_HOME", cache());
    command.env_remove("LD_PRELOAD");
    command.arg("exec").args(options).arg("--").args(program).output().unwrap()
}

/// A folder for the library, which stays.
fn cache() -> &'static str {
    env!("CARGO_TARGET_TMPDIR")
}

/// The sources of the fake driver and its program; `None` on a host that only has the test binary.
fn fake(scratch: &Scratch) -> Option<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xlog-preload/tests/suite");
    if !sources.exists() {
        eprintln!("{} is not on this host", sources.display());
        return None;
    }
    let folder = scratch.folder().join("fake");
    std::fs::create_dir_all(&folder).unwrap();
    let compile = |name: &str, output: &str, arguments: &[&str]| {
        let mut compiler = Command::new("cc");
        compiler.arg(sources.join(name)).arg("-o").arg(folder.join(output)).args(arguments);
        assert!(compiler.status().unwrap().success(), "{name}");
    };
    let shared = ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"];
    compile("fake_cuda.c", "libcuda.so.1", &shared);
    compile("program.c", "cuda-program", &["-ldl", "-pthread"]);
    Some(folder)
}

#[test]
fn exec_passes_arguments_output_and_status_on() {
    let scratch = Scratch::new("exec-status");
    let output = exec(&scratch, &[], &["sh", "-c", "echo \"$1\"; exit 7", "sh", "--limit 5 "]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(7), "--limit 5 \n"));
    let warning = text(&output.stderr);
    assert!(warning.contains("nothing was intercepted") && warning.contains("no CUDA call"));
    assert_eq!(warning.lines().count(), 1, "{warning}");
    let killed = exec(&scratch, &[], &["sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(137));
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

#[test]
fn exec_passes_the_mode_of_stacks_on_and_refuses_one_without_a_log() {
    let scratch = Scratch::new("exec-stacks");
    let log = scratch.folder().join("run-%p.xtrace");
    let log = log.to_str().unwrap();
    let show = ["sh", "-c", "echo $XLOG_EXEC_STACKS"];
    let output = exec(&scratch, &["--log", log, "--stacks", "sampled:7"], &show);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "sampled:7\n"));
    let refused = exec(&scratch, &["--stacks", "all"], &show);
    assert_refused(&refused, &["--stacks", "give --log too"]);
    let refused = exec(&scratch, &["--log", log, "--stacks", "some"], &show);
    assert_refused(&refused, &["--stacks", "some"]);
}

#[test]
fn exec_keeps_what_is_preloaded_and_switches_the_runtimes_own_ledger_off() {
    let mut command = xlogmem();
    let show = "echo $LD_PRELOAD $XLOG_DEVICE_LEDGER $XLOG_EXEC_LIMIT";
    command.env("LD_PRELOAD", "/nonexistent/other.so /elsewhere/libxlog_preload.so");
    command.env("XDG_CACHE_HOME", cache());
    let output = command.args(["exec", "--limit", "50%", "sh", "-c", show]).output().unwrap();
    let shown = text(&output.stdout);
    let (ours, rest) = shown.split_once(':').unwrap();
    assert!(ours.ends_with("/libxlog_preload.so") && Path::new(ours).exists(), "{shown}");
    assert_eq!(rest, "/nonexistent/other.so off share:50000000\n");
}

#[test]
fn exec_passes_a_signal_on() {
    let scratch = Scratch::new("exec-signal");
    let mut command = xlogmem();
    command.env("TMPDIR", scratch.folder()).env("XDG_CACHE_HOME", cache());
    command.args(["exec", "sh", "-c"]);
    command.arg("trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "caught");
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

/// The temporary files below a folder.
fn temporary_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // What is listed may be gone by now.
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_name().to_string_lossy().starts_with(".tmp") {
            true => found.push(entry.path()),
            false => found.extend(temporary_files(&entry.path())),
        }
    }
    found
}

#[test]
fn exec_leaves_no_temporary_file_if_it_is_ended_before_the_program_starts() {
    let scratch = Scratch::new("exec-begins");
    let mut ended = 0;
    // Not every round meets the file while it is written.
    for round in 0.. {
        let cache = PathBuf::from(scratch.path(&format!("cache-{round}")));
        let temporary = scratch.path(&format!("temporary-{round}"));
        std::fs::create_dir(&temporary).unwrap();
        let mut command = xlogmem();
        command.env("TMPDIR", &temporary).env("XDG_CACHE_HOME", &cache).args(["exec", "true"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            if !temporary_files(&cache).is_empty() {
                kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
                ended += 1;
                break;
            }
        }
        child.wait().unwrap();
        assert_eq!(temporary_files(&cache), Vec::<PathBuf>::new());
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
        std::fs::remove_dir_all(&cache).unwrap();
        if ended == 5 {
            break;
        }
    }
}

#[test]
fn exec_refuses_what_it_cannot_do() {
    let scratch = Scratch::new("exec-refused");
    for (options, program, words) in [
        (&["--limit", "apples"][..], &["true"][..], &["--limit", "apples"][..]),
        (&["--log", "run.csv"], &["true"], &["--log", ".xtrace"]),
        (&["--log", "run-%d.xtrace"], &["true"], &["--log", "%"]),
        (&["--log", "/nonexistent/run.xtrace"], &["true"], &["--log", "directory"]),
        (&["--ledger", "here"], &["true"], &["--ledger", "here"]),
        (&[], &["/nonexistent/program"], &["/nonexistent/program"]),
        (&[], &[], &["PROGRAM"]),
    ] {
        assert_refused(&exec(&scratch, options, program), words);
    }
}

#[test]
fn exec_limits_logs_and_shows_a_cuda_program() {
    let scratch = Scratch::new("exec-cuda");
    let Some(fake) = fake(&scratch) else { return };
    let (ledgers, log) = (scratch.path("ledgers"), scratch.path("run-%p.xtrace"));
    let mut command = xlogmem();
    command.env("LD_LIBRARY_PATH", &fake).env_remove("LD_PRELOAD");
    command.env("XDG_CACHE_HOME", cache());
    command.args(["exec", "--limit", "100MiB", "--log", &log, "--ledger", &ledgers, "--"]);
    command.arg(fake.join("cuda-program")).arg("proc2");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut ask = |command: &str| {
        writeln!(input, "{command}").unwrap();
        answers.next().unwrap().unwrap()
    };
    assert_eq!(ask("init"), "0 0xc0de");
    assert!(ask(&format!("alloc {}", 60 << 20)).starts_with("0 "));
    assert_eq!(ask(&format!("alloc {}", 60 << 20)), "2 0x0", "out of memory");
    assert_eq!(ask("info"), format!("0 {} {}", 40 << 20, 100 << 20));

    let shown = xlogmem().args(["ledger", "--json", "--ledger", &ledgers]).output().unwrap();
    let shown = json(&shown).to_string();
    assert!(shown.contains("cuda-program") && shown.contains(&(60 << 20).to_string()), "{shown}");
    drop(input);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(errors, "");

    let logs: Vec<String> =
        scratch.names().into_iter().filter(|name| name.ends_with(".xtrace")).collect();
    assert_eq!(logs.len(), 1, "{logs:?}");
    let summary = xlogmem().arg("summary").arg(scratch.path(&logs[0])).output().unwrap();
    let summary = text(&summary.stdout);
    assert!(summary.contains("cuda-program") && summary.contains("60 MiB"), "{summary}");
    let page = scratch.path("report.html");
    let report = xlogmem().arg("report").arg(scratch.path(&logs[0])).args(["-o", &page]).output();
    assert!(report.unwrap().status.success() && Path::new(&page).exists());
}

#[test]
fn exec_leaves_the_library_to_children_that_outlive_the_program() {
    let scratch = Scratch::new("exec-outlive");
    let preloaded = || {
        let mut command = xlogmem();
        // A folder of its own: the file is damaged below.
        command.env("XDG_CACHE_HOME", scratch.path("cache")).env_remove("LD_PRELOAD");
        let output = command.args(["exec", "sh", "-c", "echo $LD_PRELOAD"]).output().unwrap();
        text(&output.stdout).trim_end().to_owned()
    };
    let first = preloaded();
    assert!(Path::new(&first).is_file(), "{first}");
    let bytes = std::fs::read(&first).unwrap();
    assert_eq!(preloaded(), first, "one file for all runs");
    std::fs::write(&first, "damaged").unwrap();
    assert_eq!(preloaded(), first);
    assert!(std::fs::read(&first).unwrap() == bytes, "a damaged file is replaced");
}

#[test]
fn exec_inside_exec_keeps_the_outer_limit_and_log() {
    let scratch = Scratch::new("exec-nested");
    let log = scratch.path("run-%p.xtrace");
    let own = env!("CARGO_BIN_EXE_xlogmem");
    let show = "echo $XLOG_EXEC_LIMIT $XLOG_EXEC_LOG";
    let outer = ["--limit", "1MiB", "--log", &log];
    let inherited = exec(&scratch, &outer, &[own, "exec", "--", "sh", "-c", show]);
    assert_eq!(text(&inherited.stdout), format!("1048576 {log}\n"));
    let limited = [own, "exec", "--limit", "50%", "--", "sh", "-c", show];
    let both = exec(&scratch, &outer, &limited);
    assert_eq!(text(&both.stdout), format!("share:50000000,1048576 {log}\n"));
    // What the inner one intercepts, the outer one knows of.
    let note = "echo 1 >> $XLOG_EXEC_NOTE";
    let noted = exec(&scratch, &[], &[own, "exec", "--", "sh", "-c", note]);
    assert_eq!(text(&noted.stderr), "");
}

#[test]
fn exec_keeps_ignored_signals_ignored() {
    let scratch = Scratch::new("exec-nohup");
    let script = "trap '' HUP; exec \"$0\" exec -- sh -c 'kill -HUP $$; echo alive'";
    let mut command = Command::new("sh");
    command.env("TMPDIR", scratch.folder()).env("XDG_CACHE_HOME", cache());
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_xlogmem")]).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "alive\n"));
}

#[test]
fn exec_passes_an_interrupt_on_that_no_terminal_sent() {
    use std::os::unix::process::CommandExt;
    // A shell cannot trap a signal that is ignored when it starts, as this one is below `nohup`.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(xlogmem().get_program()).args(["exec", "sh", "-c"]);
    command.env("XDG_CACHE_HOME", cache()).process_group(0);
    command.arg("trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "caught");
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn exec_keeps_the_status_if_standard_error_is_full() {
    let mut command = xlogmem();
    command.env("XDG_CACHE_HOME", cache()).args(["exec", "--", "sh", "-c", "exit 4"]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(command.stderr(full).status().unwrap().code(), Some(4));
}

#[test]
fn exec_does_without_folders_that_cannot_be_used() {
    let mut command = xlogmem();
    command.env_remove("LD_PRELOAD").env("TMPDIR", "/nonexistent/temporary");
    command.env("XDG_CACHE_HOME", "/nonexistent/$ORIGIN").args(["exec", "--"]);
    let output = command.args(["sh", "-c", "echo $LD_PRELOAD"]).output().unwrap();
    let library = text(&output.stdout).trim_end().to_owned();
    assert!(library.starts_with("/tmp/") && Path::new(&library).is_file(), "{library}");
}

#[test]
fn exec_names_the_setting_and_the_reason() {
    let scratch = Scratch::new("exec-reasons");
    let mut command = xlogmem();
    command.env("XLOG_EXEC_LEDGER", "here").args(["exec", "true"]);
    assert_refused(&command.output().unwrap(), &["XLOG_EXEC_LEDGER", "here"]);
    let script = scratch.path("script");
    // A process of its own writes it: a file that is open for writing, also in a process that another test is starting, cannot be run.
    let mut write = Command::new("sh");
    let text_of_script = "#!/usr/bin/env -S A=b sh -e\nexit 0\n";
    write.args(["-c", r#"printf %s "$1" >"$0" && chmod 755 "$0""#, &script, text_of_script]);
    assert!(write.status().unwrap().success());
    let output = exec(&scratch, &[], &[&script]);
    assert!(text(&output.stderr).contains("no CUDA call"), "{}", text(&output.stderr));
}

/// The files that the build script watches, in a workspace that is in the scratch folder; `None` on a host without the sources.
fn watched_by_the_build(scratch: &Scratch) -> Option<Vec<String>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs");
    if !source.exists() {
        eprintln!("{} is not on this host", source.display());
        return None;
    }
    let script = scratch.path("build-script");
    let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    compiler.args(["--edition", "2024", "-o", &script]).arg(source);
    assert!(compiler.status().unwrap().success());
    let output = scratch.folder().join("target/debug/build/xlogmem-1/out");
    let manifest = scratch.folder().join("crates/xlogmem");
    std::fs::create_dir_all(&output).unwrap();
    std::fs::create_dir_all(&manifest).unwrap();
    let run = Command::new(&script)
        .env("OUT_DIR", output)
        .env("CARGO_MANIFEST_DIR", manifest)
        .env("CARGO", scratch.folder().join("cargo"))
        .env("HOST", "x86_64-unknown-linux-gnu")
        .env("TARGET", "x86_64-unknown-linux-gnu")
        .env("CARGO_CFG_TARGET_OS", "linux")
        .env("CARGO_CFG_TARGET_ARCH", "x86_64")
        .env("CARGO_CFG_TARGET_ENV", "gnu")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", text(&run.stderr));
    let lines = text(&run.stdout).lines();
    let watched = lines.filter_map(|line| line.strip_prefix("cargo::rerun-if-changed="));
    let crates = scratch.path("crates/xlogmem/../");
    Some(watched.map(|path| path.replace(&crates, "")).collect())
}

#[test]
fn the_preloaded_library_is_built_again_when_its_workspace_changes() {
    let scratch = Scratch::new("exec-rebuild");
    let Some(watched) = watched_by_the_build(&scratch) else { return };
    // Files that are missing would build it each time.
    assert_eq!(watched, ["build.rs"], "outside the workspace");

    let preload = scratch.folder().join("crates/xlog-preload");
    std::fs::create_dir_all(&preload).unwrap();
    std::fs::write(preload.join("Cargo.toml"), "").unwrap();
    let cargo = "#!/bin/sh\nwhile [ \"$1\" != --target-dir ]; do shift; done\n\
        mkdir -p \"$2/preload\" && echo library > \"$2/preload/libxlog_preload.so\"\n";
    let cargo = scratch.write("cargo", cargo);
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(cargo, executable).unwrap();
    let watched = watched_by_the_build(&scratch).unwrap();
    for name in ["../Cargo.toml", "../Cargo.lock", "xlog-preload/src", "xlog-ledger/Cargo.toml"] {
        assert!(watched.iter().any(|path| path == name), "{name}: {watched:?}");
    }
}
