//! `xlogmem report` and `xlogmem diff` as their users meet them, without a browser.

use crate::scratch::{Scratch, bad, good, page, run};
use crate::support::{assert_refused, json, text};
use serde_json::Value;

/// Two tags, a peak of 1,500 bytes after 3 us, one block never freed, one call failed; a use on another stream.
const LOG: &str = "\
thread,time,action,pointer,bytes,stream,tag,error_kind,error_message
7,1000,allocate,0x7f0000000000,1000,1,table,,
7,2000,use_prepare,0x7f0000000000,,2,,,
7,2500,use_finish,0x7f0000000000,,2,,,
7,4000,allocate,0x7f0000001000,500,1,rows,,
7,5000,deallocate,0x7f0000000000,1000,1,table,,
7,6000,allocate,,99999999,1,rows,out_of_memory,the device is full
7,9000,allocate,0x7f0000000000,64,2,rows,,
7,11000,deallocate,0x7f0000001000,500,1,rows,,
";

/// The same with a larger peak, of another tag, and everything freed.
const LATER: &str = "\
thread,time,action,pointer,bytes,stream,tag
7,1000,allocate,0x7f0000000000,1000,1,table
7,4000,allocate,0x7f0000001000,2000,1,index
7,5000,deallocate,0x7f0000000000,1000,1,table
7,6000,deallocate,0x7f0000001000,2000,1,index
";

/// The JSON in a page.
fn data_of(html: &str) -> Value {
    let from = html.split_once("id=\"data\">").unwrap().1;
    serde_json::from_str(from.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn the_figures_are_those_of_the_log() {
    let scratch = Scratch::new("report-figures");
    let log = scratch.write("log.csv", LOG);
    let report = bad(&["report", &log, "--budget", "1.2kB"], &["above the budget of 1.2 KiB"]);
    assert_eq!((&report["records"], &report["uses"]), (&8.into(), &2.into()));
    assert_eq!(
        (&report["allocations"], &report["frees"], &report["failures"]),
        (&3.into(), &2.into(), &1.into())
    );
    let peak = &report["peak"];
    assert_eq!(
        (&peak["bytes"], &peak["blocks"], &peak["time_nanos"]),
        (&1500.into(), &2.into(), &3000.into())
    );
    assert_eq!(
        (&peak["holders"][0]["tag"], &peak["holders"][0]["bytes"]),
        (&"table".into(), &1000.into())
    );
    assert_eq!((&report["budget"], &report["over_budget"]), (&1200.into(), &true.into()));
    assert_eq!((&report["live_bytes"], &report["live_blocks"]), (&64.into(), &1.into()));
    // One use on another stream, and the free back on the first.
    assert_eq!(report["handovers"], 2);
    let idle = report["idle"].as_array().unwrap();
    let table = idle.iter().find(|row| row["tag"] == "table").unwrap();
    // 1000 bytes held for 4 us, the last 2.5 us of them idle.
    let close = |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-12;
    assert!(
        close(&table["held_byte_seconds"], 4e-3) && close(&table["idle_byte_seconds"], 2.5e-3),
        "{table}"
    );
    let highest = report["over_time"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).max();
    assert_eq!(highest, Some(1500));
}

#[test]
fn the_report_agrees_with_the_summary_on_every_kind_of_log() {
    let scratch = Scratch::new("report-summary");
    for kind in ["dataframe", "llm", "datalog"] {
        let log = scratch.path(&format!("{kind}.xtrace"));
        good(&["generate", kind, "-o", &log, "--records", "20000", "--seed", "3"]);
        let (report, summary) = (good(&["report", &log]), good(&["summary", &log]));
        let numbers = &summary["numbers"];
        assert_eq!(report["peak"]["bytes"], numbers["total"]["peak_bytes"], "{kind}");
        assert_eq!(report["peak"]["order"], numbers["peak_order"], "{kind}");
        assert_eq!(report["duration_nanos"], numbers["duration_nanos"], "{kind}");
        let sum = |rows: &Value, field: &str| -> u64 {
            rows.as_array().unwrap().iter().map(|row| row[field].as_u64().unwrap()).sum()
        };
        let peak = &report["peak"];
        assert_eq!(sum(&peak["holders"], "bytes"), peak["bytes"].as_u64().unwrap(), "{kind}");
        assert_eq!(sum(&peak["holders"], "blocks"), peak["blocks"].as_u64().unwrap(), "{kind}");
        for histogram in ["sizes", "lifetimes_nanos"] {
            let blocks = sum(&report[histogram], "blocks");
            assert_eq!(blocks, numbers["total"]["allocations"].as_u64().unwrap(), "{kind}");
        }
    }
}

#[test]
fn the_text_has_bars_and_fits_a_terminal() {
    let scratch = Scratch::new("report-text");
    let (log, other) = (scratch.write("log.csv", LOG), scratch.write("later.csv", LATER));
    let text = page(&["report", &log, "--text", "--budget", "2000", "--compare", &other], 0);
    for part in [
        "1.5 KiB",
        "█",
        "----",
        "table",
        "66.7 %",
        "#####",
        "out_of_memory",
        "0x7f0000000000",
        "Since the other log",
        "index",
    ] {
        assert!(text.contains(part), "{text} does not have {part}");
    }
    assert_eq!(text, page(&["report", &log, "--budget", "2000", "--compare", &other], 0));
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.join(" ").ends_with("64 bytes in 1 block was never freed"), "{text}");
}

#[test]
fn a_log_cannot_command_the_terminal() {
    let scratch = Scratch::new("report-terminal");
    let log = LOG.replace("rows", "a\x1b[2Jb").replace("out_of_memory", "x\x1b]0;y\x07");
    let log = scratch.write("log.csv", &log);
    for command in [&["report", &log][..], &["diff", &log, &log]] {
        let text = page(command, 0);
        assert!(!text.contains(['\x1b', '\x07']), "{text:?}");
    }
}

#[test]
fn a_log_in_which_nothing_came_about_has_a_report() {
    let scratch = Scratch::new("report-nothing");
    let lines: Vec<&str> = LOG.lines().collect();
    let log = scratch.write("log.csv", &format!("{}\n{}\n", lines[0], lines[6]));
    let (html, svg, png) = (scratch.path("a.html"), scratch.path("a.svg"), scratch.path("a.png"));
    let report = good(&["report", &log, "-o", &html, "--svg", &svg, "--png", &png]);
    assert_eq!((&report["failures"], &report["peak"]["bytes"]), (&1.into(), &0.into()));
    assert!(page(&["report", &log, "--budget", "1"], 0).contains("the device is full"));
    page(&["diff", &log, &log], 0);
}

#[test]
fn the_page_is_whole_and_asks_for_nothing() {
    let scratch = Scratch::new("report-page");
    let (log, html) = (scratch.write("log.csv", LOG), scratch.path("report.html"));
    let written = page(&["report", &log, "-o", &html], 0);
    assert!(written.contains("report.html is written"), "{written}");
    let html = std::fs::read_to_string(&html).unwrap();
    let policy = html.split_once("Content-Security-Policy\" content=\"").unwrap().1;
    let policy = policy.split_once('"').unwrap().0;
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
    for reference in ["http://", "https://", " src=", "@import", "url("] {
        assert!(!html.contains(reference), "the page has {reference}");
    }
    let folder = scratch.folder().to_str().unwrap();
    assert!(!html.contains(folder), "the page says where the log lay");
    let data = data_of(&html);
    assert_eq!(
        (&data["peak"]["bytes"], &data["failed"][0]["message"]),
        (&1500.into(), &"the device is full".into())
    );
    assert_eq!(data["leaks"][0]["address"], "0x7f0000000000");
    // The same log gives the same page.
    let again = scratch.path("again.html");
    page(&["report", &log, "-o", &again], 0);
    assert_eq!(std::fs::read_to_string(&again).unwrap(), html);
}

#[test]
fn pictures_are_what_their_names_say() {
    let scratch = Scratch::new("report-pictures");
    let log = scratch.write("log.csv", &LOG.replace("table", "<b>&\"table\""));
    let (svg, png) = (scratch.path("a.svg"), scratch.path("a.png"));
    let report = good(&["report", &log, "--svg", &svg, "--png", &png, "--budget", "1600"]);
    assert_eq!(report["written"].as_array().unwrap().len(), 2);
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    assert!(svg.contains("budget 1.6 KiB"), "{svg}");
    assert!(!svg.contains("<b>") && svg.contains("&lt;b&gt;&amp;&quot;table"), "{svg}");
    let png = std::fs::read(&png).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 1000);
    let size = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
    assert_eq!((size(16), size(20)), (1920, 840));
    assert_eq!(scratch.names(), ["a.png", "a.svg", "log.csv"]);
}

#[test]
fn diff_answers_with_its_exit_status() {
    let scratch = Scratch::new("diff");
    let (log, later) = (scratch.write("log.csv", LOG), scratch.write("later.csv", LATER));
    // Times and addresses do not count.
    let moved = LOG.replace("7f00", "7e00").replace(",9000,", ",10000,");
    let moved = scratch.write("moved.csv", &moved);
    assert!(page(&["diff", &log, &log], 0).ends_with("the logs say the same of memory\n"));
    assert!(page(&["diff", &log, &moved], 0).contains("same"));
    let text = page(&["diff", &log, &later], 1);
    for part in [
        "1.5 KiB",
        "2.9 KiB",
        "+1.5 KiB",
        "+100.0 %",
        "index",
        "new",
        "gone",
        "out_of_memory",
        "the logs differ",
    ] {
        assert!(text.contains(part), "{text} does not have {part}");
    }
    let output = run(&["diff", &log, &later, "--json"]);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(1), 0));
    let report = json(&output);
    let comparison = &report["comparison"];
    assert_eq!((&report["ok"], &comparison["same"]), (&false.into(), &false.into()));
    let peak = &comparison["total"]["peak_bytes"];
    assert_eq!((&peak["before"], &peak["after"]), (&1500.into(), &3000.into()));
    let first = &comparison["by_tag"][0];
    assert_eq!((&first["tag"], &first["peak_bytes"]["after"]), (&"index".into(), &2000.into()));
    let live = &comparison["total"]["live_bytes"];
    assert_eq!((&live["before"], &live["after"]), (&64.into(), &0.into()));
}

#[test]
fn reserved_memory_is_in_every_form_and_does_not_make_logs_differ() {
    let scratch = Scratch::new("reserved");
    let segments = "\
7,500,segment_take,0x7f0000000000,2097152,,,,
7,12000,segment_return,0x7f0000000000,1048576,,,,
";
    let with = format!("{LOG}{segments}");
    let (log, without) = (scratch.write("with.csv", &with), scratch.write("without.csv", LOG));
    let text = page(&["report", &log], 0);
    assert!(text.contains("reserved            2 MiB at most"), "{text}");
    let reserved = &good(&["report", &log])["reserved"];
    assert_eq!(
        (&reserved["peak_bytes"], &reserved["end_bytes"]),
        (&2097152.into(), &1048576.into())
    );
    assert_eq!(reserved["over_time"].as_array().unwrap().len(), 64);
    assert!(good(&["report", &without])["reserved"].is_null());
    assert!(page(&["summary", &log], 0).contains("1 MiB at the end"));
    assert_eq!(good(&["summary", &log])["numbers"]["reserved"], {
        let mut reserved = reserved.clone();
        reserved.as_object_mut().unwrap().remove("over_time");
        reserved
    });
    assert!(page(&["diff", &without, &log], 0).contains("reserved at most"));
    // A replay has segments of its own; other formats leave them out.
    let rmm = scratch.path("out.rmm.csv");
    assert_eq!(good(&["convert", &log, &rmm])["left_out"], 4);
    let trace = scratch.path("out.json");
    good(&["convert", &log, &trace]);
    let events: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let counters: Vec<_> = events["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["name"] == "reserved bytes")
        .map(|event| event["args"]["reserved"].as_u64().unwrap())
        .collect();
    assert_eq!(counters, [2097152, 1048576]);
}

#[test]
fn what_cannot_be_read_is_refused_in_one_line_and_nothing_is_written() {
    let scratch = Scratch::new("report-unreadable");
    let good_log = scratch.write("good.csv", LOG);
    let html = scratch.path("out.html");
    let letter = scratch.write("letter.txt", "Dear reader,\n");
    let nothing = scratch.write("nothing.xtrace", "");
    let header = scratch.write("header.csv", LOG.lines().next().unwrap());
    let damaged = scratch.write("damaged.csv", &LOG.replace("use_finish", "explode\0"));
    let cut = scratch.write("cut.csv", LOG.trim_end());
    let binary = scratch.path("whole.xtrace");
    good(&["convert", &good_log, &binary]);
    let whole = std::fs::read(&binary).unwrap();
    let short = scratch.path("short.xtrace");
    std::fs::write(&short, &whole[..whole.len() - 150]).unwrap();
    let missing = scratch.path("missing.xtrace");
    let folder = scratch.folder().to_str().unwrap().to_owned();
    let before = scratch.names();
    for (log, words) in [
        (&letter, ["not an allocation log", "Dear reader"]),
        (&nothing, ["not an allocation log", "nothing"]),
        (&header, ["no records", "expected"]),
        (&damaged, ["line 4", "--partial"]),
        (&cut, ["7 records are good", "--partial"]),
        (&short, ["records are good", "--partial"]),
        (&missing, ["opening the log", "missing.xtrace"]),
        (&folder, ["opening the log", "directory"]),
    ] {
        let words = [&[log.as_str()], &words[..]].concat();
        assert_refused(&run(&["report", log, "-o", &html]), &words);
        assert_refused(&run(&["report", log, "--text"]), &words);
        assert_refused(&run(&["report", &good_log, "-o", &html, "--compare", log]), &words);
        assert_refused(&run(&["diff", log, &good_log]), &words);
        assert_refused(&run(&["diff", &good_log, log, "--json"]), &words);
        assert_eq!(scratch.names(), before, "{log}");
    }
    for (log, note) in
        [(&damaged, "1 bad places of the log were skipped"), (&cut, "cut off"), (&short, "cut off")]
    {
        let text = page(&["report", log, "--partial"], 0);
        assert!(text.contains(note), "{text}");
        page(&["diff", log, log, "--partial"], 0);
    }
}

#[test]
fn what_cannot_be_written_is_refused_in_one_line_and_what_was_there_stays() {
    let scratch = Scratch::new("report-unwritable");
    let log = scratch.write("log.csv", LOG);
    let nowhere = scratch.path("no/such/folder.html");
    let folder = scratch.folder().to_str().unwrap().to_owned();
    let locked = scratch.write("locked.html", "old");
    let mut permissions = std::fs::metadata(&locked).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&locked, permissions).unwrap();
    let fine = scratch.path("fine.svg");
    for (path, word) in [
        (&nowhere, "No such file"),
        (&folder, "folder"),
        (&locked, "read-only"),
        (&log, "it is the log"),
    ] {
        for option in ["-o", "--svg", "--png"] {
            assert_refused(&run(&["report", &log, option, path]), &[path, word]);
        }
    }
    // One that cannot be written keeps the others from being written.
    assert_refused(&run(&["report", &log, "--svg", &fine, "-o", &locked]), &["read-only"]);
    assert_refused(&run(&["report", &log, "--svg", &fine, "--png", &fine]), &["twice"]);
    assert_eq!(scratch.names(), ["locked.html", "log.csv"]);
    assert_eq!(std::fs::read_to_string(&locked).unwrap(), "old");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), LOG);
}

#[test]
fn a_bad_command_line_is_refused_in_one_line() {
    let scratch = Scratch::new("report-refused");
    let log = scratch.write("log.csv", LOG);
    assert_refused(&run(&["report"]), &["<LOG>"]);
    assert_refused(
        &run(&["report", &log, "--budget", "4 apples"]),
        &["--budget", "4 apples", "4GiB"],
    );
    assert_refused(&run(&["report", &log, "--budget", "-1"]), &["--budget", "-1"]);
    assert_refused(&run(&["report", &log, "--from", "json"]), &["--from", "\"json\"", "xtrace"]);
    assert_refused(&run(&["report", &log, "--text", "--json"]), &["--text", "--json"]);
    assert_refused(&run(&["report", &log, "--colour"]), &["--colour"]);
    assert_refused(&run(&["diff", &log]), &["<B>"]);
    assert_refused(&run(&["diff", &log, &log, "--from", "torch"]), &["--from", "\"torch\""]);
    assert_eq!(scratch.names(), ["log.csv"]);
}

#[test]
fn help_fits_a_terminal_and_says_the_exit_status() {
    for command in ["report", "diff"] {
        let output = run(&[command, "--help"]);
        let page = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0));
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
        assert!(page.contains("Exit status: 0"), "{page}");
    }
}
