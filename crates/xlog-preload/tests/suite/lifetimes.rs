//! Memory that lives by handles, mappings, arrays and contexts.

use super::{MIB, Scratch, WAYS, initialized};

#[test]
fn mapped_memory_lives_until_it_is_released_and_unmapped() {
    for way in WAYS {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[]);
        let handle = program.get(&format!("create {}", 2 * MIB));
        assert_eq!(scratch.used(), 2 * MIB);
        program.get(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB));
        program.get(&format!("release {handle}"));
        assert_eq!(scratch.used(), 2 * MIB, "{way}: mapped");
        program.get(&format!("unmap {} {}", 64 * MIB, 2 * MIB));
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way}");
        // The other order.
        let handle = program.get(&format!("create {}", 2 * MIB));
        program.get(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB));
        program.get(&format!("unmap {} {}", 64 * MIB, 2 * MIB));
        assert_eq!(scratch.used(), 2 * MIB, "{way}: not released");
        program.get(&format!("release {handle}"));
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{way}");
    }
}

#[test]
fn a_handle_mapped_twice_counts_once_and_lives_until_the_second_unmap() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    let handle = program.get(&format!("create {}", 2 * MIB));
    program.get(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB));
    program.get(&format!("map {} {} {handle}", 128 * MIB, 2 * MIB));
    assert_ne!(program.call(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB)).0, 0);
    program.get(&format!("release {handle}"));
    program.get(&format!("unmap {} {}", 64 * MIB, 2 * MIB));
    assert_eq!(scratch.used(), 2 * MIB);
    program.get(&format!("unmap {} {}", 128 * MIB, 2 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}

#[test]
fn one_unmap_ends_several_mappings() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    for part in 0..3 {
        let handle = program.get(&format!("create {}", 2 * MIB));
        program.get(&format!("map {} {} {handle}", (64 + 2 * part) * MIB, 2 * MIB));
        program.get(&format!("release {handle}"));
    }
    assert_eq!(scratch.used(), 6 * MIB);
    program.get(&format!("unmap {} {}", 64 * MIB, 4 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (2 * MIB, 2 * MIB));
    program.get(&format!("unmap {} {}", 68 * MIB, 2 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}

#[test]
fn a_retained_handle_is_released_once_more() {
    let scratch = Scratch::new();
    let mut program = initialized("linked", &scratch, &[]);
    let handle = program.get(&format!("create {}", 2 * MIB));
    program.get(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB));
    program.get(&format!("release {handle}"));
    let retained = program.get(&format!("retain {}", 64 * MIB));
    program.get(&format!("unmap {} {}", 64 * MIB, 2 * MIB));
    assert_eq!(scratch.used(), 2 * MIB);
    program.get(&format!("release {retained}"));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
    assert_ne!(program.call(&format!("release {retained}")).0, 0);
    assert_eq!(scratch.used(), 0);
}

#[test]
fn pitched_managed_and_array_memory_is_counted_and_given_back() {
    for way in ["linked", "proc2"] {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[]);
        for (take, bytes, give) in [
            ("pitch 1000 100", 102_400, "free"),
            ("managed 4096", 4096, "free"),
            ("array 1024 64", 65_536, "destroy-array"),
            ("array 1024 0", 1024, "destroy-array"),
            ("cubic 256 256", 65_536, "destroy-array"),
            // Two levels: 256 x 256 and 128 x 128 bytes.
            ("mipmapped 256 256", 81_920, "destroy-mipmapped"),
        ] {
            let place = program.get(take);
            assert_eq!(scratch.used(), bytes, "{way}: {take}");
            program.get(&format!("{give} {place}"));
            assert_eq!(scratch.used(), 0, "{way}: {give}");
        }
        // Sparse: no memory of its own.
        program.get("cubic 256 256 64");
        assert_eq!(scratch.used(), 0, "{way}");
    }
}

#[test]
fn the_end_of_a_primary_context_is_noticed_if_its_first_request_was_for_another_device() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    program.get(&format!("create {} 0 1", 8 * MIB));
    program.get(&format!("alloc {MIB}"));
    assert_eq!(scratch.used(), 9 * MIB);
    program.get("reset");
    assert_eq!((scratch.used(), program.driver_bytes()), (8 * MIB, 8 * MIB));
}

#[test]
fn the_end_of_a_context_gives_its_memory_back_and_no_other() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    program.get(&format!("alloc {MIB}"));
    let context = program.get("context");
    program.get(&format!("alloc {}", 2 * MIB));
    program.get(&format!("array {} 1", 4 * MIB));
    let handle = program.get(&format!("create {}", 8 * MIB));
    assert_eq!(scratch.used(), 15 * MIB);
    assert_ne!(program.call("destroy-context 0").0, 0);
    program.get(&format!("destroy-context {context}"));
    assert_eq!(scratch.used(), 9 * MIB);
    program.get(&format!("current {}", 0xc0de));
    program.get("reset");
    assert_eq!(scratch.used(), 8 * MIB, "physical memory outlives contexts");
    program.get(&format!("release {handle}"));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}
