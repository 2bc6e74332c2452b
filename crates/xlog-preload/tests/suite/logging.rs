//! The log: who asked, for how much, on which stream.

use std::path::PathBuf;
use std::time::Duration;

use xlog_trace::{Action, Reader, Record, Source, Summary};

use super::{MIB, Scratch, initialized};

fn records(path: &std::path::Path) -> Vec<(Record, String)> {
    let mut reader = Reader::open(path).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        let tag = reader.names().text_or_empty(record.tag()).to_owned();
        records.push((record, tag));
    }
    records
}

#[test]
fn every_record_names_the_library_behind_the_runtime() {
    let scratch = Scratch::new();
    let log = scratch.0.join("run.xtrace");
    let mut program = initialized("dlsym", &scratch, &[("XLOG_EXEC_LOG", log.to_str().unwrap())]);
    for request in ["forward 1024", "ask 1024", "ask 1024", "forward 1024"] {
        program.get(request);
    }
    assert!(program.end().0.success());
    let tags: Vec<_> = records(&log).into_iter().map(|(_, tag)| tag).collect();
    assert_eq!(tags, ["loaded", "libother.so", "libother.so", "loaded"]);
}

#[test]
fn the_log_names_the_object_that_asked_the_stream_and_the_size() {
    for (way, object) in [("linked", "linked"), ("per-thread", "loaded")] {
        let scratch = Scratch::new();
        let pattern = scratch.0.join("run-%p.xtrace");
        let settings =
            [("XLOG_EXEC_LOG", pattern.to_str().unwrap()), ("XLOG_EXEC_LIMIT", "104857600")];
        let mut program = initialized(way, &scratch, &settings);
        let log = scratch.0.join(format!("run-{}.xtrace", program.child.id()));
        let block = program.get("alloc 1000");
        let pooled = program.get("async 2000 0");
        let other = program.get("async 3000 77");
        program.call(&format!("alloc {}", 200 * MIB));
        program.get(&format!("free {block}"));
        program.get(&format!("free-async {pooled} 0"));
        let handle = program.get(&format!("create {}", 2 * MIB));
        program.get(&format!("release {handle}"));
        assert!(program.end().0.success());

        let records = records(&log);
        assert!(records.iter().all(|(_, tag)| tag == object), "{way}: {records:?}");
        let default_stream = if way == "per-thread" { 2 } else { 0 };
        let seen: Vec<_> = records
            .iter()
            .map(|(record, _)| (record.action(), record.bytes(), record.stream(), record.ptr()))
            .collect();
        let (take, give) = (Action::Allocate, Action::Deallocate);
        assert_eq!(
            seen,
            [
                (take, Some(1000), None, Some(block)),
                (take, Some(2000), Some(default_stream), Some(pooled)),
                (take, Some(3000), Some(3), Some(other)),
                (take, Some(200 * MIB), None, None),
                (give, Some(1000), None, Some(block)),
                (give, Some(2000), Some(default_stream), Some(pooled)),
                (take, Some(2 * MIB), None, Some(handle)),
                (give, Some(2 * MIB), None, Some(handle)),
            ],
            "{way}"
        );
        assert_eq!(records.iter().filter(|(record, _)| record.is_failure()).count(), 1);
        let summary = Summary::of(&mut Reader::open(&log).unwrap()).unwrap();
        assert_eq!(summary.total.live_bytes, 3000, "{way}");
    }
}

#[test]
fn sampled_allocations_have_the_stack_of_the_program() {
    for (mode, sampled) in
        [("off", [0, 0, 0, 0]), ("all", [1, 1, 1, 1]), ("sampled:2", [1, 0, 1, 0])]
    {
        let scratch = Scratch::new();
        let pattern = scratch.0.join("run-%p.xtrace");
        let settings = [("XLOG_EXEC_LOG", pattern.to_str().unwrap()), ("XLOG_EXEC_STACKS", mode)];
        let mut program = initialized("linked", &scratch, &settings);
        let log = scratch.0.join(format!("run-{}.xtrace", program.child.id()));
        for _ in 0..2 {
            program.get("alloc 1000");
            let block = program.get("async 2000 0");
            program.get(&format!("free-async {block} 0"));
        }
        assert!(program.end().0.success());
        let mut reader = Reader::open(&log).unwrap();
        let mut found = Vec::new();
        while let Some(record) = reader.next_record().unwrap() {
            let frames: Vec<_> =
                reader.names().stack_texts(record.stack()).map(str::to_owned).collect();
            match record.action() {
                Action::Allocate => found.push(frames),
                _ => assert!(frames.is_empty(), "{frames:?}"),
            }
        }
        let has_stack: Vec<_> =
            found.iter().map(|frames| usize::from(!frames.is_empty())).collect();
        assert_eq!(has_stack, sampled, "{mode}: {found:?}");
        for frames in found.iter().filter(|frames| !frames.is_empty()) {
            // From the program's own frame on: the library and the driver are not in it.
            let of_library = |frame: &String| frame.contains("xlog_preload");
            assert!(!frames.iter().any(of_library), "{frames:?}");
            let first = &frames[0];
            assert!(first.contains("perform") || first.starts_with("linked+0x"), "{frames:?}");
        }
        let summary = Summary::of(&mut Reader::open(&log).unwrap()).unwrap();
        assert_eq!(summary.by_stack.is_empty(), mode == "off", "{mode}");
    }
}

#[test]
fn a_log_that_cannot_be_written_is_reported_once_and_the_program_runs() {
    let scratch = Scratch::new();
    let log = scratch.0.join("missing/run.xtrace");
    let mut program = initialized("proc2", &scratch, &[("XLOG_EXEC_LOG", log.to_str().unwrap())]);
    for _ in 0..3 {
        program.get("alloc 1000");
    }
    let (status, errors) = program.end();
    assert!(status.success());
    assert!(errors.contains("nothing is logged") && errors.lines().count() == 1, "{errors}");
}

#[test]
fn a_forked_child_writes_a_log_of_its_own() {
    let scratch = Scratch::new();
    let pattern = scratch.0.join("run-%p.xtrace");
    let settings = [("XLOG_EXEC_LOG", pattern.to_str().unwrap())];
    let mut program = initialized("dlsym", &scratch, &settings);
    program.get("alloc 1000");
    let child = program.ask("fork");
    program.get("alloc 2000");
    assert_eq!(program.ask("exit 0"), "0");
    program.get("alloc 3000");
    let parent = program.child.id().to_string();
    assert!(program.end().0.success());
    let sizes = |process: &str| -> Vec<Option<u64>> {
        let path = scratch.0.join(format!("run-{process}.xtrace"));
        records(&path).iter().map(|(record, _)| record.bytes()).collect()
    };
    assert_eq!(sizes(child.strip_prefix("child ").unwrap()), [Some(2000)]);
    assert_eq!(sizes(&parent), [Some(1000), Some(3000)]);
}

#[test]
fn a_log_without_the_process_in_its_name_is_not_overwritten_by_the_next_process_of_a_run() {
    let scratch = Scratch::new();
    let (log, note) = (scratch.0.join("run.xtrace"), scratch.0.join("note"));
    let settings =
        [("XLOG_EXEC_LOG", log.to_str().unwrap()), ("XLOG_EXEC_NOTE", note.to_str().unwrap())];
    let mut processes = Vec::new();
    for bytes in [1000, 2000] {
        let mut program = initialized("dlsym", &scratch, &settings);
        program.get(&format!("alloc {bytes}"));
        processes.push(program.child.id());
        assert!(program.end().0.success());
    }
    let second = scratch.0.join(format!("run-{}.xtrace", processes[1]));
    let size = |path| records(path)[0].0.bytes();
    assert_eq!((size(&log), size(&second)), (Some(1000), Some(2000)));
}

#[test]
fn the_log_of_an_earlier_process_is_not_overwritten_after_the_run() {
    let scratch = Scratch::new();
    let run = scratch.0.join("run");
    std::fs::create_dir(&run).unwrap();
    let (log, note) = (scratch.0.join("run.xtrace"), run.join("note"));
    let settings =
        [("XLOG_EXEC_LOG", log.to_str().unwrap()), ("XLOG_EXEC_NOTE", note.to_str().unwrap())];
    let mut logs = vec![log.clone()];
    for bytes in [1000, 2000, 3000] {
        let mut program = initialized("dlsym", &scratch, &settings);
        program.get(&format!("alloc {bytes}"));
        logs.push(scratch.0.join(format!("run-{}.xtrace", program.child.id())));
        assert!(program.end().0.success());
        // `xlogmem exec` has ended, and children that outlive it begin to use CUDA.
        let _ = std::fs::remove_dir_all(&run);
    }
    let sizes = |path: &PathBuf| records(path)[0].0.bytes();
    assert_eq!(sizes(&log), Some(1000));
    assert_eq!((sizes(&logs[2]), sizes(&logs[3])), (Some(2000), Some(3000)));
}

#[test]
fn a_process_that_calls_exec_keeps_the_log_of_its_first_program() {
    for pattern in ["run-%p.xtrace", "run.xtrace"] {
        let scratch = Scratch::new();
        let (log, note) = (scratch.0.join(pattern), scratch.0.join("note"));
        let settings =
            [("XLOG_EXEC_LOG", log.to_str().unwrap()), ("XLOG_EXEC_NOTE", note.to_str().unwrap())];
        let mut program = initialized("dlsym", &scratch, &settings);
        let process = program.child.id();
        let first = scratch.0.join(pattern.replace("%p", &process.to_string()));
        for bytes in [1000, 2000, 3000] {
            program.get(&format!("alloc {bytes}"));
            if bytes == 1000 {
                // An exec ends the thread that writes.
                let is_written = |_: &u32| {
                    std::thread::sleep(Duration::from_millis(1));
                    !records(&first).is_empty()
                };
                assert!((0..20_000).find(is_written).is_some());
            }
            if bytes < 3000 {
                program.get("exec");
                program.get("init");
            }
        }
        assert!(program.end().0.success());
        let mut names: Vec<_> = std::fs::read_dir(&scratch.0)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "xtrace"))
            .collect();
        names.sort();
        let path = |end: &str| scratch.0.join(format!("run-{process}{end}.xtrace"));
        let expected = match pattern {
            "run.xtrace" => [path("-2"), path(""), first.clone()],
            _ => [path("-2"), path("-3"), path("")],
        };
        assert_eq!(names, expected);
        assert_eq!(records(&first)[0].0.bytes(), Some(1000), "{pattern}");
        let last = if pattern == "run.xtrace" { path("-2") } else { path("-3") };
        assert_eq!(records(&last)[0].0.bytes(), Some(3000), "{pattern}");
    }
}
