//! How a pool behaves: sizes, reuse, where memory comes from. Every value is checked when the pool is made.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::resource::{ResourceError, ResourceResult};
use crate::{Result, XlogError};

const MIB: usize = 1 << 20;

/// Which memory of another stream a request may be served from. Memory of the own stream always is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PoolReuse {
    /// Memory whose last work the asking stream already follows.
    pub follow_dependencies: bool,
    /// Memory whose last work the host finds to have completed. What is served then depends on time.
    pub opportunistic: bool,
    /// Memory that is still in use, with a wait queued for it, once the pool cannot grow or has enough that is free.
    pub insert_waits: bool,
}

impl Default for PoolReuse {
    fn default() -> Self {
        Self { follow_dependencies: true, opportunistic: true, insert_waits: true }
    }
}

impl PoolReuse {
    /// The same program gets the same addresses in every run, as far as blocks are used on their own streams: which memory is
    /// handed out does not depend on what has completed when.
    #[must_use]
    pub fn deterministic() -> Self {
        Self { opportunistic: false, ..Self::default() }
    }
}

/// Where a pool takes its memory from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PoolSegments {
    /// Mapped where the device has virtual memory, plain otherwise.
    #[default]
    Automatic,
    /// Physical memory mapped into reserved addresses; given back piece by piece.
    Mapped,
    /// One driver allocation per segment, as compute-sanitizer wants it.
    Plain,
}

/// Whether a pool works for a memory checker such as compute-sanitizer: memory in plain segments, blocks of exactly the bytes that
/// were asked for, memory handed out again only once the host has seen all work on it complete, and the checker told of every
/// block through the NVTX memory extension. All of it costs time.
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
    /// No.
    #[default]
    Off,
    /// Where a tool is attached that takes heaps and regions, and the memory of the pool is a GPU's and can be told to it.
    Automatic,
    /// Yes. Without a tool nobody is told, and the same rules hold. A tool that cannot be attached is an error.
    On,
}

impl FromStr for PoolSanitizer {
    type Err = XlogError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Automatic),
            "on" => Ok(Self::On),
            _ => Err(XlogError::BadSetting {
                name: "the sanitizer mode",
                value: text.to_owned(),
                reason: "there is no such mode",
                accepted: "\"auto\", \"on\" and \"off\"",
            }),
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
    /// Taken from the device at once. 0: nothing before the first request.
    pub initial_bytes: usize,
    /// Never hold more of the device than this.
    pub maximum_bytes: usize,
    /// Memory is taken in pieces of at most this size, smaller ones while the pool is small, or of the request if that is larger.
    pub growth_bytes: usize,
    /// Up to here the pool rather grows than lets one stream wait for another. When it holds more, and at least half of that is free,
    /// a request first gets free memory of another stream with a wait for the work on it.
    pub eager_growth_bytes: usize,
    /// What the pool keeps when [`PoolConfig::idle_decay`] lets memory go.
    pub release_threshold: usize,
    /// How long nothing must have been taken from the device before free memory goes back to it; `None`: only `trim` gives back.
    pub idle_decay: Option<Duration>,
    /// How many bytes of free blocks all streams together keep ready to hand out; 2 % of what the pool holds if that is more.
    pub magazine_bytes: usize,
    /// Which memory of other streams may be handed out.
    pub reuse: PoolReuse,
    /// When an event is recorded for a use that is closed.
    pub event_policy: EventPolicy,
    /// Where memory comes from.
    pub segments: PoolSegments,
    /// Whether it works for a memory checker.
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
            idle_decay: None,
            magazine_bytes: 16 * MIB,
            reuse: PoolReuse::default(),
            event_policy: EventPolicy::default(),
            segments: PoolSegments::default(),
            sanitizer: PoolSanitizer::default(),
        }
    }
}

impl PoolConfig {
    /// Takes this much from the device at once.
    #[must_use]
    pub fn with_initial(mut self, bytes: usize) -> Self {
        self.initial_bytes = bytes;
        self
    }

    /// Never holds more of the device than this.
    #[must_use]
    pub fn with_maximum(mut self, bytes: usize) -> Self {
        self.maximum_bytes = bytes;
        self
    }

    /// Takes memory in pieces of this size.
    #[must_use]
    pub fn with_growth(mut self, bytes: usize) -> Self {
        self.growth_bytes = bytes;
        self
    }

    /// Rather grows than lets streams wait for each other up to this; 0 saves memory, `usize::MAX` time.
    #[must_use]
    pub fn with_eager_growth(mut self, bytes: usize) -> Self {
        self.eager_growth_bytes = bytes;
        self
    }

    /// Lets free memory go back to the device after `idle`, down to `keep` bytes.
    #[must_use]
    pub fn with_decay(mut self, idle: Duration, keep: usize) -> Self {
        self.idle_decay = Some(idle);
        self.release_threshold = keep;
        self
    }

    /// Keeps this many bytes of free blocks ready, on all streams together.
    #[must_use]
    pub fn with_magazines(mut self, bytes: usize) -> Self {
        self.magazine_bytes = bytes;
        self
    }

    /// Hands out memory of other streams by this policy.
    #[must_use]
    pub fn with_reuse(mut self, reuse: PoolReuse) -> Self {
        self.reuse = reuse;
        self
    }

    /// Records the events of closed uses by another policy.
    #[must_use]
    pub fn with_event_policy(mut self, event_policy: EventPolicy) -> Self {
        self.event_policy = event_policy;
        self
    }

    /// Takes memory from there.
    #[must_use]
    pub fn with_segments(mut self, segments: PoolSegments) -> Self {
        self.segments = segments;
        self
    }

    /// Works for a memory checker.
    #[must_use]
    pub fn with_sanitizer(mut self, sanitizer: PoolSanitizer) -> Self {
        self.sanitizer = sanitizer;
        self
    }

    pub(super) fn check(&self) -> ResourceResult<()> {
        let refuse = |field: &str, value: usize, accepted: String| {
            Err(ResourceError::InvalidRequest { value: format!("{field} = {value}"), accepted })
        };
        if self.maximum_bytes == 0 {
            return refuse("maximum_bytes", 0, "at least 1 byte".to_owned());
        }
        if self.initial_bytes > self.maximum_bytes {
            let accepted = format!("at most maximum_bytes, which is {}", self.maximum_bytes);
            return refuse("initial_bytes", self.initial_bytes, accepted);
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
