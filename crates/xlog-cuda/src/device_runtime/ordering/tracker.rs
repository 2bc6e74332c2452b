//! What every resource that tracks uses has: its blocks, and the streams they are used on.

use std::sync::Arc;

use super::EdgePolicy;
use super::cells::Cells;
use super::clock::ClockCell;
use super::gate::Attempt;
use super::record::{BlockTable, Record, tag_of};
use super::tally::Tally;
use super::uses::OutstandingList;
use crate::CudaDevice;
use crate::device_runtime::resource::{
    BlockId, Generation, ResourceError, ResourceResult, StreamId,
};
use crate::device_runtime::stream_pool::StreamPool;
use crate::device_runtime::stream_table::StreamTable;
use crate::stream::RawStream;

/// The blocks of one resource, and the streams they are used on.
#[derive(Debug)]
pub(crate) struct Tracker {
    pub(crate) table: BlockTable,
    /// Those of `streams`.
    cells: Arc<Cells>,
    pub(crate) policy: EdgePolicy,
    /// Why nothing can be done with these parts, if they do not fit together.
    misfit: Option<String>,
    pub(crate) streams: Arc<StreamPool>,
    /// That of `streams`, one step nearer.
    pub(super) stream_table: Arc<StreamTable>,
    pub(crate) tally: Tally,
}

impl Tracker {
    pub(crate) fn new(device: &CudaDevice, ordinal: u32, streams: Arc<StreamPool>) -> Self {
        let misfit = if device.ordinal() != ordinal {
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
            cells: Arc::clone(streams.cells()),
            policy: EdgePolicy::default(),
            misfit,
            stream_table: Arc::clone(streams.table()),
            streams,
            tally: Tally::default(),
        }
    }

    #[inline]
    pub(crate) fn check_parts(&self) -> ResourceResult<()> {
        match &self.misfit {
            None => Ok(()),
            Some(misfit) => refuse_parts(misfit),
        }
    }

    /// The stream that is out under an id.
    #[inline]
    pub(crate) fn stream(&self, id: StreamId) -> ResourceResult<&RawStream> {
        self.check_parts()?;
        match self.streams.raw(id) {
            Some(raw) => Ok(raw),
            None => Err(ResourceError::unknown_stream(id)),
        }
    }

    /// The stream that a block was allocated on.
    pub(crate) fn home(&self, record: &Record) -> ResourceResult<&RawStream> {
        match self.streams.at(record.home()) {
            Some(raw) => Ok(raw),
            None => Err(ResourceError::UseAfterFree { generation: record.generation() }),
        }
    }

    /// The cell of the stream at a place, if it is found by one step.
    #[inline]
    pub(crate) fn near_cell(&self, place: u32) -> Option<&ClockCell> {
        self.cells.near(place)
    }

    /// The id a block is begun under: where every use records an event none is quick, which an id that is never issued says.
    pub(crate) fn quick_id(&self, stream: StreamId) -> StreamId {
        if self.policy == EdgePolicy::Exact { StreamId(u32::MAX) } else { stream }
    }

    /// Takes a block from its user: `Err` if it is not the live one.
    #[inline]
    pub(crate) fn retire(
        &self,
        record: &Record,
        generation: Generation,
    ) -> ResourceResult<Retired> {
        let tag = tag_of(generation);
        match record.gate.retire_quiet(tag) {
            Attempt::Done => return Ok(Retired::Quiet),
            Attempt::Stale => return Err(ResourceError::UseAfterFree { generation }),
            _ => {}
        }
        let retired = record.with_uses(|uses| {
            record.gate.retire(tag).then(|| {
                uses.give_stamps(record);
                uses.free_on_close = record.gate.has_open() || uses.has_open();
                match uses.free_on_close {
                    true => Retired::Open,
                    false if uses.is_quiet() => Retired::Quiet,
                    false => Retired::Used,
                }
            })
        });
        retired.ok_or(ResourceError::UseAfterFree { generation })
    }

    /// True when everything outstanding on a block is known to have completed, or no event could tell.
    pub(crate) fn is_complete(&self, record: &Record) -> bool {
        record.with_uses(|uses| uses.copy_outstanding()).iter().all(|entry| {
            let stream = self.streams.at(entry.place);
            stream.is_none_or(|stream| stream.poll(entry.stamp) != Some(false))
        })
    }

    /// Makes `home` follow these.
    pub(crate) fn follow_all(
        &self,
        home: &RawStream,
        outstanding: &OutstandingList,
    ) -> ResourceResult<()> {
        for entry in outstanding {
            if let Some(stream) = self.streams.at(entry.place) {
                home.wait_for(stream, entry.stamp, &self.tally)?;
            }
        }
        Ok(())
    }

    /// The clock of the block's own stream, if `stream` is that one and may go without the lock.
    #[inline]
    pub(super) fn own_clock(&self, record: &Record, stream: StreamId) -> Option<&ClockCell> {
        if record.stream_id() == stream.0 { self.cells.get(record.home()) } else { None }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refuse(&self, block: BlockId) -> ResourceResult<()> {
        self.table.find_id(block).map(|_| ())
    }
}

/// How a returned block stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Retired {
    /// Its own stream follows everything that other streams did with it.
    Quiet,
    /// Other streams have used it.
    Used,
    /// A use is open: the last one to close frees it.
    Open,
}

#[cold]
fn refuse_parts(misfit: &str) -> ResourceResult<()> {
    Err(ResourceError::Driver(misfit.to_owned()))
}
