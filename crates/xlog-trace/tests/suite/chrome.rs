//! The Chrome trace keeps the rules of the trace-event format.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xlog_trace::export::write_chrome_trace;
use xlog_trace::{Action, Failure, Format, Names, Record, Strictness};

use crate::support::{Random, Scratch, any_record, encode, for_seeds, reader};
use crate::tools::left_out;

fn export(records: &[Record], names: &Names) -> Value {
    let bytes = encode(Format::Binary, records, names);
    let mut out = Vec::new();
    let counts = write_chrome_trace(&mut reader(&bytes, Strictness::Strict), &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).expect("valid JSON");
    assert_eq!(trace["traceEvents"].as_array().unwrap().len() as u64, counts.events);
    trace
}

/// What the format demands of each phase of event.
fn check(trace: &Value) {
    let number = |event: &Value, key: &str| {
        let value = event[key].as_f64();
        value.filter(|value| value.is_finite() && *value >= 0.0).unwrap_or_else(|| {
            panic!("`{key}` is not a number of at least 0 in {event}");
        })
    };
    assert!(["ms", "ns"].contains(&trace["displayTimeUnit"].as_str().unwrap()));
    let mut open: HashSet<(u64, String, String)> = HashSet::new();
    let mut process_names = HashSet::new();
    let mut thread_names = HashSet::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let phase = event["ph"].as_str().expect("every event has a phase");
        assert!(event["name"].is_string() && event["cat"].is_string(), "{event}");
        number(event, "ts");
        let pid = event["pid"].as_u64().expect("an integer pid");
        let tid = event["tid"].as_u64().expect("an integer tid");
        let id = || {
            let text = |key: &str| event[key].as_str().unwrap().to_owned();
            (pid, text("cat"), text("id"))
        };
        match phase {
            "M" => {
                assert!(event["args"]["name"].is_string(), "{event}");
                match event["name"].as_str().unwrap() {
                    "process_name" => assert!(process_names.insert(pid), "named twice: {event}"),
                    "thread_name" => assert!(thread_names.insert((pid, tid)), "twice: {event}"),
                    other => panic!("unknown metadata {other}"),
                }
                continue;
            }
            "X" => assert!(number(event, "dur") >= 0.0),
            "b" => assert!(open.insert(id()), "begun twice: {event}"),
            "e" => assert!(open.remove(&id()), "ended without a beginning: {event}"),
            "C" => {
                let args = event["args"].as_object().unwrap();
                assert!(!args.is_empty() && args.values().all(Value::is_number), "{event}");
            }
            "i" => assert!(["g", "p", "t"].contains(&event["s"].as_str().unwrap()), "{event}"),
            other => panic!("unknown phase {other}"),
        }
        assert!(process_names.contains(&pid), "a process without a name: {event}");
        assert!(phase == "C" || thread_names.contains(&(pid, tid)), "no track: {event}");
    }
}

fn any_log(seed: u64, count: usize) -> (Vec<Record>, Names) {
    let mut random = Random::new(seed);
    let mut names = Names::new();
    let records = (0..count)
        .map(|_| {
            let record = any_record(&mut random, &mut names);
            // Few addresses, so that blocks meet their frees.
            if random.one_in(2) { record.with_ptr(random.below_u64(20)) } else { record }
        })
        .collect();
    (records, names)
}

#[test]
fn any_log_becomes_a_trace_within_the_rules() {
    for_seeds(10, |seed| {
        let (records, names) = any_log(seed, 500);
        check(&export(&records, &names));
    });
}

/// Checks each file with the JSON Schema of the format; ends with 3 where the module is missing, with 1 at a bad file.
const VALIDATE: &str = r#"
import json, sys
try:
    import jsonschema
except ImportError:
    sys.exit(3)
validator = jsonschema.Draft202012Validator(json.load(open(sys.argv[1])))
for path in sys.argv[2:]:
    for error in validator.iter_errors(json.load(open(path))):
        sys.exit(f"{path}: {error.json_path}: {error.message[:200]}")
"#;

/// Whether all files keep to the schema; none where that cannot be asked.
fn is_within_schema(files: &[&Path]) -> Option<Result<(), String>> {
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/chrome-trace.json");
    let mut command = Command::new("python3");
    let output = match command.args(["-c", VALIDATE]).arg(schema).args(files).output() {
        Ok(output) if output.status.code() != Some(3) => output,
        _ => {
            let missing = "there is no python3 with the module jsonschema";
            left_out("the JSON schema of Chrome traces", missing);
            return None;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() { Ok(()) } else { Err(said) })
}

#[test]
fn traces_keep_to_the_json_schema_of_the_format() {
    let scratch = Scratch::new("chrome-schema");
    let paths = [scratch.path("0"), scratch.path("1"), scratch.path("2")];
    for (seed, path) in paths.iter().enumerate() {
        let (records, names) = any_log(seed as u64, 80);
        std::fs::write(path, export(&records, &names).to_string()).unwrap();
    }
    let files: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
    let Some(verdict) = is_within_schema(&files) else { return };
    assert_eq!(verdict, Ok(()));

    // The schema is one that can say no, to every phase of event.
    let (records, names) = any_log(0, 80);
    let good = export(&records, &names);
    for (phase, field) in [("M", "args"), ("X", "dur"), ("b", "id"), ("C", "args"), ("i", "s")] {
        let mut bad = good.clone();
        let events = bad["traceEvents"].as_array_mut().unwrap();
        let event = events.iter_mut().find(|event| event["ph"] == phase).unwrap();
        event.as_object_mut().unwrap().remove(field);
        let path = scratch.path("bad");
        std::fs::write(&path, bad.to_string()).unwrap();
        assert!(is_within_schema(&[path.as_ref()]).unwrap().is_err(), "{phase} without {field}");
    }
}

#[test]
fn lives_counters_and_failures_are_there() {
    let mut names = Names::new();
    let tag = names.intern("join \"a\"\n");
    let failure = Failure { kind: names.intern("OutOfBudget"), message: names.intern("full") };
    let base = |action, order: u64| {
        Record::new(action, 0, order, 5_000_000_000 + order * 1500).with_stream(2)
    };
    let records = [
        base(Action::Allocate, 0).with_ptr(256).with_bytes(100).with_granted(256).with_tag(tag),
        base(Action::Allocate, 1).with_ptr(512).with_bytes(50).with_latency_nanos(250),
        base(Action::Allocate, 2).with_bytes(1 << 40).with_failure(failure),
        base(Action::Deallocate, 3).with_ptr(256),
    ];
    let trace = export(&records, &names);
    check(&trace);
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let counters: Vec<u64> =
        of("C").iter().map(|event| event["args"]["live"].as_u64().unwrap()).collect();
    assert_eq!(counters, [256, 306, 50]);
    let lives: HashMap<&str, usize> =
        [("b", of("b").len()), ("e", of("e").len()), ("i", of("i").len())].into();
    assert_eq!(lives, HashMap::from([("b", 2), ("e", 1), ("i", 1)]));
    assert_eq!(of("b")[0]["name"], "join \"a\"\n");
    assert_eq!(of("e")[0]["ts"], 4.5, "microseconds since the first record");
    assert_eq!(of("i")[0]["args"]["kind"], "OutOfBudget");
    assert_eq!(of("X")[1]["dur"], 0.25);
    let tracks: Vec<&Value> = of("M").iter().map(|event| &event["args"]["name"]).collect();
    assert_eq!(tracks, ["device 0 (process 0)", "stream 2"]);
}

#[test]
fn blocks_and_failures_have_their_call_site_and_stack() {
    let mut names = Names::new();
    let site = names.intern("src/load.rs:7");
    let frames = ["load", "main"].map(|frame| names.intern(frame));
    let block = Record::new(Action::Allocate, 0, 0, 0).with_ptr(1).with_bytes(512).with_site(site);
    let block = block.with_stack(names.intern_stack(&frames));
    let kind = names.intern("out_of_budget");
    let failed = Record::new(Action::Allocate, 0, 1, 9).with_bytes(7).with_site(site);
    let failed = failed.with_failure(Failure { kind, message: kind });
    let trace = export(&[block, failed], &names);
    let events = trace["traceEvents"].as_array().unwrap();
    let args = |ph: &str| &events.iter().find(|event| event["ph"] == ph).unwrap()["args"];
    assert_eq!(args("b")["site"], "src/load.rs:7");
    assert_eq!(args("b")["stack"], "load\nmain");
    assert_eq!(args("i")["site"], "src/load.rs:7");
    assert_eq!(args("i")["stack"], Value::Null);
}
