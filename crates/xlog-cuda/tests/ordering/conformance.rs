//! Every resource passes the suite; a stranger's passes it too; and a resource with a flaw does not.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use crate::support::stranger::{Flaw, Stranger};
use xlog_conformance::{Outcome, Suite};
use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    AsyncCudaResource, DirectCudaResource, PoolConfig, PoolResource, PoolSegments, StreamPool,
};
use xlog_testing::{for_each_seam, for_each_sim};

#[test]
fn the_async_resource_conforms() {
    for_each_seam(|device| {
        let suite = Suite::new(|device, pool| {
            Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone()))
        });
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
        // Only what is about resources that track nothing may be skipped.
        assert!(report.skipped().all(|check| SKIPPED.contains(&check.name)), "{report}");
    });
}

/// What may be skipped by a resource that tracks uses.
const SKIPPED: [&str; 3] = [
    "hooks::refuse_where_nothing_is_tracked",
    "allocation::one_gibibyte",
    // Behind a plain seam, and on a GPU, no driver call fails on request.
    "faults::a_finish_that_fails_closes_the_use",
];

fn a_pool_conforms(make: fn(&Arc<CudaDevice>, &Arc<StreamPool>) -> PoolResource) {
    for_each_seam(|device| {
        let suite = Suite::new(|device, pool| Box::new(make(device, pool)));
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
        assert!(report.skipped().all(|check| SKIPPED.contains(&check.name)), "{report}");
    });
}

#[test]
fn a_pool_of_mapped_memory_conforms() {
    a_pool_conforms(|device, streams| {
        let config = PoolConfig::default().with_segments(PoolSegments::Mapped);
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config).unwrap()
    });
}

#[test]
fn a_pool_of_plain_memory_conforms() {
    a_pool_conforms(|device, streams| {
        let config = PoolConfig::default().with_segments(PoolSegments::Plain);
        PoolResource::new(device.clone(), device.ordinal(), streams.clone(), config).unwrap()
    });
}

#[test]
fn a_pool_over_another_resource_conforms() {
    a_pool_conforms(|device, streams| {
        let inner = AsyncCudaResource::new(device.clone(), device.ordinal(), streams.clone());
        PoolResource::over(Box::new(inner), streams.clone(), PoolConfig::default()).unwrap()
    });
}

#[test]
fn the_direct_resource_conforms() {
    for_each_seam(|device| {
        let suite = Suite::new(|device, _| {
            Box::new(DirectCudaResource::new(device.clone(), device.ordinal()))
        });
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
        assert!(report.skipped().all(|check| !check.name.contains("inside_work")), "{report}");
    });
}

#[test]
fn a_strangers_resource_conforms() {
    for_each_seam(|device| {
        let suite =
            Suite::new(|device, pool| Box::new(Stranger::new(device, pool, Flaw::None)) as _);
        let report = suite.run(device);
        println!("{report}");
        report.assert_passed();
    });
}

/// Each flaw and a check that must name it.
const FLAWS: &[(Flaw, &str)] = &[
    (Flaw::NotBornDependent, "ordering::a_first_use_elsewhere_waits_for_the_allocation"),
    (Flaw::ReadIgnoresWrites, "ordering::a_read_waits_for_writes"),
    (Flaw::ReadWaitsForReads, "ordering::a_read_does_not_wait_for_reads"),
    (Flaw::WriteIgnoresReads, "ordering::a_write_waits_for_reads_and_writes"),
    (Flaw::FreeIgnoresReads, "ordering::a_free_waits_for_every_use"),
    (Flaw::FinishForgetsAll, "ordering::a_write_that_finishes_inside_a_write_is_kept"),
    (Flaw::FinishForgetsAll, "ordering::two_open_writers_are_both_waited_for"),
    (Flaw::FinishForgetsReads, "ordering::a_read_that_finishes_inside_a_write_is_kept"),
    (Flaw::FreesUnderOpenUses, "lives::free_with_an_open_use"),
    (Flaw::FreesUnderWork, "lives::a_free_inside_work_completes_after_it"),
    (Flaw::RetiredAcceptsUses, "lives::a_retired_block_refuses_new_uses"),
    (Flaw::FinishNeedsNoPrepare, "hooks::finish_without_prepare_is_refused"),
    (Flaw::FinishNeedsNoPrepare, "hooks::a_use_is_closed_once"),
    (Flaw::RecordDoesNothing, "ordering::a_free_waits_for_a_recorded_use"),
    (Flaw::RecordDoesNothing, "ordering::later_uses_wait_for_a_recorded_use"),
    (Flaw::RecordSupersedes, "ordering::a_recorded_use_supersedes_nothing"),
    (Flaw::TrustsBytes, "identity::other_forged_fields_are_ignored"),
    (Flaw::TrustsAllocStream, "identity::other_forged_fields_are_ignored"),
    (Flaw::IgnoresGeneration, "identity::a_stale_generation_is_refused"),
    (Flaw::IgnoresGeneration, "identity::an_address_reused_does_not_revive_its_old_name"),
    (Flaw::IgnoresOrdinal, "identity::a_forged_ordinal_is_refused_first"),
    (Flaw::PointerBeforeOrdinal, "identity::a_forged_ordinal_is_refused_first"),
    (Flaw::CountsFreeAtOnce, "accounting::retired_bytes_are_counted_until_reaped"),
    (Flaw::CountsRefusals, "allocation::one_pebibyte_is_refused"),
    (Flaw::ReapPendingForgets, "accounting::every_byte_is_counted"),
    (Flaw::NeedsLiveAllocStream, "streams::a_block_outlives_its_allocation_stream"),
    (Flaw::RefusesFinishOnGoneStream, "streams::a_use_outlives_its_stream"),
    (Flaw::TracksNothingSilently, "hooks::refuse_where_nothing_is_tracked"),
    (Flaw::AcceptsZero, "allocation::zero_bytes_are_refused"),
];

#[test]
fn a_resource_with_a_flaw_does_not_conform() {
    for_each_sim(|device, sim| {
        for &(flaw, check) in FLAWS {
            // Only a seeded device can prove a wait that never ends; the others have the suite's patience.
            if flaw == Flaw::ReadWaitsForReads && sim.seed().is_none() {
                continue;
            }
            let suite = Suite::new(|device, pool| Box::new(Stranger::new(device, pool, flaw)) as _);
            let report = suite.only(check).run(device);
            let failed = matches!(report.checks()[0].outcome, Outcome::Failed(_));
            assert!(failed, "{flaw:?} passes {check}\n{report}");
        }
    });
}

#[test]
fn a_resource_that_waits_in_the_non_blocking_reap_does_not_conform() {
    for_each_sim(|device, sim| {
        if sim.seed().is_none() {
            return;
        }
        let flaw = Flaw::ReapCompletedWaits;
        let suite = Suite::new(|device, pool| Box::new(Stranger::new(device, pool, flaw)) as _);
        let report = suite.only("stalled::reap_completed_does_not_wait").run(device);
        assert_eq!(report.failed().count(), 1, "{report}");
    });
}

#[test]
fn checks_that_are_left_out_are_skipped_and_no_others() {
    for_each_sim(|device, _| {
        let suite = Suite::new(|device, pool| {
            Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone()))
        });
        let report = suite.only("identity").without("double_free").run(device);
        for check in report.checks() {
            let is_skipped = matches!(check.outcome, Outcome::Skipped(_));
            assert_eq!(is_skipped, check.name.contains("double_free"), "{report}");
        }
        assert!(report.checks().len() > 2, "{report}");
    });
}

#[test]
fn a_resource_that_checks_before_it_frees_lets_two_threads_free_twins() {
    for_each_sim(|device, sim| {
        let flaw = Flaw::ChecksThenFrees;
        let suite = Suite::new(|device, pool| Box::new(Stranger::new(device, pool, flaw)) as _);
        let report = suite.only("identity::of_two_threads_freeing_twins_one_wins").run(device);
        // Real threads need not meet in the gap; under a seed, in one of 40 rounds they do.
        assert!(sim.seed().is_none() || report.failed().count() == 1, "{report}");
    });
}
