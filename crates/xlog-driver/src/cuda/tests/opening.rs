//! Missing drivers and devices, and the errors that report them.

use crate::cuda::fake::{self, Without, fail, open_error, with};
use crate::cuda::{CudaDriver, library, open};
use crate::{DeviceKind, Driver, DriverError};

fn parts(error: DriverError) -> (String, String) {
    match error {
        DriverError::Unavailable { what, remedy } => (what, remedy),
        other => panic!("not Unavailable: {other:?}"),
    }
}

#[test]
fn a_library_that_is_nowhere_is_not_found() {
    let error = library::probe(&["libcuda-that-is-nowhere.so.1".to_owned()]).unwrap_err();
    let (what, remedy) = parts(error);
    assert_eq!(what, "libcuda was not found");
    assert!(remedy.contains("NVIDIA driver"), "{remedy}");
}

#[test]
fn a_library_that_does_not_load_is_told_apart_with_the_loaders_words() {
    let folder = std::env::temp_dir().join(format!("xlog-driver-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("libcuda.so.1");
    std::fs::write(&path, b"this is no library, but it is long enough to be looked at as one.....")
        .unwrap();
    let error = library::probe(&[path.to_string_lossy().into_owned()]).unwrap_err();
    std::fs::remove_dir_all(&folder).unwrap();
    let (what, _) = parts(error);
    assert!(what.contains("does not load") && what.contains("ELF"), "{what}");
}

#[test]
fn the_candidates_have_the_name_that_drivers_install() {
    let names = library::candidates();
    let expected = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    assert!(names.iter().any(|name| name == expected), "{names:?}");
}

#[test]
fn an_old_driver_is_refused_with_both_versions() {
    let (what, remedy) = parts(open_error(|state| state.version = 11_040, 0));
    assert!(what.contains("11.4") && what.contains("12.0"), "{what}");
    assert!(remedy.contains("12.0"), "{remedy}");
    assert_eq!(fake::logged("cuInit"), 0);
}

#[test]
fn the_version_of_an_old_driver_can_still_be_asked() {
    let api = fake::api();
    with(|state| state.version = 11_040);
    assert_eq!(open::version_of(&api), Ok(11_040));
}

#[test]
fn a_missing_required_symbol_is_named() {
    let Err(error) = fake::load(Without(&[c"cuStreamGetId"])) else { panic!("must fail") };
    let (what, _) = parts(error);
    assert!(what.contains("cuStreamGetId"), "{what}");
}

#[test]
fn no_device_by_count_and_by_code_are_the_same_answer() {
    let by_count = parts(open_error(|state| state.count = 0, 0));
    let by_code = parts(open_error(|state| _ = state.failures.insert("cuInit", 100), 0));
    assert_eq!(by_count, by_code);
    assert!(by_count.0.contains("no device"), "{}", by_count.0);
    let api = fake::api();
    fail("cuInit", 100);
    assert_eq!(open::count_with(&api), Ok(0));
}

#[test]
fn a_bad_ordinal_is_named_with_the_range() {
    let (what, remedy) = parts(open_error(|state| state.count = 4, 99));
    assert!(what.contains("device 99") && what.contains("4 devices"), "{what}");
    assert!(remedy.contains("0 to 3"), "{remedy}");
    let (_, remedy) = parts(open_error(|_| {}, usize::MAX));
    assert!(remedy.contains("ordinal 0"), "{remedy}");
}

#[test]
fn an_unknown_code_at_open_is_shown_as_a_number() {
    let (what, _) = parts(open_error(|state| _ = state.failures.insert("cuInit", 4242), 0));
    assert!(what.contains("4242") && what.contains("no name known"), "{what}");
}

#[test]
fn a_failed_open_leaves_no_context_retained() {
    let steps =
        ["cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute"];
    for step in steps {
        parts(open_error(|state| _ = state.failures.insert(step, 1), 0));
        assert_eq!(with(|state| state.retains), 0, "{step}");
    }
    parts(open_error(|state| _ = state.failures.insert("cuDevicePrimaryCtxRetain", 46), 0));
}

#[test]
fn properties_are_what_the_driver_says() {
    let device = fake::device();
    let properties = device.properties();
    assert_eq!(properties.kind, DeviceKind::Cuda);
    assert_eq!(properties.name, "Fake");
    assert_eq!(properties.uuid.to_string(), "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff");
    assert_eq!(properties.compute_capability, (9, 0));
    assert_eq!(properties.multiprocessors, 132);
    assert_eq!((properties.least_priority, properties.greatest_priority), (0, -5));
    assert_eq!(properties.driver_version, 13_000);
    assert_eq!(properties.granularity, 2 << 20);
    assert!(properties.async_pools && properties.virtual_memory);
    assert!(format!("{device:?}").contains("Fake"));
}

#[test]
fn two_opens_retain_and_release_twice() {
    let api = fake::api();
    let first = CudaDriver::open_with(api.clone(), 0).unwrap();
    let second = CudaDriver::open_with(api, 0).unwrap();
    assert_eq!(with(|state| state.retains), 2);
    drop(first);
    second.memory_info().unwrap();
    drop(second);
    assert_eq!(with(|state| state.retains), 0);
}

#[test]
fn a_registry_shares_while_somebody_has_it_open() {
    use crate::cuda::core::Registry;
    use std::sync::Arc;
    let api = fake::api();
    let registry = Registry::new();
    let open = || registry.share(0, || open::open_with(api.clone(), 0)).unwrap();
    let (first, second) = (open(), open());
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(with(|state| state.retains), 1);
    drop((first, second));
    assert_eq!(with(|state| state.retains), 0);
    drop(open());
    assert_eq!(with(|state| (state.retains, state.logged("cuDevicePrimaryCtxRetain"))), (0, 2));
}
