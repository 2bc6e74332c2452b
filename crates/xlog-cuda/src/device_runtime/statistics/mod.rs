//! Memory statistics: current, peak and total bytes and blocks, by tag, stream and query.
//!
//! [`StatisticsResource`] counts the blocks of the resource below; a [`Statistics`] handle reads the counts. Each thread counts in its
//! own shard. A snapshot reads all shards at one instant, so current values and totals are exact and consistent. The size of a block is
//! stored by its generation: the size that a caller passes to `deallocate` is ignored.
//!
//! The peak of an account that only one thread changes is exact. Otherwise it is approximate: a shard publishes its difference when that
//! reaches its step. All other shards together may be off by about an eighth of the peak ([`PEAK_STEP_PART`]), or each by
//! [`PEAK_STEP_BYTES`] and [`PEAK_STEP_BLOCKS`] if that is more. A shard that was alone until others joined may be off by
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
#[cfg(feature = "guard")]
pub(super) use live::write_frames;
pub use live::{LiveBlock, LiveReport, TagShare};
pub use openmetrics::openmetrics_text;
pub use resource::StatisticsResource;
pub use scope::{ScopeReport, ScopeStatistics, StatisticsScope};
pub use shard::{PEAK_STEP_ALONE_BYTES, PEAK_STEP_BLOCKS, PEAK_STEP_BYTES, PEAK_STEP_PART};
pub use snapshot::{StatisticsSnapshot, Usage};
pub use xlog_base::PowerHistogram;
