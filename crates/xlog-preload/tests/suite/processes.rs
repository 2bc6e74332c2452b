//! Forks, children, kills and the end of a process.

use super::{MIB, OUT_OF_MEMORY, Program, Scratch, initialized};

#[test]
fn a_forked_child_has_a_slot_of_its_own() {
    let scratch = Scratch::new();
    let limit = ("XLOG_EXEC_LIMIT", "104857600");
    let mut program = initialized("proc2", &scratch, &[limit]);
    let block = program.get(&format!("alloc {}", 80 * MIB));
    let child = program.ask("fork");
    assert!(child.starts_with("child "), "{child}");
    assert_eq!(program.call(&format!("alloc {}", 101 * MIB)).0, OUT_OF_MEMORY);
    program.get(&format!("alloc {}", 50 * MIB));
    // The parent's block is not the child's to give back.
    program.get(&format!("free {block}"));
    let slots = scratch.snapshot().unwrap().slots;
    let used: Vec<u64> = slots.iter().filter(|slot| slot.alive).map(|slot| slot.used).collect();
    assert_eq!(used, [80 * MIB, 50 * MIB]);
    assert_eq!(program.ask("exit 0"), "0", "the child has ended, and the parent goes on");
    assert_eq!(scratch.used(), 80 * MIB);
    program.get(&format!("free {block}"));
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_child_that_outlives_its_parent_keeps_none_of_its_bytes() {
    let scratch = Scratch::new();
    let mut program = initialized("linked", &scratch, &[]);
    program.get(&format!("alloc {}", 80 * MIB));
    let parent = program.child.id();
    assert!(program.ask("fork").starts_with("child "));
    kill(parent);
    program.child.wait().unwrap();
    // The child still has the pipe.
    assert_eq!(program.ask("default cuNothing"), "none");
    assert_eq!(scratch.used(), 0);
    writeln_exit(&mut program);
}

#[test]
fn a_killed_process_leaves_nothing_that_the_next_request_does_not_get() {
    let scratch = Scratch::new();
    let mut victim = initialized("dlsym", &scratch, &[]);
    victim.get(&format!("alloc {}", 900 * MIB));
    kill(victim.child.id());
    victim.child.wait().unwrap();
    let mut next = initialized("dlsym", &scratch, &[]);
    next.get(&format!("alloc {}", 960 * MIB));
    let (status, errors) = next.end();
    assert!(status.success() && errors.is_empty(), "{errors}");
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_process_shows_its_command_and_its_libraries_until_its_end() {
    let scratch = Scratch::new();
    let mut program = initialized("linked", &scratch, &[]);
    program.get("alloc 1000");
    let slots = scratch.snapshot().unwrap().slots;
    assert_eq!((slots.len(), slots[0].name.as_str()), (1, "linked"));
    let tags = &slots[0].tags.as_ref().unwrap().tags;
    assert_eq!((tags.len(), tags[0].tag.as_str(), tags[0].bytes), (1, "linked", 1024));
    assert!(program.end().0.success());
    assert!(scratch.snapshot().unwrap().slots.is_empty());
}

#[test]
fn the_bytes_of_a_library_are_shown_to_a_mebibyte_or_a_part_of_them() {
    let scratch = Scratch::new();
    let mut program = initialized("linked", &scratch, &[]);
    let shown = || {
        let slots = scratch.snapshot().unwrap().slots;
        slots[0].tags.as_ref().unwrap().tags.iter().map(|tag| tag.bytes).sum::<u64>()
    };
    let first = program.get("alloc 1024");
    assert_eq!(shown(), 1024);
    program.get(&format!("alloc {}", MIB - 1));
    assert_eq!(shown(), 1024);
    program.get(&format!("free {first}"));
    let large = program.get(&format!("alloc {}", 127 * MIB + 1));
    assert_eq!(shown(), 128 * MIB);
    let small = program.get(&format!("alloc {}", 2 * MIB - 1));
    assert_eq!(shown(), 128 * MIB);
    program.get("alloc 1");
    assert_eq!(shown(), 130 * MIB);
    program.get(&format!("free {large}"));
    assert!(shown().abs_diff(3 * MIB) < MIB);
    program.get(&format!("free {small}"));
    assert!(shown().abs_diff(MIB) < MIB);
}

#[test]
fn requests_by_the_runtime_go_to_the_library_behind_it_the_small_ones_by_the_last_walk() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let shown = |of: &str| {
        let slots = scratch.snapshot().unwrap().slots;
        let tags = &slots[0].tags.as_ref().unwrap().tags;
        tags.iter().find(|tag| tag.tag == of).map_or(0, |tag| tag.bytes)
    };
    program.get("forward 1024");
    assert_eq!((shown("loaded"), shown("libother.so")), (1024, 0));
    program.get(&format!("ask {}", 8 * MIB));
    assert_eq!((shown("loaded"), shown("libother.so")), (1024, 8 * MIB));
    // The fourth makes the sum 8 MiB.
    for _ in 0..4 {
        program.get(&format!("forward {}", 2 * MIB));
    }
    assert_eq!((shown("loaded"), shown("libother.so")), (1024 + 2 * MIB, 14 * MIB));
    program.get(&format!("ask {}", 8 * MIB));
    assert_eq!((shown("loaded"), shown("libother.so")), (1024 + 2 * MIB, 22 * MIB));
}

fn kill(process: u32) {
    // SAFETY: the call passes no pointer.
    let sent = unsafe { libc::kill(process.try_into().unwrap(), libc::SIGKILL) };
    assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
}

/// Ends a child whose parent is gone.
fn writeln_exit(program: &mut Program) {
    use std::io::Write;
    let _ = writeln!(program.input.as_mut().unwrap(), "exit 0");
}
