//! Configuration of a pool: sizes, reuse policy, segments. Creating the pool validates every value.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::resource::{MIN_ALIGN, ResourceError, ResourceResult};
use crate::{Result, XlogError};

const MIB: usize = 1 << 20;
/// The default of [`PoolConfig::idle_decay`].
const DECAY: Duration = Duration::from_secs(10);

/// Which memory of other streams may serve a request. Memory of the request's own stream always may.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PoolReuse {
    /// Memory whose last work happens before the request.
    pub follow_dependencies: bool,
    /// Memory whose last work has completed when the host polls it. The result depends on timing.
    pub opportunistic: bool,
    /// Memory that is still in use, with a queued wait, once the pool cannot grow or prefers waits over growth.
    pub insert_waits: bool,
}

impl Default for PoolReuse {
    fn default() -> Self {
        Self { follow_dependencies: true, opportunistic: true, insert_waits: true }
    }
}

impl PoolReuse {
    /// Returns a policy that does not depend on completion: a program gets the same addresses in every run, as long as
    /// blocks are used on their own streams only.
    #[must_use]
    pub fn deterministic() -> Self {
        Self { opportunistic: false, ..Self::default() }
    }
}

/// The kind of segments of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PoolSegments {
    /// Mapped if the device has virtual memory, otherwise plain.
    #[default]
    Automatic,
    /// Physical handles mapped into reserved addresses; each handle is returned by itself.
    Mapped,
    /// One driver allocation for each segment, which memory checkers need.
    Plain,
}

/// Whether the pool reports its blocks to a memory checker. It then uses plain segments and exact block sizes, reuses memory
/// only after completion, and registers each block through NVTX.
///
/// ```
/// use xlog_cuda::device_runtime::PoolSanitizer;
///
/// assert_eq!("auto".parse(), Ok(PoolSanitizer::Automatic));
/// assert!("yes".parse::<PoolSanitizer>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PoolSanitizer {
    /// Off.
    #[default]
    Off,
    /// On if a tool is attached that accepts heaps and regions, and the pool's memory is that of a GPU.
    Automatic,
    /// On, even without a tool: blocks follow the rules above and are not registered. A tool that cannot be attached is an error.
    On,
}

impl FromStr for PoolSanitizer {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Automatic),
            "on" => Ok(Self::On),
            _ => Err(XlogError::bad_setting(
                "the sanitizer mode",
                text,
                "there is no such mode",
                "\"auto\", \"on\" and \"off\"",
            )),
        }
    }
}

impl fmt::Display for PoolSanitizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Automatic => "auto",
            Self::On => "on",
        })
    }
}

/// The configuration of a pool.
///
/// ```
/// use xlog_cuda::device_runtime::{PoolConfig, PoolReuse};
///
/// let config = PoolConfig::default()
///     .with_maximum(4 << 30)
///     .with_reuse(PoolReuse::deterministic());
/// assert_eq!(config.maximum_bytes, 4 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Bytes taken from the device when the pool is created; with 0 the first request takes memory.
    pub initial_bytes: usize,
    /// The maximum number of bytes that the pool takes from the device.
    pub maximum_bytes: usize,
    /// The largest step of growth, or the request if that is larger. A small pool grows in smaller steps.
    pub growth_bytes: usize,
    /// Up to this size the pool prefers growth over waits. Above it, with at least half of the pool free, a request
    /// first steals from another stream with a wait.
    pub eager_growth_bytes: usize,
    /// Bytes that [`PoolConfig::idle_decay`] leaves in the pool.
    pub release_threshold: usize,
    /// Time after which free memory that no request needed is returned to the device. With `None` only a trim returns it.
    pub idle_decay: Option<Duration>,
    /// Bytes of free blocks that all magazines together cache, or 2 % of the pool if that is more.
    pub magazine_bytes: usize,
    /// Which memory of other streams may be reused.
    pub reuse: PoolReuse,
    /// When an event is recorded for a closed use.
    pub event_policy: EventPolicy,
    /// The kind of segments.
    pub segments: PoolSegments,
    /// Whether the pool reports its blocks to a memory checker.
    pub sanitizer: PoolSanitizer,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            initial_bytes: 0,
            maximum_bytes: usize::MAX,
            growth_bytes: 32 * MIB,
            eager_growth_bytes: 4096 * MIB,
            release_threshold: 0,
            idle_decay: Some(DECAY),
            magazine_bytes: 16 * MIB,
            reuse: PoolReuse::default(),
            event_policy: EventPolicy::default(),
            segments: PoolSegments::default(),
            sanitizer: PoolSanitizer::default(),
        }
    }
}

impl PoolConfig {
    xlog_base::setters! {
        /// Sets [`PoolConfig::initial_bytes`].
        with_initial(bytes: usize) { initial_bytes: bytes }
        /// Sets [`PoolConfig::maximum_bytes`].
        with_maximum(bytes: usize) { maximum_bytes: bytes }
        /// Sets [`PoolConfig::growth_bytes`].
        with_growth(bytes: usize) { growth_bytes: bytes }
        /// Sets [`PoolConfig::eager_growth_bytes`]: 0 saves memory, `usize::MAX` saves time.
        with_eager_growth(bytes: usize) { eager_growth_bytes: bytes }
        /// Sets [`PoolConfig::magazine_bytes`].
        with_magazines(bytes: usize) { magazine_bytes: bytes }
        /// Sets the reuse policy.
        with_reuse(reuse: PoolReuse) { reuse: reuse }
        /// Sets [`PoolConfig::event_policy`].
        with_event_policy(event_policy: EventPolicy) { event_policy: event_policy }
        /// Sets the kind of segments.
        with_segments(segments: PoolSegments) { segments: segments }
        /// Sets [`PoolConfig::sanitizer`].
        with_sanitizer(sanitizer: PoolSanitizer) { sanitizer: sanitizer }
    }

    /// Returns free memory to the device after `idle`, down to `keep` bytes.
    #[must_use]
    pub fn with_decay(mut self, idle: Duration, keep: usize) -> Self {
        self.idle_decay = Some(idle);
        self.release_threshold = keep;
        self
    }

    /// Keeps free memory until a trim.
    #[must_use]
    pub fn without_decay(mut self) -> Self {
        self.idle_decay = None;
        self
    }

    pub(super) fn check(&self) -> ResourceResult<()> {
        let refuse = |field: &str, value: usize, accepted: String| {
            Err(ResourceError::InvalidRequest { value: format!("{field} = {value}"), accepted })
        };
        if self.initial_bytes > self.maximum_bytes {
            let accepted = format!("at most maximum_bytes, which is {}", self.maximum_bytes);
            return refuse("initial_bytes", self.initial_bytes, accepted);
        }
        if self.maximum_bytes < MIN_ALIGN {
            let accepted = format!("at least {MIN_ALIGN} bytes");
            return refuse("maximum_bytes", self.maximum_bytes, accepted);
        }
        if !(4096..=1 << 40).contains(&self.growth_bytes) || !self.growth_bytes.is_multiple_of(4096)
        {
            let accepted = "a multiple of 4 KiB, from 4 KiB to 1 TiB".to_owned();
            return refuse("growth_bytes", self.growth_bytes, accepted);
        }
        if self.magazine_bytes > 1 << 40 {
            return refuse("magazine_bytes", self.magazine_bytes, "at most 1 TiB".to_owned());
        }
        Ok(())
    }
}
