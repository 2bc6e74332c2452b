//! `xlogmem replay` as its users meet it.

use crate::scratch::{Scratch, bad, good, page, run};
use crate::support::{assert_refused, text};
use serde_json::Value;
use xlog_testing::specs;

fn generate(scratch: &Scratch, kind: &str, name: &str, records: &str) -> String {
    let path = scratch.path(name);
    good(&["generate", kind, "-o", &path, "--records", records, "--scale", "0.05"]);
    path
}

#[test]
fn every_resource_serves_every_log_on_every_test_device() {
    let scratch = Scratch::new("replay-all");
    let logs = [
        generate(&scratch, "dataframe", "a.xtrace", "600"),
        generate(&scratch, "llm", "b.csv", "600"),
        generate(&scratch, "datalog", "c.rmm.csv", "600"),
    ];
    for spec in specs() {
        for log in &logs {
            let report =
                good(&["replay", log, "--device", &spec, "--compare", "async,pool,direct"]);
            assert_eq!((&report["schema"], &report["mode"]), (&1.into(), &"sequential".into()));
            assert_eq!(report["selection"]["spec"], spec.as_str());
            let figures = &report["log_figures"];
            let operations = figures["allocations"].as_u64().unwrap() * 2;
            assert_eq!(report["reading"]["records"], operations);
            let runs = report["runs"].as_array().unwrap();
            let names: Vec<_> = runs.iter().map(|run| run["resource"].as_str().unwrap()).collect();
            assert_eq!(names, ["async", "pool", "direct"]);
            for run in runs {
                assert_eq!(
                    (&run["served"], &run["operations"]),
                    (&true.into(), &operations.into())
                );
                assert_eq!((&run["failures"], &run["bytes_left"]), (&0.into(), &0.into()));
                assert_eq!(run["races"].as_array().unwrap().len(), 0);
                assert_eq!(run["peak_live_bytes"], figures["peak_live_bytes"]);
                assert!(run["reserved_ratio"].as_f64().unwrap() >= 1.0, "{run:#}");
                assert!(run["nanos_per_operation"].as_f64().unwrap() > 0.0);
                assert_eq!(run["pool"].is_object(), run["resource"] == "pool");
                let samples = run["over_time"].as_array().unwrap();
                assert!((100..=129).contains(&samples.len()), "{}", samples.len());
                assert_eq!(samples[samples.len() - 1]["operation"], operations);
                assert_eq!(samples[samples.len() - 1]["live_bytes"], 0);
                for sample in samples {
                    let number = |name: &str| sample[name].as_u64().unwrap();
                    assert!(number("reserved_bytes") >= number("live_bytes"), "{sample}");
                    assert!(number("live_bytes") <= run["peak_live_bytes"].as_u64().unwrap());
                    let part = &sample["fragmentation"];
                    assert_eq!(part.is_f64(), run["resource"] == "pool", "{sample}");
                }
            }
            // Direct takes what is asked for, in whole units of the device.
            assert!(runs[2]["reserved_ratio"].as_f64().unwrap() < 1.01, "{runs:#?}");
            assert!(runs[0]["time_ratio"].is_null() && runs[1]["time_ratio"].is_f64());
            let paths = &runs[1]["pool"];
            let served: u64 = ["magazine", "own", "covered", "completed", "grown", "waited"]
                .iter()
                .map(|path| paths[path].as_u64().unwrap())
                .sum();
            assert_eq!(served * 2, operations, "every allocation has a path: {paths:#}");
        }
    }
}

#[test]
fn threads_keep_their_order_and_free_nothing_before_it_is_there() {
    let scratch = Scratch::new("replay-threads");
    // Each block goes from one thread to the next, which frees it at once: any thread that runs ahead would free too early.
    let mut log = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    for block in 0..400 {
        let (from, to) = (block % 5, (block + 1) % 5);
        let (address, size) = (0x7f00_0000_0000_u64 + block * 4096, 1 + block * 7 % 4000);
        let time = format!("10:00:00.{:06}", block * 2);
        let next = format!("10:00:00.{:06}", block * 2 + 1);
        log += &format!("{from},{time},allocate,{address:#x},{size},0x{}\n", 3 + from);
        log += &format!("{to},{next},free,{address:#x},{size},0x{}\n", 3 + to);
    }
    let path = scratch.write("ring.csv", &log);
    for spec in specs() {
        for resource in ["direct", "async", "pool"] {
            let report = good(&[
                "replay",
                &path,
                "--device",
                &spec,
                "--mode",
                "threads",
                "--resource",
                resource,
            ]);
            let figures = &report["log_figures"];
            assert_eq!((&figures["threads"], &figures["streams"]), (&5.into(), &5.into()));
            assert_eq!(figures["cross_stream_frees"], 400);
            // The allocation's stream follows the one that frees, unless that is known to be done.
            let run = &report["runs"][0];
            let waits =
                run["waits_inserted"].as_u64().unwrap() + run["waits_elided"].as_u64().unwrap();
            assert!(waits > 0 || resource != "async", "{run:#}");
            assert_eq!(
                (&report["runs"][0]["operations"], &report["runs"][0]["skipped"]),
                (&800.into(), &0.into())
            );
        }
    }
}

#[test]
fn one_seed_of_the_simulated_device_is_one_replay() {
    let scratch = Scratch::new("replay-seed");
    let log = generate(&scratch, "dataframe", "a.xtrace", "800");
    let replay = || {
        let report =
            good(&["replay", &log, "--device", "sim:9", "--mode", "threads", "--resource", "pool"]);
        let run = &report["runs"][0];
        (run["pool"].clone(), run["peak_reserved_bytes"].clone(), run["peak_live_bytes"].clone())
    };
    assert_eq!(replay(), replay());
}

#[test]
fn recorded_time_goes_by_as_fast_as_asked_for() {
    let scratch = Scratch::new("replay-time");
    let path = scratch.write(
        "slow.csv",
        "Thread,Time,Action,Pointer,Size,Stream
1,10:00:00.000000,allocate,0x1000,100,0x1
2,10:00:00.400000,allocate,0x2000,100,0x2
1,10:13:20.000000,free,0x1000,100,0x1
2,10:13:20.000001,free,0x2000,100,0x2
",
    );
    let seconds = |arguments: &[&str]| {
        let base = ["replay", &path, "--device", "sim"];
        good(&[&base, arguments].concat())["runs"][0]["seconds"].as_f64().unwrap()
    };
    // 800 s at 4000 times the speed; a busy machine adds to that, but not minutes.
    let timed = seconds(&["--mode", "recorded", "--speed", "4000"]);
    assert!((0.2..400.0).contains(&timed), "{timed}");
    assert!(seconds(&["--mode", "threads"]) < 400.0);
}

#[test]
fn a_budget_names_the_records_that_do_not_fit() {
    let scratch = Scratch::new("replay-budget");
    let path = scratch.write(
        "log.csv",
        "thread,action,pointer,bytes,stream,tag,order
5,allocate,0x1000,4096,1,rows,10
5,allocate,0x2000,8192,1,keys,20
5,deallocate,0x2000,8192,1,,30
5,deallocate,0x1000,4096,1,,40
",
    );
    let arguments = ["replay", &path, "--device", "sim", "--budget", "8KiB", "--resource", "pool"];
    let report = bad(
        &arguments,
        &[
            "1 operations failed",
            "order 20",
            "thread 5",
            "stream 1",
            "8192 bytes",
            "keys",
            "out of budget",
        ],
    );
    let run = &report["runs"][0];
    assert_eq!(
        (&run["failures"], &run["skipped"], &run["served"]),
        (&1.into(), &1.into(), &false.into())
    );
    let failed = &run["first_failures"][0];
    assert_eq!(
        (&failed["order"], &failed["action"], &failed["bytes"]),
        (&20.into(), &"allocate".into(), &8192.into())
    );
    assert_eq!((&run["peak_live_bytes"], &run["bytes_left"]), (&4096.into(), &0.into()));
    good(&["replay", &path, "--device", "sim", "--budget", "12KiB", "--resource", "pool"]);
}

#[test]
fn a_log_with_gaps_is_mended_and_counted_or_refused_when_strict() {
    let scratch = Scratch::new("replay-gaps");
    let path = scratch.write(
        "gaps.csv",
        "Thread,Time,Action,Pointer,Size,Stream
1,10:00:00.000001,free,0x9000,10,0x1
1,10:00:00.000002,allocate,0x1000,1000,0x1
1,10:00:00.000003,allocate,0x1000,2000,0x1
1,10:00:00.000004,allocate,(nil),0,0x1
1,10:00:00.000005,allocate failure,(nil),5000,0x1
1,10:00:00.000006,free,(nil),0,0x1
1,10:00:00.000007,allocate,0x3000,3000,0x1
",
    );
    let report = good(&["replay", &path, "--device", "sim", "--resource", "pool"]);
    let figures = &report["log_figures"];
    for (field, count) in [
        ("allocations", 3),
        ("unknown_blocks", 1),
        ("missing_frees", 1),
        ("empty", 2),
        ("recorded_failures", 1),
        ("never_freed", 2),
        ("peak_live_bytes", 5000),
    ] {
        assert_eq!(figures[field], count, "{field}: {figures:#}");
    }
    let problem = figures["first_problem"].as_str().unwrap();
    assert!(problem.contains("order 0") && problem.contains("0x9000"), "{problem}");
    let run = &report["runs"][0];
    assert_eq!((&run["operations"], &run["peak_live_bytes"]), (&4.into(), &5000.into()));

    let report =
        bad(&["replay", &path, "--device", "sim", "--strict"], &[&path, "order 0", "0x9000"]);
    assert_eq!(report["runs"].as_array().unwrap().len(), 0, "nothing is replayed");
    let text = page(&["replay", &path, "--device", "sim"], 0);
    assert!(text.contains("1 frees missing, 2 blocks never freed"), "{text}");
}

#[test]
fn one_address_on_two_devices_is_two_blocks() {
    let scratch = Scratch::new("replay-devices");
    let path = scratch.write(
        "two.csv",
        "thread,action,pointer,bytes,stream,device,process,order
1,allocate,0x1000,100,1,0,1,1
1,allocate,0x1000,200,1,1,1,2
1,allocate,0x1000,400,1,0,2,3
1,deallocate,0x1000,100,1,0,1,4
1,deallocate,0x1000,200,1,1,1,5
1,deallocate,0x1000,400,1,0,2,6
",
    );
    let report = good(&["replay", &path, "--device", "sim", "--strict", "--resource", "pool"]);
    let figures = &report["log_figures"];
    assert_eq!((&figures["devices"], &figures["threads"]), (&3.into(), &2.into()));
    assert_eq!((&figures["peak_live_bytes"], &figures["missing_frees"]), (&700.into(), &0.into()));
}

#[test]
fn uses_are_replayed_where_they_are_tracked() {
    let scratch = Scratch::new("replay-uses");
    let path = scratch.write(
        "uses.csv",
        "thread,action,pointer,bytes,stream,generation,access,order
1,allocate,0x1000,4096,1,7,,1
1,use_prepare,0x1000,,2,7,write,2
1,use_finish,0x1000,,2,7,write,3
2,use_prepare,0x1000,,3,7,read,4
1,deallocate,0x1000,4096,1,7,,5
2,use_finish,0x1000,,3,7,read,6
1,allocate,0x1000,4096,1,8,,7
1,use_prepare,0x1000,,2,8,read,8
1,use_prepare,0x1000,,2,7,read,9
1,deallocate,0x1000,4096,1,8,,10
",
    );
    for mode in ["sequential", "threads"] {
        let arguments = ["replay", &path, "--device", "sim:3", "--mode", mode];
        let report = good(&[&arguments[..], &["--compare", "async,pool,direct"]].concat());
        let figures = &report["log_figures"];
        // The use of the block of generation 7, which is gone, is not replayed.
        assert_eq!((&figures["uses"], &figures["unknown_blocks"]), (&3.into(), &1.into()));
        for at in [0, 1] {
            let run = &report["runs"][at];
            // The use that stays open is closed at the end, or its block would be kept.
            assert_eq!((&run["uses"]["calls"], &run["skipped"]), (&6.into(), &0.into()), "{run:#}");
        }
        assert_eq!(
            (&report["runs"][2]["uses"]["calls"], &report["runs"][2]["skipped"]),
            (&0.into(), &6.into())
        );
    }
}

#[test]
fn the_text_says_what_the_json_says() {
    let scratch = Scratch::new("replay-text");
    let log = generate(&scratch, "llm", "a.xtrace", "500");
    let text = page(&["replay", &log, "--device", "sim", "--compare", "direct,pool"], 0);
    for part in
        ["Side by side", "res/req", "Resource pool", "served from", "fragmentation", "1.00x"]
    {
        assert!(text.contains(part), "{text} does not have {part}");
    }
    assert!(text.ends_with("sim: every operation was served\n"), "{text}");
}

#[test]
fn what_cannot_be_replayed_is_refused_or_failed_with_all_fields_there() {
    let scratch = Scratch::new("replay-refused");
    let log = generate(&scratch, "llm", "a.xtrace", "200");
    let replay = |arguments: &[&str]| run(&[&["replay", &log], arguments].concat());
    for (arguments, words) in [
        (&["--resource", "fast"][..], &["--resource", "\"fast\"", "pool"][..]),
        (&["--resource", "async,pool"], &["--resource", "--compare"]),
        (&["--compare", "async,fast"], &["--compare", "\"fast\""]),
        (&["--compare", "async,async"], &["--compare", "async", "twice"]),
        (&["--compare", "async", "--resource", "pool"], &["--compare", "--resource"]),
        (&["--budget", "much"], &["--budget", "\"much\"", "4GiB"]),
        (&["--budget", "-1"], &["--budget", "\"-1\""]),
        (&["--budget", "0"], &["--budget", "\"0\"", "nothing at all"]),
        (&["--mode", "backwards"], &["--mode", "\"backwards\"", "recorded"]),
        (&["--mode", "recorded", "--speed", "0"], &["--speed", "0"]),
        (&["--speed", "2"], &["--speed", "recorded"]),
        (&["--mode", "recorded", "--device", "sim:1"], &["sim:1", "--device sim"]),
        (&["--device", "gpu"], &["\"gpu\"", "sim:SEED"]),
        (&["--from", "chrome"], &["--from", "only written"]),
    ] {
        assert_refused(&replay(arguments), words);
    }
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let report = good(&["replay", &log, "--device", "sim"]);
    let failed = bad(&["replay", &log, "--device", "cuda:99"], &["cuda:99"]);
    assert_eq!(fields(&failed), fields(&report));
}

#[test]
fn recorded_time_of_more_than_a_day_is_refused_with_a_speed_that_fits() {
    let scratch = Scratch::new("centuries");
    let log = scratch.write(
        "log.csv",
        &format!(
            "time,action,pointer,bytes,order\n5,allocate,0x1000,64,1\n{},deallocate,0x1000,64,2\n",
            u64::MAX
        ),
    );
    let recorded = ["replay", &log, "--device", "sim", "--mode", "recorded"];
    let output = run(&recorded);
    assert_refused(
        &output,
        &["log.csv", "order 1 and 2", "hours", "24", "--speed", "--mode threads"],
    );
    let said = text(&output.stderr);
    let speed = said.split("--speed of ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(speed.parse::<f64>().unwrap() > 1e5, "{said}");

    let day = scratch.write(
        "day.csv",
        "time,action,pointer,bytes,order\n0,allocate,0x1000,64,1\n90000000000000,deallocate,0x1000,64,2\n",
    );
    let recorded = ["replay", &day, "--device", "sim", "--mode", "recorded"];
    assert_refused(&run(&recorded), &["25.0 hours"]);
    good(&[&recorded[..], &["--speed", "1e9"]].concat());
}
