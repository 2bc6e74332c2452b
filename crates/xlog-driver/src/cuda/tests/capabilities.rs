//! Pools and virtual memory: their availability, and the arguments that the driver gets.

use std::ffi::CStr;

use crate::cuda::CudaDriver;
use crate::cuda::abi::attribute;
use crate::cuda::fake::{self, BASE, Without, fail, logged, with};
use crate::{
    AsyncPools, Driver, DriverError, HostMemory, MapAccess, PoolOptions, PoolUsage, ReusePolicy,
    VirtualMemory,
};

fn capabilities(missing: &'static [&'static CStr], off: u32) -> (bool, bool) {
    let api = fake::load(Without(missing)).unwrap();
    with(|state| state.attributes.insert(off, 0));
    let device = CudaDriver::open_with(api, 0).unwrap();
    assert_eq!(device.properties().async_pools, device.async_pools().is_some());
    assert_eq!(device.properties().virtual_memory, device.virtual_memory().is_some());
    (device.async_pools().is_some(), device.virtual_memory().is_some())
}

#[test]
fn a_missing_symbol_or_a_zero_attribute_is_an_absent_capability() {
    assert_eq!(capabilities(&[], 0), (true, true));
    assert_eq!(capabilities(&[c"cuMemPoolTrimTo"], 0), (false, true));
    assert_eq!(capabilities(&[c"cuMemMap"], 0), (true, false));
    assert_eq!(capabilities(&[], attribute::MEMORY_POOLS_SUPPORTED), (false, true));
    assert_eq!(capabilities(&[], attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), (true, false));
}

#[test]
fn an_attribute_the_driver_does_not_know_is_an_absent_capability() {
    let api = fake::api();
    with(|state| state.attributes.remove(&attribute::MEMORY_POOLS_SUPPORTED));
    assert!(CudaDriver::open_with(api, 0).unwrap().async_pools().is_none());
    let api = fake::api();
    fail("cuMemGetAllocationGranularity", 801);
    let device = CudaDriver::open_with(api, 0).unwrap();
    assert!(device.virtual_memory().is_none());
    assert_eq!(device.properties().granularity, 0);
    assert!(matches!(device.create(2 << 20), Err(DriverError::Unsupported { call: "create" })));
}

#[test]
fn a_pool_gets_all_its_options() {
    let device = fake::device();
    let options = PoolOptions {
        release_threshold: 1 << 30,
        max_bytes: Some(3 << 30),
        reuse: ReusePolicy::DETERMINISTIC,
    };
    let pool = device.pool_create(&options).unwrap();
    let props = with(|state| state.pool_props).unwrap();
    assert_eq!((props.allocation_type, props.handle_types), (1, 0));
    assert_eq!((props.location.kind, props.location.id), (1, 0));
    assert_eq!(props.max_size, 3 << 30);
    assert_eq!(props.reserved, [0; 56]);
    let mut values: Vec<_> = with(|state| state.pool_values.clone().into_iter().collect());
    values.sort_unstable();
    assert_eq!(values, [(1, 1), (2, 0), (3, 0), (4, 1 << 30)]);
    let usage = PoolUsage { reserved: 500, reserved_peak: 600, used: 700, used_peak: 800 };
    assert_eq!(device.pool_usage(pool), Ok(usage));
    // SAFETY: made here, and not used any more.
    unsafe { device.pool_destroy(pool) }.unwrap();
}

#[test]
fn a_pool_that_cannot_be_set_up_is_destroyed() {
    let device = fake::device();
    fail("cuMemPoolSetAttribute", 1);
    device.pool_create(&PoolOptions::default()).unwrap_err();
    assert_eq!(logged("cuMemPoolDestroy"), 1);
}

#[test]
fn a_maximum_is_refused_where_the_driver_would_not_keep_it() {
    let api = fake::api();
    with(|state| state.version = 12_010);
    let device = CudaDriver::open_with(api, 0).unwrap();
    let options = PoolOptions { max_bytes: Some(1 << 30), ..PoolOptions::default() };
    assert!(matches!(device.pool_create(&options), Err(DriverError::Unsupported { .. })));
    device.pool_create(&PoolOptions::default()).unwrap();
    assert_eq!(with(|state| state.pool_props).unwrap().max_size, 0);
    let none = PoolOptions { max_bytes: Some(0), ..PoolOptions::default() };
    assert!(matches!(device.pool_create(&none), Err(DriverError::Invalid { .. })));
}

#[test]
fn pool_allocations_translate_their_failures() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let pool = device.pool_create(&PoolOptions::default()).unwrap();
    assert!(matches!(device.alloc_async(0, pool, stream), Err(DriverError::Invalid { .. })));
    let block = device.alloc_async(100, pool, stream).unwrap();
    // SAFETY: the block is live and nothing uses it.
    unsafe { device.free_async(block, stream) }.unwrap();
    fail("cuMemAllocFromPoolAsync", 2);
    let expected = DriverError::OutOfMemory { call: "cuMemAllocFromPoolAsync", requested: 100 };
    assert_eq!(device.alloc_async(100, pool, stream), Err(expected));
}

#[test]
fn a_pool_is_not_asked_for_more_than_the_device_has() {
    let device = fake::device();
    let stream = device.stream_create(0).unwrap();
    let pool = device.pool_create(&PoolOptions::default()).unwrap();
    // The call would fail with this code.
    fail("cuMemAllocFromPoolAsync", 999);
    let requested = device.properties().total_bytes + 1;
    let expected = DriverError::OutOfMemory { call: "cuMemAllocFromPoolAsync", requested };
    assert_eq!(device.alloc_async(requested as usize, pool, stream), Err(expected));
}

#[test]
fn mappings_name_this_device_and_the_right_rights() {
    let device = fake::device();
    let bytes = device.granularity();
    let address = device.reserve(bytes, 0).unwrap();
    let memory = device.create(bytes).unwrap();
    let prop = with(|state| state.prop).unwrap();
    assert_eq!((prop.allocation_type, prop.requested_handle_types), (1, 0));
    assert_eq!((prop.location.kind, prop.location.id, prop.flags), (1, 0, [0; 8]));
    // SAFETY: the range was reserved above and is empty.
    unsafe { device.map(address, bytes, memory) }.unwrap();
    let rights = [(MapAccess::None, 0), (MapAccess::Read, 1), (MapAccess::ReadWrite, 3)];
    for (access, flags) in rights {
        // SAFETY: the range is one mapping and nothing is queued.
        unsafe { device.set_access(address, bytes, access) }.unwrap();
        let desc = with(|state| state.access).unwrap();
        assert_eq!((desc.location.kind, desc.location.id, desc.flags), (1, 0, flags));
    }
    // SAFETY: the range is one mapping and nothing is queued.
    unsafe { device.unmap(address, bytes) }.unwrap();
    // SAFETY: as above.
    unsafe { device.destroy(memory) }.unwrap();
    // SAFETY: nothing is mapped in the reservation.
    unsafe { device.release(address, bytes) }.unwrap();
    assert!(matches!(device.reserve(0, 0), Err(DriverError::Invalid { .. })));
    assert!(matches!(device.create(0), Err(DriverError::Invalid { .. })));
    fail("cuMemCreate", 2);
    assert!(device.create(bytes).unwrap_err().is_out_of_memory());
    assert_eq!(address, BASE);
}

#[test]
fn page_locked_memory_is_the_hosts_and_the_devices_and_freed_once() {
    let device = fake::device();
    assert!(device.host_memory().is_some());
    let memory = device.alloc_host(4096).unwrap();
    assert_eq!(memory.device, memory.host.addr().get() as u64);
    assert_eq!(with(|state| state.host_blocks.len()), 1);
    // SAFETY: allocated here, and nothing uses it.
    unsafe { device.free_host(memory) }.unwrap();
    assert_eq!(with(|state| state.host_blocks.len()), 0);
    assert!(matches!(device.alloc_host(0), Err(DriverError::Invalid { .. })));
}

#[test]
fn page_locked_memory_that_is_out_names_the_host_and_the_bytes() {
    let device = fake::device();
    fail("cuMemHostAlloc", 2);
    let error = device.alloc_host(1 << 20).unwrap_err();
    let expected = DriverError::OutOfHostMemory { call: "cuMemHostAlloc", requested: 1 << 20 };
    assert_eq!(error, expected);
    assert!(!error.is_out_of_memory(), "freeing device memory does not help");
    assert!(error.to_string().contains("page-locked host memory (1048576 bytes"), "{error}");
    fail("cuMemHostAlloc", 719);
    assert!(device.alloc_host(64).unwrap_err().is_device_lost());
}

#[test]
fn page_locked_memory_without_a_device_address_is_freed_again() {
    let device = fake::device();
    fail("cuMemHostGetDevicePointer_v2", 1);
    let error = device.alloc_host(4096).unwrap_err();
    assert!(matches!(error, DriverError::Code { code: 1, .. }), "{error}");
    assert_eq!(with(|state| state.host_blocks.len()), 0);
    fail("cuMemHostGetDevicePointer_v2", 0);
    let memory = device.alloc_host(4096).unwrap();
    fail("cuMemFreeHost", 999);
    // SAFETY: allocated here, and nothing uses it.
    let refused = unsafe { device.free_host(memory) };
    assert!(matches!(refused, Err(DriverError::Code { code: 999, .. })), "{refused:?}");
    fail("cuMemFreeHost", 0);
    // SAFETY: the refused call has freed nothing.
    unsafe { device.free_host(memory) }.unwrap();
}
