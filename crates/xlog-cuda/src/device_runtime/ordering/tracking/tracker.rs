//! The blocks of a resource, and the streams that they are used on.

use std::sync::Arc;

use super::striped_counters::StripedCounters;
use crate::CudaDevice;
use crate::device_runtime::ordering::EventPolicy;
use crate::device_runtime::ordering::block::block_meta::{BlockMeta, BlockTable, generation_bits};
use crate::device_runtime::ordering::block::state_word::Attempt;
use crate::device_runtime::ordering::block::uses::OutstandingList;
use crate::device_runtime::ordering::clock::clock_headers::ClockHeaders;
use crate::device_runtime::ordering::clock::stream_clock::ClockHeader;
use crate::device_runtime::resource::{
    BlockId, Generation, ResourceError, ResourceResult, ResourceStatistics, StreamId,
};
use crate::device_runtime::stream_pool::StreamPool;
use crate::device_runtime::stream_table::StreamTable;
use crate::stream::{Completion, RawStream};

/// The block table, streams and counters of one resource.
#[derive(Debug)]
pub(crate) struct Tracker {
    pub(crate) table: BlockTable,
    pub(crate) headers: Arc<ClockHeaders>,
    pub(crate) policy: EventPolicy,
    /// The mismatch between device, number and stream pool, if there is one.
    mismatch: Option<String>,
    pub(crate) streams: Arc<StreamPool>,
    pub(in crate::device_runtime) stream_table: Arc<StreamTable>,
    pub(crate) counters: StripedCounters,
}

impl Tracker {
    pub(crate) fn new(device: &CudaDevice, ordinal: u32, streams: Arc<StreamPool>) -> Self {
        let mismatch = if device.ordinal() != ordinal {
            Some(format!("a resource of device {ordinal} was given device {}", device.ordinal()))
        } else if !streams.device().is_same(device) {
            Some(format!(
                "a resource of {} was given a stream pool of another open device, {}",
                device.spec(),
                streams.device().spec()
            ))
        } else {
            None
        };
        Self {
            table: BlockTable::new(ordinal),
            headers: Arc::clone(streams.headers()),
            policy: EventPolicy::default(),
            mismatch,
            stream_table: Arc::clone(&streams.table),
            streams,
            counters: StripedCounters::default(),
        }
    }

    #[inline]
    pub(crate) fn check_parts(&self) -> ResourceResult<()> {
        match &self.mismatch {
            None => Ok(()),
            Some(mismatch) => refuse_parts(mismatch),
        }
    }

    /// Returns the stream that is leased under an id.
    #[inline]
    pub(crate) fn stream(&self, id: StreamId) -> ResourceResult<&RawStream> {
        self.check_parts()?;
        match self.streams.raw(id) {
            Some(raw) => Ok(raw),
            None => Err(ResourceError::unknown_stream(id)),
        }
    }

    pub(crate) fn owner_stream(&self, meta: &BlockMeta) -> ResourceResult<&RawStream> {
        match self.streams.at(meta.owner()) {
            Some(raw) => Ok(raw),
            None => Err(ResourceError::UseAfterFree { generation: meta.generation() }),
        }
    }

    /// Returns the stream id for the metadata of a new block. If every use records an event, it is an id that is never
    /// issued, so that no use takes the fast path.
    pub(crate) fn fast_path_id(&self, stream: StreamId) -> StreamId {
        if self.policy == EventPolicy::Exact { StreamId(u32::MAX) } else { stream }
    }

    /// Retires a block; an error if it is not live.
    #[inline]
    pub(crate) fn retire(
        &self,
        meta: &BlockMeta,
        generation: Generation,
    ) -> ResourceResult<Retired> {
        let bits = generation_bits(generation);
        match meta.state.retire_own_stream_only(bits) {
            Attempt::Done => return Ok(Retired::OwnStreamOnly),
            Attempt::Stale => return Err(ResourceError::UseAfterFree { generation }),
            _ => {}
        }
        let retired = meta.with_uses(|uses| {
            meta.state.retire(bits).then(|| {
                uses.store_stamps(meta);
                uses.free_on_close = meta.state.has_open() || uses.has_open();
                match uses.free_on_close {
                    true => Retired::Open,
                    false if uses.is_own_stream_only() => Retired::OwnStreamOnly,
                    false => Retired::Used,
                }
            })
        });
        retired.ok_or(ResourceError::UseAfterFree { generation })
    }

    /// Whether each outstanding use of a block has completed, or has no event to poll.
    pub(crate) fn is_complete(&self, meta: &BlockMeta) -> bool {
        meta.with_uses(|uses| uses.copy_outstanding()).iter().all(|entry| {
            let stream = self.streams.at(entry.slot);
            stream.is_none_or(|stream| stream.poll(entry.stamp) != Completion::Pending)
        })
    }

    /// Makes `owner` wait for all outstanding uses.
    pub(crate) fn wait_on_all(
        &self,
        owner: &RawStream,
        outstanding: &OutstandingList,
    ) -> ResourceResult<()> {
        for entry in outstanding {
            if let Some(stream) = self.streams.at(entry.slot) {
                owner.wait_on_clock(stream, entry.stamp, &self.counters)?;
            }
        }
        Ok(())
    }

    pub(crate) fn statistics(&self) -> ResourceStatistics {
        let counts = self.counters.sum();
        ResourceStatistics {
            bytes_outstanding: counts.outstanding,
            live_blocks: counts.allocations.saturating_sub(counts.deallocations) as usize,
            retired_blocks: counts.deallocations.saturating_sub(counts.freed) as usize,
            allocations: counts.allocations,
            deallocations: counts.deallocations,
            events_recorded: counts.recorded,
            waits_inserted: counts.inserted,
            waits_elided: counts.elided,
        }
    }

    /// Returns the clock header of the block's own stream, if `stream` is that one and may work without the lock.
    #[inline]
    pub(super) fn own_header(&self, meta: &BlockMeta, stream: StreamId) -> Option<&ClockHeader> {
        if meta.stream_id() == stream.0 { self.headers.get(meta.owner()) } else { None }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refuse(&self, block: BlockId) -> ResourceResult<()> {
        self.table.find_by_id(block).map(|_| ())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Retired {
    /// Its own stream is ordered after all uses.
    OwnStreamOnly,
    /// Other streams have used it.
    Used,
    /// A use is open: the last one to close frees the block.
    Open,
}

#[cold]
fn refuse_parts(mismatch: &str) -> ResourceResult<()> {
    Err(ResourceError::Driver(mismatch.to_owned()))
}
