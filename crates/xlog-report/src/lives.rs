//! Live blocks with the time and stream of their last use.
//!
//! The rules are those of the log's summary. Process, device and address identify a block; a free of another generation
//! concerns a block that the log lacks; an allocation at a live address means that a free is missing. Memory grows with
//! the live blocks, not with the log, up to the limit of `reserve_live`.
use std::collections::HashMap;

use xlog_trace::{Action, NameId, Record, TraceError, reserve_live};

/// The key of a block in a log: process, device, address.
pub(crate) type Key = (u32, u32, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Life {
    pub(crate) process: u32,
    pub(crate) device: u32,
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    /// Bytes covered from its address on, for address maps.
    pub(crate) extent: u64,
    /// Series of its tag.
    pub(crate) tag: u8,
    /// Its tag, even if it is shown together with others.
    pub(crate) name: Option<NameId>,
    pub(crate) stream: Option<u32>,
    pub(crate) generation: Option<u64>,
    pub(crate) order: u64,
    /// Nanoseconds since the first record.
    pub(crate) born: u64,
    pub(crate) last_use: Option<u64>,
    pub(crate) last_stream: Option<u32>,
}

/// The change that a record made to the live blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    None,
    Born(Life),
    /// An allocation at the address of a live block, whose free the log lacks.
    Replaced {
        born: Life,
        lost: Life,
    },
    Died(Life),
    /// A use of a live block, as it was before.
    Used(Life),
}

#[derive(Debug, Default)]
pub(crate) struct Lives(HashMap<Key, Life>);

impl Lives {
    /// Applies a record at `time`, whose tag is shown as series `tag`.
    ///
    /// Fails if more blocks are live than can be tracked.
    pub(crate) fn apply(
        &mut self,
        record: &Record,
        time: u64,
        tag: u8,
    ) -> Result<Change, TraceError> {
        let Some(ptr) = record.ptr().filter(|&ptr| ptr != 0 && !record.is_failure()) else {
            return Ok(Change::None);
        };
        let key = (record.process(), record.device(), ptr);
        Ok(match record.action() {
            Action::Allocate => {
                reserve_live(&mut self.0)?;
                let bytes = record.charged_bytes();
                let born = Life {
                    process: record.process(),
                    device: record.device(),
                    ptr,
                    bytes,
                    extent: bytes.max(record.bytes().unwrap_or(0)).max(1),
                    tag,
                    name: record.tag(),
                    stream: record.stream(),
                    generation: record.generation(),
                    order: record.order(),
                    born: time,
                    last_use: None,
                    last_stream: record.stream(),
                };
                match self.0.insert(key, born) {
                    Some(lost) => Change::Replaced { born, lost },
                    None => Change::Born(born),
                }
            }
            Action::Deallocate => match self.0.get(&key) {
                Some(life) if !is_stale(life, record) => {
                    self.0.remove(&key).map_or(Change::None, Change::Died)
                }
                _ => Change::None,
            },
            Action::UsePrepare | Action::UseFinish => {
                match self.0.get_mut(&key).filter(|life| !is_stale(life, record)) {
                    Some(life) => {
                        let before = *life;
                        life.last_use = Some(time);
                        life.last_stream = record.stream().or(life.last_stream);
                        Change::Used(before)
                    }
                    None => Change::None,
                }
            }
            _ => Change::None,
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Life> {
        self.0.values()
    }
}

fn is_stale(life: &Life, record: &Record) -> bool {
    matches!((life.generation, record.generation()), (Some(a), Some(b)) if a != b)
}
