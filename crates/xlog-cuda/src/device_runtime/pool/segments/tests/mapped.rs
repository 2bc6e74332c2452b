//! Virtual memory: contiguity, exact capacity, whole handles, remaps.

use xlog_sim::{Call, Fault};

use super::model::Model;
use super::*;

#[test]
fn successive_growth_is_one_contiguous_range() {
    for device in devices(64 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        for bytes in [1, 2 * GRAIN, 3 * GRAIN, GRAIN + 1, 20 * GRAIN] {
            model.grow(bytes).unwrap();
        }
        let spans = model.idle.spans();
        assert_eq!((spans.len(), spans[0].bytes), (1, (2 + 2 + 3 + 2 + 20) * GRAIN));
        assert!(spans[0].ptr.is_multiple_of(2 * MIB));
        assert_eq!(segments.reserved(), used(&device));
        model.lend(spans[0], 5);
        model.finish();
        assert_eq!((segments.reserved(), segments.segment_count(), used(&device)), (0, 0, 0));
        assert!(device.races().is_empty());
    }
}

#[test]
fn a_large_request_makes_few_handles_and_a_small_one_a_shared_one() {
    let device = device(None, 256 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    let pieces_of = |bytes| {
        let before = segments.segment_count();
        let span = segments.grow(bytes, ON).unwrap();
        (span.bytes / GRAIN, segments.segment_count() - before)
    };
    assert_eq!(pieces_of(1), (2, 1));
    assert_eq!(pieces_of(3 * GRAIN), (3, 1));
    assert_eq!(pieces_of(5 * GRAIN), (5, 1));
    assert_eq!(pieces_of(8 * GRAIN), (8, 1));
    assert_eq!(pieces_of(19 * GRAIN - 1), (19, 3));
    assert_eq!(sim(&device).faults().calls(Call::Create), 7);
    assert_eq!(sim(&device).faults().calls(Call::SetAccess), 5, "one for each growth");
    assert_eq!(sim(&device).faults().calls(Call::Reserve), 1);
}

#[test]
fn the_last_byte_of_the_device_is_served_and_one_more_is_refused() {
    for device in devices(33 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        model.grow(30 * GRAIN).unwrap();
        model.grow(1).unwrap();
        // A step of two does not fit any more; the one unit that is left does.
        assert_eq!(model.grow(1).unwrap().bytes, GRAIN);
        assert_eq!((used(&device), segments.reserved()), (33 * GRAIN, 33 * GRAIN));
        assert!(is_out_of_memory(&model.grow(1), 1));
        model.release(8 * GRAIN).unwrap();
        assert!(is_out_of_memory(&model.grow(20 * GRAIN), 20 * GRAIN), "several handles");
        assert!(is_out_of_memory(&model.grow(34 * GRAIN), 34 * GRAIN), "more than there is");
        assert!(is_out_of_memory(&model.grow(u64::MAX), u64::MAX));
        assert_eq!(segments.grow(0, ON), Err(ResourceError::zero_bytes()));
        assert_eq!(segments.reserved(), used(&device));
        model.finish();
        assert_eq!(used(&device), 0);
    }
}

#[test]
fn the_limit_and_the_meter_are_exact_and_a_refusal_takes_nothing() {
    let device = device(Some(3), 64 * GRAIN);
    let segments = mapped(&device, 9 * GRAIN);
    segments.grow(6 * GRAIN, ON).unwrap();
    let meter = Meter::new(10 * GRAIN);
    segments.meter_physical(meter.clone()).unwrap();
    assert_eq!(meter.held(), 6 * GRAIN, "what is held already is announced");
    assert!(segments.meter_physical(Meter::new(0)).is_err(), "one meter only");
    let refused = segments.grow(4 * GRAIN, ON);
    assert!(is_out_of_memory(&refused, 4 * GRAIN));
    let said = refused.unwrap_err().to_string();
    assert!(said.contains(&format!("{} of at most {} bytes", 6 * GRAIN, 9 * GRAIN)), "{said}");
    assert_eq!(segments.grow(3 * GRAIN, ON).unwrap().bytes, 3 * GRAIN);
    segments.set_limit(u64::MAX);
    assert_eq!(segments.limit(), u64::MAX);
    // The meter has one unit left: no step of two, but the request.
    assert_eq!(segments.grow(1, ON).unwrap().bytes, GRAIN);
    let refused = segments.grow(1, ON);
    assert_eq!(
        refused,
        Err(ResourceError::OutOfBudget { requested: GRAIN as usize, remaining: 0 })
    );
    assert_eq!(
        (meter.held(), segments.reserved(), used(&device)),
        (10 * GRAIN, 10 * GRAIN, 10 * GRAIN)
    );
    segments.set_limit(4 * GRAIN);
    assert_eq!(segments.reserved(), 10 * GRAIN, "a lower limit takes nothing away");
}

#[test]
fn a_meter_that_cannot_take_what_is_held_is_not_installed() {
    let device = device(None, 64 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    segments.grow(4 * GRAIN, ON).unwrap();
    let small = Meter::new(4 * GRAIN - 1);
    assert!(segments.meter_physical(small.clone()).is_err());
    segments.grow(1, ON).unwrap();
    assert_eq!(small.held(), 0);
    segments.meter_physical(Meter::new(u64::MAX)).unwrap();
}

#[test]
fn a_piece_that_is_in_use_at_either_end_is_not_given_back() {
    for device in devices(64 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        // Three adjacent handles: 4, 4 and 4 units.
        let first = model.grow(4 * GRAIN).unwrap().ptr;
        model.grow(4 * GRAIN).unwrap();
        model.grow(4 * GRAIN).unwrap();
        model.lend(Span { ptr: first + 4 * GRAIN - UNIT, bytes: 2 * UNIT }, 9);
        assert_eq!(model.release(4 * GRAIN - 1), Ok(0), "no piece is as small");
        assert_eq!(model.release(u64::MAX), Ok(4 * GRAIN));
        assert_eq!((segments.segment_count(), segments.reserved()), (2, 8 * GRAIN));
        model.take_back(0);
        assert_eq!(model.release(5 * GRAIN), Ok(4 * GRAIN), "at most what was asked for");
        assert_eq!(model.idle.spans(), [Span { ptr: first, bytes: 4 * GRAIN }]);
        // Returned addresses are reused first.
        assert_eq!(model.grow(1).unwrap().ptr, first + 4 * GRAIN);
        model.finish();
        assert_eq!(used(&device), 0);
    }
}

#[test]
fn idle_handles_between_live_ones_serve_a_request_that_no_range_could() {
    for device in devices(16 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        let spans: Vec<Span> = (0..8).map(|_| model.grow(2 * GRAIN).unwrap()).collect();
        for (index, &span) in spans.iter().enumerate() {
            model.lend(span, index as u8);
        }
        // Every other handle is free, and the device is full.
        for index in [6, 4, 2, 0] {
            model.take_back(index);
        }
        assert!(is_out_of_memory(&model.grow(7 * GRAIN), 7 * GRAIN));
        assert!(is_out_of_memory(&model.defragment(8 * GRAIN + 1), 8 * GRAIN + 1));
        let before = model.idle.spans();
        let creates = sim(&device).faults().calls(Call::Create);
        let span = model.defragment(7 * GRAIN).unwrap().unwrap();
        assert_eq!((span.bytes, segments.segment_count()), (8 * GRAIN, 8));
        assert_eq!(sim(&device).faults().calls(Call::Create), creates, "nothing new was needed");
        assert!(before.iter().all(|old| !model.idle.spans().contains(old)));
        model.lend(span, 77);
        assert_eq!((segments.reserved(), used(&device)), (16 * GRAIN, 16 * GRAIN));
        model.finish();
        assert!(device.races().is_empty());
    }
}

#[test]
fn a_handle_with_pending_work_is_mapped_twice_until_that_work_completes() {
    for device in devices(16 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        let spans: Vec<Span> = (0..8).map(|_| model.grow(2 * GRAIN).unwrap()).collect();
        let gate = model.hold();
        for (index, &span) in spans.iter().enumerate() {
            model.lend(span, index as u8);
        }
        for index in [6, 4, 2, 0] {
            model.free_pending(index);
        }
        let unmapped = || sim(&device).faults().calls(Call::Unmap);
        let span = model.defragment(7 * GRAIN).unwrap().unwrap();
        assert_eq!((span.bytes, unmapped(), used(&device)), (8 * GRAIN, 0, 16 * GRAIN));
        model.lend(span, 77);
        // Nothing of it can be returned or unmapped yet.
        model.free_pending(model.live.len() - 1);
        segments.unmap_stale(usize::MAX, &|_| false);
        assert_eq!(segments.release(&[span], u64::MAX), (vec![], Ok(())));
        assert_eq!((unmapped(), segments.releasable(&[span])), (0, 0));
        drop(gate);
        model.synchronize();
        assert_eq!((unmapped(), segments.releasable(&[span])), (4, 8 * GRAIN));
        model.finish();
        assert_eq!((segments.reserved(), used(&device)), (0, 0));
        assert!(device.races().is_empty(), "{:?}", device.races());
    }
}

#[test]
fn a_gather_takes_fresh_memory_only_for_what_idle_handles_lack() {
    let device = device(Some(11), 64 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    let mut model = Model::new(&segments, &device);
    let spans: Vec<Span> = [4, 3, 2, 5, 2].iter().map(|n| model.grow(n * GRAIN).unwrap()).collect();
    model.lend(Span { ptr: spans[1].ptr, bytes: UNIT }, 1);
    model.lend(Span { ptr: spans[3].ptr, bytes: UNIT }, 1);
    let unmapped = || sim(&device).faults().calls(Call::Unmap);
    // The last five units and the two behind them are free but for one byte: two more are moved there.
    let before = unmapped();
    let span = model.defragment(8 * GRAIN).unwrap().unwrap();
    assert_eq!((span.ptr, span.holds(8 * GRAIN, UNIT)), (spans[3].ptr + UNIT, true));
    assert_eq!((segments.reserved(), unmapped() - before), (16 * GRAIN, 1));
    model.lend(Span { ptr: span.ptr, bytes: 8 * GRAIN }, 2);
    // What is left is too little, so the rest is fresh.
    let idle = model.idle.bytes();
    let span = model.defragment(9 * GRAIN).unwrap().unwrap();
    assert!(span.holds(9 * GRAIN, UNIT));
    let grown = segments.reserved() - 16 * GRAIN;
    assert!(grown > 0 && grown < 9 * GRAIN && idle + grown >= 9 * GRAIN, "{grown} of {idle}");
    assert_eq!(segments.reserved(), used(&device));
    // Without any idle memory it is growth by exactly what is needed.
    let (span, gone, outcome) = segments.defragment(FreeMemory::idle(&[]), request(GRAIN), ON);
    assert_eq!((span.map(|span| span.bytes), gone, outcome), (Some(GRAIN), vec![], Ok(())));
    assert!(device.races().is_empty());
}

#[test]
fn a_free_range_at_the_end_is_extended_in_place_and_nothing_moves() {
    for device in devices(64 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        let all = model.grow(8 * GRAIN).unwrap();
        model.lend(Span { ptr: all.ptr, bytes: GRAIN + UNIT }, 7);
        let request = SpanRequest { max_moved: 0, ..request(10 * GRAIN) };
        let span = model.defragment_for(request).unwrap().unwrap();
        // A part of a handle serves as well.
        assert_eq!(span.ptr, all.ptr + GRAIN + UNIT);
        assert_eq!(segments.reserved(), 12 * GRAIN, "what was missing, in whole units");
        assert_eq!(sim(&device).faults().calls(Call::Unmap), 0);
        model.lend(Span { ptr: span.ptr, bytes: 10 * GRAIN }, 8);
        model.finish();
        assert!(device.races().is_empty());
    }
}

#[test]
fn two_free_ranges_with_unmapped_addresses_between_them_are_bridged() {
    for device in devices(64 * GRAIN) {
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        let spans: Vec<Span> = (0..5).map(|_| model.grow(2 * GRAIN).unwrap()).collect();
        model.lend(spans[4], 4);
        model.lend(spans[0], 0);
        // The handle in the middle goes back to the device: free, unmapped, free.
        let (gone, outcome) = segments.release(&[spans[2]], u64::MAX);
        assert_eq!((gone, outcome), (vec![spans[2]], Ok(())));
        model.idle.remove(spans[2]);
        let span = model.defragment(6 * GRAIN).unwrap().unwrap();
        assert_eq!(span, Span { ptr: spans[1].ptr, bytes: 6 * GRAIN });
        assert_eq!(segments.reserved(), 10 * GRAIN);
        model.lend(span, 9);
        model.finish();
        assert!(device.races().is_empty());
    }
}

#[test]
fn memory_in_use_is_neither_unmapped_under_work_nor_by_a_drop() {
    let device = device(None, 64 * GRAIN);
    let segments = mapped(&device, u64::MAX);
    let stream = device.driver().stream_create(0).unwrap();
    let (live, spare) = (segments.grow(1, ON).unwrap(), segments.grow(1, ON).unwrap());
    let gate = device.driver().hold(stream).unwrap();
    #[allow(unsafe_code)]
    // SAFETY: the range is mapped, and segments that are dropped do not unmap what was not released.
    unsafe { device.driver().memset(live.ptr, 3, live.bytes as usize, stream) }.unwrap();
    let (gone, outcome) = segments.release(&[spare], u64::MAX);
    assert_eq!((gone, outcome), (vec![spare], Ok(())));
    drop(segments);
    gate.release();
    device.driver().stream_synchronize(stream).unwrap();
    assert_eq!(used(&device), live.bytes);
    assert!(device.races().is_empty());
}

#[test]
fn a_driver_that_gives_few_addresses_is_asked_again_and_no_range_lies_across_two_reservations() {
    for device in devices(128 * GRAIN) {
        // 1 TiB, halved until there is room for no more than 32 units and the one that is never used.
        for nth in 1..=19 {
            sim(&device).faults().fail_nth(Call::Reserve, nth, Fault::OutOfMemory);
        }
        let segments = mapped(&device, u64::MAX);
        let mut model = Model::new(&segments, &device);
        for _ in 0..3 {
            model.grow(32 * GRAIN).unwrap();
        }
        assert_eq!(sim(&device).faults().calls(Call::Reserve), 19 + 3);
        let spans = model.idle.spans();
        assert_eq!(spans.len(), 3, "{spans:?}");
        spans.into_iter().for_each(|span| model.lend(span, 8));
        model.finish();
        // Returned addresses are used before more are reserved.
        let span = segments.grow(32 * GRAIN, ON).unwrap();
        assert_eq!(sim(&device).faults().calls(Call::Reserve), 19 + 3);
        segments.release(&[span], u64::MAX).1.unwrap();
        drop(segments);
        assert_eq!(sim(&device).faults().calls(Call::Release), 3);
    }
}

#[test]
fn a_drop_gives_the_addresses_back() {
    let device = device(None, 64 * GRAIN);
    for _ in 0..40 {
        let segments = mapped(&device, u64::MAX);
        let span = segments.grow(1, ON).unwrap();
        segments.release(&[span], u64::MAX).1.unwrap();
    }
    let calls = |call| sim(&device).faults().calls(call);
    assert_eq!((calls(Call::Reserve), calls(Call::Release)), (40, 40));
}

#[test]
fn a_device_whose_memory_cannot_be_mapped_is_refused_with_the_reason() {
    let sim = |config| Arc::new(CudaDevice::from_sim(SimDevice::open(config).unwrap()));
    for (config, reason) in [
        (SimConfig::default().with_virtual_memory(false), "not supported"),
        (SimConfig::default().with_granularity(256 << 20), "granularity = 268435456"),
    ] {
        let refused = MappedSegments::new(sim(config), u64::MAX).err().unwrap();
        assert!(refused.to_string().contains(reason), "{refused}");
    }
    MappedSegments::new(Arc::new(CudaDevice::open("sim").unwrap()), u64::MAX).unwrap();
}
