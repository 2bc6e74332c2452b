//! Other threads, and a driver that is closed and opened again.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::{MIB, OUT_OF_MEMORY, Program, Scratch, initialized};

/// Functions of the fake driver in which a thread can be held.
const ALLOCATE: &str = "cuMemAllocFromPoolAsync";
const ASK: &str = "cuMemPoolGetAttribute";
const CURRENT: &str = "cuDeviceGetMemPool";
const FREE: &str = "cuMemFreeAsync";
const DESTROY: &str = "cuMemPoolDestroy";
const SYNCHRONIZE: &str = "cuStreamSynchronize";
const LAUNCH: &str = "cuGraphLaunch";
const RELEASE: &str = "cuMemRelease";
const UNMAP: &str = "cuMemUnmap";

#[test]
fn a_request_to_a_pool_with_room_takes_nothing_from_other_threads() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[("XLOG_EXEC_LIMIT", "104857600")]);
    program.get(&format!("async {MIB} 0"));
    let request = program.begin_inside(ALLOCATE, &format!("async {MIB} 0"));
    // 32 MiB of the pool and 60 MiB fit; 32 MiB more for the request to the pool would not.
    program.get(&format!("alloc {}", 60 * MIB));
    program.get(&format!("go {ALLOCATE}"));
    program.get(&format!("join {request}"));
    assert_eq!(scratch.used(), 92 * MIB);
}

/// Makes the ledger one of version 1, which has no quotas, with an older process that keeps it so as long as the file is open.
fn make_version_1(scratch: &Scratch) -> File {
    const SLOTS: u64 = 256;
    const HEADER: u64 = 4096;
    initialized("dlsym", scratch, &[]).get("alloc 1024");
    let path = xlog_ledger::list(&scratch.ledgers()).unwrap().pop().unwrap().path;
    let mut bytes = std::fs::read(&path).unwrap();
    let size = HEADER + SLOTS * 128;
    assert_eq!(bytes.len() as u64, size + SLOTS * 64);
    bytes.truncate(size as usize);
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    bytes[16..24].copy_from_slice(&size.to_le_bytes());
    let sum = bytes[..120].iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    bytes[120..128].copy_from_slice(&sum.to_le_bytes());
    // In place: the file keeps its permissions.
    std::fs::write(&path, bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let slot = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: HEADER as libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open; the kernel only reads the range.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const slot) }, 0);
    file.write_all_at(&1u32.to_le_bytes(), HEADER).unwrap();
    file.write_all_at(&4711u32.to_le_bytes(), HEADER + 16).unwrap();
    file
}

#[test]
fn a_request_is_not_refused_for_bytes_that_another_thread_does_not_get() {
    // With the limit in the ledger, and with the limit in the process.
    for version in [2, 1] {
        let scratch = Scratch::new();
        let _older = (version == 1).then(|| make_version_1(&scratch));
        let limit = ("XLOG_EXEC_LIMIT", "734003200"); // 700 MiB
        let mut program = initialized("dlsym", &scratch, &[limit]);
        program.get("alloc 1024");
        assert_eq!(scratch.snapshot().unwrap().version, version);
        let ledger = scratch.open_ledger();
        let lock = ledger.hold_file_lock().unwrap();
        // It needs the ledger's lock, does not get it, and is refused.
        let large = program.begin(&format!("alloc {}", 699 * MIB));
        // Until it waits for the lock, as a rule. If it does not yet, this test shows less.
        (0..200).for_each(|_| drop(program.ask("info")));
        // It fits the limit without the large one, and needs no lock.
        program.get(&format!("alloc {}", 2 * MIB));
        assert_eq!(program.ask(&format!("join {large}")), format!("{OUT_OF_MEMORY} 0x0"));
        drop(lock);
        program.get(&format!("alloc {}", 697 * MIB));
        assert_eq!(program.call(&format!("alloc {MIB}")).0, OUT_OF_MEMORY, "the limit holds");
    }
}

#[test]
fn a_free_does_not_wait_for_a_request_to_its_pool() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let block = program.get(&format!("async {MIB} 0"));
    let request = program.begin_inside(ALLOCATE, &format!("async {MIB} 0"));
    program.get(&format!("free-async {block} 0"));
    program.get(&format!("go {ALLOCATE}"));
    program.get(&format!("join {request}"));
    program.get("sync");
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
}

#[test]
fn growth_beyond_the_limit_is_freed_on_the_stream_of_its_request_with_the_pool_unlocked() {
    for (way, stream, freed_on) in [("dlsym", 0, 0), ("dlsym", 77, 77), ("per-thread", 0, 2)] {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[("XLOG_EXEC_LIMIT", "104857600")]);
        program.get(&format!("alloc {}", 70 * MIB));
        // 10 MiB fit, the chunk of 32 MiB does not.
        let request = program.begin_inside(FREE, &format!("async {} {stream}", 10 * MIB));
        // Another request to the pool is answered while the free waits for the driver.
        assert_eq!(program.call(&format!("async {MIB} {stream}")).0, OUT_OF_MEMORY, "{way}");
        program.get(&format!("go {FREE}"));
        assert_eq!(program.ask(&format!("join {request}")), "2 0x0", "{way}");
        assert_eq!(program.get("freed-on"), freed_on, "{way}");
        assert_eq!((scratch.used(), program.driver_bytes()), (70 * MIB, 70 * MIB), "{way}");
    }
}

#[test]
fn growth_beyond_the_limit_is_returned_by_the_synchronisation_after_its_free() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[("XLOG_EXEC_LIMIT", "104857600")]);
    program.get(&format!("alloc {}", 70 * MIB));
    let pool = program.get("pool 0");
    // The fake driver frees on stream 55 when it is synchronised. The pool returns nothing by itself.
    assert_eq!(program.ask(&format!("from {} {pool} 55", 10 * MIB)), "2 0x0");
    assert_eq!(program.driver_bytes(), 102 * MIB);
    // The one of another stream does not end the wait.
    program.get("sync 0");
    assert_eq!(program.driver_bytes(), 102 * MIB);
    program.get("sync 55");
    assert_eq!((scratch.used(), program.driver_bytes()), (70 * MIB, 70 * MIB));
    let (status, errors) = program.end();
    assert!(status.success() && errors.contains("more than was charged"), "{errors}");
}

#[test]
fn a_pool_that_another_thread_destroys_is_not_asked() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let mut pools = Vec::new();
    for _ in 0..3 {
        let pool = program.get("pool 0");
        let block = program.get(&format!("from {MIB} {pool} 0"));
        program.get(&format!("free-async {block} 0"));
        pools.push(pool);
    }
    // The synchronisation asks one pool. Meanwhile the second is destroyed, and the third is being destroyed. The fake driver aborts the
    // program if it is asked for a destroyed pool.
    program.get(&format!("hold {ASK}"));
    let synchronization = program.begin("sync");
    let asked = program.get(&format!("arrived {ASK}"));
    pools.retain(|pool| *pool != asked);
    program.get(&format!("destroy-pool {}", pools[0]));
    let destruction = program.begin_inside(DESTROY, &format!("destroy-pool {}", pools[1]));
    program.get(&format!("go {ASK}"));
    program.get(&format!("join {synchronization}"));
    program.get(&format!("go {DESTROY}"));
    program.get(&format!("join {destruction}"));
    program.get(&format!("destroy-pool {asked}"));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}

#[test]
fn a_pool_that_is_destroyed_before_a_request_locks_it_is_not_asked_again() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let old = program.get("pool 0");
    program.get(&format!("use-pool {old}"));
    let block = program.get(&format!("async {MIB} 0"));
    // Again, so that the next request asks for it. It has read the current pool, which is replaced and destroyed.
    program.get(&format!("use-pool {old}"));
    let request = program.begin_inside(CURRENT, &format!("async {MIB} 0"));
    program.get("use-pool 1");
    program.get(&format!("free-async {block} 0"));
    program.get(&format!("destroy-pool {old}"));
    program.get(&format!("go {CURRENT}"));
    let block = program.get(&format!("join {request}"));
    // The fake driver aborts the program if it is asked for a destroyed pool.
    program.get("sync");
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
    program.get(&format!("free-async {block} 0"));
    program.get("sync");
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
    // The driver gives the handle again: that pool is counted.
    assert_eq!(program.get("pool 0"), old);
    program.get(&format!("from {MIB} {old} 0"));
    assert_eq!(scratch.used(), 32 * MIB);
}

#[test]
fn a_pool_that_the_program_chooses_while_another_thread_asks_for_the_current_one_stays_chosen() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let chosen = program.get("pool 0");
    let request = program.begin_inside(CURRENT, &format!("async {MIB} 0"));
    program.get(&format!("use-pool {chosen}"));
    program.get(&format!("go {CURRENT}"));
    program.get(&format!("join {request}"));
    program.get(&format!("async {MIB} 0"));
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
}

#[test]
fn a_pool_that_another_thread_has_asked_is_corrected_by_the_next_synchronisation() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let blocks = [(); 2].map(|()| program.get(&format!("async {} 0", 20 * MIB)));
    // The thread knows that the pool has 64 MiB, and has not noted it.
    let thread = program.begin_inside("answered", &format!("trim 1 {}", 64 * MIB));
    program.get(&format!("free-async {} 0", blocks[0]));
    program.get("sync 0");
    program.get("go answered");
    program.get(&format!("join {thread}"));
    program.get("sync 0");
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
}

#[test]
fn a_synchronisation_that_comes_between_a_free_and_its_return_corrects_the_charge() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let block = program.get(&format!("async {MIB} 0"));
    let free = program.begin_inside("freed", &format!("free-async {block} 0"));
    program.get("sync 0");
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
    program.get("go freed");
    program.get(&format!("join {free}"));
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_free_during_a_synchronisation_of_its_stream_is_not_taken_as_covered() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let pool = program.get("pool 0");
    let blocks = [(); 2].map(|()| program.get(&format!("from {} {pool} 0", 20 * MIB)));
    program.get(&format!("free-async {} 0", blocks[0]));
    let synchronization = program.begin_inside(SYNCHRONIZE, "sync 0");
    program.get(&format!("free-async {} 0", blocks[1]));
    program.get(&format!("go {SYNCHRONIZE}"));
    program.get(&format!("join {synchronization}"));
    let asks = program.ask("asks");
    program.get("sync 7");
    assert_ne!(program.ask("asks"), asks, "the second free may be outstanding");
}

#[test]
fn a_synchronisation_that_fails_covers_nothing() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let block = program.get(&format!("async {MIB} 0"));
    program.get(&format!("free-async {block} 0"));
    program.get(&format!("fail {SYNCHRONIZE}"));
    program.get(&format!("go {SYNCHRONIZE}"));
    assert_ne!(program.call("sync 0").0, 0);
    assert_eq!(scratch.used(), 32 * MIB);
    program.get("sync 7");
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}

#[test]
fn the_charge_of_a_graph_stays_while_its_launch_is_under_way() {
    for meanwhile in ["launch", "sync", "trim", "destroy"] {
        let scratch = Scratch::new();
        let mut program = initialized("dlsym", &scratch, &[]);
        let graph = program.get(&format!("graph {}", 600 * MIB));
        let executable = program.get(&format!("instantiate {graph}"));
        let small = program.get(&format!("graph {}", 2 * MIB));
        let others = [(); 2].map(|()| program.get(&format!("instantiate {small}")));
        program.get(&format!("launch {} 0", others[0]));
        let block = program.get(&format!("async {MIB} 0"));
        program.get(&format!("free-async {block} 0"));
        let launch = program.begin_inside(LAUNCH, &format!("launch {executable} 0"));
        match meanwhile {
            "launch" => program.get(&format!("launch {} 0", others[1])),
            "sync" => program.get("sync 0"),
            "trim" => program.get("trim-graphs"),
            _ => program.get(&format!("destroy-executable {}", others[0])),
        };
        // Another process does not get what the launch is about to take.
        let mut other = initialized("dlsym", &scratch, &[]);
        assert_eq!(other.call(&format!("alloc {}", 400 * MIB)).0, OUT_OF_MEMORY, "{meanwhile}");
        program.get(&format!("go {LAUNCH}"));
        program.get(&format!("join {launch}"));
        program.get("sync 0");
        assert_eq!(scratch.used(), program.driver_bytes(), "{meanwhile}");
        let (status, errors) = program.end();
        assert!(status.success() && errors.is_empty(), "{meanwhile}: {errors}");
    }
}

#[test]
fn physical_memory_that_the_driver_refuses_to_give_back_stays_charged() {
    for (refused, other) in [(RELEASE, "unmap"), (UNMAP, "release")] {
        let scratch = Scratch::new();
        let mut program = initialized("dlsym", &scratch, &[]);
        let handle = program.get(&format!("create {}", 2 * MIB));
        program.get(&format!("map {} {} {handle}", 64 * MIB, 2 * MIB));
        let release = format!("release {handle}");
        let unmap = format!("unmap {} {}", 64 * MIB, 2 * MIB);
        program.get(&format!("fail {refused}"));
        let (first, second) =
            if other == "unmap" { (&release, &unmap) } else { (&unmap, &release) };
        let thread = program.begin(first);
        program.get(&format!("arrived {refused}"));
        program.get(second);
        program.get(&format!("go {refused}"));
        assert!(!program.ask(&format!("join {thread}")).starts_with('0'));
        assert_eq!((scratch.used(), program.driver_bytes()), (2 * MIB, 2 * MIB), "{refused}");
        program.get(first);
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{refused}");
    }
}

#[test]
fn a_driver_that_is_closed_and_opened_again_still_answers() {
    let scratch = Scratch::new();
    let mut program = Program::start("late", &scratch, &[]);
    program.get("reload");
    program.get("init");
    program.get(&format!("alloc {MIB}"));
    assert_eq!(scratch.used(), MIB);
}
