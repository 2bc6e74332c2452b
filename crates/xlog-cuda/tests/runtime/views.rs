//! Views of buffers and copies on the device: what they reach, how they are ordered, and what is refused.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use crate::support::{direct, manager, runtime, scripted};
use xlog_cuda::device_runtime::{BlockState, ResourceError};
use xlog_cuda::prelude::*;
use xlog_testing::{WatchedGate, for_each_device};

#[track_caller]
fn invalid<T: std::fmt::Debug>(answer: xlog_cuda::Result<T>) -> String {
    match answer {
        Err(XlogError::Resource(ResourceError::InvalidRequest { value, accepted })) => {
            format!("{value}; {accepted}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_view_reaches_its_elements_and_no_others() {
    for_each_device(|device| {
        let memory = manager(device);
        let mut column = memory.alloc_from(&[1_u16, 2, 3, 4, 5, 6]).unwrap();
        column.slice_mut(1..=2).unwrap().copy_from_slice(&[20, 30]).unwrap();
        column.slice_mut(4..).unwrap().slice_mut(1..).unwrap().fill_bytes(0).unwrap();
        assert_eq!(column.to_vec().unwrap(), [1, 20, 30, 4, 5, 0]);
        let view = column.slice(1..5).unwrap();
        assert_eq!((view.len(), view.size_bytes(), view.ptr()), (4, 8, column.ptr() + 2));
        assert_eq!(view.slice(..2).unwrap().to_vec().unwrap(), [20, 30]);
        assert_eq!(view.slice(2..).unwrap().to_vec().unwrap(), [4, 5]);
        let mut back = [0; 2];
        view.slice(1..3).unwrap().copy_to_slice(&mut back).unwrap();
        assert_eq!(back, [30, 4]);
        let empty = view.slice(4..4).unwrap();
        assert!(empty.is_empty());
        assert_eq!(empty.to_vec().unwrap(), [0; 0]);
        assert_eq!(memory.alloc_zeroed::<u64>(5).unwrap().to_vec().unwrap(), [0; 5]);
        assert_eq!(memory.alloc_from::<u64>(&[]).unwrap().len(), 0);
    });
}

#[test]
fn a_range_outside_of_the_buffer_or_of_the_view_is_refused_by_name() {
    for_each_device(|device| {
        let mut column = manager(device).alloc_zeroed::<u32>(4).unwrap();
        let reversed = std::ops::Range { start: 3, end: 2 };
        assert!(invalid(column.slice(reversed)).contains("0..4"));
        assert!(invalid(column.slice(2..5)).contains('5'));
        invalid(column.slice(5..));
        invalid(column.slice(..=usize::MAX));
        invalid(column.slice((std::ops::Bound::Excluded(usize::MAX), std::ops::Bound::Unbounded)));
        invalid(column.slice_mut(..5));
        invalid(column.slice(1..3).unwrap().slice(..3));
        invalid(column.slice_mut(1..3).unwrap().slice_mut(2..4));
        invalid(column.slice_mut(1..3).unwrap().copy_from_slice(&[0; 3]));
        invalid(column.slice(1..3).unwrap().copy_to_slice(&mut [0; 1]));
        let other = manager(device).alloc_zeroed::<u32>(3).unwrap();
        invalid(column.copy_from(&other));
    });
}

#[test]
fn a_copy_on_the_device_is_a_use_of_both_blocks_in_order() {
    for_each_device(|device| {
        let (runtime, script) = scripted(device);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let streams = [(); 3].map(|()| runtime.stream_pool().lease().unwrap());
        let mut source = memory.on_stream(streams[0].id()).alloc::<u32>(1024).unwrap();
        let mut copy = memory.on_stream(streams[1].id()).alloc_zeroed::<u32>(1024).unwrap();
        let held = WatchedGate::new(streams[0].hold().unwrap());
        source.copy_from_slice(&[7; 1024]).unwrap();
        copy.slice_mut(512..).unwrap().copy_from(source.slice(..512).unwrap()).unwrap();
        copy.slice_mut(..512)
            .unwrap()
            .copy_from_on(source.slice(512..).unwrap(), streams[2].id())
            .unwrap();
        assert_eq!(script.open_uses(), 0);
        let id = source.id().unwrap();
        drop(source);
        // The frees and copies are queued behind the gate; nothing has run yet.
        assert_ne!(runtime.block_state(id), BlockState::Live);
        held.release();
        assert_eq!(copy.to_vec_on(streams[0].id()).unwrap(), [7; 1024]);
        drop(copy);
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.bytes_outstanding(), 0);
        assert!(device.races().is_empty(), "{:?}", device.races());
    });
}

#[test]
fn a_copy_that_is_refused_leaves_no_use_open() {
    for_each_device(|device| {
        let (runtime, script) = scripted(device);
        let memory = GpuMemoryManager::with_runtime(runtime.clone());
        let source = memory.alloc_from(&[1_u32, 2]).unwrap();
        let mut copy = memory.alloc_zeroed::<u32>(2).unwrap();
        for after in 0..2 {
            *script.fail_prepare_after.lock().unwrap() = Some(after);
            assert!(copy.copy_from(&source).is_err());
            assert_eq!(script.open_uses(), 0);
        }
        copy.copy_from(&source).unwrap();
        assert_eq!(copy.to_vec().unwrap(), [1, 2]);
    });
}

#[test]
fn buffers_of_two_runtimes_and_other_streams_of_an_untracked_one_are_refused() {
    for_each_device(|device| {
        let mine = manager(device);
        let other = GpuMemoryManager::with_runtime(runtime(device));
        let source = other.alloc_from(&[1_u32, 2]).unwrap();
        let mut copy = mine.alloc_zeroed::<u32>(2).unwrap();
        let error = copy.copy_from(&source).unwrap_err();
        assert!(matches!(error, XlogError::Resource(ResourceError::StreamMisuse(_))), "{error:?}");
        for pool in [mine.runtime(), other.runtime()].map(|runtime| runtime.stream_pool().number())
        {
            assert!(error.to_string().contains(&format!("stream pool {pool}")), "{error}");
        }

        let untracked = GpuMemoryManager::with_runtime(direct(device));
        let source = untracked.alloc_from(&[1_u32, 2]).unwrap();
        let mut copy = untracked.alloc_zeroed::<u32>(2).unwrap();
        copy.copy_from(&source).unwrap();
        assert_eq!(copy.slice(1..).unwrap().to_vec().unwrap(), [2]);
        let stream = untracked.runtime().stream_pool().lease().unwrap();
        assert!(copy.copy_from_on(&source, stream.id()).is_err());
    });
}

#[test]
fn page_locked_buffers_copy_to_and_from_views() {
    for_each_device(|device| {
        let memory = manager(device);
        let streams = memory.runtime().stream_pool();
        let stream = streams.lease().unwrap();
        let pinned =
            Arc::new(PinnedHostResource::new(device.clone(), device.ordinal(), streams.clone()));
        let mut staging = pinned.alloc::<u32>(2, stream.id(), AllocTag("staging")).unwrap();
        staging.as_mut_slice().unwrap().copy_from_slice(&[8, 9]);
        let mut column = memory.alloc_zeroed::<u32>(6).unwrap();
        staging.copy_to(column.slice_mut(3..5).unwrap(), stream.id()).unwrap();
        assert_eq!(column.to_vec().unwrap(), [0, 0, 0, 8, 9, 0]);
        staging.copy_from(column.slice(4..).unwrap(), stream.id()).unwrap();
        assert_eq!(staging.as_slice().unwrap(), [9, 0]);
        invalid(staging.copy_to(&mut column, stream.id()));
    });
}
