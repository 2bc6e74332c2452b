//! Which ledger is joined, with which limit, and what becomes of a runtime whose ledger cannot be.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use xlog_cuda::device_runtime::{
    AllocTag, LedgerPreview, LedgerSetting, LimitSource, ResourceError, ResourceKind,
    RuntimeConfig, StreamId, XlogDeviceRuntime,
};
use xlog_cuda::ledger::Quota;
use xlog_cuda::sim::{SimConfig, SimMachine};
use xlog_cuda::{ByteSize, CudaDevice};

use crate::support::{MIB, TestDirectory};

fn sim() -> Arc<CudaDevice> {
    Arc::new(CudaDevice::open("sim").unwrap())
}

fn in_directory(directory: &TestDirectory) -> RuntimeConfig {
    RuntimeConfig::default().with_ledger(LedgerSetting::Directory(directory.path().to_owned()))
}

#[test]
fn a_named_ledger_is_created_with_the_budget_and_keeps_its_limit() {
    let directory = TestDirectory::new();
    let config = in_directory(&directory).with_budget(ByteSize::Bytes(64 * MIB));
    let first = XlogDeviceRuntime::with_config(sim(), &config).unwrap();
    let snapshot = first.ledger_snapshot().unwrap().unwrap();
    assert_eq!((snapshot.limit, snapshot.key.as_str()), (64 * MIB, "sim-0"));
    assert_eq!(first.effective_limit().unwrap().bytes() as u64, 64 * MIB);

    // Whoever comes later gets the limit of the file, or less of its own.
    let larger = config.clone().with_budget(ByteSize::Bytes(1 << 30));
    let second = XlogDeviceRuntime::with_config(sim(), &larger).unwrap();
    let limit = second.effective_limit().unwrap();
    assert_eq!((limit.bytes() as u64, limit.ruled_by()), (64 * MIB, LimitSource::Ledger));
    let smaller = config.with_budget(ByteSize::Bytes(MIB));
    let third = XlogDeviceRuntime::with_config(sim(), &smaller).unwrap();
    let limit = third.effective_limit().unwrap();
    assert_eq!((limit.bytes() as u64, limit.ruled_by()), (MIB, LimitSource::Configuration));
    assert_eq!(third.ledger_snapshot().unwrap().unwrap().slots.len(), 3);
    drop((first, second));
    assert_eq!(third.ledger_snapshot().unwrap().unwrap().slots.len(), 1);
}

#[test]
fn a_named_ledger_without_a_budget_has_what_the_device_allows() {
    let directory = TestDirectory::new();
    let runtime = XlogDeviceRuntime::with_config(sim(), &in_directory(&directory)).unwrap();
    assert_eq!(runtime.ledger_snapshot().unwrap().unwrap().limit, 31 << 30);
}

#[test]
fn a_runtime_keeps_the_quota_it_was_started_with_and_the_one_that_is_set_while_it_runs() {
    for resource in [ResourceKind::Direct, ResourceKind::Pool] {
        let directory = TestDirectory::new();
        let config = in_directory(&directory).with_resource(resource);
        let config = config.with_ledger_limit(ByteSize::Bytes(512 * MIB));
        let quota = config.clone().with_quota(ByteSize::Bytes(64 * MIB));
        let runtime = XlogDeviceRuntime::with_config(sim(), &quota).unwrap();
        let limit = runtime.effective_limit().unwrap();
        assert_eq!((limit.bytes() as u64, limit.ruled_by()), (64 * MIB, LimitSource::Ledger));
        let allocate =
            |bytes: u64| runtime.allocate(bytes as usize, StreamId::DEFAULT, AllocTag::UNTAGGED);
        let refused = |bytes: u64| match allocate(bytes) {
            Err(ResourceError::OutOfBudget { .. }) => {}
            other => panic!("{resource:?}: {bytes} bytes: {other:?}"),
        };
        let held = allocate(48 * MIB).unwrap();
        refused(48 * MIB);
        let administrator = runtime.ledger().ledger().unwrap().clone();
        let set = |bytes: u64| administrator.set_quota(&Quota::limited_to(bytes)).unwrap();
        set(128 * MIB);
        let more = allocate(48 * MIB).unwrap();
        set(MIB);
        refused(2 * MIB);
        runtime.deallocate(more).unwrap();
        runtime.deallocate(held).unwrap();
        set(256 * MIB);
        let all = allocate(200 * MIB).unwrap();
        runtime.deallocate(all).unwrap();
    }
}

#[test]
fn a_simulated_device_has_no_ledger_unless_one_is_named() {
    let runtime = XlogDeviceRuntime::with_config(sim(), &RuntimeConfig::default()).unwrap();
    assert!(runtime.ledger().ledger().is_none());
    assert_eq!(runtime.ledger().to_string(), "off");
    let preview = XlogDeviceRuntime::preview_limits(&sim(), &RuntimeConfig::default()).unwrap();
    assert!(matches!(preview.ledger, LedgerPreview::Off));
}

/// Every way in which a ledger file can be wrong: the runtime is refused, the file named and left as it was.
#[test]
fn a_ledger_that_is_damaged_foreign_or_read_only_refuses_the_runtime_and_stays_as_it_is() {
    type Damage = fn(&TestDirectory);
    let cases: [(&str, &str, Damage); 6] = [
        ("truncated", "truncated", |directory| cut(directory, 100)),
        ("cut at the header", "truncated", |directory| cut(directory, 4096)),
        ("zeroed", "not a valid ledger", |directory| write(directory, &[0; 4096 + 256 * 128])),
        ("no ledger", "truncated", |directory| write(directory, b"hello")),
        ("newer", "version 9", |directory| patch(directory, 8, 9)),
        ("read-only", "read-only", |directory| mode(directory, 0o400)),
    ];
    for (name, expected, damage) in cases {
        let directory = TestDirectory::new();
        drop(directory.ledger(MIB));
        damage(&directory);
        refused(&directory, name, expected);
    }
    let directory = TestDirectory::new();
    drop(directory.ledger(MIB));
    mode(&directory, 0o622);
    refused(&directory, "too open", "lets others write");
    let directory = TestDirectory::new();
    fs::create_dir(directory.ledger_path()).unwrap();
    let config = directory.config(ResourceKind::Async, MIB);
    let said = XlogDeviceRuntime::with_config(sim(), &config).unwrap_err().to_string();
    assert!(said.contains("a directory"), "{said}");
}

fn refused(directory: &TestDirectory, name: &str, expected: &str) {
    let path = directory.ledger_path();
    let before = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().permissions().mode());
    let config = directory.config(ResourceKind::Async, MIB);
    let said = XlogDeviceRuntime::with_config(sim(), &config).unwrap_err().to_string();
    for part in [expected, path.to_str().unwrap(), "XLOG_DEVICE_LEDGER=off"] {
        assert!(said.contains(part), "{name}: {part} is missing in {said}");
    }
    match XlogDeviceRuntime::preview_limits(&sim(), &config).unwrap().ledger {
        LedgerPreview::Refused { reason } => assert_eq!(reason, said, "{name}"),
        other => panic!("{name}: {other:?}"),
    }
    let after = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().permissions().mode());
    assert_eq!(before, after, "{name}");
    // And without it there is a way out.
    let config = config.with_ledger(LedgerSetting::Off);
    XlogDeviceRuntime::with_config(sim(), &config).unwrap();
}

fn cut(directory: &TestDirectory, bytes: u64) {
    let file = fs::File::options().write(true).open(directory.ledger_path()).unwrap();
    file.set_len(bytes).unwrap();
}

fn write(directory: &TestDirectory, bytes: &[u8]) {
    fs::write(directory.ledger_path(), bytes).unwrap();
}

fn patch(directory: &TestDirectory, at: usize, value: u8) {
    let mut bytes = fs::read(directory.ledger_path()).unwrap();
    bytes[at] = value;
    write(directory, &bytes);
}

fn mode(directory: &TestDirectory, mode: u32) {
    fs::set_permissions(directory.ledger_path(), fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_named_place_that_does_not_exist_is_an_error() {
    let config = RuntimeConfig::default()
        .with_ledger(LedgerSetting::Directory("/nonexistent-place/ledgers".into()));
    let said = XlogDeviceRuntime::with_config(sim(), &config).unwrap_err().to_string();
    assert!(said.contains("/nonexistent-place/ledgers"), "{said}");
}

#[test]
fn one_file_is_not_the_ledger_of_two_devices() {
    let directory = TestDirectory::new();
    let machine = SimMachine::new(SimConfig::default().with_ordinals(2)).unwrap();
    let device = |ordinal| Arc::new(CudaDevice::from_sim(machine.device(ordinal).unwrap()));
    let config = directory.config(ResourceKind::Direct, MIB);
    let _first = XlogDeviceRuntime::with_config(device(0), &config).unwrap();
    let said = XlogDeviceRuntime::with_config(device(1), &config).unwrap_err().to_string();
    assert!(said.contains("test.ledger") && said.contains("directory"), "{said}");
    // In a directory each has its own.
    let config = in_directory(&directory);
    let second = XlogDeviceRuntime::with_config(device(1), &config).unwrap();
    assert!(second.ledger().to_string().contains("sim-1.ledger"));
}

#[test]
fn a_survey_creates_nothing_and_sees_what_is_there() {
    let directory = TestDirectory::new();
    let config = directory.config(ResourceKind::Async, 64 * MIB);
    let preview = XlogDeviceRuntime::preview_limits(&sim(), &config).unwrap();
    match preview.ledger {
        LedgerPreview::Absent { path, limit } => {
            assert_eq!((path, limit), (directory.ledger_path(), 64 * MIB));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(preview.limit.bytes() as u64, 64 * MIB);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

    let ledger = directory.ledger(32 * MIB);
    ledger.charge(MIB).unwrap();
    let preview = XlogDeviceRuntime::preview_limits(&sim(), &config).unwrap();
    match preview.ledger {
        LedgerPreview::Present(found) => {
            assert_eq!((found.limit, found.used(), found.slots.len()), (32 * MIB, MIB, 1));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(preview.limit.ruled_by(), LimitSource::Ledger);
    assert_eq!(ledger.snapshot().unwrap().slots.len(), 1, "the preview has left");
}

/// What the preview says of a ledger that is not there yet is what the runtime meets when it creates it.
#[test]
fn a_survey_refuses_where_the_runtime_would_be_refused() {
    let directory = TestDirectory::new();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    let open = directory.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let count = || fs::read_dir(directory.path()).unwrap().count();
    let before = count();
    let within = |place: &std::path::Path| {
        RuntimeConfig::default().with_ledger(LedgerSetting::Directory(place.to_owned()))
    };
    let displaced = TestDirectory::new();
    let survivor = displaced.ledger(MIB);
    fs::remove_file(survivor.path()).unwrap();
    let configs = [
        within(&directory.path().join("missing/place")),
        within(&file.join("place")),
        within(&file),
        within(&link),
        within(&open),
        within(&directory.path().join("new")).with_ledger_limit(ByteSize::Bytes(1)),
        displaced.config(ResourceKind::Direct, MIB),
    ];
    for config in configs {
        let preview = XlogDeviceRuntime::preview_limits(&sim(), &config).unwrap();
        assert_eq!(count(), before, "the preview left something behind: {config:?}");
        let said = XlogDeviceRuntime::with_config(sim(), &config).unwrap_err().to_string();
        match preview.ledger {
            LedgerPreview::Refused { reason } => assert_eq!(reason, said),
            other => panic!("{config:?}: {other:?}, but {said}"),
        }
        let _ = fs::remove_dir(directory.path().join("new"));
    }
    let preview =
        XlogDeviceRuntime::preview_limits(&sim(), &within(&directory.path().join("new"))).unwrap();
    assert!(matches!(preview.ledger, LedgerPreview::Absent { .. }), "{preview:?}");
    assert_eq!(count(), before);
}
