//! The runtimes that the whole process shares. The table is the process's and so is the environment: each case runs in a
//! process of its own, which is this test binary asked for one ignored test.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::error::Error;
use std::process::Command;
use std::sync::{Arc, Barrier};

use xlog_cuda::device_runtime::{
    AllocTag, DeviceMemoryResource, MAX_DEVICE_ORDINALS, PinnedHostResource, ResourceError,
    ResourceKind, RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::driver::DeviceKind;
use xlog_cuda::{DeviceSpec, XlogError};

const VARIABLES: [&str; 10] = [
    "XLOG_DEVICE",
    "XLOG_DEVICE_RESOURCE",
    "XLOG_DEVICE_BUDGET",
    "XLOG_DEVICE_LEDGER",
    "XLOG_DEVICE_QUOTA",
    "XLOG_DEVICE_QUOTA_NAME",
    "XLOG_DEVICE_LOG",
    "XLOG_DEVICE_GUARD",
    "XLOG_DEVICE_SANITIZER",
    "NVTX_INJECTION64_PATH",
];

/// Set in the processes that this file starts; the ignored tests mean nothing elsewhere.
const CHILD: &str = "XLOG_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs an ignored test of this file in a process with these variables and returns what it printed.
fn child(test: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", &format!("singleton::{test}")]);
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.env(CHILD, "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{variables:?}\n{printed}\n{errors}");
    assert!(printed.contains("1 passed"), "no test is called {test}:\n{printed}");
    printed
}

fn message(ordinal: u32) -> String {
    match XlogDeviceRuntime::try_get(ordinal) {
        Err(XlogError::Kernel(message)) => message,
        other => panic!("expected an error of kind Kernel, got {other:?}"),
    }
}

/// The typed cause of a shared runtime that cannot be built.
fn cause(ordinal: u32) -> XlogError {
    let error = XlogDeviceRuntime::try_get(ordinal).unwrap_err();
    let source = error.source().expect("an error of try_get has a source");
    source.downcast_ref::<XlogError>().expect("the source is typed").clone()
}

#[test]
fn a_cold_race_of_eight_threads_gives_one_runtime() {
    for device in ["sim", "sim:5"] {
        child("child_races_for_the_runtime", &[("XLOG_DEVICE", device)]);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_races_for_the_runtime() {
    if !is_child() {
        return;
    }
    for ordinal in [0, 5, 15] {
        let barrier = Barrier::new(8);
        let found: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        std::ptr::from_ref(XlogDeviceRuntime::try_get(ordinal).unwrap()).addr()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let held = XlogDeviceRuntime::try_get_arc(ordinal).unwrap();
        assert!(found.iter().all(|&one| one == Arc::as_ptr(&held).addr()), "{found:?}");
        assert_eq!((held.device_ordinal(), held.device().ordinal()), (ordinal, ordinal));
        assert_eq!(held.device().properties().kind, DeviceKind::Simulated);
        let block = held.allocate(64, StreamId::DEFAULT, AllocTag::UNTAGGED).unwrap();
        held.deallocate(block).unwrap();
    }
}

#[test]
fn a_build_that_failed_is_tried_again_and_a_built_runtime_is_not_changed() {
    child("child_fails_then_succeeds", &[]);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_fails_then_succeeds() {
    if !is_child() {
        return;
    }
    // No machine has that many GPUs, so the last ordinal fails with and without a GPU.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let said = message(15);
                assert!(said.contains("cuda:15") && said.contains("XLOG_DEVICE=sim"), "{said}");
            });
        }
    });
    let config = RuntimeConfig::default()
        .with_device(DeviceSpec::SimSeeded(3))
        .with_resource(ResourceKind::Direct)
        .with_max_streams(2);
    XlogDeviceRuntime::configure(15, config.clone().with_max_streams(9)).unwrap();
    XlogDeviceRuntime::configure(15, config.clone()).unwrap();
    let runtime = XlogDeviceRuntime::try_get(15).unwrap();
    assert_eq!(runtime.device().spec(), "sim:3");
    assert!(!runtime.supports_block_use_tracking());
    assert_eq!(runtime.stream_pool().max_streams(), 2);

    let late = XlogDeviceRuntime::configure(15, config).unwrap_err().to_string();
    assert!(late.contains("15") && late.contains("before its first use"), "{late}");
}

#[test]
fn without_being_asked_for_a_simulated_device_is_never_invented() {
    child("child_asks_for_the_first_gpu", &[]);
    child("child_asks_for_the_first_gpu", &[("XLOG_DEVICE", "cuda:7")]);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_asks_for_the_first_gpu() {
    if !is_child() {
        return;
    }
    match XlogDeviceRuntime::try_get(0) {
        Ok(runtime) => assert_eq!(runtime.device().properties().kind, DeviceKind::Cuda),
        Err(XlogError::Kernel(said)) => {
            assert!(said.contains("cuda:0") && said.contains("XLOG_DEVICE=sim"), "{said}");
            assert!(matches!(cause(0), XlogError::Open { spec, .. } if spec == "cuda:0"));
        }
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn settings_that_are_not_accepted_are_refused_by_name() {
    let cases = [
        ("XLOG_DEVICE", "gpu", "sim:SEED"),
        ("XLOG_DEVICE", "", "sim:SEED"),
        ("XLOG_DEVICE_RESOURCE", "Async", "\"async\", \"pool\" and \"direct\""),
        ("XLOG_DEVICE_RESOURCE", "", "\"async\", \"pool\" and \"direct\""),
        ("XLOG_DEVICE_BUDGET", "8g", "4GiB"),
        ("XLOG_DEVICE_BUDGET", "", "4GiB"),
        ("XLOG_DEVICE_BUDGET", "0", "nothing at all"),
        ("XLOG_DEVICE_BUDGET", "101%", "more than the whole"),
        ("XLOG_DEVICE_LEDGER", "", "\"off\""),
        ("XLOG_DEVICE_LEDGER", "here", "absolute"),
        ("XLOG_DEVICE_LEDGER", "/tmp/a b.ledger", "no device key"),
        ("XLOG_DEVICE_LOG", "", ".xtrace or .csv"),
        ("XLOG_DEVICE_LOG", "/tmp/log.txt", ".xtrace or .csv"),
        ("XLOG_DEVICE_GUARD", "on", "sampled:N"),
        ("XLOG_DEVICE_GUARD", "", "no such guard"),
        ("XLOG_DEVICE_GUARD", "sampled:0", "no number above 0"),
        ("XLOG_DEVICE_SANITIZER", "yes", "\"auto\", \"on\" and \"off\""),
        ("XLOG_DEVICE_SANITIZER", "", "\"auto\", \"on\" and \"off\""),
    ];
    for (variable, value, expected) in cases {
        let mut variables = vec![("XLOG_DEVICE", "sim")];
        variables.retain(|(name, _)| *name != variable);
        variables.push((variable, value));
        let said = child("child_prints_the_error", &variables);
        for part in [variable, &format!("{value:?}"), expected] {
            assert!(said.contains(part), "{variable}={value}: {part} is missing in\n{said}");
        }
        assert!(said.contains("cause: BadSetting {") || said.contains("cause: BadDeviceSpec {"));
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_prints_the_error() {
    if !is_child() {
        return;
    }
    println!("error: {}", message(0));
    let cause = cause(0);
    assert!(message(0).ends_with(&cause.to_string()), "{cause:?}");
    println!("cause: {cause:?}");
    // What code asks for does not depend on the environment.
    XlogDeviceRuntime::configure(0, RuntimeConfig::default().with_device(DeviceSpec::Sim)).unwrap();
    XlogDeviceRuntime::try_get(0).unwrap();
}

#[test]
fn the_resource_is_the_one_the_environment_names() {
    for (value, tracks) in [("async", "true"), ("pool", "true"), ("direct", "false")] {
        let variables = [("XLOG_DEVICE", "sim:8"), ("XLOG_DEVICE_RESOURCE", value)];
        let said = child("child_prints_what_it_got", &variables);
        assert!(said.contains(&format!("tracks {tracks} on sim:8")), "{said}");
    }
    let said = child("child_prints_what_it_got", &[("XLOG_DEVICE", "sim:8")]);
    assert!(said.contains("tracks true"), "the default is not the stream-ordered one: {said}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_prints_what_it_got() {
    if !is_child() {
        return;
    }
    let runtime = XlogDeviceRuntime::try_get(2).unwrap();
    let tracks = runtime.supports_block_use_tracking();
    println!("tracks {tracks} on {}", runtime.device().spec());
}

#[test]
fn a_pool_works_for_a_checker_where_the_environment_says_so() {
    let pool = [("XLOG_DEVICE", "sim"), ("XLOG_DEVICE_RESOURCE", "pool")];
    let nowhere = ("NVTX_INJECTION64_PATH", "/nowhere/tool.so");
    let with = |more: &[(&'static str, &'static str)]| [pool.as_slice(), more].concat();
    // A block of exactly the bytes that were asked for shows it.
    for (variables, bytes) in [
        (with(&[]), 1024),
        (with(&[("XLOG_DEVICE_SANITIZER", "auto")]), 1024),
        (with(&[("XLOG_DEVICE_SANITIZER", "auto"), nowhere]), 1024),
        (with(&[("XLOG_DEVICE_SANITIZER", "off"), nowhere]), 1024),
        (with(&[("XLOG_DEVICE_SANITIZER", "on")]), 1000),
    ] {
        let said = child("child_prints_the_bytes_of_a_block", &variables);
        assert!(said.contains(&format!("bytes: {bytes}\n")), "{variables:?}: {said}");
    }
    let said = child("child_prints_the_error", &with(&[("XLOG_DEVICE_SANITIZER", "on"), nowhere]));
    assert!(said.contains("NVTX_INJECTION64_PATH names /nowhere/tool.so"), "{said}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_prints_the_bytes_of_a_block() {
    if !is_child() {
        return;
    }
    let runtime = XlogDeviceRuntime::try_get(0).unwrap();
    let block = runtime.allocate(1000, StreamId::DEFAULT, AllocTag::UNTAGGED).unwrap();
    println!("bytes: {}", block.bytes);
    runtime.deallocate(block).unwrap();
}

/// What the limits of the shared runtime are, as the environment sets them.
#[test]
fn the_budget_and_the_ledger_are_those_the_environment_names() {
    let directory = std::env::temp_dir().join(format!("xlog-singleton-{}", std::process::id()));
    let file = directory.join("team.ledger");
    std::fs::create_dir_all(&directory).unwrap();
    // Private, whatever the mask of whoever runs the tests.
    #[cfg(unix)]
    std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    let (in_directory, in_file) = (directory.display().to_string(), file.display().to_string());
    let gib = 1_u64 << 30;
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Variables<'_>, u64, &str, &str); 8] = [
        (&[], 31 * gib, "device total less reserve", "off"),
        (&[("XLOG_DEVICE_BUDGET", "4GiB")], 4 * gib, "configuration", "off"),
        (&[("XLOG_DEVICE_BUDGET", "512MB")], 512_000_000, "configuration", "off"),
        (&[("XLOG_DEVICE_BUDGET", "1e9")], 1_000_000_000, "configuration", "off"),
        (&[("XLOG_DEVICE_BUDGET", "50%")], 16 * gib, "configuration", "off"),
        (&[("XLOG_DEVICE_BUDGET", "1TiB")], 31 * gib, "device total less reserve", "off"),
        (&[("XLOG_DEVICE_LEDGER", "off")], 31 * gib, "device total less reserve", "off"),
        (
            &[("XLOG_DEVICE_LEDGER", &in_file), ("XLOG_DEVICE_BUDGET", "2GiB")],
            2 * gib,
            "configuration",
            &in_file,
        ),
    ];
    let run = |variables: &[(&str, &str)], bytes: u64, by: &str, ledger: &str| {
        for resource in ["async", "pool", "direct"] {
            let mut all = vec![("XLOG_DEVICE", "sim"), ("XLOG_DEVICE_RESOURCE", resource)];
            all.extend(variables);
            let said = child("child_prints_its_limits", &all);
            let expected = format!("limit {bytes} by {by};");
            assert!(said.contains(&expected) && said.contains(ledger), "{all:?}: {said}");
        }
    };
    for (variables, bytes, by, ledger) in cases {
        run(variables, bytes, by, ledger);
    }
    // The limit of the file that is there now rules over what the next one would like.
    let wants = [("XLOG_DEVICE_LEDGER", in_file.as_str()), ("XLOG_DEVICE_BUDGET", "8GiB")];
    run(&wants, 2 * gib, "ledger", &in_file);
    run(
        &[("XLOG_DEVICE_LEDGER", &in_directory)],
        31 * gib,
        "device total less reserve",
        "sim-2.ledger",
    );

    std::fs::write(&file, "damaged").unwrap();
    let said = child(
        "child_prints_the_error",
        &[("XLOG_DEVICE", "sim"), ("XLOG_DEVICE_LEDGER", &in_file)],
    );
    assert!(said.contains("truncated") && said.contains(&in_file), "{said}");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_prints_its_limits() {
    if !is_child() {
        return;
    }
    let runtime = XlogDeviceRuntime::try_get(2).unwrap();
    let limit = runtime.effective_limit().unwrap();
    let budget = runtime.budget().unwrap();
    assert_eq!(budget.limit(), limit.bytes());
    let above = runtime.allocate(limit.bytes() + 1, StreamId::DEFAULT, AllocTag("too many"));
    assert!(matches!(above, Err(ResourceError::OutOfBudget { .. })), "{above:?}");
    let block = runtime.allocate(1000, StreamId::DEFAULT, AllocTag("rows")).unwrap();
    if let Some(snapshot) = runtime.ledger_snapshot().unwrap() {
        assert!(snapshot.used() >= 1000, "{snapshot:?}");
    }
    runtime.deallocate(block).unwrap();
    println!("limit {} by {}; ledger {}", limit.bytes(), limit.ruled_by(), runtime.ledger());
}

#[test]
fn ordinals_outside_the_table_and_other_gpus_are_refused() {
    assert_eq!(MAX_DEVICE_ORDINALS, 16);
    for ordinal in [16, u32::MAX] {
        let said = message(ordinal);
        assert!(said.contains(&ordinal.to_string()) && said.contains("0 to 15"), "{said}");
        let config = RuntimeConfig::default().with_device(DeviceSpec::Sim);
        assert!(XlogDeviceRuntime::configure(ordinal, config).is_err());
    }
    let config = RuntimeConfig::default().with_device(DeviceSpec::Cuda(3));
    let said = XlogDeviceRuntime::configure(4, config).unwrap_err().to_string();
    assert!(said.contains("cuda:3") && said.contains("ordinal 4"), "{said}");
}

#[test]
fn runtimes_of_several_devices_write_logs_of_their_own_by_one_variable() {
    let folder = std::env::temp_dir().join(format!("xlog-logs-by-device-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let pattern = folder.join("%d.xtrace");
    let variables = [("XLOG_DEVICE", "sim"), ("XLOG_DEVICE_LOG", pattern.to_str().unwrap())];
    child("child_logs_by_device", &variables);
    for ordinal in 0..2 {
        let reader = xlog_trace::Reader::open(folder.join(format!("{ordinal}.xtrace"))).unwrap();
        let records: Vec<_> = reader.map(Result::unwrap).collect();
        let is_call = |record: &&xlog_trace::Record| {
            use xlog_trace::Action::{Allocate, Deallocate};
            matches!(record.action(), Allocate | Deallocate)
        };
        assert_eq!(records.iter().filter(is_call).count(), 2000, "device {ordinal}");
        assert!(records.iter().all(|record| record.device() == ordinal), "device {ordinal}");
    }
    let pattern = folder.join("both.xtrace");
    let variables = [("XLOG_DEVICE", "sim"), ("XLOG_DEVICE_LOG", pattern.to_str().unwrap())];
    child("child_is_refused_the_log_of_another_device", &variables);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_logs_by_device() {
    if !is_child() {
        return;
    }
    let runtimes = [0, 1].map(|ordinal| XlogDeviceRuntime::try_get(ordinal).unwrap());
    for _ in 0..1000 {
        for runtime in runtimes {
            let block = runtime.allocate(64, StreamId::DEFAULT, AllocTag("log")).unwrap();
            runtime.deallocate(block).unwrap();
        }
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_is_refused_the_log_of_another_device() {
    if !is_child() {
        return;
    }
    XlogDeviceRuntime::try_get(0).unwrap();
    let said = message(1);
    assert!(said.contains("both.xtrace") && said.contains("%d"), "{said}");
}

/// Runs an ignored test of this file on the simulated device and returns what it wrote to standard error.
fn errors_of(test: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", &format!("singleton::{test}")]);
    for name in VARIABLES {
        command.env_remove(name);
    }
    let output = command.env(CHILD, "1").env("XLOG_DEVICE", "sim").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn leaks_of_shared_runtimes_and_forgotten_buffers_are_reported_by_tag_at_exit() {
    let said = errors_of("child_leaks");
    for word in ["\"sim\" (ordinal 2)", "1 live blocks", "lost rows", "lost keys", "process ends"] {
        assert!(said.contains(word), "{word} is missing: {said}");
    }
    assert!(!said.contains("kept"), "{said}");
    assert_eq!(
        said.matches("live blocks, ").count(),
        2 * 2 + 2,
        "a line for each, and a table for each runtime: {said}"
    );
    for (end, bytes) in [("ended", 8192), ("is alive at the end of the process", 1024)] {
        let line = format!("page-locked memory of device \"sim\" (ordinal 0) {end} with 1 live");
        assert!(said.contains(&line) && said.contains(&format!("{bytes} bytes")), "{said}");
    }
    let said = errors_of("child_leaks_nothing");
    assert!(!said.contains("live blocks"), "{said}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_leaks() {
    if !is_child() {
        return;
    }
    let shared = XlogDeviceRuntime::try_get(2).unwrap();
    // A block that its owner loses.
    drop(shared.allocate(4096, StreamId::DEFAULT, AllocTag("lost rows")).unwrap());
    let kept = shared.allocate(4096, StreamId::DEFAULT, AllocTag("kept")).unwrap();
    shared.deallocate(kept).unwrap();
    // A buffer that is forgotten keeps its runtime, which nothing else holds.
    let device = Arc::new(xlog_cuda::CudaDevice::open("sim").unwrap());
    let own = XlogDeviceRuntime::with_config(device, &RuntimeConfig::default()).unwrap();
    let manager = xlog_cuda::GpuMemoryManager::with_runtime(Arc::new(own));
    std::mem::forget(manager.alloc_tagged::<u64>(512, AllocTag("lost keys")).unwrap());
    // So does a buffer of page-locked memory; a block does not.
    let (device, streams) = (manager.runtime().device(), manager.runtime().stream_pool());
    let pinned = || Arc::new(PinnedHostResource::new(device.clone(), 0, streams.clone()));
    let staging = pinned().alloc::<u8>(1024, StreamId::DEFAULT, AllocTag("staging"));
    std::mem::forget(staging.unwrap());
    drop(pinned().allocate(8192, StreamId::DEFAULT, AllocTag("staging")).unwrap());
    drop(pinned().alloc::<u8>(2048, StreamId::DEFAULT, AllocTag("staging")).unwrap());
    drop(manager);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_leaks_nothing() {
    if !is_child() {
        return;
    }
    let shared = XlogDeviceRuntime::try_get(2).unwrap();
    let block = shared.allocate(4096, StreamId::DEFAULT, AllocTag("kept")).unwrap();
    shared.deallocate(block).unwrap();
}

#[test]
fn a_layer_that_asks_for_the_runtime_it_is_built_into_is_refused() {
    child("child_asks_for_itself", &[]);
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn child_asks_for_itself() {
    if !is_child() {
        return;
    }
    let simulated = || RuntimeConfig::default().with_device(DeviceSpec::Sim);
    XlogDeviceRuntime::configure(4, simulated()).unwrap();
    let asking = move |inner| {
        assert!(message(5).contains("is being built by this thread"));
        let configured = XlogDeviceRuntime::configure(5, simulated());
        assert!(configured.unwrap_err().to_string().contains("is being built by this thread"));
        // Another runtime may be built meanwhile.
        XlogDeviceRuntime::try_get(4).unwrap();
        assert!(message(5).contains("is being built by this thread"));
        inner
    };
    let config = RuntimeConfig::default().with_device(DeviceSpec::Sim).with_layer(asking);
    XlogDeviceRuntime::configure(5, config).unwrap();
    XlogDeviceRuntime::try_get(5).unwrap();
    XlogDeviceRuntime::try_get(5).unwrap();
}

#[test]
fn a_process_keeps_the_quota_of_its_environment_in_whatever_runtime_it_opens() {
    let directory = std::env::temp_dir().join(format!("xlog-quota-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    #[cfg(unix)]
    std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    let place = directory.display().to_string();
    let variables = [
        ("XLOG_DEVICE_LEDGER", place.as_str()),
        ("XLOG_DEVICE_QUOTA", "25%"),
        ("XLOG_DEVICE_QUOTA_NAME", "trainer"),
    ];
    child("child_opens_runtimes_under_a_quota", &variables);
    let bad = [("XLOG_DEVICE_LEDGER", place.as_str()), ("XLOG_DEVICE_QUOTA", "a lot")];
    child("child_is_refused_a_quota_that_is_no_size", &bad);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_opens_runtimes_under_a_quota() {
    if !is_child() {
        return;
    }
    let runtime = XlogDeviceRuntime::open("sim").unwrap();
    let snapshot = runtime.ledger_snapshot().unwrap().unwrap();
    let quota = &snapshot.slots[0].quota;
    assert_eq!((quota.limit, quota.name.as_deref()), (Some((31 << 30) / 4), Some("trainer")));
    let allocate = |bytes: usize| runtime.allocate(bytes, StreamId::DEFAULT, AllocTag::UNTAGGED);
    let quarter = (31 << 30) / 4;
    runtime.deallocate(allocate(quarter).unwrap()).unwrap();
    assert!(matches!(allocate(quarter + 1), Err(ResourceError::OutOfBudget { .. })));

    // The freed quarter is cached. A smaller quota holds for it too, and what is above goes back to the device.
    let ledger = runtime.ledger().ledger().unwrap().clone();
    let set = |bytes: u64| {
        ledger.set_quota(&xlog_cuda::ledger::Quota::limited_to(bytes)).unwrap();
        assert_eq!(XlogDeviceRuntime::refresh_all_limits(), 1);
    };
    set(1 << 30);
    assert_eq!(ledger.used(), 0);
    assert!(matches!(allocate((1 << 30) + 1), Err(ResourceError::OutOfBudget { .. })));
    let whole = allocate(1 << 30).unwrap();
    // A larger one is there at once, and a limit that the program has set stays.
    set(3 << 30);
    let more = allocate(2 << 30).unwrap();
    runtime.budget().unwrap().set_limit(4 << 20);
    set(5 << 30);
    assert_eq!(runtime.budget().unwrap().limit(), 4 << 20);
    // Also after a share that was lower still.
    set(2 << 20);
    assert_eq!(runtime.budget().unwrap().limit(), 2 << 20);
    set(5 << 30);
    assert_eq!(runtime.budget().unwrap().limit(), 4 << 20);
    assert_eq!(runtime.refresh_limit().unwrap().bytes(), runtime.budget().unwrap().limit());
    runtime.deallocate(whole).unwrap();
    runtime.deallocate(more).unwrap();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_is_refused_a_quota_that_is_no_size() {
    if !is_child() {
        return;
    }
    let said = XlogDeviceRuntime::open("sim").unwrap_err().to_string();
    assert!(said.contains("XLOG_DEVICE_QUOTA") && said.contains("a lot"), "{said}");
}
