//! Nothing lost in silence: logs with missing records, and files that are taken for others.

use crate::scratch::{Scratch, assert_warning, bad, good, page, run, warned};
use crate::support::{assert_refused, json, text};
use xlog_trace::{Action, Encoder, Format, Header, Names, Record, encoder};

/// A log of `records` records, of which one block is never freed, with or without its end.
fn log(scratch: &Scratch, name: &str, records: u64, dropped: Option<u64>) -> String {
    let (mut bytes, names) = (Vec::new(), Names::new());
    let mut encoder: Box<dyn Encoder> = encoder(Format::Binary);
    encoder.begin(&Header::new(), &mut bytes);
    for order in 0..records {
        let action = if order % 2 == 0 { Action::Allocate } else { Action::Deallocate };
        let block = Record::new(action, 0, order, order * 1000).with_ptr(((order / 2) + 1) << 12);
        encoder.record(&block.with_bytes(4096).with_stream(0), &names, &mut bytes);
    }
    encoder.seal(&mut bytes);
    if let Some(dropped) = dropped {
        encoder.end(records, dropped, &mut bytes);
    }
    let path = scratch.path(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A complete log, one with dropped records, one of a killed process; and what names the losses of the last two.
fn logs(scratch: &Scratch) -> (String, [(String, &'static str); 2]) {
    let whole = log(scratch, "whole.xtrace", 41, Some(0));
    let dropped = log(scratch, "dropped.xtrace", 21, Some(1266));
    let killed = log(scratch, "killed.xtrace", 21, None);
    (whole, [(dropped, "1266 records are missing"), (killed, "not closed by its writer")])
}

/// The text of a command without its line breaks.
fn words(arguments: &[&str]) -> String {
    text(&run(arguments).stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_command_warns_of_an_incomplete_log_and_says_so_in_its_json() {
    let scratch = Scratch::new("incomplete-warned");
    let (whole, incomplete) = logs(&scratch);
    let out = scratch.path("out.csv");
    let html = scratch.path("out.html");
    let reading = good(&["summary", &whole])["reading"].clone();
    assert_eq!((&reading["complete"], &reading["incomplete"]), (&true.into(), &().into()));
    for (log, why) in &incomplete {
        let lines: [&[&str]; 5] = [
            &["summary", log],
            &["report", log],
            &["report", log, "-o", &html],
            &["replay", log, "--device", "sim"],
            &["convert", log, &out],
        ];
        for line in lines {
            let reading = warned(line, &[log, why, "21 records"])["reading"].clone();
            assert_eq!(reading["complete"], false, "{line:?}");
            assert!(reading["incomplete"].as_str().unwrap().contains(why), "{reading:#}");
            assert_warning(&run(line), &[log, why]);
        }
        let report = warned(&["diff", log, log], &[log, why]);
        for reading in ["reading_before", "reading_after"] {
            assert_eq!(report[reading]["complete"], false, "{report:#}");
        }
        let page = std::fs::read_to_string(&html).unwrap();
        assert!(page.contains("dropped by the writer") || page.contains("not closed"), "{why}");
    }
    let (dropped, killed) = (&incomplete[0].0, &incomplete[1].0);
    let both = run(&["diff", dropped, killed]);
    let error = text(&both.stderr);
    assert_eq!((both.status.code(), error.lines().count()), (Some(0), 2), "{error}");
    let both = run(&["report", &whole, "--compare", killed]);
    assert_warning(&both, &[killed, "not closed by its writer"]);
}

#[test]
fn conclusions_from_an_incomplete_log_are_qualified_and_from_a_complete_one_are_not() {
    let scratch = Scratch::new("incomplete-words");
    let (whole, incomplete) = logs(&scratch);
    for command in ["summary", "report"] {
        assert!(words(&[command, &whole]).contains("in 1 block was never freed"));
    }
    assert!(words(&["diff", &whole, &whole]).ends_with("the logs say the same of memory"));
    assert!(words(&["replay", &whole, "--device", "sim"]).ends_with("every operation was served"));
    for (log, why) in &incomplete {
        for command in ["summary", "report"] {
            let page = words(&[command, log]);
            assert!(!page.to_lowercase().contains("never freed"), "{page}");
            assert!(page.contains("unknown: ") && page.contains(why), "{page}");
        }
        let page = words(&["diff", log, log]);
        assert!(!page.contains("the logs say the same of memory"), "{page}");
        assert!(page.contains("unknown") && page.contains(why), "{page}");
        let differ = words(&["diff", &whole, log]);
        assert!(differ.contains("perhaps only by missing records"), "{differ}");
        let page = words(&["replay", log, "--device", "sim"]);
        assert!(!page.ends_with("every operation was served") && page.contains(why), "{page}");
    }
}

#[test]
fn strict_fails_on_an_incomplete_log_and_writes_nothing() {
    let scratch = Scratch::new("incomplete-strict");
    let (whole, incomplete) = logs(&scratch);
    let out = scratch.path("out.xtrace");
    for (log, why) in &incomplete {
        let lines: [&[&str]; 3] =
            [&["summary", log], &["replay", log, "--device", "sim"], &["convert", log, &out]];
        for line in lines {
            bad(&[line, &["--strict"]].concat(), &[log, why]);
        }
        assert_refused(&run(&["report", log, "--strict"]), &[log, why]);
        assert_refused(&run(&["diff", &whole, log, "--strict"]), &[log, why]);
    }
    assert!(!scratch.names().contains(&"out.xtrace".to_owned()));
    page(&["report", &whole, "--strict"], 0);
    page(&["diff", &whole, &whole, "--strict"], 0);
    good(&["summary", &whole, "--strict"]);
}

#[test]
fn a_converted_log_is_as_incomplete_as_its_input_where_the_format_can_say_so() {
    let scratch = Scratch::new("incomplete-convert");
    let (whole, mut incomplete) = (log(&scratch, "whole.xtrace", 41, Some(0)), Vec::new());
    incomplete.push(log(&scratch, "dropped.xtrace", 21, Some(1266)));
    incomplete.push(log(&scratch, "killed.xtrace", 21, None));
    // Two logs put together: records were dropped in one, the other has no end.
    let both = [&incomplete[0], &incomplete[1]].map(|log| std::fs::read(log).unwrap()).concat();
    incomplete.push(scratch.path("both.xtrace"));
    std::fs::write(&incomplete[2], both).unwrap();
    let bytes = std::fs::read(&whole).unwrap();
    incomplete.push(scratch.path("cut.xtrace"));
    std::fs::write(&incomplete[3], &bytes[..bytes.len() / 2]).unwrap();

    let copy = scratch.path("copy.xtrace");
    for log in &incomplete {
        let report = warned(&["convert", log, &copy], &[log, "marked as incomplete"]);
        assert_eq!(report["carries_loss"], true);
        let read = |log: &str| {
            let report = json(&run(&["summary", log, "--json"]));
            let reading = report["reading"].clone();
            let is_open = reading["not_closed"] == true || reading["cut_off"] == true;
            (reading["records"].clone(), reading["dropped_by_writer"].clone(), is_open)
        };
        assert_eq!(read(log), read(&copy), "{log}");
        let csv = scratch.path("copy.csv");
        let (_, dropped, _) = read(log);
        let words = if dropped == 0 { "looks complete" } else { "marked as incomplete" };
        let report = warned(&["convert", log, &csv], &[log, words, &csv]);
        assert_eq!((&report["carries_loss"], read(&csv).1), (&(dropped != 0).into(), dropped));
        for other in ["copy.rmm.csv", "copy.json", "copy.pickle"] {
            let out = scratch.path(other);
            let report = warned(&["convert", log, &out], &[log, "looks complete", &out]);
            assert_eq!(report["carries_loss"], false);
        }
    }
    let report = good(&["convert", &whole, &copy]);
    assert_eq!(report["carries_loss"], false);
    assert_eq!(good(&["summary", &copy])["reading"]["complete"], true);
}

#[test]
fn a_log_cut_off_before_its_first_record_is_refused_by_every_command() {
    let scratch = Scratch::new("incomplete-head");
    let whole = log(&scratch, "whole.xtrace", 41, Some(0));
    let head = scratch.path("head.xtrace");
    std::fs::write(&head, &std::fs::read(&whole).unwrap()[..10]).unwrap();
    let out = scratch.path("out.csv");
    let lines: [&[&str]; 5] = [
        &["summary", &head],
        &["replay", &head, "--device", "sim"],
        &["convert", &head, &out],
        &["report", &head],
        &["diff", &head, &head],
    ];
    for line in lines {
        assert_refused(&run(line), &[&head, "record"]);
    }
    // A log that ended in order before any record is good, and nothing was freed in it.
    let empty = log(&scratch, "empty.xtrace", 0, Some(0));
    assert!(page(&["summary", &empty], 0).ends_with("it has no records\n"));
}

#[test]
fn plain_and_strict_readers_count_a_log_that_is_cut_off_alike() {
    let scratch = Scratch::new("incomplete-cut");
    let whole = log(&scratch, "whole.xtrace", 41, Some(0));
    let csv = scratch.path("whole.csv");
    good(&["convert", &whole, &csv]);
    for whole in [&whole, &csv] {
        let bytes = std::fs::read(whole).unwrap();
        let cut = whole.replace("whole.", "cut.");
        std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
        let plain = warned(&["summary", &cut], &[&cut, "cut off"]);
        let strict = bad(&["summary", &cut, "--strict"], &[&cut]);
        for count in ["records", "skipped", "cut_off"] {
            assert_eq!(plain["reading"][count], strict["reading"][count], "{count} of {cut}");
        }
        assert!(plain["reading"]["records"].as_u64().unwrap() > 0);
        let last = words(&["summary", &cut]);
        assert!(last.ends_with("it is cut off at the end"), "{last}");
    }
}

#[test]
fn diff_of_different_logs_is_not_ok_in_its_json() {
    let scratch = Scratch::new("diff-ok");
    let (one, two) =
        (log(&scratch, "1.xtrace", 41, Some(0)), log(&scratch, "2.xtrace", 43, Some(0)));
    let output = run(&["diff", &one, &two, "--json"]);
    let report = json(&output);
    assert_eq!((output.status.code(), &report["ok"]), (Some(1), &false.into()), "{report:#}");
    assert_eq!(report["error"], "the logs differ");
    let same = good(&["diff", &one, &one]);
    assert_eq!(same["comparison"]["same"], true);
}

#[test]
fn a_log_is_replaced_by_its_conversion_only_where_the_format_is_named() {
    let scratch = Scratch::new("convert-itself");
    let path = log(&scratch, "run.xtrace", 41, Some(0));
    let before = std::fs::read(&path).unwrap();
    let other = format!("{}/./run.xtrace", scratch.folder().display());
    for output in [&path, &other] {
        assert_refused(&run(&["convert", &path, output]), &["run.xtrace", "it is the log", "--to"]);
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    good(&["convert", &path, &path, "--to", "csv"]);
    assert_eq!(good(&["summary", &path])["format"], "csv");
}

#[test]
fn a_file_that_is_no_ledger_is_refused_with_what_is_accepted() {
    let scratch = Scratch::new("no-ledger");
    let path = log(&scratch, "run.xtrace", 41, Some(0));
    for command in ["ledger", "top"] {
        let refused = run(&[command, "--ledger", &path]);
        assert_refused(&refused, &[&path, "no ledger", "folder", ".ledger"]);
    }
}

#[test]
fn a_run_takes_its_log_from_the_environment_and_the_option_wins() {
    let scratch = Scratch::new("log-variable");
    let (variable, option) = (scratch.path("variable.xtrace"), scratch.path("option.xtrace"));
    let churn = ["run", "churn", "--device", "sim:1", "--allocations", "10"];
    for (more, file) in [(&[][..], &variable), (&["--log", &option], &option)] {
        let mut command = crate::support::xlogmem();
        command.args(churn).args(more).env("XLOG_DEVICE_LOG", &variable);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(good(&["summary", file])["reading"]["complete"], true);
        std::fs::remove_file(file).unwrap();
        assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    }
}
