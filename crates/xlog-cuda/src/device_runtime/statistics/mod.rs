//! Who holds the memory: bytes and blocks, now, at most and in all, by tag, stream and query.
//!
//! [`StatisticsResource`] counts what the resource below hands out; a [`Statistics`] handle reads it, also after the resource is
//! boxed away. Each thread counts in a shard of its own; reading visits all shards at one instant, so that current values and
//! totals are exact and agree with each other. What a block weighs is remembered here by its generation: what a caller passes to
//! `deallocate` is not believed.
//!
//! The peak of an account that one thread alone changes is exact. Otherwise it is approximate: a shard publishes its difference when that
//! has reached its step, so all other shards together may be off by about an eighth of the peak ([`PEAK_STEP_PART`]), or by
//! [`PEAK_STEP_BYTES`] and [`PEAK_STEP_BLOCKS`] each where that is more. A shard that was alone until others joined may be off by
//! [`PEAK_STEP_ALONE_BYTES`] below the peak.

mod core;
#[cfg(feature = "metrics")]
mod export;
mod live;
mod names;
mod openmetrics;
mod resource;
mod scope;
mod shard;
mod snapshot;

pub use self::core::{Backtraces, Statistics, StatisticsConfig};
#[cfg(feature = "metrics")]
pub use export::{MetricsServer, describe_metrics, publish_metrics, serve_metrics};
pub use live::{LiveBlock, LiveReport, TagShare};
pub use openmetrics::openmetrics_text;
pub use resource::StatisticsResource;
pub use scope::{ScopeReport, ScopeUsage, StatisticsScope};
pub use shard::{PEAK_STEP_ALONE_BYTES, PEAK_STEP_BLOCKS, PEAK_STEP_BYTES, PEAK_STEP_PART};
pub use snapshot::{SizeHistogram, StatisticsSnapshot, Usage};
