//! `xlogmem convert`, `summary` and `generate` as their users meet them.

use std::io::{BufWriter, Write};
use std::process::{Command, Output, Stdio};

use crate::scratch::{Scratch, bad, good, page, run, warned};
use crate::support::{assert_refused, text, xlogmem};
use xlog_trace::{Action, Format, Header, LogWriter, MAX_FRAMES, MAX_NAME_BYTES, Names, Record};

/// Three allocations, two frees, one failure; one block is never freed.
const RMM: &str = "Thread,Time,Action,Pointer,Size,Stream
7,10:00:00.000001,allocate,0x7f0000000000,1000,0x2
7,10:00:00.000002,allocate,0x7f0000001000,500,0x55aa00
8,10:00:00.000003,allocate failure,(nil),99999999,0
7,10:00:00.000004,free,0x7f0000000000,1000,0x2
8,10:00:00.000005,allocate,0x7f0000000000,64,0x2
8,10:00:00.000006,free,0x7f0000001000,500,0x55aa00
";

#[test]
fn every_kind_of_log_is_made_the_same_from_the_same_seed_and_sums_up() {
    let scratch = Scratch::new("generate");
    for kind in ["dataframe", "llm", "datalog"] {
        let (one, two, other) = (
            scratch.path(&format!("{kind}-1.xtrace")),
            scratch.path(&format!("{kind}-2.xtrace")),
            scratch.path(&format!("{kind}-3.xtrace")),
        );
        let make = |path: &str, seed: &str| {
            good(&["generate", kind, "-o", path, "--records", "5000", "--seed", seed])
        };
        let made = make(&one, "3");
        make(&two, "3");
        make(&other, "4");
        let read = |path: &str| std::fs::read(path).unwrap();
        assert_eq!(read(&one), read(&two), "{kind}: the same seed");
        assert_ne!(read(&one), read(&other), "{kind}: another seed");

        let records = made["records"].as_u64().unwrap();
        assert!((5_000..10_000).contains(&records), "{made:#}");
        let summary = good(&["summary", &one]);
        assert_eq!(summary["reading"]["records"], records);
        let numbers = &summary["numbers"];
        let total = &numbers["total"];
        // All is freed, nothing overlaps or is freed twice, and no other record is there.
        assert_eq!((&total["live_blocks"], &total["failures"]), (&0.into(), &0.into()));
        assert_eq!((&numbers["unknown_frees"], &numbers["missing_frees"]), (&0.into(), &0.into()));
        assert_eq!(total["allocations"], total["frees"]);
        assert_eq!(total["allocations"].as_u64().unwrap() * 2, records);
        assert_eq!(total["peak_blocks"], made["peak_blocks"]);
        assert!(numbers["by_tag"].as_array().unwrap().len() >= 8, "{numbers:#}");
        assert!(numbers["by_stream"].as_array().unwrap().len() >= 2);
        let sizes: u64 = numbers["sizes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["requests"].as_u64().unwrap())
            .sum();
        assert_eq!(total["allocations"], sizes);
    }
}

#[test]
fn the_logs_of_several_processes_are_summarized_and_reported_together() {
    let scratch = Scratch::new("several");
    let [one, two, both] = ["a.xtrace", "b.xtrace", "both.xtrace"].map(|name| scratch.path(name));
    // The same addresses and numbers in two processes.
    for (path, process, bytes) in [(&one, 11, 1000), (&two, 22, 500)] {
        let file = BufWriter::new(std::fs::File::create(path).unwrap());
        let mut log = LogWriter::new(Format::Binary, &Header::new().with_process(process), file);
        let record = Record::new(Action::Allocate, 0, 1, 1)
            .with_process(process)
            .with_ptr(0x7f00_0000_0000)
            .with_bytes(bytes);
        log.write(&record, &Names::new()).unwrap();
        drop(log.finish());
    }
    let joined = [std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap()].concat();
    std::fs::write(&both, joined).unwrap();
    let summary = |arguments: &[&str]| good(&[&["summary"], arguments].concat());
    let together = summary(&[&one, &two]);
    assert_eq!(together["numbers"], summary(&[&both])["numbers"]);
    assert_eq!(together["numbers"]["total"]["live_bytes"], 1500, "{together:#}");
    assert_eq!(together["log"], format!("{one} and 1 more"));
    let page = scratch.path("page.html");
    let output = run(&["report", &one, &two, "-o", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(std::fs::read_to_string(&page).unwrap().contains("and 1 more"));
    let csv = scratch.write("c.csv", RMM);
    for command in ["summary", "report"] {
        let refused = run(&[command, &one, &csv]);
        assert_refused(&refused, &[&csv, "not an xtrace log"]);
        assert_refused(&run(&[command, &one, "nowhere.xtrace"]), &["nowhere.xtrace"]);
    }
}

#[test]
fn scale_makes_blocks_larger_and_not_more() {
    let scratch = Scratch::new("scale");
    for kind in ["dataframe", "llm", "datalog"] {
        let peak = |scale: &str| {
            let path = scratch.path(&format!("{kind}-{scale}.csv"));
            let report =
                good(&["generate", kind, "-o", &path, "--records", "3000", "--scale", scale]);
            report["peak_bytes"].as_u64().unwrap()
        };
        assert!(peak("4") > 2 * peak("0.5"), "{kind}");
    }
}

#[test]
fn a_log_survives_a_journey_through_every_format() {
    let scratch = Scratch::new("journey");
    let [first, csv, back, rmm, again] =
        ["a.xtrace", "b.csv", "c.xtrace", "d.rmm.csv", "e.rmm.csv"].map(|name| scratch.path(name));
    let made = good(&["generate", "datalog", "-o", &first, "--records", "2000"]);
    let report = good(&["convert", &first, &csv]);
    assert_eq!((&report["from"], &report["to"]), (&"xtrace".into(), &"csv".into()));
    assert_eq!(report["written"], made["records"]);
    assert_eq!((&report["left_out"], &report["reading"]["skipped"]), (&0.into(), &0.into()));
    good(&["convert", &csv, &back]);
    let summary = |path: &str| {
        let mut report = good(&["summary", path]);
        let numbers = report["numbers"].as_object_mut().unwrap();
        // CSV has times of day.
        numbers.remove("peak_time_nanos");
        report["numbers"].clone()
    };
    assert_eq!(summary(&first), summary(&csv));
    assert_eq!(summary(&first), summary(&back));

    good(&["convert", &back, &rmm]);
    good(&["convert", &rmm, &csv]);
    good(&["convert", &csv, &again]);
    assert_eq!(std::fs::read(&rmm).unwrap(), std::fs::read(&again).unwrap());
    assert!(scratch.names().iter().all(|name| !name.contains(".part")), "{:?}", scratch.names());
}

#[test]
fn exports_are_what_other_tools_open() {
    let scratch = Scratch::new("exports");
    let rmm = scratch.write("in.csv", RMM);
    let (json, pickle) = (scratch.path("out.json"), scratch.path("out.pickle"));
    let report = good(&["convert", &rmm, &json]);
    assert_eq!((&report["from"], &report["to"]), (&"rmm-csv".into(), &"chrome".into()));
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(report["written"], events.len());
    let report = good(&["convert", &rmm, &pickle]);
    assert_eq!(report["reading"]["records"], 6);
    assert!(report["written"].as_u64().unwrap() >= 5, "{report:#}");
    let bytes = std::fs::read(&pickle).unwrap();
    assert!(bytes.starts_with(&[0x80]) && bytes.ends_with(b"."), "a pickle");
    assert_eq!(report["bytes"], bytes.len());
    // The format may also be said, whatever the name.
    let named = scratch.path("trace");
    good(&["convert", &rmm, &named, "--to", "torch"]);
    assert_eq!(std::fs::read(&named).unwrap(), bytes);
}

#[test]
fn a_log_may_be_converted_onto_itself() {
    let scratch = Scratch::new("itself");
    let path = scratch.write("log.csv", RMM);
    good(&["convert", &path, &path, "--to", "csv"]);
    let report = good(&["summary", &path]);
    assert_eq!((&report["format"], &report["reading"]["records"]), (&"csv".into(), &6.into()));
}

#[cfg(unix)]
#[test]
fn an_output_that_is_no_plain_file_is_written_to_and_stays_what_it_is() {
    let scratch = Scratch::new("special");
    let rmm = scratch.write("log.csv", RMM);
    let (target, link) = (scratch.write("target.csv", "old"), scratch.path("link.csv"));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    good(&["convert", &rmm, &link]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::read_to_string(&target).unwrap().starts_with("thread,"));
    good(&["convert", &rmm, "/dev/null", "--to", "csv"]);
    assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
}

#[test]
fn the_summary_names_who_holds_what_and_what_was_never_freed() {
    let scratch = Scratch::new("summary");
    let path = scratch.write("log.csv", RMM);
    let report = good(&["summary", &path]);
    let numbers = &report["numbers"];
    assert_eq!((&report["schema"], &report["format"]), (&1.into(), &"rmm-csv".into()));
    let total = &numbers["total"];
    assert_eq!((&total["allocations"], &total["frees"]), (&3.into(), &2.into()));
    assert_eq!((&total["peak_bytes"], &total["live_bytes"]), (&1500.into(), &64.into()));
    assert_eq!((&total["failures"], &numbers["failures"][0]["count"]), (&1.into(), &1.into()));
    let leak = &numbers["leaks"][0];
    assert_eq!((&leak["pointer"], &leak["bytes"]), (&"0x7f0000000000".into(), &64.into()));
    assert_eq!((&leak["thread"], &leak["age_nanos"]), (&8.into(), &1000.into()));
    assert_eq!(numbers["by_stream"].as_array().unwrap().len(), 3, "{numbers:#}");
    assert_eq!(numbers["sizes"][0]["from"], 64);

    let text = page(&["summary", &path], 0);
    for part in
        ["3 allocations, 2 frees, 1 failure\n", "0x7f0000000000", "0x55aa00", "64 bytes in 1 block"]
    {
        assert!(text.contains(part), "{text} does not have {part}");
    }
    assert!(text.ends_with("was never freed\n"), "{text}");
}

#[test]
fn bad_records_are_skipped_and_counted_or_stop_a_strict_reader() {
    let scratch = Scratch::new("bad-records");
    let path = scratch.write("log.csv", &RMM.replace("allocate failure,(nil)", "explode,(nil)"));
    let out = scratch.path("out.xtrace");
    let report = warned(&["convert", &path, &out], &[&path, "1 bad place was skipped"]);
    assert_eq!((&report["written"], &report["reading"]["skipped"]), (&5.into(), &1.into()));
    let first = report["reading"]["first_bad"].as_str().unwrap();
    assert!(first.contains("line 4") && first.contains("explode"), "{first}");
    assert!(page(&["convert", &path, &out], 0).contains("line 4"));

    std::fs::remove_file(&out).unwrap();
    for command in [&["convert", &path, &out, "--strict"][..], &["summary", &path, "--strict"]] {
        bad(command, &[&path, "line 4", "expected", "explode", "2 records before it are good"]);
    }
    // Nothing is left of an output that did not come about.
    assert_eq!(scratch.names(), ["log.csv"]);
}

#[test]
fn what_is_no_log_is_said_to_be_none_with_its_name() {
    let scratch = Scratch::new("no-log");
    let out = scratch.path("out.csv");
    let letter = scratch.write("letter.txt", "Dear reader,\n");
    let empty = scratch.write("empty.xtrace", "");
    let missing = scratch.path("missing.xtrace");
    let folder = scratch.folder().to_str().unwrap();
    for (path, words) in [
        (letter.as_str(), ["not an allocation log", "Dear reader"]),
        (&empty, ["not an allocation log", "nothing"]),
        (&missing, ["opening the log", "missing.xtrace"]),
        (folder, ["opening the log", "directory"]),
    ] {
        assert_refused(&run(&["convert", path, &out]), &[&[path], &words[..]].concat());
        assert_refused(&run(&["summary", path]), &[&[path], &words[..]].concat());
    }
    assert!(!std::path::Path::new(&out).exists());
    let rmm = scratch.write("rmm.csv", RMM);
    assert_refused(&run(&["convert", &rmm, folder, "--to", "csv"]), &[folder, "folder"]);
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    let scratch = Scratch::new("refused");
    let rmm = scratch.write("rmm.csv", RMM);
    let out = scratch.path("out.bin");
    assert_refused(&run(&["convert", &rmm, &out]), &["out.bin", ".xtrace", "--to"]);
    assert_refused(&run(&["convert", &rmm, &out, "--to", "xml"]), &["--to", "\"xml\"", "rmm-csv"]);
    assert_refused(
        &run(&["convert", &rmm, &out, "--to", "csv", "--from", "torch"]),
        &["--from", "\"torch\"", "only written"],
    );
    assert_refused(&run(&["summary", &rmm, "--from", "json"]), &["--from", "\"json\"", "xtrace"]);
    assert_refused(&run(&["convert", &rmm]), &["<OUT>"]);
    assert_refused(&run(&["summary"]), &["<LOG>"]);
    let csv = scratch.path("out.csv");
    assert_refused(&run(&["generate", "poem", "-o", &csv]), &["\"poem\"", "datalog"]);
    assert_refused(&run(&["generate", "llm"]), &["--output"]);
    assert_refused(&run(&["generate", "llm", "-o", &scratch.path("x.json")]), &["chrome", ".csv"]);
    for scale in ["0", "nan", "1e9"] {
        assert_refused(
            &run(&["generate", "llm", "-o", &csv, "--scale", scale]),
            &["--scale", "0.001"],
        );
    }
    assert_refused(&run(&["generate", "llm", "-o", &csv, "--records", "0"]), &["--records"]);
    assert_eq!(scratch.names(), ["rmm.csv"]);
}

#[test]
fn help_fits_a_terminal_and_says_the_exit_status() {
    for command in [
        &["convert", "--help"][..],
        &["summary", "--help"],
        &["generate", "--help"],
        &["replay", "--help"],
        &["run", "churn", "--help"],
    ] {
        let output = run(command);
        assert_eq!(output.status.code(), Some(0), "{command:?}");
        let page = text(&output.stdout);
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
        assert!(page.contains("Exit status: 0"), "{page}");
    }
}

/// The command with these bytes on its standard input, which is a pipe.
fn piped(bytes: &[u8], arguments: &[&str]) -> Output {
    let mut command = xlogmem();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // A command that refuses its input does not read all of it.
        scope.spawn(move || drop(input.write_all(bytes)));
        child.wait_with_output().unwrap()
    })
}

#[test]
fn every_command_reads_a_log_from_a_pipe_as_from_a_file() {
    let scratch = Scratch::new("pipes");
    let log = scratch.path("log.xtrace");
    // Larger than a pipe and any buffer.
    good(&["generate", "dataframe", "-o", &log, "--records", "20000"]);
    let bytes = std::fs::read(&log).unwrap();
    assert!(bytes.len() > 1 << 20);
    let stdin = "/dev/stdin";

    for output in ["out.csv", "out.xtrace", "out.rmm.csv", "out.json", "out.pickle"] {
        let (by_file, by_pipe) = (scratch.path(&format!("file-{output}")), scratch.path(output));
        good(&["convert", &log, &by_file]);
        let piped = piped(&bytes, &["convert", stdin, &by_pipe]);
        assert_eq!(piped.status.code(), Some(0), "{}", text(&piped.stderr));
        assert!(std::fs::read(&by_file).unwrap() == std::fs::read(&by_pipe).unwrap(), "{output}");
    }
    for command in [
        &["summary", "LOG", "--strict", "--json"][..],
        &["report", "LOG", "--json"],
        &["report", "LOG", "--compare", &log, "--json"],
        &["diff", "LOG", &log, "--json"],
        &["diff", &log, "LOG", "--json"],
        &["diff", "LOG", "LOG", "--json"],
        &["replay", "LOG", "--device", "sim:1", "--json"],
    ] {
        let with = |log: &str| -> Vec<String> {
            command.iter().map(|word| if *word == "LOG" { log } else { word }.to_owned()).collect()
        };
        let by_pipe = with(stdin);
        let by_pipe = piped(&bytes, &by_pipe.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(by_pipe.status.code(), Some(0), "{command:?}: {}", text(&by_pipe.stderr));
        let by_file = with(&log);
        let by_file = run(&by_file.iter().map(String::as_str).collect::<Vec<_>>());
        let figures = |output: &Output| {
            let mut report = crate::support::json(output);
            // Names of files and times of calls differ.
            for name in ["log", "before", "after", "runs", "clock_nanos"] {
                report.as_object_mut().unwrap().remove(name);
            }
            report
        };
        if command[0] != "report" {
            assert_eq!(figures(&by_pipe), figures(&by_file), "{command:?}");
        }
    }
    // A pipe that ends at once is no log, and makes none.
    let empty = scratch.path("empty.csv");
    assert_refused(&piped(b"", &["convert", stdin, &empty]), &["nothing"]);
    assert!(!std::path::Path::new(&empty).exists());
}

#[test]
fn a_log_equals_itself_whatever_its_tags() {
    let scratch = Scratch::new("same");
    // No tag and the empty tag have the same peak, so that nothing but a hash table would order them.
    let log = scratch.write(
        "log.csv",
        "action,pointer,bytes,tag\nallocate,0x1000,7,\nallocate,0x2000,7,\"\"\nallocate,0x3000,7,untagged\n\
         deallocate,0x1000,7,\ndeallocate,0x2000,7,\"\"\naction,pointer,bytes,tag\nallocate,0x1000,7,\"\"\n",
    );
    let first = text(&run(&["summary", &log, "--json"]).stdout).to_owned();
    // Hash tables of another process have another order.
    for _ in 0..20 {
        assert_eq!(good(&["diff", &log, &log])["comparison"]["same"], true);
        assert_eq!(text(&run(&["summary", &log, "--strict", "--json"]).stdout), first);
    }
}

/// The command in a shell with this limit, which fails calls instead of ending the process.
pub(crate) fn limited(limit: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit {limit} && exec \"$0\" \"$@\"");
    command.args(["-c", &script]).arg(xlogmem().get_program()).args(arguments);
    for (name, value) in xlogmem().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

#[test]
fn a_run_says_how_many_records_of_its_log_are_missing() {
    let scratch = Scratch::new("full-disk");
    for (work, format) in [
        (&["run", "handoff", "--rounds", "500"][..], "xtrace"),
        (&["run", "churn", "--allocations", "5000"], "xtrace"),
        (&["run", "churn", "--allocations", "5000"], "csv"),
        (&["run", "join", "--rows", "2000", "--repeat", "40"], "xtrace"),
    ] {
        let log = scratch.path(&format!("{}.{format}", work[1]));
        let arguments = [work, &["--device", "sim:1", "--log", &log]].concat();
        let whole = good(&arguments);
        assert_eq!(whole["log"]["dropped_records"], 0, "{work:?}");
        let records = good(&["summary", &log])["reading"]["records"].as_u64().unwrap();
        assert!(
            good(&work.iter().chain(&["--device", "sim:1"]).copied().collect::<Vec<_>>())["log"]
                .is_null()
        );

        // No file may be larger than a few KiB.
        let arguments = [&arguments[..], &["--json"]].concat();
        let output = limited("-f 8", &arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{work:?}: {}", text(&output.stderr));
        let report = crate::support::json(&output);
        let dropped = report["log"]["dropped_records"].as_u64().unwrap();
        assert_eq!((report["ok"].as_bool(), dropped > 0), (Some(false), true), "{report:#}");
        let said = report["error"].as_str().unwrap();
        assert!(said.contains(&log) && said.contains(&dropped.to_string()), "{said}");
        let page = limited("-f 8", &arguments[..arguments.len() - 1]).output().unwrap();
        assert!(text(&page.stdout).contains("records are missing"), "{}", text(&page.stdout));

        let summary = warned(&["summary", &log], &[&log, "incomplete"]);
        let reading = &summary["reading"];
        let is_told = reading["not_closed"] == true || reading["dropped_by_writer"] != 0;
        assert!(is_told && reading["records"].as_u64().unwrap() < records, "{reading:#}");
        if format == "csv" {
            let [read, dropped] =
                ["records", "dropped_by_writer"].map(|count| reading[count].as_u64().unwrap());
            assert_eq!(read + dropped, records, "{reading:#}");
        }
    }
}

/// A quarter of a million blocks that are never freed, as a log.
fn leaks(out: impl Write) {
    let mut log = LogWriter::new(Format::Binary, &Header::new(), BufWriter::new(out));
    for number in 1..=250_000 {
        let record =
            Record::new(Action::Allocate, 0, number, number).with_ptr(number << 8).with_bytes(256);
        // A reader that has seen enough closes the pipe.
        if log.write(&record, &Names::new()).is_err() {
            return;
        }
    }
    drop(log.finish());
}

#[test]
fn too_many_live_blocks_are_refused_with_what_they_would_take() {
    let scratch = Scratch::new("leaks");
    let log = scratch.path("leaks.xtrace");
    leaks(std::fs::File::create(&log).unwrap());
    let page = scratch.path("page.html");
    for command in [
        &["summary", &log][..],
        &["report", &log, "-o", &page],
        &["diff", &log, &log],
        &["convert", &log, &scratch.path("out.json")],
        &["convert", &log, &scratch.path("out.pickle")],
    ] {
        let output = limited("-v 120000", command).output().unwrap();
        assert_refused(&output, &["blocks are live", "MiB of memory", "leaks.xtrace"]);
    }
    assert_eq!(scratch.names(), ["leaks.xtrace"]);
}

#[test]
fn a_replay_without_memory_for_its_plan_is_refused_with_what_it_would_take() {
    let scratch = Scratch::new("plan");
    let log = scratch.path("leaks.xtrace");
    leaks(std::fs::File::create(&log).unwrap());
    for limit in ["-v 60000", "-v 70000", "-v 80000"] {
        let command = ["replay", &log, "--device", "sim:1", "--mode", "threads"];
        let output = limited(limit, &command).output().unwrap();
        assert_refused(&output, &["MiB of memory", "leaks.xtrace"]);
    }
}

/// Writes a log whose stacks share two long texts: formatted, its frames take hundreds of times its size.
fn deep_stacks(path: &str) {
    let mut names = Names::new();
    let frames = ["a", "b"].map(|text| names.intern(&text.repeat(MAX_NAME_BYTES)));
    let file = BufWriter::new(std::fs::File::create(path).unwrap());
    let mut log = LogWriter::new(Format::Binary, &Header::new(), file);
    for number in 1..=600_u64 {
        let depth = 0..MAX_FRAMES as u32;
        let stack: Vec<_> =
            depth.map(|depth| frames[usize::from(number >> (depth % 60) & 1 == 1)]).collect();
        let record = Record::new(Action::Allocate, 0, number, number)
            .with_ptr(number << 8)
            .with_bytes(256)
            .with_stack(names.intern_stack(&stack));
        log.write(&record, &names).unwrap();
    }
    drop(log.finish().unwrap());
}

#[test]
fn stacks_that_share_their_texts_take_the_memory_of_one() {
    let scratch = Scratch::new("stacks");
    let log = scratch.path("stacks.xtrace");
    deep_stacks(&log);
    assert!(std::fs::metadata(&log).unwrap().len() < 1 << 20);
    let (page, pickle) = (scratch.path("page.html"), scratch.path("out.pickle"));
    for command in [
        &["summary", &log][..],
        &["summary", &log, "--json"],
        &["report", &log],
        &["report", &log, "-o", &page],
        &["diff", &log, &log],
        &["convert", &log, &pickle],
    ] {
        // The texts of all frames take 157 MB.
        let mut command_line = limited("-v 120000", command);
        let output = command_line.stdout(Stdio::null()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{command:?}: {}", text(&output.stderr));
    }
    for written in [&page, &pickle] {
        assert!(std::fs::metadata(written).unwrap().len() < 1 << 20);
    }
}
