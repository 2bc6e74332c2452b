//! Graph memory: counted from the first launch until it is trimmed, and refused beyond the limit.

use super::{LEDGER_LIMIT, MIB, OUT_OF_MEMORY, Scratch, WAYS, initialized};

const LIMIT: (&str, &str) = ("XLOG_EXEC_LIMIT", "104857600"); // 100 MiB

#[test]
fn the_memory_of_a_graph_is_counted_from_its_first_launch_until_it_is_trimmed() {
    for way in WAYS {
        for instantiate in ["instantiate", "instantiate-short"] {
            for start in ["launch", "upload"] {
                let scratch = Scratch::new();
                let mut program = initialized(way, &scratch, &[]);
                let graph = program.get(&format!("graph {}", 5 * MIB));
                let executable = program.get(&format!("{instantiate} {graph}"));
                assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way} {instantiate}");
                for _ in 0..2 {
                    program.get(&format!("{start} {executable} 0"));
                    // What the driver has reserved, in its own steps.
                    assert_eq!(scratch.used(), 6 * MIB, "{way} {instantiate} {start}");
                    assert_eq!(program.driver_bytes(), 6 * MIB);
                }
                // While there is another executable graph, the driver keeps the memory for it.
                let other = program.get(&format!("{instantiate} {graph}"));
                program.get(&format!("destroy-executable {executable}"));
                assert_eq!(scratch.used(), 6 * MIB, "the driver keeps it");
                program.get("trim-graphs");
                assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way} {start}");
                program.get(&format!("destroy-executable {other}"));
            }
        }
    }
}

#[test]
fn a_launch_beyond_the_limit_is_refused_before_the_driver_sees_it_and_can_be_repeated() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    let block = program.get(&format!("alloc {}", 60 * MIB));
    let graph = program.get(&format!("graph {}", 50 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    let calls = program.ask("calls");
    for start in ["launch", "upload"] {
        assert_eq!(program.call(&format!("{start} {executable} 0")).0, OUT_OF_MEMORY);
    }
    assert_eq!(program.ask("calls"), calls, "the driver was not asked");
    assert_eq!(scratch.used(), 60 * MIB, "a refusal leaves no charge");
    program.get(&format!("free {block}"));
    program.get(&format!("launch {executable} 0"));
    assert_eq!(scratch.used(), 50 * MIB);
    assert_eq!(program.call(&format!("alloc {}", 51 * MIB)).0, OUT_OF_MEMORY);
}

#[test]
fn graphs_inside_graphs_count_and_graphs_without_memory_do_not() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    let empty = program.get("graph 0");
    let executable = program.get(&format!("instantiate {empty}"));
    program.get(&format!("launch {executable} 0"));
    assert_eq!(scratch.used(), 0);
    let inner = program.get(&format!("graph {}", 70 * MIB));
    let outer = program.get(&format!("graph {} {inner}", 40 * MIB));
    let executable = program.get(&format!("instantiate {outer}"));
    assert_eq!(program.call(&format!("launch {executable} 0")).0, OUT_OF_MEMORY, "110 MiB");
}

#[test]
fn memory_that_ended_graphs_left_to_the_driver_is_trimmed_before_a_refusal() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[LIMIT]);
    let graph = program.get(&format!("graph {}", 80 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    program.get(&format!("launch {executable} 0"));
    assert_eq!(program.call(&format!("alloc {}", 30 * MIB)).0, OUT_OF_MEMORY, "it is in use");
    program.get(&format!("launch {executable} 0"));
    assert_eq!(scratch.used(), 80 * MIB, "charged once");
    let _other = program.get(&format!("instantiate {graph}"));
    program.get(&format!("destroy-executable {executable}"));
    assert_eq!(scratch.used(), 80 * MIB, "kept for the other graph");
    program.get(&format!("alloc {}", 100 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (100 * MIB, 100 * MIB));
}

/// Another process that needs the memory cannot make the program trim it.
#[test]
fn the_memory_of_the_last_graph_goes_back_when_it_is_destroyed_without_a_further_call() {
    for way in WAYS {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[]);
        let graph = program.get(&format!("graph {}", 800 * MIB));
        let executable = program.get(&format!("instantiate {graph}"));
        program.get(&format!("launch {executable} 0"));
        let mut other = initialized(way, &scratch, &[]);
        assert_eq!(other.call(&format!("alloc {}", 500 * MIB)).0, OUT_OF_MEMORY, "{way}");
        program.get(&format!("destroy-executable {executable}"));
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way}");
        other.get(&format!("alloc {}", 500 * MIB));
    }
}

#[test]
fn calls_of_the_library_break_no_capture_of_the_program() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    let pooled = program.get(&format!("async {} 0", 40 * MIB));
    program.get(&format!("free-async {pooled} 0"));
    let graph = program.get(&format!("graph {}", 20 * MIB));
    let executables = [(); 2].map(|()| program.get(&format!("instantiate {graph}")));
    program.get(&format!("launch {} 0", executables[0]));
    program.get("capture 1");
    // The limit is reached: pools and graphs are asked and trimmed. Taking physical memory is allowed during a capture.
    let handle = program.get(&format!("create {}", 70 * MIB));
    for executable in executables {
        program.get(&format!("destroy-executable {executable}"));
    }
    assert_eq!(scratch.used(), 70 * MIB);
    program.get(&format!("release {handle}"));
    assert_eq!(program.ask("broken"), "0");
    // The mode of the thread is as before.
    program.get("trim 1 0");
    assert_eq!(program.ask("broken"), "1", "the program's own call does break it");
}

#[test]
fn memory_that_a_trim_takes_from_an_idle_graph_is_charged_before_its_next_launch() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    program.get("trims-idle 1");
    let graph = program.get(&format!("graph {}", 80 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    program.get(&format!("launch {executable} 0"));
    let block = program.get(&format!("alloc {}", 60 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (60 * MIB, 60 * MIB), "trimmed");
    let calls = program.ask("calls");
    assert_eq!(program.call(&format!("launch {executable} 0")).0, OUT_OF_MEMORY);
    assert_eq!(program.ask("calls"), calls, "the driver was not asked");
    program.get(&format!("free {block}"));
    for _ in 0..2 {
        program.get(&format!("launch {executable} 0"));
        assert_eq!((scratch.used(), program.driver_bytes()), (80 * MIB, 80 * MIB));
    }
}

#[test]
fn graph_memory_that_the_driver_refuses_leaves_no_charge() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[("XLOG_EXEC_LEDGER", "off")]);
    program.get(&format!("alloc {}", 1000 * MIB));
    let graph = program.get(&format!("graph {}", 50 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    assert_eq!(program.call(&format!("launch {executable} 0")).0, OUT_OF_MEMORY, "of the driver");
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    let graph = program.get(&format!("graph {}", 1020 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    assert_eq!(program.call(&format!("launch {executable} 0")).0, OUT_OF_MEMORY);
    assert_eq!(scratch.used(), 0);
    program.get(&format!("alloc {LEDGER_LIMIT}"));
}

/// Neither the destruction nor the synchronisation of another stream can return it.
#[test]
fn the_memory_of_a_graph_that_is_destroyed_while_it_runs_goes_back_when_it_is_done() {
    for way in ["dlsym", "per-thread"] {
        for synchronization in ["sync 55", "sync-event 55", "sync-context"] {
            let scratch = Scratch::new();
            let mut program = initialized(way, &scratch, &[]);
            let graph = program.get(&format!("graph {}", 50 * MIB));
            let executable = program.get(&format!("instantiate {graph}"));
            for stream in [0, 55] {
                program.get(&format!("launch {executable} {stream}"));
            }
            program.get(&format!("destroy-executable {executable}"));
            for other in ["sync 0", "sync-event 7", "sync 0"] {
                program.get(other);
                assert_eq!((scratch.used(), program.driver_bytes()), (50 * MIB, 50 * MIB), "{way}");
            }
            program.get(synchronization);
            assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{synchronization}");
        }
    }
}

#[test]
fn a_block_that_an_ended_graph_has_left_to_the_program_goes_back_when_it_is_freed() {
    for is_ordered in [true, false] {
        let scratch = Scratch::new();
        let mut program = initialized("proc2", &scratch, &[]);
        let graph = program.get(&format!("graph {}", 50 * MIB));
        let executable = program.get(&format!("instantiate {graph}"));
        program.get(&format!("launch {executable} 0"));
        let block = program.get(&format!("leave {executable}"));
        program.get(&format!("destroy-executable {executable}"));
        program.get("sync-context");
        assert_eq!(scratch.used(), 50 * MIB, "the program has it");
        if is_ordered {
            program.get(&format!("free-async {block} 77"));
            program.get("sync 77");
        } else {
            program.get(&format!("free {block}"));
        }
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{is_ordered}");
    }
}

#[test]
fn a_graph_that_took_more_than_was_charged_is_charged_by_its_next_launch() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    let block = program.get(&format!("alloc {}", 80 * MIB));
    program.get(&format!("graph-step {}", 32 * MIB));
    let graph = program.get(&format!("graph {}", 10 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    program.get(&format!("launch {executable} 0"));
    assert_eq!((scratch.used(), program.driver_bytes()), (90 * MIB, 112 * MIB));
    program.get(&format!("free {block}"));
    program.get(&format!("launch {executable} 0"));
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
    let (status, errors) = program.end();
    assert!(status.success() && errors.contains("more than was charged"), "{errors}");
}
