//! Limits, refusals, and what the driver reports of its memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use xlog_ledger::{AskListener, Heard, Ledger, Quota, SlotSnapshot};
use xlog_trace::Source;

use super::{LEDGER_LIMIT, MIB, OUT_OF_MEMORY, Program, Scratch, WAYS, initialized};

const LIMIT: (&str, &str) = ("XLOG_EXEC_LIMIT", "104857600"); // 100 MiB

#[test]
fn a_request_beyond_the_limit_of_the_process_is_refused_and_never_reaches_the_driver() {
    for way in WAYS {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[LIMIT]);
        let block = program.get(&format!("alloc {}", 60 * MIB));
        let calls = program.ask("calls");
        for request in ["alloc", "managed", "create", "array"] {
            let (status, _) = program.call(&format!("{request} {}", 40 * MIB + 1));
            assert_eq!(status, OUT_OF_MEMORY, "{way}: {request}");
        }
        assert_eq!(program.call(&format!("async {} 0", 41 * MIB)).0, OUT_OF_MEMORY, "{way}");
        assert_eq!(program.ask("calls"), calls, "{way}: the driver was not asked");
        let rest = program.get(&format!("alloc {}", 40 * MIB));
        assert_eq!(scratch.used(), 100 * MIB);
        program.get(&format!("free {block}"));
        program.get(&format!("free {rest}"));
        program.get(&format!("alloc {}", 100 * MIB));
        assert_eq!(scratch.used(), 100 * MIB, "{way}");
    }
}

#[test]
fn the_limit_may_be_a_share_of_the_device() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[("XLOG_EXEC_LIMIT", "share:25000000")]);
    assert_eq!(program.ask("total"), format!("0 {}", 256 * MIB));
    assert_eq!(program.call(&format!("alloc {}", 256 * MIB + 1)).0, OUT_OF_MEMORY);
    program.get(&format!("alloc {}", 256 * MIB));
}

#[test]
fn the_smallest_of_several_limits_holds() {
    let scratch = Scratch::new();
    for limits in ["104857600,share:25000000", "share:25000000,104857600"] {
        let mut program = initialized("proc2", &scratch, &[("XLOG_EXEC_LIMIT", limits)]);
        assert_eq!(program.ask("total"), format!("0 {}", 100 * MIB));
    }
}

#[test]
fn what_the_driver_reports_of_its_memory_is_within_the_limit() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    program.get(&format!("alloc {}", 30 * MIB));
    assert_eq!(program.ask("info"), format!("0 {} {}", 70 * MIB, 100 * MIB));
    assert_eq!(program.ask("total"), format!("0 {}", 100 * MIB));
    // Another process without a limit of its own sees the ledger's.
    let mut other = initialized("dlsym", &scratch, &[]);
    assert_eq!(other.ask("info"), format!("0 {} {LEDGER_LIMIT}", LEDGER_LIMIT - 30 * MIB));
}

/// An administrator, and the slot of a program.
fn administrator(scratch: &Scratch, program: &Program) -> (Ledger, SlotSnapshot) {
    let ledger = scratch.open_ledger();
    let shown = ledger.snapshot().unwrap();
    let slot = shown.slots.into_iter().find(|slot| slot.pid == program.child.id()).unwrap();
    (ledger, slot)
}

#[test]
fn a_quota_that_is_changed_while_the_program_runs_holds_from_its_next_call() {
    let scratch = Scratch::new();
    let name = ("XLOG_EXEC_NAME", "job 7");
    let mut program = initialized("proc2", &scratch, &[LIMIT, name]);
    let first = program.get(&format!("alloc {}", 60 * MIB));
    let (ledger, slot) = administrator(&scratch, &program);
    assert_eq!(slot.quota, Quota::limited_to(100 * MIB).with_name("job 7"));
    assert_eq!(program.call(&format!("alloc {}", 41 * MIB)).0, OUT_OF_MEMORY);
    ledger.set_quota_of(&slot, &Quota::limited_to(200 * MIB)).unwrap();
    assert_eq!(program.ask("info"), format!("0 {} {}", 140 * MIB, 200 * MIB));
    let second = program.get(&format!("alloc {}", 140 * MIB));
    ledger.set_quota_of(&slot, &Quota::limited_to(80 * MIB)).unwrap();
    program.get(&format!("free {first}"));
    assert_eq!(program.call("alloc 1").0, OUT_OF_MEMORY, "140 MiB are still in use");
    assert_eq!(program.call("async 1 0").0, OUT_OF_MEMORY);
    program.get(&format!("free {second}"));
    program.get(&format!("alloc {}", 80 * MIB));
    ledger.set_quota_of(&slot, &Quota::default()).unwrap();
    program.get(&format!("alloc {}", LEDGER_LIMIT - 80 * MIB));
}

#[test]
fn a_guaranteed_share_is_left_free_by_other_programs() {
    let scratch = Scratch::new();
    let share = ("XLOG_EXEC_GUARANTEE", "share:50000000");
    let mut owner = initialized("linked", &scratch, &[share]);
    assert_eq!(owner.ask("info"), format!("0 {LEDGER_LIMIT} {LEDGER_LIMIT}"));
    let mut other = initialized("proc2", &scratch, &[]);
    let rest = LEDGER_LIMIT - 512 * MIB;
    assert_eq!(other.ask("info"), format!("0 {rest} {LEDGER_LIMIT}"));
    assert_eq!(other.call(&format!("alloc {}", rest + MIB)).0, OUT_OF_MEMORY);
    other.get(&format!("alloc {rest}"));
    owner.get(&format!("alloc {}", 512 * MIB));
    // A share that cannot be kept is reported; the program runs without it.
    let mut late = initialized("dlsym", &scratch, &[share]);
    assert_eq!(late.ask("info"), format!("0 0 {LEDGER_LIMIT}"));
    let (status, said) = late.end();
    assert!(status.success() && said.contains("cannot be guaranteed"), "{said}");
}

#[test]
fn the_limit_may_be_a_share_of_the_ledgers_limit_so_that_equal_shares_fill_it() {
    let scratch = Scratch::new();
    let quarter = ("XLOG_EXEC_LIMIT", "ledger-share:25000000");
    let mut programs: Vec<Program> =
        (0..4).map(|_| initialized("proc2", &scratch, &[quarter])).collect();
    for program in &mut programs {
        program.get(&format!("alloc {}", LEDGER_LIMIT / 4));
        assert_eq!(program.call("alloc 1").0, OUT_OF_MEMORY);
    }
    assert_eq!(scratch.used(), LEDGER_LIMIT);
}

#[test]
fn the_limit_holds_without_a_ledger() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT, ("XLOG_EXEC_LEDGER", "off")]);
    assert_eq!(program.call(&format!("alloc {}", 100 * MIB + 1)).0, OUT_OF_MEMORY);
    program.get(&format!("alloc {}", 100 * MIB));
    assert_eq!(program.ask("info"), format!("0 0 {}", 100 * MIB));
}

#[test]
fn processes_share_the_limit_of_the_ledger() {
    let scratch = Scratch::new();
    let mut first = initialized("linked", &scratch, &[]);
    let mut second = initialized("proc2", &scratch, &[]);
    let block = first.get(&format!("alloc {}", 600 * MIB));
    assert_eq!(second.call(&format!("alloc {}", 361 * MIB)).0, OUT_OF_MEMORY);
    second.get(&format!("alloc {}", 360 * MIB));
    first.get(&format!("free {block}"));
    second.get(&format!("alloc {}", 600 * MIB));
    assert_eq!(scratch.used(), LEDGER_LIMIT);
    drop(second);
    first.get(&format!("alloc {LEDGER_LIMIT}"));
}

#[test]
fn processes_that_cache_memory_are_asked_for_it_before_a_refusal() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    program.get("alloc 1024");
    let ledger = scratch.open_ledger();
    ledger.charge(900 * MIB).unwrap();
    // An ask before this would not be heard.
    let mut listener = AskListener::new(&ledger);
    ledger.publish_memory(900 * MIB, 0);
    let (ledger, is_over) = (&ledger, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                let heard =
                    listener.wait(Duration::from_millis(50), || is_over.load(Ordering::SeqCst));
                if matches!(heard, Heard::Ask) {
                    ledger.release(ledger.used()).unwrap();
                    ledger.publish_memory(0, 0);
                    listener.answer(false);
                }
            }
        });
        // Another process has a second to answer; on a busy machine a later request finds what it gave.
        let mut ask = |call: String| {
            let mut answers = (0..60).map(|_| program.call(&call).0);
            answers.find(|answer| *answer != OUT_OF_MEMORY).unwrap_or(OUT_OF_MEMORY)
        };
        let answers = [ask(format!("alloc {}", 500 * MIB)), ask(format!("async {} 0", 100 * MIB))];
        is_over.store(true, Ordering::SeqCst);
        ledger.wake_listeners();
        assert_eq!(answers, [0, 0]);
    });
    assert_eq!(ledger.used(), 0);
}

#[test]
fn a_refusal_of_the_driver_gives_the_charge_back() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[("XLOG_EXEC_LEDGER", "off")]);
    program.get(&format!("alloc {}", 1000 * MIB));
    drop(program);
    let mut program = initialized("dlsym", &scratch, &[]);
    for request in ["alloc 0", "alloc -1", "create 0", "unmap 5 5", "release 77", "map 1 1 77"] {
        assert_ne!(program.call(request).0, 0, "{request}");
    }
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_pool_is_charged_with_what_it_reserves() {
    let scratch = Scratch::new();
    let mut program = initialized("per-thread", &scratch, &[LIMIT]);
    let first = program.get(&format!("async {} 0", 20 * MIB));
    let second = program.get(&format!("async {} 0", 20 * MIB));
    // One chunk is 32 MiB.
    assert_eq!((scratch.used(), program.driver_bytes()), (64 * MIB, 64 * MIB));
    program.get(&format!("free-async {first} 0"));
    assert_eq!(scratch.used(), 64 * MIB, "the pool keeps it");
    program.get("sync");
    assert_eq!((scratch.used(), program.driver_bytes()), (32 * MIB, 32 * MIB));
    program.get(&format!("free {second}"));
    program.get("sync");
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_request_is_charged_to_the_pool_that_the_program_chose_last() {
    for choose in ["use-pool", "use-pool-at"] {
        let scratch = Scratch::new();
        let mut program = initialized("dlsym", &scratch, &[]);
        let pool = program.get("pool 0");
        program.get(&format!("async {MIB} 0"));
        program.get(&format!("{choose} {pool}"));
        program.get(&format!("async {MIB} 0"));
        assert_eq!((scratch.used(), program.driver_bytes()), (64 * MIB, 64 * MIB), "{choose}");
        // Its successor is the device's own, which has room.
        program.get(&format!("destroy-pool {pool}"));
        program.get(&format!("async {} 0", 2 * MIB));
        assert_eq!(scratch.used(), 33 * MIB, "{choose}");
    }
}

#[test]
fn growth_of_a_pool_whose_free_memory_seems_enough_is_charged_or_refused() {
    // The driver frees on stream 55 when it is synchronised, and grows by 32 MiB before.
    for (beside, is_refused) in [(20 * MIB, false), (60 * MIB, true)] {
        let scratch = Scratch::new();
        let mut program = initialized("dlsym", &scratch, &[LIMIT]);
        program.get(&format!("alloc {beside}"));
        let block = program.get(&format!("async {} 0", 20 * MIB));
        program.get(&format!("free-async {block} 55"));
        let (status, block) = program.call(&format!("async {} 0", 20 * MIB));
        assert_eq!((status == OUT_OF_MEMORY, block == 0), (is_refused, is_refused));
        assert!(scratch.used() <= 100 * MIB);
        if !is_refused {
            assert_eq!(scratch.used(), program.driver_bytes());
            program.get(&format!("free-async {block} 0"));
        }
        program.get("sync 55");
        assert_eq!((scratch.used(), program.driver_bytes()), (beside, beside));
    }
}

/// The calls that the library makes by itself in a pair of calls that take and free memory, once both have been made before.
fn queries_of_a_pair(program: &mut Program, take: &str, free: &str, stream: &str) -> u32 {
    let mut queries = [0_u32; 2];
    for count in &mut queries {
        let before: u32 = program.ask("queries").parse().unwrap();
        let block = program.get(take);
        program.get(&format!("{free} {block} {stream}"));
        *count = program.ask("queries").parse::<u32>().unwrap() - before;
    }
    queries[1]
}

#[test]
fn calls_that_need_no_further_memory_from_the_device_make_few_calls_of_the_driver() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let pool = program.get("pool 0");
    let from = format!("from 65536 {pool} 77");
    // To allocate: the device, whether the stream is captured, and the reserved bytes between two changes of the capture mode. To free: the
    // context.
    for (take, free, stream, most) in [
        ("async 65536 77", "free-async", "77", 6),
        ("async 65536 0", "free-async", "0", 5),
        (&from, "free-async", "77", 5),
        ("alloc 65536", "free", "", 2),
    ] {
        let queries = queries_of_a_pair(&mut program, take, free, stream);
        assert!(queries <= most, "{take}: {queries}");
    }
}

#[test]
fn a_pool_gives_up_what_it_keeps_before_a_request_is_refused() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[LIMIT]);
    let pool = program.get("pool 0");
    let kept = program.get(&format!("from {} {pool} 0", 60 * MIB));
    program.get(&format!("free-async {kept} 0"));
    program.get("sync");
    assert_eq!(scratch.used(), 64 * MIB, "only the device's own pool returns memory by itself");
    // Cached memory serves a request that would not fit beside it.
    let again = program.get(&format!("from {} {pool} 0", 50 * MIB));
    assert!(scratch.used() <= 100 * MIB);
    program.get(&format!("free-async {again} 0"));
    program.get(&format!("from {} {pool} 0", 90 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (96 * MIB, 96 * MIB));
    assert_eq!(program.call(&format!("from {} {pool} 0", 10 * MIB)).0, OUT_OF_MEMORY);
    // What is left in the chunks is served without growth.
    program.get(&format!("from {} {pool} 0", 2 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (96 * MIB, 96 * MIB));
}

#[test]
fn a_destroyed_pool_is_charged_until_its_last_block_is_freed() {
    let scratch = Scratch::new();
    let mut program = initialized("proc", &scratch, &[]);
    let pool = program.get("pool 0");
    let block = program.get(&format!("from {} {pool} 0", 10 * MIB));
    program.get(&format!("destroy-pool {pool}"));
    assert_eq!(scratch.used(), 10 * MIB);
    let successor = program.get("pool 0");
    assert_eq!(successor, pool, "the driver reuses the handle");
    program.get(&format!("from {MIB} {successor} 0"));
    assert_eq!(scratch.used(), 42 * MIB);
    program.get(&format!("free-async {block} 0"));
    assert_eq!(scratch.used(), 32 * MIB);
    program.get(&format!("trim {successor} 0"));
    assert_eq!(scratch.used(), 32 * MIB, "a block is alive");
}

#[test]
fn a_free_on_a_busy_stream_is_corrected_by_the_synchronisation_that_covers_it() {
    for synchronization in ["sync 55", "sync-event 55", "sync-context"] {
        let scratch = Scratch::new();
        let mut program = initialized("dlsym", &scratch, &[]);
        let block = program.get(&format!("async {} 0", 40 * MIB));
        program.get(&format!("free-async {block} 55"));
        for other in ["sync 0", "sync-event 7", "sync 0"] {
            program.get(other);
            assert_eq!((scratch.used(), program.driver_bytes()), (64 * MIB, 64 * MIB), "{other}");
        }
        program.get(synchronization);
        assert_eq!((scratch.used(), program.driver_bytes()), (0, 0), "{synchronization}");
    }
}

#[test]
fn synchronisations_ask_no_pool_once_all_frees_are_covered() {
    for (way, stream, synchronization) in
        [("dlsym", 77, "sync 77"), ("per-thread", 0, "sync 0"), ("dlsym", 77, "sync-context")]
    {
        let scratch = Scratch::new();
        let mut program = initialized(way, &scratch, &[]);
        // It keeps what is freed.
        let pool = program.get("pool 0");
        let block = program.get(&format!("from {} {pool} {stream}", 40 * MIB));
        program.get(&format!("free-async {block} {stream}"));
        let mut asks = program.ask("asks");
        for _ in 0..2 {
            program.get("sync 7");
            let before = std::mem::replace(&mut asks, program.ask("asks"));
            assert_ne!(before, asks, "{way}: the free may be outstanding");
        }
        program.get(synchronization);
        asks = program.ask("asks");
        for again in ["sync 7", synchronization, "sync-event 7"] {
            program.get(again);
            assert_eq!(program.ask("asks"), asks, "{way}: {again}");
        }
    }
    // A pool that has nothing left to return ends it as well.
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let block = program.get(&format!("async {MIB} 77"));
    program.get(&format!("free-async {block} 77"));
    program.get("sync-event 77");
    let asks = program.ask("asks");
    program.get("sync-event 77");
    assert_eq!((scratch.used(), program.ask("asks")), (0, asks));
}

#[test]
fn a_block_of_a_pool_that_is_not_freed_in_stream_order_is_corrected_at_once() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    let block = program.get(&format!("async {MIB} 0"));
    program.get(&format!("free {block}"));
    assert_eq!((scratch.used(), program.driver_bytes()), (0, 0));
}

#[test]
fn memory_of_the_host_is_free() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    program.get(&format!("create {} 1", 500 * MIB));
    let pool = program.get("pool 1");
    program.get(&format!("from {} {pool} 0", 200 * MIB));
    assert_eq!(scratch.used(), 0);
}

#[test]
fn a_ledger_that_cannot_be_joined_is_reported_once_and_the_program_runs() {
    let scratch = Scratch::new();
    std::fs::write(scratch.ledgers(), "not a directory").unwrap();
    let mut program = initialized("proc2", &scratch, &[LIMIT]);
    for _ in 0..3 {
        program.get("alloc 1000");
    }
    assert_eq!(program.call(&format!("alloc {}", 100 * MIB)).0, OUT_OF_MEMORY, "its own limit");
    let (status, errors) = program.end();
    assert!(status.success());
    assert!(errors.contains("not counted in a ledger") && errors.lines().count() == 1, "{errors}");
}

#[test]
fn a_ledger_whose_lock_is_held_refuses_and_is_not_left() {
    let scratch = Scratch::new();
    let mut program = initialized("proc2", &scratch, &[]);
    program.get("alloc 1000");
    let ledger = scratch.open_ledger();
    let lock = ledger.hold_file_lock().unwrap();
    // More than the process has been granted, so that it needs the lock.
    assert_eq!(program.call(&format!("alloc {}", 700 * MIB)).0, OUT_OF_MEMORY);
    drop(lock);
    program.get(&format!("alloc {}", 700 * MIB));
    assert_eq!(scratch.used(), 700 * MIB + 1024, "others see its bytes");
    let (status, errors) = program.end();
    assert!(status.success() && errors.is_empty(), "{errors}");
}

#[test]
fn a_request_waits_for_the_ledgers_lock_once() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[]);
    program.get("async 1000 0");
    program.get(&format!("alloc {}", 40 * MIB));
    let graph = program.get(&format!("graph {}", 100 * MIB));
    let executable = program.get(&format!("instantiate {graph}"));
    let ledger = scratch.open_ledger();
    let lock = ledger.hold_file_lock().unwrap();
    let slots = scratch.snapshot().unwrap().slots;
    let grant = slots.iter().find(|slot| slot.pid == program.child.id()).unwrap().granted;
    assert!((4 * MIB..32 * MIB).contains(&grant), "{grant}");
    let before = (program.ask("calls"), program.ask("trims"));
    // The pool's free memory does not cover it. The grant covers 2 MiB, but not the step of 32 MiB, for which the request has waited.
    assert_eq!(program.call(&format!("async {} 0", 33 * MIB)).0, OUT_OF_MEMORY);
    assert_eq!(program.call(&format!("alloc {}", 700 * MIB)).0, OUT_OF_MEMORY);
    assert_eq!(program.call(&format!("launch {executable} 0")).0, OUT_OF_MEMORY);
    // No memory of this process can make the lock free.
    assert_eq!((program.ask("calls"), program.ask("trims")), before);
    drop(lock);
    program.get(&format!("async {} 0", 33 * MIB));
    program.get(&format!("alloc {}", 700 * MIB));
}

#[test]
fn idle_memory_of_any_pool_is_returned_before_a_request_is_refused() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[LIMIT]);
    let pool = program.get("pool 0");
    let kept = program.get(&format!("from {MIB} {pool} 0"));
    program.get(&format!("free-async {kept} 0"));
    let own = program.get(&format!("async {MIB} 0"));
    program.get(&format!("free-async {own} 0"));
    assert_eq!(scratch.used(), 64 * MIB, "both pools keep a chunk");
    let block = program.get(&format!("alloc {}", 90 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (90 * MIB, 90 * MIB));
    program.get(&format!("free {block}"));
    // One pool's request makes the other return its memory.
    let kept = program.get(&format!("from {} {pool} 0", 60 * MIB));
    program.get(&format!("free-async {kept} 0"));
    program.get(&format!("async {} 0", 90 * MIB));
    assert_eq!((scratch.used(), program.driver_bytes()), (96 * MIB, 96 * MIB));
}

#[test]
fn growth_beyond_the_limit_is_returned_and_refused_as_ours() {
    let scratch = Scratch::new();
    let log = scratch.0.join("run.xtrace");
    let settings = [LIMIT, ("XLOG_EXEC_LOG", log.to_str().unwrap())];
    let mut program = initialized("dlsym", &scratch, &settings);
    program.get(&format!("alloc {}", 70 * MIB));
    // 10 MiB fit, the chunk of 32 MiB does not.
    assert_eq!(program.ask(&format!("async {} 0", 10 * MIB)), "2 0x0");
    assert_eq!((scratch.used(), program.driver_bytes()), (70 * MIB, 70 * MIB));
    assert!(program.end().0.success());
    let mut reader = xlog_trace::Reader::open(&log).unwrap();
    let mut kinds = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        if let Some(failure) = record.failure() {
            kinds.push(reader.names().text_or_empty(Some(failure.kind)).to_owned());
        }
    }
    assert_eq!(kinds, ["process_limit"]);
}

#[test]
fn a_request_on_a_captured_stream_is_passed_on() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[LIMIT]);
    program.get(&format!("async {} 99", 200 * MIB));
    assert_eq!(scratch.used(), 0, "it takes no memory until the graph is launched");
    assert_eq!(program.call(&format!("async {} 98", 200 * MIB)).0, OUT_OF_MEMORY);
}

#[test]
fn a_reused_address_or_handle_is_charged_once() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[LIMIT]);
    for take in ["alloc", "create"] {
        let mut place = program.get(&format!("{take} {}", 20 * MIB));
        for _ in 0..3 {
            program.get(&format!("reuse {place}"));
            let again = program.get(&format!("{take} {}", 20 * MIB));
            assert_eq!(std::mem::replace(&mut place, again), again, "{take}");
        }
    }
    assert_eq!((scratch.used(), program.driver_bytes()), (40 * MIB, 40 * MIB));
}

#[test]
fn a_path_in_a_message_does_not_command_the_terminal() {
    let scratch = Scratch::new();
    let log = ("XLOG_EXEC_LOG", "/nonexistent/\u{1b}[2J\u{202e}/run.xtrace");
    let mut program = initialized("dlsym", &scratch, &[log]);
    program.get("alloc 1000");
    let (_, errors) = Program::end(program);
    assert!(errors.contains("/nonexistent/\\u001b[2J\\u202e/run.xtrace"), "{errors:?}");
    assert!(!errors.contains(['\u{1b}', '\u{202e}']), "{errors:?}");
}

#[test]
fn settings_that_are_not_understood_are_reported() {
    let scratch = Scratch::new();
    let mut program = initialized("dlsym", &scratch, &[("XLOG_EXEC_LIMIT", "10 apples")]);
    program.get("alloc 1000");
    let (_, errors) = Program::end(program);
    assert!(errors.contains("10 apples"), "{errors}");
}
