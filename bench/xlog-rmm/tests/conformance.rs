//! RMM behind our trait passes the suite that every resource passes.
//!
//! With `XLOG_RMM_BRIDGE` naming the bridge, and a GPU, it is RMM; a fake bridge, compiled here, stands for it on simulated devices,
//! so that everything on this side of the C functions is tested everywhere.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use xlog_conformance::{Outcome, Report, Suite};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, DeviceMemoryResource, PoolConfig, PoolResource, ResourceError,
    StreamId, StreamPool,
};
use xlog_cuda::driver::{DriverError, StreamHandle};
use xlog_rmm::{Bridge, BridgeError, RmmKind, RmmResource};

/// The device whose memory the fake hands out. One at a time: the fake is one library.
static DEVICE: Mutex<Option<Arc<CudaDevice>>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

extern "C" fn allocate(_: *mut c_void, bytes: usize, stream: *mut c_void, ptr: *mut u64) -> i32 {
    let device = DEVICE.lock().unwrap().clone().unwrap();
    let pools = device.driver().async_pools().unwrap();
    match pools.alloc_async(
        bytes,
        device.memory_pool().unwrap(),
        StreamHandle::numbered(stream as u64),
    ) {
        Ok(address) => {
            // SAFETY: the bridge passes a place for the address.
            unsafe { *ptr = address };
            0
        }
        Err(DriverError::OutOfMemory { .. }) => 1,
        Err(_) => 2,
    }
}

extern "C" fn deallocate(_: *mut c_void, ptr: u64, stream: *mut c_void) -> i32 {
    let device = DEVICE.lock().unwrap().clone().unwrap();
    let pools = device.driver().async_pools().unwrap();
    // SAFETY: the resource under test answers for the address; the simulated device checks it.
    let freed = unsafe { pools.free_async(ptr, StreamHandle::numbered(stream as u64)) };
    if freed.is_ok() { 0 } else { 2 }
}

/// Compiles the fake, once for each set of flags.
fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("xlog-rmm-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&source, include_str!("fake_bridge.c")).unwrap();
    let named = std::env::var("CC").ok();
    let compilers = named.iter().map(String::as_str).chain(["cc", "gcc", "clang"]);
    let mut outputs = compilers.filter_map(|compiler| {
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args(flags).arg(&source);
        command.output().ok()
    });
    let done = outputs.next().expect("a C compiler: CC, cc, gcc or clang");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    library
}

static FAKE: LazyLock<PathBuf> = LazyLock::new(|| compile("fake", &[]));

fn load(path: &Path) -> Result<Bridge, BridgeError> {
    // SAFETY: the fake was compiled from the source beside this test; the other one is named as a bridge by whoever runs the test.
    unsafe { Bridge::load(path) }
}

/// The fake, with memory of a device, as long as the guard lives.
fn fake(device: &Arc<CudaDevice>) -> (Bridge, MutexGuard<'static, ()>) {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    *DEVICE.lock().unwrap() = Some(device.clone());
    let bridge = load(&FAKE).unwrap();
    // SAFETY: the fake has this function with this signature; it stays loaded while the bridge lives.
    unsafe {
        let library = libloading::Library::new(&*FAKE).unwrap();
        type Allocate = extern "C" fn(*mut c_void, usize, *mut c_void, *mut u64) -> i32;
        type Deallocate = extern "C" fn(*mut c_void, u64, *mut c_void) -> i32;
        let install =
            library.get::<unsafe extern "C" fn(Allocate, Deallocate)>(b"fake_install\0").unwrap();
        install(allocate, deallocate);
    }
    (bridge, turn)
}

fn fail_frees(count: i32) {
    // SAFETY: the fake has this function with this signature.
    unsafe {
        let library = libloading::Library::new(&*FAKE).unwrap();
        library.get::<unsafe extern "C" fn(i32)>(b"fake_fail_frees\0").unwrap()(count);
    }
}

fn suite(device: &Arc<CudaDevice>, bridge: &Bridge, kind: RmmKind, initial: usize) -> Report {
    let suite = Suite::new(|device, pool| {
        let resource =
            RmmResource::new(bridge, kind, device.clone(), pool.clone(), initial).unwrap();
        Box::new(resource)
    });
    suite.run(device)
}

fn passed(report: &Report) -> usize {
    report.checks().iter().filter(|check| check.outcome == Outcome::Passed).count()
}

#[test]
fn a_resource_over_a_bridge_passes_on_simulated_devices() {
    for spec in ["sim", "sim:1", "sim:2", "sim:3"] {
        let device = Arc::new(CudaDevice::open(spec).unwrap());
        let (bridge, _turn) = fake(&device);
        let report = suite(&device, &bridge, RmmKind::Async, 0);
        report.assert_passed();
        // Most of what is skipped is about uses, which are not tracked.
        assert!(passed(&report) >= 25, "{report}");
    }
}

#[test]
fn a_pool_over_a_bridge_tracks_uses_and_passes() {
    for spec in ["sim", "sim:5"] {
        let device = Arc::new(CudaDevice::open(spec).unwrap());
        let (bridge, _turn) = fake(&device);
        let suite = Suite::new(|device, pool| {
            let inner = RmmResource::new(&bridge, RmmKind::Pool, device.clone(), pool.clone(), 0);
            let pool =
                PoolResource::over(Box::new(inner.unwrap()), pool.clone(), PoolConfig::default());
            Box::new(pool.unwrap())
        });
        let report = suite.run(&device);
        report.assert_passed();
        assert!(passed(&report) > 45, "{report}");
    }
}

#[test]
fn a_free_that_fails_half_way_is_kept_and_finished_by_a_reap() {
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let (bridge, _turn) = fake(&device);
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let resource = RmmResource::new(&bridge, RmmKind::Pool, device, streams, 0).unwrap();
    let block = resource.allocate(1000, StreamId::DEFAULT, AllocTag::UNTAGGED).unwrap();
    let id = BlockId::from_block(&block);
    fail_frees(2);
    let said = resource.deallocate(block).unwrap_err();
    assert!(matches!(&said, ResourceError::Driver(text) if text.contains("this free")), "{said:?}");
    assert_eq!(
        (resource.block_state(id), resource.bytes_outstanding()),
        (BlockState::Retired, 1000)
    );
    resource.reap_pending().unwrap_err();
    assert_eq!(resource.statistics().retired_blocks, 1);
    resource.reap_pending().unwrap();
    assert_eq!((resource.block_state(id), resource.bytes_outstanding()), (BlockState::Freed, 0));
}

#[test]
fn what_is_no_bridge_is_refused_by_name() {
    let missing = load(Path::new("/nowhere/librmm_bridge.so")).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/librmm_bridge.so"), "{missing}");
    let newer = compile("newer", &["-DFAKE_VERSION=7"]);
    assert_eq!(load(&newer).unwrap_err(), BridgeError::Version { path: newer, found: 7 });
    let device = Arc::new(CudaDevice::open("sim").unwrap());
    let (bridge, _turn) = fake(&device);
    let streams = Arc::new(StreamPool::with_defaults(device.clone()));
    let refused = RmmResource::new(&bridge, RmmKind::Arena, device, streams, 1).unwrap_err();
    assert_eq!(refused.to_string(), "no arena resource of RMM: no arena today");
}

/// On a GPU host with the bridge: every resource of RMM, by itself and under a pool that tracks uses.
#[test]
fn rmm_passes() {
    let Some(path) = std::env::var_os("XLOG_RMM_BRIDGE") else {
        println!("left out: XLOG_RMM_BRIDGE names no bridge to RMM");
        return;
    };
    let bridge = load(Path::new(&path)).unwrap();
    let spec = std::env::var("XLOG_TEST_DEVICE").unwrap_or_else(|_| "cuda:0".to_owned());
    let device = Arc::new(CudaDevice::open(&spec).unwrap());
    let mut failed = Vec::new();
    for kind in RmmKind::ALL {
        let report = suite(&device, &bridge, kind, 4 << 30);
        let (bad, left) = (report.failed().count(), report.skipped().count());
        println!("rmm {kind}: {} checks passed, {bad} failed, {left} left out", passed(&report));
        if !report.passed() {
            failed.push(format!("{kind}:\n{report}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
