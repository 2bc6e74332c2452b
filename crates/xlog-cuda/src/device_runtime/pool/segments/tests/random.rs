//! Seeded random operations with failures, checked by the model; and concurrent threads.

use xlog_base::Random;
use xlog_sim::{Call, Fault};

use super::model::Model;
use super::*;

/// Makes one random step. Failures are expected; the caller checks their effects.
fn step(model: &mut Model<'_>, draw: &mut Random) {
    match draw.below_u64(16) {
        0..3 => {
            let _ = model.grow((1 + draw.below_u64(12)) * GRAIN - draw.below_u64(2) * UNIT);
        }
        3..7 => {
            let mut idle = model.idle.spans();
            idle.extend(model.pending.spans());
            let Some(range) = idle.get(draw.below_u64(idle.len() as u64) as usize) else { return };
            let units = range.bytes / UNIT;
            let at = draw.below_u64(units);
            let long = 1 + draw.below_u64((units - at).min(3 * GRAIN / UNIT));
            let span = Span { ptr: range.ptr + at * UNIT, bytes: long * UNIT };
            model.lend(span, draw.below_u64(256) as u8);
        }
        7..10 if !model.live.is_empty() => {
            let index = draw.below_u64(model.live.len() as u64) as usize;
            model.take_back(index);
        }
        10..13 if !model.live.is_empty() => {
            model.free_pending(draw.below_u64(model.live.len() as u64) as usize);
        }
        13 => model.synchronize(),
        14 => {
            let _ = model.release(draw.below_u64(10) * GRAIN);
        }
        _ => {
            let bytes = (1 + draw.below_u64(14)) * GRAIN - draw.below_u64(2) * UNIT;
            let align = UNIT << draw.below_u64(11);
            let max_moved = [0, 1, 3, usize::MAX][draw.below_u64(4) as usize];
            let _ = model.defragment_for(SpanRequest { bytes, align, max_moved });
        }
    }
}

#[test]
fn random_lives_with_failing_calls_lose_nothing() {
    let calls =
        [Call::Reserve, Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Destroy];
    for seed in 0..60 {
        let mut draw = Random::new(seed);
        let device = device((seed % 2 == 0).then_some(seed), 48 * GRAIN);
        let segments = mapped(&device, u64::MAX);
        let meter = Meter::new(40 * GRAIN);
        segments.meter_physical(meter.clone()).unwrap();
        let mut model = Model::new(&segments, &device);
        for at in 0..150 {
            if draw.below_u64(4) == 0 {
                let call = calls[draw.below_u64(calls.len() as u64) as usize];
                let fault = [Fault::OutOfMemory, Fault::Code(999)][draw.below_u64(2) as usize];
                sim(&device).faults().fail_nth(call, 1 + draw.below_u64(4), fault);
            }
            step(&mut model, &mut draw);
            let held = segments.reserved();
            assert_eq!((held, held), (used(&device), meter.held()), "seed {seed}, step {at}");
            let known = model.bytes() + segments.hidden_bytes();
            assert_eq!(known, held, "seed {seed}, step {at}");
        }
        sim(&device).faults().clear();
        model.finish();
        assert_eq!((segments.reserved(), meter.held(), used(&device)), (0, 0, 0), "seed {seed}");
        assert!(device.races().is_empty(), "seed {seed}: {:?}", device.races());
    }
}

#[test]
fn threads_that_grow_release_and_gather_at_once_stay_within_the_limit() {
    for seed in 0..30 {
        let device = device((seed % 3 != 0).then_some(seed), 64 * GRAIN);
        let segments = mapped(&device, 48 * GRAIN);
        let meter = Meter::new(44 * GRAIN);
        segments.meter_physical(meter.clone()).unwrap();
        let (segments, device) = (&segments, &device);
        let bodies = (0..4_u64).map(|thread| -> Box<dyn FnOnce() + Send> {
            Box::new(move || {
                let mut draw = Random::new(seed * 4 + thread);
                let mut model = Model::new(segments, device);
                for _ in 0..60 {
                    step(&mut model, &mut draw);
                    assert!(segments.reserved() <= 48 * GRAIN, "seed {seed}");
                }
                model.finish();
            })
        });
        sim(device).run_threads(bodies.collect());
        assert_eq!((segments.reserved(), meter.held(), used(device)), (0, 0, 0), "seed {seed}");
        assert!(device.races().is_empty(), "seed {seed}: {:?}", device.races());
    }
}
