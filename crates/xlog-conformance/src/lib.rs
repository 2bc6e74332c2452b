//! The conformance suite for memory resources, of this project and of others.
//!
//! A [`Suite`] builds a new resource for every check: the rows of the [`DeviceMemoryResource`] contract, its ordering and identity rules,
//! and the workloads of other allocators' suites with all bytes verified. On simulated devices a check also fails if the race detector
//! reports a race. If [`supports_block_use_tracking`](DeviceMemoryResource::supports_block_use_tracking) is true, the hooks must work;
//! otherwise they must refuse.
//!
//! ```
//! use std::sync::Arc;
//! use xlog_cuda::CudaDevice;
//! use xlog_conformance::Suite;
//! use xlog_cuda::device_runtime::AsyncCudaResource;
//!
//! let device = Arc::new(CudaDevice::open("sim:7")?);
//! let suite = Suite::new(|device, pool| {
//!     Box::new(AsyncCudaResource::new(device.clone(), device.ordinal(), pool.clone()))
//! });
//! suite.only("identity").run(&device).assert_passed();
//! # Ok::<(), xlog_cuda::XlogError>(())
//! ```
//!
//! On simulated devices the suite also injects driver failures. It does not measure time.

#![deny(unsafe_code)]

mod accounting;
mod allocation;
#[allow(unsafe_code)]
mod bytes;
mod faults;
mod fixture;
mod forms;
mod forwarding;
mod hooks;
mod identity;
mod lives;
mod ordering;
mod probe;
mod report;
mod stalled;
mod streams;
mod workloads;

use std::fmt;
use std::sync::Arc;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{DeviceMemoryResource, StreamPool};

use fixture::{Fixture, Stop};
use forwarding::Below;
use probe::Probe;

pub use report::{CheckReport, Outcome, Report};

/// The resource that a suite builds for each check.
pub type BoxedResource = Box<dyn DeviceMemoryResource + Send + Sync>;

/// Runs the example of `docs/decorators.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/decorators.md")]
struct DecoratorsPage;

/// Runs the example of `docs/adding-a-resource.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/adding-a-resource.md")]
struct AddingAResourcePage;

/// The number of streams besides the default one that each check may use.
const STREAMS: usize = 16;

struct Check {
    name: &'static str,
    run: fn(&Fixture) -> Result<(), Stop>,
}

/// Makes the checks of each group, named `module::function`.
macro_rules! checks {
    ($($group:ident: $($check:ident),+;)+) => {
        &[$($(Check {
            name: concat!(stringify!($group), "::", stringify!($check)),
            run: $group::$check,
        },)+)+]
    };
}

const CHECKS: &[Check] = checks! {
    allocation: zero_bytes_are_refused, blocks_say_what_they_are, blocks_hold_what_is_written,
        blocks_do_not_overlap, one_gibibyte, one_pebibyte_is_refused, generations_never_repeat;
    accounting: every_byte_is_counted, retired_bytes_are_counted_until_reaped,
        refusals_count_nothing, threads_lose_no_byte;
    identity: a_stale_generation_is_refused, a_double_free_is_refused, a_forged_pointer_is_refused,
        a_forged_ordinal_is_refused_first, other_forged_fields_are_ignored,
        of_two_threads_freeing_twins_one_wins, work_runs_only_on_the_live_block, an_address_reused_does_not_revive_its_old_name;
    hooks: refuse_where_nothing_is_tracked, accept_own_and_foreign_streams,
        refuse_unknown_streams, refuse_claims_that_are_not_the_live_block,
        finish_without_prepare_is_refused, a_use_is_closed_once, many_uses_may_be_open;
    lives: state_at_each_step, free_with_an_open_use, free_with_many_open_uses,
        a_retired_block_refuses_new_uses, an_open_use_is_skipped_by_reaps,
        a_free_inside_work_completes_after_it;
    ordering: a_first_use_elsewhere_waits_for_the_allocation, a_read_waits_for_writes,
        a_read_does_not_wait_for_reads, a_write_waits_for_reads_and_writes,
        a_free_waits_for_every_use, a_free_waits_for_a_recorded_use,
        later_uses_wait_for_a_recorded_use, a_recorded_use_supersedes_nothing, two_open_writers_are_both_waited_for,
        a_read_that_finishes_inside_a_write_is_kept, a_write_that_finishes_inside_a_write_is_kept,
        unhooked_work_on_the_own_stream_precedes_the_free;
    streams: unknown_streams_are_refused, anothers_pool_is_unknown,
        a_block_outlives_its_allocation_stream, a_use_outlives_its_stream,
        more_streams_than_the_pool_has;
    stalled: calls_on_a_held_stream_return, reap_completed_does_not_wait,
        reap_pending_waits_for_queued_frees;
    forms: aligned, bad_alignment_is_refused,
        batched_finishes, a_failing_finish_does_not_stop_the_others, counters_agree;
    faults: a_finish_that_fails_closes_the_use;
    forwarding: says_what_is_below;
    workloads: sizes_of_the_shared_suite, random_kept_then_freed, random_on_several_streams,
        random_by_four_threads, mixed, mixed_on_several_streams, mixed_by_four_threads,
        producer_and_consumer;
};

/// Further checks of a decorator.
const OF_DECORATORS: &[Check] = checks! {
    forwarding: reap_pending, reap_completed, supports_block_use_tracking,
        record_block_use, prepare_and_finish_block_use, finish_block_uses, block_state, while_live,
        allocate_request, charge_for, home,
        statistics, trim, trim_under_pressure, return_idle, on_growth, meter_physical, cap_physical, watch_segments, physical_bytes,
        memory_use, free_space, places_blocks, reserve_budget,
        allocate_request_reserved, log_refusal;
};

/// The suite for one way to build a resource.
pub struct Suite<F> {
    build: F,
    only: Option<String>,
    without: Vec<String>,
}

/// Builds the resource of one check.
pub trait Build {
    #[doc(hidden)]
    const IS_DECORATOR: bool = false;

    #[doc(hidden)]
    fn build(&self, device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Built;
}

/// A resource, and the probe below it if it is a decorator.
#[doc(hidden)]
pub struct Built {
    resource: BoxedResource,
    below: Option<Below>,
}

impl<F: Fn(&Arc<CudaDevice>, &Arc<StreamPool>) -> BoxedResource> Build for F {
    fn build(&self, device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Built {
        Built { resource: self(device, streams), below: None }
    }
}

/// Builds a decorator over a probe.
#[derive(Clone, Copy, Debug)]
pub struct Decorates<W>(W);

impl<W: Fn(BoxedResource) -> BoxedResource> Build for Decorates<W> {
    const IS_DECORATOR: bool = true;

    fn build(&self, device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Built {
        let probe = Probe::new(device, streams);
        let below = Some(Below { calls: probe.calls(), budget: probe.budget() });
        Built { resource: (self.0)(Box::new(probe)), below }
    }
}

impl<W: Fn(BoxedResource) -> BoxedResource> Suite<Decorates<W>> {
    /// Makes a suite for a decorator, which `wrap` puts over a resource.
    ///
    /// That resource is a budget over the async resource that records its calls. Each method that the decorator does not forward fails its
    /// check in the group `forwarding`.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use xlog_cuda::CudaDevice;
    /// use xlog_conformance::Suite;
    /// use xlog_cuda::device_runtime::StatisticsResource;
    ///
    /// let device = Arc::new(CudaDevice::open("sim:7")?);
    /// let suite = Suite::of_decorator(|inner| Box::new(StatisticsResource::new(inner)));
    /// suite.only("forwarding").run(&device).assert_passed();
    /// # Ok::<(), xlog_cuda::XlogError>(())
    /// ```
    pub fn of_decorator(wrap: W) -> Self {
        Self { build: Decorates(wrap), only: None, without: Vec::new() }
    }
}

impl<F> Suite<F>
where
    F: Fn(&Arc<CudaDevice>, &Arc<StreamPool>) -> BoxedResource,
{
    /// Makes a suite for the resources that `build` makes on a device with the streams of a pool.
    ///
    /// Each check gets a new resource without outstanding bytes.
    pub fn new(build: F) -> Self {
        Self { build, only: None, without: Vec::new() }
    }
}

impl<F: Build> Suite<F> {
    /// Runs only the checks whose names contain `text`.
    #[must_use]
    pub fn only(mut self, text: &str) -> Self {
        self.only = Some(text.to_owned());
        self
    }

    /// Skips the checks whose names contain `text`.
    #[must_use]
    pub fn without(mut self, text: &str) -> Self {
        self.without.push(text.to_owned());
        self
    }

    /// Runs the checks one after another.
    pub fn run(&self, device: &Arc<CudaDevice>) -> Report {
        let wanted =
            |check: &&Check| self.only.as_deref().is_none_or(|text| check.name.contains(text));
        let of_decorators = if F::IS_DECORATOR { OF_DECORATORS } else { &[] };
        let checks = CHECKS.iter().chain(of_decorators);
        let checks = checks.filter(wanted).map(|check| self.run_one(device, check));
        Report::new(device.spec(), checks.collect())
    }

    fn run_one(&self, device: &Arc<CudaDevice>, check: &Check) -> CheckReport {
        if self.without.iter().any(|text| check.name.contains(text.as_str())) {
            let outcome = Outcome::Skipped("it was asked to be left out".to_owned());
            return CheckReport { name: check.name, outcome };
        }
        let races = device.races().len();
        let pool = Arc::new(StreamPool::new(device.clone(), STREAMS));
        let built = self.build.build(device, &pool);
        let fixture = Fixture::new(device, &pool, built);
        // Runs on a logical thread of a seeded device, which can prove that a wait never ends.
        let outcome = fixture.threads(vec![Box::new(|| {
            (check.run)(&fixture)?;
            fixture.drain()
        })]);
        let mut outcome = match outcome {
            Ok(()) => Outcome::Passed,
            Err(Stop::Skipped(reason)) => Outcome::Skipped(reason),
            Err(Stop::Failed(reason)) => Outcome::Failed(reason),
        };
        if let Some(race) = device.races().get(races) {
            let before = match outcome {
                Outcome::Failed(reason) => format!("{reason}; "),
                _ => String::new(),
            };
            outcome = Outcome::Failed(format!("{before}the program races: {race}"));
        }
        CheckReport { name: check.name, outcome }
    }
}

impl<F> fmt::Debug for Suite<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suite")
            .field("only", &self.only)
            .field("without", &self.without)
            .finish_non_exhaustive()
    }
}
