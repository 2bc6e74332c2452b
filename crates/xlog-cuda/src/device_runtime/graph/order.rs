//! The order of captured work: a vector clock for every stream of one capture.
//!
//! A point counts the work of one captured stream. A stream follows a point once it has waited, inside the capture, for an
//! event recorded at or after the point. Waits that the caller queues itself are not tracked: they only make a wait redundant.

use std::sync::Arc;

use smallvec::SmallVec;
use xlog_driver::{Driver, DriverResult};

use crate::device_runtime::resource::{Access, StreamId};
use crate::stream::RawStream;

/// The index of a stream in its capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Member(u32);

/// The work of one captured stream up to a count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Point {
    member: Member,
    count: u64,
}

/// At most one point of each stream.
pub(super) type Points = SmallVec<[Point; 2]>;

/// Adds a point; of two points of one stream the later is kept.
pub(super) fn add_point(points: &mut Points, point: Point) {
    match points.iter_mut().find(|known| known.member == point.member) {
        Some(known) => known.count = known.count.max(point.count),
        None => points.push(point),
    }
}

#[derive(Debug)]
struct CapturedStream {
    id: StreamId,
    raw: Arc<RawStream>,
    /// Whether the runtime brought the stream into the capture.
    is_marked: bool,
    /// The counts of work, by member, that this stream follows. Its own entry counts its own work.
    clock: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct CapturedOrder {
    streams: Vec<CapturedStream>,
}

impl CapturedOrder {
    /// Returns the member of a stream, and adds it without order if it is new.
    pub(super) fn member(&mut self, id: StreamId, raw: &Arc<RawStream>) -> Member {
        self.find(raw).unwrap_or_else(|| self.add(id, raw, false))
    }

    fn find(&self, raw: &RawStream) -> Option<Member> {
        let index = self.streams.iter().position(|each| each.raw.handle() == raw.handle())?;
        Some(Member(index as u32))
    }

    fn add(&mut self, id: StreamId, raw: &Arc<RawStream>, is_marked: bool) -> Member {
        let raw = Arc::clone(raw);
        self.streams.push(CapturedStream { id, raw, is_marked, clock: Vec::new() });
        Member(self.streams.len() as u32 - 1)
    }

    /// Adds a stream that the runtime is about to capture. Other threads can queue nothing on it from now on.
    pub(super) fn begin(&mut self, id: StreamId, raw: &Arc<RawStream>) -> DriverResult<Member> {
        if let Some(member) = self.find(raw) {
            return Ok(member);
        }
        raw.begin_capture()?;
        Ok(self.add(id, raw, true))
    }

    /// Iterates over all streams; the stream that the capture began on is first.
    pub(super) fn members(&self) -> impl Iterator<Item = (Member, &Arc<RawStream>)> {
        self.streams.iter().enumerate().map(|(index, each)| (Member(index as u32), &each.raw))
    }

    /// Returns the member of a known stream.
    pub(super) fn member_of(&self, id: StreamId) -> Option<Member> {
        let index = self.streams.iter().position(|each| each.id == id)?;
        Some(Member(index as u32))
    }

    fn count(&self, of: Member, at: Member) -> u64 {
        let clock = &self.streams[at.0 as usize].clock;
        clock.get(of.0 as usize).copied().unwrap_or(0)
    }

    fn set_count(&mut self, of: Member, at: Member, count: u64) {
        let clock = &mut self.streams[at.0 as usize].clock;
        if clock.len() <= of.0 as usize {
            clock.resize(of.0 as usize + 1, 0);
        }
        clock[of.0 as usize] = count;
    }

    /// Counts the work queued on a stream so far, and returns its point.
    pub(super) fn point(&mut self, member: Member) -> Point {
        let count = self.count(member, member) + 1;
        self.set_count(member, member, count);
        Point { member, count }
    }

    /// Whether later work of `member` follows the points.
    pub(super) fn covers(&self, member: Member, points: &Points) -> bool {
        points.iter().all(|point| self.covers_point(member, *point))
    }

    fn covers_point(&self, member: Member, point: Point) -> bool {
        self.count(point.member, member) >= point.count
    }

    /// Makes later work of `member` follow the points, with waits inside the capture.
    pub(super) fn follow(
        &mut self,
        driver: &dyn Driver,
        member: Member,
        points: &Points,
    ) -> DriverResult<()> {
        for point in points {
            if !self.covers_point(member, *point) {
                self.wait(driver, member, point.member)?;
            }
        }
        Ok(())
    }

    /// Makes later work of `member` follow all work queued on `other`.
    pub(super) fn wait(
        &mut self,
        driver: &dyn Driver,
        member: Member,
        other: Member,
    ) -> DriverResult<()> {
        if member == other {
            return Ok(());
        }
        let handle = |of: Member| self.streams[of.0 as usize].raw.handle();
        let (waiting, awaited) = (handle(member), handle(other));
        let event = driver.event_create()?;
        let queued = driver
            .event_record(event, awaited)
            .and_then(|()| driver.stream_wait_event(waiting, event));
        #[allow(unsafe_code)]
        // SAFETY: created here, and not used any more. The captured work does not need the event.
        let destroyed = unsafe { driver.event_destroy(event) };
        queued?;
        for of in 0..self.streams.len() as u32 {
            let known = self.count(Member(of), other).max(self.count(Member(of), member));
            self.set_count(Member(of), member, known);
        }
        destroyed
    }

    /// Ends the capture: its streams become ordinary ones.
    pub(super) fn end(&self) {
        self.streams.iter().filter(|each| each.is_marked).for_each(|each| each.raw.end_capture());
    }
}

/// The uses of one block inside one capture.
#[derive(Clone, Debug, Default)]
pub(super) struct CapturedUses {
    writes: Points,
    reads: Points,
}

impl CapturedUses {
    /// Creates the uses of a block whose only use is its allocation.
    pub(super) fn since(allocation: Point) -> Self {
        Self { writes: SmallVec::from_slice(&[allocation]), reads: Points::new() }
    }

    /// Returns the points that a new use follows.
    pub(super) fn before(&self, access: Access) -> Points {
        let mut points = self.writes.clone();
        if access.writes() {
            self.reads.iter().for_each(|read| add_point(&mut points, *read));
        }
        points
    }

    /// Adds unannounced work of the block's own stream.
    pub(super) fn add_write(&mut self, point: Point) {
        add_point(&mut self.writes, point);
    }

    /// Adds a finished use. A write replaces the points that its stream follows, since followers of the write follow them too.
    pub(super) fn finish(
        &mut self,
        order: &CapturedOrder,
        member: Member,
        point: Point,
        access: Access,
    ) {
        if !access.writes() {
            add_point(&mut self.reads, point);
            return;
        }
        self.writes.retain(|known| !order.covers_point(member, *known));
        self.reads.retain(|known| !order.covers_point(member, *known));
        add_point(&mut self.writes, point);
    }
}
