//! Every command over bad options, inputs and outputs: exit status 2, one line that names what is bad, and nothing written.
//!
//! The tables name every command that the help names, so that a new one is not forgotten. Outputs that cannot be written are places that
//! refuse also root: below a plain file, in a folder that is not there, a folder itself, a full device.

#![cfg(target_os = "linux")]

mod names;
mod temporary;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

use crate::scratch::{Scratch, assert_warning, good, run, warned};
use crate::support::{assert_refused, commands, text, xlogmem};

/// Every command, with arguments that are good as far as they go.
const COMMANDS: [(&str, &[&str]); 21] = [
    ("doctor", &[]),
    ("exec", &[]),
    ("ledger", &[]),
    ("top", &["--once"]),
    ("demo", &["--for", "100ms"]),
    ("run join", &[]),
    ("run fixpoint", &[]),
    ("run sort", &[]),
    ("run handoff", &[]),
    ("run tenants", &[]),
    ("run churn", &[]),
    ("certify", &[]),
    ("replay", &["LOG"]),
    ("convert", &["LOG", "OUT.csv"]),
    ("summary", &["LOG"]),
    ("report", &["LOG"]),
    ("diff", &["LOG", "LOG"]),
    ("generate", &["llm", "-o", "OUT.csv"]),
    ("bench", &[]),
    ("completions", &["bash"]),
    ("man", &[]),
];

/// Every way in which a command reads a log: `IN` is the bad one, `LOG` a good one, `OUT` where an output would go.
const READERS: [&str; 11] = [
    "summary IN",
    "convert IN OUT.csv",
    "convert IN OUT.json",
    "convert IN OUT.pickle",
    "replay IN --device sim",
    "report IN",
    "report IN -o OUT.html --svg OUT.svg --png OUT.png",
    "report LOG -o OUT.html --compare IN",
    "report LOG --compare IN",
    "diff IN LOG",
    "diff LOG IN",
];

/// Every way in which a command writes a file, `OUT`, with a name that tells its format.
const FILES: [(&str, &str); 12] = [
    ("convert LOG OUT", "csv"),
    ("convert LOG OUT", "xtrace"),
    ("convert LOG OUT", "json"),
    ("convert LOG OUT", "pickle"),
    ("generate llm --records 100 -o OUT", "xtrace"),
    ("report LOG -o OUT", "html"),
    ("report LOG --svg OUT", "svg"),
    ("report LOG --png OUT", "png"),
    ("run join --device sim --rows 10 --log OUT", "csv"),
    ("run sort --device sim --rows 10 --log OUT", "xtrace"),
    ("run handoff --device sim --rounds 1 --log OUT", "csv"),
    ("run churn --device sim --allocations 1 --log OUT", "csv"),
];

/// Every way in which a command writes into a folder, `OUT`.
const FOLDERS: [&str; 3] = [
    "completions zsh --output OUT",
    "man --output OUT",
    "certify --device sim --bug none --stack direct --output OUT",
];

/// A folder with a log, `log.xtrace`, of which everything in it is known.
struct Place {
    scratch: Scratch,
    log: String,
}

impl Place {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let log = scratch.path("log.xtrace");
        good(&["generate", "llm", "--records", "500", "-o", &log]);
        Self { scratch, log }
    }

    /// The line with its places filled in.
    fn line(&self, line: &str, input: &str, output: &str) -> Vec<String> {
        let words = line.split_whitespace().map(|word| match word {
            "IN" => input.to_owned(),
            "LOG" => self.log.clone(),
            "OUT" => output.to_owned(),
            word if word.starts_with("OUT.") => self.scratch.path(word),
            word => word.to_owned(),
        });
        words.collect()
    }

    /// Every file and folder here, with what is in it.
    fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        fn walk(folder: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let is_folder = path.is_dir();
                let bytes = if is_folder { Vec::new() } else { std::fs::read(&path).unwrap() };
                found.insert(path.display().to_string(), bytes);
                if is_folder {
                    walk(&path, found);
                }
            }
        }
        let mut found = BTreeMap::new();
        walk(self.scratch.folder(), &mut found);
        found
    }

    /// The command is refused, with and without `--json`, and nothing is written.
    fn refuses(&self, line: &[String], words: &[&str]) {
        let before = self.contents();
        let mut line: Vec<&str> = line.iter().map(String::as_str).collect();
        for with_json in [false, true] {
            if with_json {
                if ["completions", "demo", "man"].contains(&line[0]) {
                    break;
                }
                line.push("--json");
            }
            let output = run(&line);
            let code = output.status.code();
            assert_eq!(code, Some(2), "{line:?}: {}", text(&output.stderr));
            assert_refused(&output, words);
            assert_eq!(before, self.contents(), "{line:?} wrote something");
        }
    }
}

#[test]
fn the_table_has_every_command() {
    let help = |path: &[&str]| text(&run(&[path, &["--help"]].concat()).stdout).to_owned();
    let mut named = Vec::new();
    for command in commands(&help(&[])) {
        match commands(&help(&[&command])) {
            inner if inner.is_empty() => named.push(command),
            inner => named.extend(inner.iter().map(|inner| format!("{command} {inner}"))),
        }
    }
    let mut table = COMMANDS.map(|(command, _)| command.to_owned());
    named.sort();
    table.sort();
    assert_eq!(named, table);
}

#[test]
fn a_bad_option_is_refused_by_every_command() {
    let place = Place::new("bad-option");
    for (command, arguments) in COMMANDS {
        let line = format!("{command} {} --no-such-option", arguments.join(" "));
        place.refuses(&place.line(&line, "", ""), &["--no-such-option"]);
        let line = format!("{command} {} one-too-many", arguments.join(" "));
        place.refuses(&place.line(&line, "", ""), &["one-too-many"]);
    }
    for (line, words) in [
        ("bench --device gpu", ["gpu", "cuda:N"]),
        ("doctor --device sim:x", ["sim:x", "sim:SEED"]),
        ("run join --device sim --resource fast", ["fast", "pool"]),
        ("run sort --device sim --guard maybe", ["maybe", "canary"]),
        ("run churn --device sim --max 4G", ["4G", "4GiB"]),
        ("run fixpoint --device sim --rows many", ["many", "--rows"]),
        ("run tenants --device sim --budget 1XB", ["1XB", "--budget"]),
        ("replay LOG --device sim --budget 512MBs", ["512MBs", "--budget"]),
        ("report LOG --budget -3", ["-3", "--budget"]),
        ("certify --device sim --sanitizer /no/such/tool", ["/no/such/tool", "--sanitizer"]),
        ("certify --device sim --bug spider", ["spider", "overflow"]),
    ] {
        place.refuses(&place.line(line, "", ""), &words);
    }
}

#[test]
fn an_input_that_is_no_log_is_refused_by_every_reader() {
    let place = Place::new("bad-input");
    let scratch = &place.scratch;
    let folder = scratch.path("folder");
    std::fs::create_dir(&folder).unwrap();
    let inputs = [
        (scratch.path("missing.xtrace"), "No such file"),
        (scratch.write("empty.xtrace", ""), "not an allocation log"),
        (scratch.write("empty.csv", ""), "not an allocation log"),
        (scratch.write("letter.csv", "Dear reader,\nall is well.\n"), "not an allocation log"),
        (scratch.write("picture.png", "\u{89}PNG\r\n\u{1a}\n"), "not an allocation log"),
        (folder, "directory"),
        (format!("{}/below", place.log), "Not a directory"),
    ];
    for (input, what) in &inputs {
        for line in READERS {
            place.refuses(&place.line(line, input, ""), &[input, what]);
        }
    }
    // A name with a line break is still one line.
    let odd = scratch.path("two\nlines.xtrace");
    place.refuses(&place.line("summary IN", &odd, ""), &["two\\nlines.xtrace"]);
    // A format that is claimed and is not there.
    let letter = inputs[3].0.as_str();
    for line in READERS {
        place.refuses(&place.line(&format!("{line} --from xtrace"), letter, ""), &[letter]);
    }
}

#[test]
fn a_log_that_is_cut_off_is_counted_found_by_strict_or_refused_by_what_needs_all_of_it() {
    let place = Place::new("cut-off");
    let csv = place.scratch.path("log.csv");
    good(&["convert", &place.log, &csv]);
    for whole in [&place.log, &csv] {
        let bytes = std::fs::read(whole).unwrap();
        let cut = whole.replace("log.", "cut.");
        std::fs::write(&cut, &bytes[..bytes.len() * 2 / 3]).unwrap();
        let out = place.scratch.path("out.csv");
        let skipping: [&[&str]; 3] =
            [&["summary", &cut], &["convert", &cut, &out], &["replay", &cut, "--device", "sim"]];
        for line in skipping {
            let reading = &warned(line, &[&cut])["reading"];
            let told = reading["skipped"].as_u64().unwrap() > 0 || reading["cut_off"] == true;
            assert!(told && reading["records"].as_u64().unwrap() > 0, "{line:?}: {reading}");
            let output = run(line);
            assert_warning(&output, &[&cut, "incomplete"]);
            let page = text(&output.stdout);
            assert!(page.contains("cut off") || page.contains("first bad place"), "{page}");
        }
        std::fs::remove_file(&out).unwrap();
        let before = place.contents();
        for line in skipping {
            let output = run(&[line, &["--strict"]].concat());
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{line:?}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
            assert!(error.contains(&cut), "{error}");
            assert_eq!(before, place.contents(), "{line:?} wrote something");
        }
        for line in READERS.iter().filter(|line| line.contains("report") || line.contains("diff")) {
            place.refuses(&place.line(line, &cut, ""), &[&cut, "--partial"]);
        }
        let partial = run(&["report", &cut, "--partial"]);
        assert_eq!(partial.status.code(), Some(0), "{}", text(&partial.stderr));
        let partial = run(&["diff", &cut, &cut, "--partial"]);
        assert_eq!(partial.status.code(), Some(0), "{}", text(&partial.stderr));
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_by_every_writer() {
    let place = Place::new("bad-output");
    let scratch = &place.scratch;
    for (line, end) in FILES {
        let folder = scratch.path(&format!("folder.{end}"));
        std::fs::create_dir_all(&folder).unwrap();
        let outputs = [
            scratch.path(&format!("no/such/folder/out.{end}")),
            format!("{}/below.{end}", place.log),
            format!("/proc/none.{end}"),
            folder,
        ];
        for output in &outputs {
            place.refuses(&place.line(line, "", output), &[output]);
        }
        if line.starts_with("run") {
            continue;
        }
        let kept = scratch.write(&format!("kept.{end}"), "kept");
        let mut rights = std::fs::metadata(&kept).unwrap().permissions();
        rights.set_readonly(true);
        std::fs::set_permissions(&kept, rights).unwrap();
        place.refuses(&place.line(line, "", &kept), &[&kept, "read-only"]);
    }
    for line in [
        "convert LOG /dev/full --to csv",
        "convert LOG /dev/full --to xtrace",
        "convert LOG /dev/full --to chrome",
        "convert LOG /dev/full --to torch",
        "generate llm --records 100 --to csv -o /dev/full",
        "report LOG -o /dev/full",
        "report LOG --svg /dev/full",
        // One that could be written stays away with the one that could not.
        "report LOG -o OUT.html --png /dev/full",
    ] {
        place.refuses(&place.line(line, "", ""), &["/dev/full", "No space left"]);
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_by_every_writer() {
    let place = Place::new("bad-folder");
    for line in FOLDERS {
        let mut outputs =
            vec![place.log.clone(), format!("{}/below", place.log), "/proc/none".to_owned()];
        if !line.starts_with("certify") {
            outputs.push(place.scratch.path("missing"));
        }
        for output in outputs {
            place.refuses(&place.line(line, "", &output), &["--output", &output]);
        }
    }
    // What is kept is there in full, and nothing else.
    let kept = place.scratch.path("made/here");
    let line = place.line(FOLDERS[2], "", &kept);
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    assert_eq!(run(&line).status.code(), Some(0));
    let names = std::fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["none-direct.txt"]);
}

#[test]
fn a_ledger_that_cannot_be_read_is_refused() {
    let place = Place::new("bad-ledger");
    let scratch = &place.scratch;
    let ledgers = [
        (scratch.write("letter.ledger", "Dear reader,\n"), "letter.ledger"),
        (scratch.write("empty.ledger", ""), "empty.ledger"),
        (place.log.clone(), "log.xtrace"),
        (format!("{}/below", place.log), "below"),
    ];
    for (ledger, word) in &ledgers {
        place.refuses(&place.line("ledger --ledger IN", ledger, ""), &[word]);
        place.refuses(&place.line("top --once --every 0.01 --ledger IN", ledger, ""), &[word]);
    }
    let nowhere = scratch.path("no/such/folder/a.ledger");
    let line = place.line("ledger --limit 1GiB --ledger IN", &nowhere, "");
    place.refuses(&line, &["no/such/folder"]);
}

#[test]
fn an_answer_that_cannot_be_printed_is_said_in_one_line() {
    let place = Place::new("bad-standard-output");
    for line in [
        "--help",
        "doctor --device sim",
        "summary LOG",
        "summary LOG --json",
        "report LOG",
        "diff LOG LOG",
        "completions bash",
        "man",
        "ledger --ledger OUT",
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let line = place.line(line, "", &place.scratch.path("ledgers"));
        let output = xlogmem().args(&line).stdout(Stdio::from(full)).output().unwrap();
        assert_refused(&output, &["standard output", "No space left"]);
    }
}
