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

fn kill(process: u32) {
    let status = std::process::Command::new("kill").args(["-9", &process.to_string()]).status();
    assert!(status.unwrap().success());
}

/// Ends a child whose parent is gone.
fn writeln_exit(program: &mut Program) {
    use std::io::Write;
    let _ = writeln!(program.input.as_mut().unwrap(), "exit 0");
}
