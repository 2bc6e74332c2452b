//! A pool under a memory checker: every block has exactly the bytes that were asked for, and memory is handed out again only once
//! the host has seen all work on it complete.
//!
//! A checker is told of blocks at host time, while work runs later. A region that ended with the free would make correct work
//! behind it an error, and one that began over memory still in use would hide a wrong one. So a returned block waits here, with
//! its region, for an event behind everything that used it. What reaches the arenas is free of work, and the rest of the pool goes
//! on as it does. Without a tool the same rules hold and nobody is told.

mod heaps;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xlog_driver::sync::Mutex;
use xlog_driver::{DeviceKind, DriverResult};

pub(super) use self::heaps::Heaps;
use super::PoolResource;
use super::config::{PoolConfig, PoolSanitizer, PoolSegments};
use crate::CudaDevice;
use crate::device_runtime::ordering::block_meta::BlockMeta;
use crate::device_runtime::ordering::striped_counters::StripedCounters;
use crate::device_runtime::resource::{AllocTag, Generation, ResourceError, ResourceResult};
use crate::stream::RawStream;

/// Returned blocks that a request looks at.
pub(super) const WAITING_PER_REQUEST: usize = 64;

/// A returned block, and the stamp of its own stream behind it.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    generation: Generation,
    stamp: u64,
}

/// A block that was handed out.
#[derive(Debug)]
struct CheckedBlock {
    /// What its memory has more than was asked for.
    slack: u64,
    has_region: bool,
}

/// What a pool keeps for a checker.
#[derive(Debug)]
pub(super) struct Sanitizer {
    /// `None` where no tool is attached.
    pub(super) heaps: Option<Arc<Heaps>>,
    waiting: Mutex<VecDeque<Waiting>>,
    /// By address.
    blocks: Mutex<HashMap<u64, CheckedBlock>>,
    slack: AtomicU64,
}

/// How a pool under a memory checker stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct SanitizerSnapshot {
    /// A tool is attached that takes heaps and regions.
    pub tool: bool,
    /// Segments that it was told of.
    pub heaps: usize,
    /// Segments that it refused: their blocks are not checked.
    pub refused_heaps: usize,
    /// Blocks that it was told of and that have not ended.
    pub regions: usize,
    /// Returned blocks on which work may be pending.
    pub waiting_blocks: usize,
}

impl Sanitizer {
    /// What a pool with this configuration keeps; `None` where it is not asked for, or no tool asks.
    pub(super) fn of(
        device: &CudaDevice,
        config: &PoolConfig,
        over_inner: bool,
    ) -> ResourceResult<Option<Self>> {
        let cannot = over_inner || config.segments == PoolSegments::Mapped;
        // A checker knows the memory of a GPU, and calls what a simulated device has an error.
        let foreign = device.properties().kind != DeviceKind::Cuda;
        let tool = match config.sanitizer {
            PoolSanitizer::Off => return Ok(None),
            PoolSanitizer::Automatic if cannot || foreign => return Ok(None),
            // A library that is none is ignored, as every other user of NVTX in the process ignores it.
            PoolSanitizer::Automatic => match xlog_nvtx::tool() {
                Ok(Some(tool)) => Some(tool),
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
            PoolSanitizer::On => {
                xlog_nvtx::tool().map_err(|error| ResourceError::Driver(error.to_string()))?
            }
        };
        let heaps = tool.map(|tool| Heaps::new(tool, format!("xlog pool of {}", device.spec())));
        Ok(Some(Self {
            heaps: heaps.map(Arc::new),
            waiting: Mutex::default(),
            blocks: Mutex::default(),
            slack: AtomicU64::new(0),
        }))
    }

    /// A block of `requested` bytes is handed out, on memory of `bytes`.
    pub(super) fn begin_block(&self, ptr: u64, bytes: usize, requested: usize, tag: AllocTag) {
        let has_region = match &self.heaps {
            Some(heaps) => heaps.begin_region(ptr, requested, tag.0),
            None => false,
        };
        let slack = bytes.saturating_sub(requested) as u64;
        self.slack.fetch_add(slack, Ordering::AcqRel);
        self.blocks.lock().insert(ptr, CheckedBlock { slack, has_region });
    }

    /// The block at this address is free, and nothing runs on it.
    pub(super) fn end_block(&self, ptr: u64) {
        let Some(blocks) = self.blocks.lock().remove(&ptr) else { return };
        if let Some(heaps) = &self.heaps
            && blocks.has_region
        {
            heaps.end_region(ptr);
        }
        self.slack.fetch_sub(blocks.slack, Ordering::AcqRel);
    }

    /// What the memory of all blocks has more than was asked for.
    pub(super) fn slack(&self) -> u64 {
        self.slack.load(Ordering::Acquire)
    }

    fn take_waiting(&self, count: usize) -> Vec<Waiting> {
        let mut waiting = self.waiting.lock();
        let count = count.min(waiting.len());
        waiting.drain(..count).collect()
    }
}

impl PoolResource {
    /// How the pool stands with a memory checker; `None` where it does not work for one.
    #[must_use]
    pub fn sanitizer(&self) -> Option<SanitizerSnapshot> {
        let sanitizer = self.sanitizer.as_ref()?;
        let counts = sanitizer.heaps.as_ref().map(|heaps| heaps.counts());
        let (heaps, regions, refused_heaps) = counts.unwrap_or_default();
        Some(SanitizerSnapshot {
            tool: sanitizer.heaps.is_some(),
            heaps,
            refused_heaps,
            regions,
            waiting_blocks: sanitizer.waiting.lock().len(),
        })
    }

    /// Keeps a retired block until everything that used it has completed. A failure leaves it to a reap.
    pub(super) fn keep_until_complete(
        &self,
        sanitizer: &Sanitizer,
        generation: Generation,
        meta: &BlockMeta,
    ) -> ResourceResult<()> {
        match self.record_behind(meta) {
            Ok(stamp) => {
                sanitizer.waiting.lock().push_back(Waiting { generation, stamp });
                Ok(())
            }
            Err(error) => {
                self.deferred_frees.keep_failed(generation);
                Err(error)
            }
        }
    }

    /// Has an event recorded behind everything that used a block; returns the stamp of its own stream that this covers. No stream
    /// waits for another.
    fn record_behind(&self, meta: &BlockMeta) -> ResourceResult<u64> {
        for entry in meta.with_uses(|uses| uses.copy_outstanding()) {
            if let Some(stream) = self.tracker.streams.at(entry.slot)
                && stream.poll(entry.stamp).is_none()
            {
                stream.record(&self.tracker.counters)?;
            }
        }
        Ok(self.tracker.owner_stream(meta)?.record(&self.tracker.counters)?)
    }

    /// True when the host has seen everything complete that used a block.
    fn has_completed(&self, meta: &BlockMeta, stamp: u64) -> bool {
        let streams = &self.tracker.streams;
        let own = streams.at(meta.owner());
        own.is_some_and(|own| own.poll(stamp) == Some(true))
            && meta.with_uses(|uses| uses.copy_outstanding()).iter().all(|entry| {
                streams.at(entry.slot).is_none_or(|other| other.poll(entry.stamp) == Some(true))
            })
    }

    /// Puts back up to `count` of the blocks that wait, if they have completed. The turn of `deferred_frees` is the caller's.
    pub(super) fn release_completed(&self, count: usize) -> ResourceResult<()> {
        self.release(count, |meta, stamp| Ok(self.has_completed(meta, stamp)))
    }

    /// Puts back all blocks that wait, once `synchronize` has waited for what used them. The turn of `deferred_frees` is the caller's.
    pub(super) fn release_with_waits<T>(
        &self,
        synchronize: impl Fn(&RawStream, &StripedCounters) -> DriverResult<T>,
    ) -> ResourceResult<()> {
        self.release(usize::MAX, |meta, stamp| {
            if self.has_completed(meta, stamp) {
                return Ok(true);
            }
            let used = meta.with_uses(|uses| uses.copy_outstanding());
            for slot in used.iter().map(|entry| entry.slot).chain([meta.owner()]) {
                if let Some(stream) = self.tracker.streams.at(slot) {
                    synchronize(stream, &self.tracker.counters)?;
                }
            }
            Ok(self.has_completed(meta, stamp))
        })
    }

    fn release(
        &self,
        count: usize,
        is_free: impl Fn(&BlockMeta, u64) -> ResourceResult<bool>,
    ) -> ResourceResult<()> {
        let Some(sanitizer) = &self.sanitizer else { return Ok(()) };
        let mut outcome = Ok(());
        for waiting in sanitizer.take_waiting(count) {
            let Some(meta) = self.tracker.table.at(waiting.generation) else { continue };
            let free = is_free(meta, waiting.stamp);
            if matches!(free, Ok(true)) {
                meta.with_uses(|uses| uses.take_outstanding(&self.tracker.streams));
                let this = self.free_to_arena(waiting.generation, meta, false);
                outcome = outcome.and(this);
            } else {
                sanitizer.waiting.lock().push_back(waiting);
                outcome = outcome.and(free.map(|_| ()));
            }
        }
        outcome
    }
}
