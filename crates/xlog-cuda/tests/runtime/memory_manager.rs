//! Typed buffers and their manager: what is counted, what is refused, and what a drop does.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Failure, direct, manager, scripted};
use xlog_cuda::device_runtime::{
    AllocTag, DeviceBlock, FailedFree, LeakReport, ResourceError, ResourceKind, RuntimeConfig,
    StreamId, XlogDeviceRuntime, set_failed_free_handler,
};
use xlog_cuda::{
    DeviceRepr, GpuMemoryManager, LaunchRecorder, RawBlock, Reservation, TrackedCudaSlice,
    XlogError,
};
use xlog_testing::{WatchedGate, for_each_device, pattern, threads};

fn out_of_budget(error: XlogError) -> (usize, usize) {
    match error {
        XlogError::Resource(ResourceError::OutOfBudget { requested, remaining }) => {
            (requested, remaining)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_empty_buffer_is_legal_and_costs_nothing() {
    for_each_device(|device| {
        let manager = manager(device).with_limit(0);
        let before = manager.runtime().statistics();
        let mut empty = manager.alloc::<u64>(0).unwrap();
        assert!(empty.is_empty());
        assert_eq!((empty.len(), empty.size_bytes()), (0, 0));
        assert!(empty.runtime_block().is_none() && empty.id().is_none());
        assert!(empty.ptr() != 0 && empty.ptr().is_multiple_of(256));
        empty.copy_from_slice(&[]).unwrap();
        empty.fill_bytes(1).unwrap();
        assert_eq!(empty.to_vec().unwrap(), [0_u64; 0]);
        let bytes = empty.into_bytes();
        assert!(bytes.is_empty());
        assert_eq!(manager.alloc_raw(0).unwrap().bytes(), 0);
        let nothing = manager.alloc::<[u32; 0]>(5).unwrap();
        assert_eq!(nothing.to_vec().unwrap().len(), 5);
        drop((bytes, nothing));
        assert_eq!(manager.runtime().statistics(), before);
        assert_eq!((manager.total_allocations(), manager.live_allocations()), (0, 0));
    });
}

#[test]
fn a_length_whose_bytes_cannot_be_counted_is_refused_and_charges_nothing() {
    for_each_device(|device| {
        let manager = manager(device);
        for len in [usize::MAX, usize::MAX / 8 + 1, isize::MAX as usize / 8 + 1] {
            let error = manager.alloc::<u64>(len).unwrap_err();
            let XlogError::Resource(ResourceError::InvalidRequest { value, .. }) = error else {
                panic!("{error:?}");
            };
            assert!(value.contains(&len.to_string()), "{value}");
            let mut reservation = manager.reserve_bytes(8).unwrap();
            assert!(reservation.alloc::<u64>(len).is_err());
        }
        assert_eq!((manager.allocated_bytes(), manager.reserved_bytes()), (0, 0));
    });
}

#[test]
fn bytes_go_to_the_device_and_come_back_on_any_stream() {
    for_each_device(|device| {
        let manager = manager(device);
        let streams = [(); 2].map(|()| manager.runtime().stream_pool().lease().unwrap());
        let sent = pattern(4096, 3);
        let mut buffer = manager.on_stream(streams[0].id()).alloc::<u8>(4096).unwrap();
        assert_eq!(buffer.stream(), streams[0].id());
        buffer.copy_from_slice(&sent).unwrap();
        assert_eq!(buffer.to_vec_on(streams[1].id()).unwrap(), sent);
        buffer.copy_from_slice_on(&pattern(4096, 4), streams[1].id()).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), pattern(4096, 4));
        for len in [0, 4095, 4097] {
            assert!(buffer.copy_from_slice(&vec![0; len]).is_err());
            assert!(buffer.copy_to_slice(&mut vec![0; len]).is_err());
        }
        let unknown = buffer.to_vec_on(StreamId(u32::MAX)).unwrap_err();
        assert!(matches!(unknown, XlogError::UnknownStream { .. }), "{unknown:?}");
    });
}

#[test]
fn into_bytes_and_raw_blocks_are_the_same_memory() {
    for_each_device(|device| {
        let manager = manager(device);
        let mut numbers = manager.alloc_tagged::<u32>(3, AllocTag("numbers")).unwrap();
        numbers.copy_from_slice(&[1, 2, 3]).unwrap();
        let (id, ptr) = (numbers.id(), numbers.ptr());
        assert_eq!(numbers.runtime_block().unwrap().tag, AllocTag("numbers"));
        let bytes = numbers.into_bytes();
        assert_eq!((bytes.id(), bytes.ptr(), bytes.len()), (id, ptr, 12));
        assert_eq!(bytes.to_vec().unwrap()[4], 2);
        let raw = bytes.into_raw();
        assert_eq!((raw.id(), raw.bytes(), raw.stream()), (id, 12, StreamId::DEFAULT));
        let numbers = raw.into_slice::<u32>().unwrap();
        assert_eq!(numbers.to_vec().unwrap(), [1, 2, 3]);
        assert_eq!((manager.live_allocations(), manager.total_allocations()), (1, 1));

        let refused = numbers.into_raw().into_slice::<u64>().unwrap_err();
        assert!(refused.to_string().contains("12 bytes"), "{refused}");
        assert_eq!((manager.live_allocations(), manager.allocated_bytes()), (0, 0));
        assert!(manager.alloc_raw(8).unwrap().into_slice::<[u8; 0]>().is_err());
    });
}

#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page(#[allow(dead_code)] [u8; 4096]);
// SAFETY: bytes without padding.
unsafe impl DeviceRepr for Page {}

#[test]
fn an_alignment_above_the_usual_one_is_given_or_refused() {
    for_each_device(|device| {
        let manager = manager(device);
        match manager.alloc::<Page>(1) {
            Ok(page) => assert!(page.ptr().is_multiple_of(4096)),
            Err(error) => {
                assert!(error.to_string().contains("alignment"), "{error}");
                assert_eq!(manager.allocated_bytes(), 0);
            }
        }
        manager.runtime().reap_pending().unwrap();
        assert_eq!(manager.runtime().statistics().live_blocks, 0);
    });
}

#[test]
fn a_limit_is_exact_under_eight_threads_and_the_counters_come_back_to_zero() {
    for_each_device(|device| {
        const EACH: usize = 1000;
        let manager = manager(device).with_limit(5 * EACH);
        let (granted, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let bodies = (0..8)
            .map(|thread| -> Box<dyn FnOnce() + Send + '_> {
                let manager = manager.clone();
                let (granted, refused) = (&granted, &refused);
                Box::new(move || {
                    let mut held = Vec::new();
                    for round in 0..20 {
                        match manager.alloc::<u8>(EACH) {
                            Ok(buffer) => {
                                held.push(buffer);
                                granted.fetch_add(1, Ordering::SeqCst);
                            }
                            Err(error) => {
                                let (requested, remaining) = out_of_budget(error);
                                assert!(requested == EACH && remaining < EACH);
                                refused.fetch_add(1, Ordering::SeqCst);
                            }
                        }
                        assert!(manager.allocated_bytes() <= 5 * EACH);
                        if (round + thread) % 3 == 0 {
                            held.clear();
                        }
                    }
                })
            })
            .collect();
        threads(device, bodies);
        assert_eq!(granted.load(Ordering::SeqCst) + refused.load(Ordering::SeqCst), 160);
        assert_eq!(manager.total_allocations(), granted.load(Ordering::SeqCst) as u64);
        assert_eq!((manager.live_allocations(), manager.allocated_bytes()), (0, 0));
        assert_eq!((manager.remaining_bytes(), manager.limit()), (5 * EACH, Some(5 * EACH)));
        assert!(manager.peak_bytes() <= 5 * EACH && manager.peak_bytes() >= EACH);
        manager.runtime().reap_pending().unwrap();
        assert_eq!(manager.runtime().bytes_outstanding(), 0);
    });
}

#[test]
fn exactly_the_limit_fits_and_one_byte_more_does_not() {
    for_each_device(|device| {
        let manager = manager(device).with_limit(100);
        let all = manager.alloc::<u8>(100).unwrap();
        assert_eq!(out_of_budget(manager.alloc::<u8>(1).unwrap_err()), (1, 0));
        drop(all);
        assert_eq!(out_of_budget(manager.alloc::<u8>(101).unwrap_err()), (101, 100));
        let stream = manager.runtime().stream_pool().lease().unwrap();
        let part = manager.on_stream(stream.id()).alloc::<u8>(60).unwrap();
        assert_eq!(out_of_budget(manager.alloc::<u8>(41).unwrap_err()), (41, 40));
        assert_eq!((manager.allocated_bytes(), manager.peak_bytes()), (60, 100));
        drop(part);
    });
}

#[test]
fn an_allocation_that_fails_below_leaves_no_charge_behind() {
    for_each_device(|device| {
        let (runtime, script) = scripted(device);
        let manager = GpuMemoryManager::with_runtime(runtime).with_limit(100);
        let fail = || *script.fail_allocate_after.lock().unwrap() = Some(0);
        fail();
        assert!(manager.alloc::<u8>(100).is_err());
        let mut reservation = manager.reserve_bytes(100).unwrap();
        fail();
        assert!(reservation.alloc::<u8>(60).is_err());
        assert_eq!((reservation.bytes(), manager.reserved_bytes()), (100, 100));
        let buffer = reservation.alloc::<u8>(60).unwrap();
        assert_eq!((manager.allocated_bytes(), manager.total_allocations()), (60, 1));
        drop(buffer);
    });
}

#[test]
fn a_reservation_is_kept_spent_split_and_given_back() {
    for_each_device(|device| {
        let manager = manager(device).with_limit(1000);
        let mut reservation = manager.reserve_bytes(700).unwrap();
        assert_eq!(out_of_budget(manager.reserve_bytes(301).unwrap_err()), (301, 300));
        assert_eq!(out_of_budget(manager.alloc::<u8>(301).unwrap_err()), (301, 300));
        let other = manager.alloc::<u8>(300).unwrap();
        let mine = reservation.alloc::<u64>(50).unwrap();
        let raw = reservation.alloc_raw(100).unwrap();
        assert_eq!(reservation.bytes(), 200);
        assert_eq!(out_of_budget(reservation.alloc::<u8>(201).unwrap_err()), (201, 200));
        let mut half = reservation.split(150).unwrap();
        assert_eq!((half.bytes(), reservation.bytes()), (150, 50));
        assert_eq!(out_of_budget(half.split(151).unwrap_err()), (151, 150));
        assert_eq!((manager.allocated_bytes(), manager.reserved_bytes()), (800, 200));
        drop(reservation);
        assert_eq!((manager.reserved_bytes(), manager.remaining_bytes()), (150, 50));
        drop(half);
        drop((mine, raw, other));
        assert_eq!((manager.reserved_bytes(), manager.remaining_bytes()), (0, 1000));
    });
}

#[test]
fn a_drop_does_not_wait_for_a_held_stream() {
    for_each_device(|device| {
        let manager = manager(device);
        let stream = manager.runtime().stream_pool().resolve(StreamId::DEFAULT).unwrap();
        let mut buffer = manager.alloc::<u8>(4096).unwrap();
        let gate = WatchedGate::new(stream.hold().unwrap());
        buffer.fill_bytes(1).unwrap();
        drop(buffer);
        assert_eq!(manager.live_allocations(), 0);
        gate.release();
        manager.runtime().reap_pending().unwrap();
        assert_eq!(manager.runtime().bytes_outstanding(), 0);
    });
}

static FAILED: Mutex<Vec<FailedFree>> = Mutex::new(Vec::new());

fn failures_of(tag: AllocTag) -> Vec<FailedFree> {
    FAILED.lock().unwrap().iter().filter(|failed| failed.tag == tag).cloned().collect()
}

#[test]
fn a_free_that_fails_is_counted_and_reported_and_never_panics() {
    set_failed_free_handler(|failed| FAILED.lock().unwrap().push(failed.clone()));
    for_each_device(|device| {
        let tag = AllocTag::intern(&format!("failing on {}", device.spec()));
        let (runtime, script) = scripted(device);
        let manager = GpuMemoryManager::with_runtime(runtime);
        for failure in [Failure::Error, Failure::Panic] {
            let buffer = manager.alloc_tagged::<u8>(512, tag).unwrap();
            let id = buffer.id().unwrap();
            *script.fail_deallocate.lock().unwrap() = Some(failure);
            drop(buffer);
            let failed = failures_of(tag).pop().unwrap();
            assert_eq!((failed.block, failed.bytes), (id, 512));
            assert!(matches!(failed.error, ResourceError::Driver(_)), "{failed}");
        }
        assert_eq!(manager.failed_frees(), 2);
        assert_eq!((manager.live_allocations(), manager.allocated_bytes()), (0, 0));
    });
}

#[test]
fn a_block_freed_behind_a_buffers_back_is_not_freed_twice() {
    set_failed_free_handler(|failed| FAILED.lock().unwrap().push(failed.clone()));
    for_each_device(|device| {
        let tag = AllocTag::intern(&format!("twin on {}", device.spec()));
        let manager = manager(device);
        let runtime = manager.runtime();
        let buffer = manager.alloc_tagged::<u8>(256, tag).unwrap();
        let block = buffer.runtime_block().unwrap();
        let generation = block.generation;
        runtime.deallocate(DeviceBlock { tag: block.tag, ..*block }).unwrap();
        let gone = buffer.to_vec().unwrap_err();
        let expected = ResourceError::UseAfterFree { generation };
        assert_eq!(gone, XlogError::Resource(expected.clone()));
        let survivor = manager.alloc::<u8>(256).unwrap();
        drop(buffer);
        assert_eq!(failures_of(tag).pop().unwrap().error, expected);
        assert_eq!((manager.failed_frees(), runtime.statistics().live_blocks), (1, 1));
        drop(survivor);
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.bytes_outstanding(), 0);
    });
}

#[test]
fn without_tracking_only_the_own_stream_copies() {
    for_each_device(|device| {
        let manager = GpuMemoryManager::with_runtime(direct(device));
        let other = manager.runtime().stream_pool().lease().unwrap();
        let mut buffer = manager.alloc::<u16>(100).unwrap();
        buffer.copy_from_slice(&[6; 100]).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [6; 100]);
        let refused = buffer.to_vec_on(other.id()).unwrap_err();
        assert!(refused.to_string().contains("unsupported"), "{refused}");
        // SAFETY: it is never given to any work.
        let foreign = unsafe { TrackedCudaSlice::<u16>::from_foreign(buffer.ptr(), 100) };
        let refused = foreign.to_vec().unwrap_err();
        assert!(
            matches!(refused, XlogError::Resource(ResourceError::StreamMisuse(_))),
            "{refused:?}"
        );
        drop(foreign);
        assert_eq!(buffer.to_vec().unwrap(), [6; 100]);
    });
}

#[test]
fn live_buffers_never_share_memory() {
    for_each_device(|device| {
        let manager = manager(device);
        let buffers: Vec<_> = (0..32).map(|_| manager.alloc::<u8>(100).unwrap()).collect();
        let places: HashSet<u64> = buffers.iter().map(TrackedCudaSlice::ptr).collect();
        assert_eq!((places.len(), manager.allocated_bytes()), (32, 3200));
    });
}

#[test]
fn public_types_can_be_shared_between_threads_and_printed() {
    fn check<T: Send + Sync + Debug>() {}
    check::<FailedFree>();
    check::<GpuMemoryManager>();
    check::<LaunchRecorder>();
    check::<LeakReport>();
    check::<RawBlock>();
    check::<Reservation>();
    check::<ResourceKind>();
    check::<RuntimeConfig>();
    check::<TrackedCudaSlice<f64>>();
    check::<XlogDeviceRuntime>();
}
