//! A pool under a memory checker: blocks have exactly the requested bytes, and memory is reused only after the host has
//! seen all work on it complete.
//!
//! The checker learns of blocks at host time, while their work runs later. A region that ended with the free would turn
//! correct pending work into an error; one that began over memory still in use would hide a real error. A freed block
//! therefore keeps its region until an event after all its uses completes. Memory that reaches the arenas has no pending
//! work. These rules also hold without a tool.

#[cfg(feature = "nvtx")]
mod heaps;
#[cfg(not(feature = "nvtx"))]
#[path = "no_heaps.rs"]
mod heaps;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::Mutex;
use xlog_driver::{DeviceKind, DriverResult};

pub(super) use self::heaps::Heaps;
use super::PoolResource;
use super::config::{PoolConfig, PoolSanitizer, PoolSegments};
use super::free::FreedBy;
use crate::CudaDevice;
use crate::device_runtime::ordering::{CompletedFrees, StripedCounters};
use crate::device_runtime::resource::{AllocTag, ResourceError, ResourceResult};
use crate::stream::RawStream;

/// Waiting blocks that a request polls.
pub(super) const WAITING_PER_REQUEST: usize = 64;

/// A block that was handed out.
#[derive(Debug)]
struct CheckedBlock {
    /// Bytes beyond the requested ones.
    slack: u64,
    has_region: bool,
}

/// The state of a pool under a memory checker.
#[derive(Debug)]
pub(super) struct Sanitizer {
    /// `None` without an attached tool.
    pub(super) heaps: Option<Arc<Heaps>>,
    /// Returned blocks, with their regions.
    pub(super) waiting: CompletedFrees,
    /// By address.
    blocks: Mutex<HashMap<u64, CheckedBlock>>,
    slack: AtomicU64,
}

/// Figures of a pool under a memory checker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct SanitizerSnapshot {
    /// Whether a tool is attached that accepts heaps and regions.
    pub tool: bool,
    /// Segments that the tool knows.
    pub heaps: usize,
    /// Segments that the tool refused: their blocks are not checked.
    pub refused_heaps: usize,
    /// Live blocks that the tool knows.
    pub regions: usize,
    /// Returned blocks on which work may be pending.
    pub waiting_blocks: usize,
}

impl Sanitizer {
    /// Creates the state for a configuration; `None` if it is off, or automatic without a tool.
    pub(super) fn of(
        device: &CudaDevice,
        config: &PoolConfig,
        over_inner: bool,
    ) -> ResourceResult<Option<Self>> {
        let cannot = over_inner || config.segments == PoolSegments::Mapped;
        // A checker reports every access to memory that is not the GPU's.
        let foreign = device.properties().kind != DeviceKind::Cuda;
        let heaps = || Heaps::of_tool(format!("xlog pool of {}", device.spec()));
        let heaps = match config.sanitizer {
            PoolSanitizer::Off => return Ok(None),
            PoolSanitizer::Automatic if cannot || foreign => return Ok(None),
            // As in NVTX itself, an invalid tool library is ignored.
            PoolSanitizer::Automatic => match heaps() {
                Ok(Some(heaps)) => Some(heaps),
                Ok(None) | Err(_) => return Ok(None),
            },
            PoolSanitizer::On if cannot => {
                return Err(ResourceError::InvalidRequest {
                    value: format!(
                        "sanitizer = on for a pool {}",
                        if over_inner { "over another resource" } else { "of mapped memory" }
                    ),
                    accepted: "a pool of the device with PoolSegments::Plain or Automatic"
                        .to_owned(),
                });
            }
            PoolSanitizer::On => heaps()?,
        };
        Ok(Some(Self {
            heaps: heaps.map(Arc::new),
            waiting: CompletedFrees::default(),
            blocks: Mutex::default(),
            slack: AtomicU64::new(0),
        }))
    }

    /// Registers a block of `requested` bytes on memory of `bytes`.
    pub(super) fn begin_block(&self, ptr: u64, bytes: usize, requested: usize, tag: AllocTag) {
        let has_region = match &self.heaps {
            Some(heaps) => heaps.begin_region(ptr, requested, tag.0),
            None => false,
        };
        let slack = bytes.saturating_sub(requested) as u64;
        self.slack.fetch_add(slack, Ordering::AcqRel);
        self.blocks.lock().insert(ptr, CheckedBlock { slack, has_region });
    }

    /// Unregisters the block at this address, on which no work is pending.
    pub(super) fn end_block(&self, ptr: u64) {
        let Some(blocks) = self.blocks.lock().remove(&ptr) else { return };
        if let Some(heaps) = &self.heaps
            && blocks.has_region
        {
            heaps.end_region(ptr);
        }
        self.slack.fetch_sub(blocks.slack, Ordering::AcqRel);
    }

    /// Bytes beyond the requested ones, of all blocks.
    pub(super) fn slack(&self) -> u64 {
        self.slack.load(Ordering::Acquire)
    }
}

impl PoolResource {
    /// Returns the figures of the memory checker; `None` without one.
    pub fn sanitizer(&self) -> Option<SanitizerSnapshot> {
        let sanitizer = self.sanitizer.as_ref()?;
        let counts = sanitizer.heaps.as_ref().map(|heaps| heaps.counts());
        let (heaps, regions, refused_heaps) = counts.unwrap_or_default();
        Some(SanitizerSnapshot {
            tool: sanitizer.heaps.is_some(),
            heaps,
            refused_heaps,
            regions,
            waiting_blocks: sanitizer.waiting.len(),
        })
    }

    /// Frees up to `count` waiting blocks that have completed. The caller holds the reaper lock.
    pub(super) fn release_completed(&self, count: usize) -> ResourceResult<()> {
        let Some(sanitizer) = &self.sanitizer else { return Ok(()) };
        sanitizer.waiting.release_completed(&self.tracker, count, |generation, meta| {
            self.free_to_arena(generation, meta, FreedBy::Deferred)
        })
    }

    /// Frees all waiting blocks after `synchronize` has waited for their streams. The caller holds the reaper lock.
    pub(super) fn release_with_waits<T>(
        &self,
        synchronize: impl Fn(&RawStream, &StripedCounters) -> DriverResult<T>,
    ) -> ResourceResult<()> {
        let Some(sanitizer) = &self.sanitizer else { return Ok(()) };
        let mut outcome = self.release_completed(usize::MAX);
        for stream in sanitizer.waiting.streams(&self.tracker) {
            let waited = synchronize(stream, &self.tracker.counters);
            outcome = outcome.and(waited.map(|_| ()).map_err(Into::into));
        }
        let released = self.release_completed(usize::MAX);
        outcome.and(released)
    }
}
