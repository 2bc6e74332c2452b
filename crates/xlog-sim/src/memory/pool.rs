//! A stream-ordered pool with the reuse rules of a driver.
//!
//! Segments are split into chunks. A free chunk stores the latest free of each stream that it is ordered after, and neighbours merge across
//! streams. The caller has the clocks and decides whether a stream may reuse a chunk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use xlog_driver::{PoolOptions, PoolUsage};

use super::Backing;
use crate::op::Marker;

/// The state of a free for the requesting stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// The stream is ordered after the free.
    Ordered,
    /// The free has completed.
    Completed,
    /// Neither.
    Pending,
}

/// An allocated chunk, and the frees that its new owner depends on.
#[derive(Debug)]
pub(crate) struct Reuse {
    pub(crate) start: u64,
    /// Frees that have completed, but that the new owner is not ordered after.
    pub(crate) completed: Vec<Arc<Marker>>,
    /// Frees that the new owner has to wait for.
    pub(crate) wait_for: Vec<Arc<Marker>>,
}

#[derive(Debug)]
struct Segment {
    bytes: u64,
    backing: Arc<Backing>,
}

#[derive(Debug)]
struct Chunk {
    bytes: u64,
    segment: u64,
    /// `None` while the chunk is in use.
    frees: Option<Vec<Arc<Marker>>>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) ordinal: u32,
    pub(crate) options: PoolOptions,
    pub(crate) usage: PoolUsage,
    pub(crate) destroyed: bool,
    segments: BTreeMap<u64, Segment>,
    chunks: BTreeMap<u64, Chunk>,
    free: BTreeSet<(u64, u64)>,
}

impl Pool {
    pub(crate) fn new(ordinal: u32, options: PoolOptions) -> Self {
        Self {
            ordinal,
            options,
            usage: PoolUsage::default(),
            destroyed: false,
            segments: BTreeMap::new(),
            chunks: BTreeMap::new(),
            free: BTreeSet::new(),
        }
    }

    /// Adds a wholly free segment without earlier frees.
    pub(crate) fn grow(&mut self, start: u64, bytes: u64, backing: Arc<Backing>) {
        self.segments.insert(start, Segment { bytes, backing });
        self.chunks.insert(start, Chunk { bytes, segment: start, frees: Some(Vec::new()) });
        self.free.insert((bytes, start));
        self.usage.reserved += bytes;
        self.usage.reserved_peak = self.usage.reserved_peak.max(self.usage.reserved);
    }

    /// Allocates from the smallest chunk in which `judge` finds no pending free.
    pub(crate) fn allocate(
        &mut self,
        bytes: u64,
        judge: impl Fn(&Marker) -> Standing,
    ) -> Option<Reuse> {
        let (start, completed) = self.free.range((bytes, 0)..).find_map(|&(_, start)| {
            let mut completed = Vec::new();
            for free in self.chunks.get(&start)?.frees.as_ref()? {
                match judge(free) {
                    Standing::Ordered => {}
                    Standing::Completed => completed.push(Arc::clone(free)),
                    Standing::Pending => return None,
                }
            }
            Some((start, completed))
        })?;
        self.claim(start, bytes);
        Some(Reuse { start, completed, wait_for: Vec::new() })
    }

    /// Allocates from the smallest chunk, and returns the frees that the new owner has to wait for.
    pub(crate) fn allocate_with_wait(
        &mut self,
        bytes: u64,
        judge: impl Fn(&Marker) -> Standing,
    ) -> Option<Reuse> {
        let &(_, start) = self.free.range((bytes, 0)..).next()?;
        let mut reuse = Reuse { start, completed: Vec::new(), wait_for: Vec::new() };
        for free in self.chunks.get(&start)?.frees.as_ref()? {
            match judge(free) {
                Standing::Ordered => {}
                Standing::Completed => reuse.completed.push(Arc::clone(free)),
                Standing::Pending => reuse.wait_for.push(Arc::clone(free)),
            }
        }
        self.claim(start, bytes);
        Some(reuse)
    }

    fn claim(&mut self, start: u64, bytes: u64) {
        let Some(chunk) = self.chunks.get_mut(&start) else {
            return;
        };
        self.free.remove(&(chunk.bytes, start));
        let frees = chunk.frees.take().unwrap_or_default();
        let rest = chunk.bytes - bytes;
        chunk.bytes = bytes;
        let segment = chunk.segment;
        if rest > 0 {
            let at = start + bytes;
            self.chunks.insert(at, Chunk { bytes: rest, segment, frees: Some(frees) });
            self.free.insert((rest, at));
        }
        self.usage.used += bytes;
        self.usage.used_peak = self.usage.used_peak.max(self.usage.used);
    }

    /// The backing of a chunk, and the chunk's offset in it.
    pub(crate) fn place(&self, start: u64) -> Option<(Arc<Backing>, usize)> {
        let segment_start = self.chunks.get(&start)?.segment;
        let segment = self.segments.get(&segment_start)?;
        Some((Arc::clone(&segment.backing), (start - segment_start) as usize))
    }

    /// Frees a chunk, which is reusable once `free` has run.
    pub(crate) fn free(&mut self, start: u64, free: Arc<Marker>) {
        let Some(chunk) = self.chunks.get_mut(&start) else {
            return;
        };
        let (mut at, mut bytes, segment) = (start, chunk.bytes, chunk.segment);
        self.usage.used -= bytes;
        self.chunks.remove(&start);
        let mut frees = vec![free];
        let before = self.chunks.range(..start).next_back().map(|(&s, _)| s);
        let after = Some(start + bytes);
        for neighbour in [before, after].into_iter().flatten() {
            let Some(chunk) = self.chunks.get_mut(&neighbour) else {
                continue;
            };
            if chunk.segment != segment {
                continue;
            }
            let Some(theirs) = chunk.frees.take() else {
                continue;
            };
            let size = chunk.bytes;
            self.chunks.remove(&neighbour);
            self.free.remove(&(size, neighbour));
            at = at.min(neighbour);
            bytes += size;
            merge(&mut frees, theirs);
        }
        self.chunks.insert(at, Chunk { bytes, segment, frees: Some(frees) });
        self.free.insert((bytes, at));
    }

    /// Removes wholly free segments whose frees have completed until at most `keep` bytes are reserved.
    pub(crate) fn release(&mut self, keep: u64) -> Vec<(u64, u64, Arc<Backing>)> {
        let mut released = Vec::new();
        let starts: Vec<u64> = self.segments.keys().rev().copied().collect();
        for start in starts {
            if self.usage.reserved <= keep {
                break;
            }
            let (Some(segment), Some(chunk)) = (self.segments.get(&start), self.chunks.get(&start))
            else {
                continue;
            };
            let idle = chunk.bytes == segment.bytes
                && chunk.frees.as_ref().is_some_and(|frees| frees.iter().all(|f| f.is_done()));
            if !idle {
                continue;
            }
            self.free.remove(&(chunk.bytes, start));
            self.chunks.remove(&start);
            if let Some(segment) = self.segments.remove(&start) {
                self.usage.reserved -= segment.bytes;
                released.push((start, segment.bytes, segment.backing));
            }
        }
        released
    }
}

/// Keeps the latest free of each stream, which is ordered after the earlier ones.
fn merge(into: &mut Vec<Arc<Marker>>, from: Vec<Arc<Marker>>) {
    for free in from {
        match into.iter_mut().find(|mine| mine.stream == free.stream) {
            Some(mine) if mine.sequence < free.sequence => *mine = free,
            Some(_) => {}
            None => into.push(free),
        }
    }
}
