//! The race detector.
//!
//! The detector receives each operation after everything that happens before it. For every byte it keeps the accesses that later ones must
//! still be compared with. Two accesses race if they conflict and the clock of the later analysed one does not cover the other. The program
//! alone decides that, not the execution times.
//!
//! Each byte range keeps its last writes, the reads since then, and the allocation of its block. A write that is ordered after an entry
//! replaces it, because happens-before is transitive. Only the next allocation replaces a free. Allocation and free count as writes of the
//! whole block. Entries that raced stay, so that every partner of a race is reported. Memory that is mapped twice keeps reads, writes and
//! frees for each mapping, because one of them may be unmapped.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use xlog_driver::StreamHandle;

use crate::clock::{Epoch, VectorClock};
use crate::memory::{Backing, BackingRange};
use crate::op::OpMeta;
use crate::race::{RaceKind, RaceReport, RaceSide, UnreadRaces};
use crate::shadow::{AccessEntry, Cells, Mode, split, unite};

/// The maximum number of stored reports. Later races are counted and still fail a synchronisation.
const MAX_REPORTS: usize = 1000;

/// Shadow memory, and the reports made from it.
#[derive(Default)]
pub(crate) struct Detector {
    shadow: HashMap<u64, Cells>,
    /// Freed backings that operations behind closed gates still refer to.
    fading: Vec<(u64, Weak<Backing>)>,
    reports: Vec<RaceReport>,
    seen: HashSet<(u64, u64)>,
    total: u64,
    /// Messages of races that no call has returned since reports were last read, at most [`MAX_REPORTS`].
    unread: Vec<Arc<str>>,
    /// The number of further unread races, whose messages were not kept.
    unread_beyond: u64,
}

/// A race that the next synchronisation of a stream reports.
pub(crate) struct Notice {
    pub(crate) stream: StreamHandle,
    pub(crate) ordinal: u32,
    pub(crate) message: Arc<str>,
}

/// An access to compare and store.
pub(crate) struct Visit<'a> {
    pub(crate) mode: Mode,
    pub(crate) clock: &'a VectorClock,
    pub(crate) epoch: Epoch,
    pub(crate) meta: &'a Arc<OpMeta>,
    pub(crate) tag: Option<&'a Arc<str>>,
}

/// A host call that ends or restricts a range while work may still use it.
pub(crate) struct HostEnd<'a> {
    pub(crate) host: &'a VectorClock,
    pub(crate) meta: &'a Arc<OpMeta>,
    pub(crate) what: Revoked,
}

/// The rights that a host call revokes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Revoked {
    /// The block.
    Block,
    /// One mapping of it.
    Mapping,
    /// Write access through one mapping.
    Writing,
    /// All access through one mapping.
    Access,
}

/// An earlier operation, and the bytes that an access shares with it.
struct Partner {
    entry: AccessEntry,
    kind: RaceKind,
    from: usize,
    to: usize,
}

impl Detector {
    pub(crate) fn reports(&self) -> &[RaceReport] {
        &self.reports
    }

    /// All races found, including those without a stored report.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Marks all reports as read.
    pub(crate) fn mark_all_read(&mut self) {
        self.unread.clear();
        self.unread_beyond = 0;
    }

    /// Marks the race with this message as returned by a call.
    pub(crate) fn mark_returned(&mut self, message: &Arc<str>) {
        self.unread.retain(|unread| !Arc::ptr_eq(unread, message));
    }

    /// Returns the unread races and marks them as read.
    pub(crate) fn take_unread(&mut self) -> UnreadRaces {
        let first = std::mem::take(&mut self.unread);
        let total = first.len() as u64 + std::mem::take(&mut self.unread_beyond);
        UnreadRaces { first, total }
    }

    /// Compares an access with the stored ones, stores it, and returns notices of the races found.
    pub(crate) fn visit(&mut self, piece: &BackingRange, visit: &Visit<'_>) -> Vec<Notice> {
        let mut partners: Vec<Partner> = Vec::new();
        let cells = self.shadow.entry(piece.backing_id()).or_default();
        let (start, end) = (piece.offset(), piece.offset() + piece.len());
        let base = piece.base();
        split(cells, start, end);
        let mine = AccessEntry {
            epoch: visit.epoch,
            mode: visit.mode,
            meta: Arc::clone(visit.meta),
            tag: visit.tag.cloned(),
            base: Some(base),
        };
        let birth = (visit.mode == Mode::Alloc).then(|| Arc::new(mine.clone()));
        for (&at, cell) in cells.range_mut(start..end) {
            // An operation queued before this block's allocation meant the previous block.
            let stale =
                cell.born.as_ref().filter(|born| visit.meta.sequence < born.meta.sequence).cloned();
            if let Some(born) = &stale {
                add(&mut partners, born, RaceKind::UseAcrossReuse, at, cell.end);
            }
            for entry in &cell.entries {
                if let Some(kind) = conflict(entry, visit, base, cell.born.is_some()) {
                    add(&mut partners, entry, kind, at, cell.end);
                }
            }
            cell.entries.retain(|entry| !supersedes(visit, base, entry));
            cell.entries.push(mine.clone());
            if stale.is_none() && matches!(visit.mode, Mode::Alloc | Mode::Free) {
                cell.born = birth.clone();
            }
        }
        if visit.mode != Mode::Read {
            unite(cells, start, end);
        }
        let mut notices = Vec::new();
        for partner in partners {
            let side = side_of(visit.meta, visit.mode, visit.tag);
            self.push(partner, side, piece, Some(visit.meta), &mut notices);
        }
        notices
    }

    /// Removes entries that `clock` covers: they precede a completed free, and the new owner is not ordered after it.
    pub(crate) fn retire(&mut self, piece: &BackingRange, clock: &VectorClock) {
        let Some(cells) = self.shadow.get_mut(&piece.backing_id()) else {
            return;
        };
        let (start, end) = (piece.offset(), piece.offset() + piece.len());
        split(cells, start, end);
        for (_, cell) in cells.range_mut(start..end) {
            cell.entries.retain(|entry| !clock.covers(entry.epoch));
        }
    }

    /// Checks a host call that ends or restricts a range: the host must have seen all affected work complete.
    pub(crate) fn end_by_host(&mut self, piece: &BackingRange, end: &HostEnd<'_>) -> Vec<Notice> {
        let Some(cells) = self.shadow.get_mut(&piece.backing_id()) else {
            return Vec::new();
        };
        let (kind, action) = match end.what {
            Revoked::Block => (RaceKind::UseAfterFree, "ends"),
            Revoked::Mapping => (RaceKind::UnmapUnderUse, "ends"),
            Revoked::Writing => (RaceKind::UnmapUnderUse, "forbids writing"),
            Revoked::Access => (RaceKind::UnmapUnderUse, "forbids access"),
        };
        let (start, stop) = (piece.offset(), piece.offset() + piece.len());
        split(cells, start, stop);
        let mut partners = Vec::new();
        for (&at, cell) in cells.range_mut(start..stop) {
            for entry in &mut cell.entries {
                if end.what != Revoked::Block && entry.base != Some(piece.base()) {
                    continue;
                }
                let concerned = match entry.mode {
                    Mode::Write => true,
                    Mode::Read => end.what != Revoked::Writing,
                    Mode::Alloc | Mode::Free => false,
                };
                if concerned && !end.host.covers(entry.epoch) {
                    add(&mut partners, entry, kind, at, cell.end);
                }
                if end.what == Revoked::Mapping {
                    entry.base = None;
                }
            }
        }
        let mut notices = Vec::new();
        for partner in partners {
            let side = RaceSide {
                operation: end.meta.label.to_string(),
                stream: None,
                stream_name: None,
                sequence: end.meta.sequence,
                action,
                tag: None,
            };
            self.push(partner, side, piece, None, &mut notices);
        }
        notices
    }

    /// Reports an operation whose block or mapping was replaced or removed before it ran.
    pub(crate) fn stale(
        &mut self,
        meta: &Arc<OpMeta>,
        kind: RaceKind,
        ptr: u64,
        bytes: u64,
        tag: Option<&Arc<str>>,
    ) -> Vec<Notice> {
        let ended =
            if kind == RaceKind::UnmapUnderUse { "end of its mapping" } else { "end of its block" };
        let first = RaceSide {
            operation: format!("the {ended}"),
            stream: None,
            stream_name: None,
            sequence: meta.sequence,
            action: "ends",
            tag: tag.map(|tag| tag.to_string()),
        };
        let second = RaceSide { action: "uses", ..side_of(meta, Mode::Read, tag) };
        let mut notices = Vec::new();
        let report = RaceReport { kind, first, second, ptr, bytes };
        self.record(report, [Some(meta)], &mut notices);
        notices
    }

    /// Removes the shadow of a backing that no operation can reach any more.
    pub(crate) fn forget(&mut self, backing: u64) {
        self.shadow.remove(&backing);
    }

    /// Removes the shadow of a freed backing once no queued operation refers to it. Until then such operations meet its frees.
    pub(crate) fn fade(&mut self, backing: &Arc<Backing>) {
        self.fading.push((backing.id(), Arc::downgrade(backing)));
    }

    /// Removes the shadows of unreferenced backings.
    pub(crate) fn sweep(&mut self) {
        let shadow = &mut self.shadow;
        self.fading.retain(|(id, backing)| {
            let meant = backing.strong_count() > 0;
            if !meant {
                shadow.remove(id);
            }
            meant
        });
    }

    /// Reports a race of two operations once, however many ranges they share.
    fn push(
        &mut self,
        partner: Partner,
        second: RaceSide,
        piece: &BackingRange,
        visitor: Option<&Arc<OpMeta>>,
        notices: &mut Vec<Notice>,
    ) {
        let Partner { entry, kind, from, to } = partner;
        if !self.seen.insert((entry.meta.sequence, second.sequence)) {
            return;
        }
        let first = side_of(&entry.meta, entry.mode, entry.tag.as_ref());
        let ptr = piece.address + (from - piece.offset()) as u64;
        let report = RaceReport { kind, first, second, ptr, bytes: (to - from) as u64 };
        self.record(report, [Some(&entry.meta), visitor], notices);
    }

    fn record<const N: usize>(
        &mut self,
        report: RaceReport,
        sides: [Option<&Arc<OpMeta>>; N],
        notices: &mut Vec<Notice>,
    ) {
        self.total += 1;
        let message: Arc<str> = Arc::from(report.to_string());
        for meta in sides.into_iter().flatten() {
            if let Some(stream) = meta.stream {
                let message = Arc::clone(&message);
                notices.push(Notice { stream, ordinal: meta.ordinal, message });
            }
        }
        if self.reports.len() < MAX_REPORTS {
            self.reports.push(report);
        }
        match self.unread.len() < MAX_REPORTS {
            true => self.unread.push(message),
            false => self.unread_beyond += 1,
        }
    }
}

/// Extends the bytes shared with the operation of `entry`.
fn add(partners: &mut Vec<Partner>, entry: &AccessEntry, kind: RaceKind, from: usize, to: usize) {
    let known = partners.iter_mut().find(|p| Arc::ptr_eq(&p.entry.meta, &entry.meta));
    match known {
        Some(partner) => partner.to = to,
        None => partners.push(Partner { entry: entry.clone(), kind, from, to }),
    }
}

fn side_of(meta: &OpMeta, mode: Mode, tag: Option<&Arc<str>>) -> RaceSide {
    RaceSide {
        operation: meta.label.to_string(),
        stream: meta.stream,
        stream_name: meta.stream_name.as_deref().map(str::to_owned),
        sequence: meta.sequence,
        action: mode.action(),
        tag: tag.map(|tag| tag.to_string()),
    }
}

/// True if accesses ordered after this one need no comparison with `entry` any more.
fn supersedes(visit: &Visit<'_>, base: u64, entry: &AccessEntry) -> bool {
    let replaces = match visit.mode {
        Mode::Read => entry.mode == Mode::Read,
        Mode::Write => entry.mode != Mode::Free,
        Mode::Alloc | Mode::Free => true,
    };
    let same_base = entry.mode == Mode::Alloc || entry.base.is_none_or(|theirs| theirs == base);
    replaces && same_base && visit.clock.covers(entry.epoch)
}

/// Returns the kind of race between an earlier access and this one, if they race. `is_born` tells that a block occupies the bytes.
fn conflict(entry: &AccessEntry, visit: &Visit<'_>, base: u64, is_born: bool) -> Option<RaceKind> {
    let ordered = visit.clock.covers(entry.epoch);
    match (entry.mode, visit.mode) {
        (Mode::Read, Mode::Read) => None,
        // An access after the free is an error even if it is ordered after it, unless the next block has begun in another mapping.
        (Mode::Free, Mode::Read | Mode::Write)
            if !ordered || !is_born || entry.base == Some(base) =>
        {
            Some(RaceKind::UseAfterFree)
        }
        // The earlier analysed access was queued after this allocation, so it meant the block that begins only now.
        (_, Mode::Alloc) if visit.meta.sequence < entry.meta.sequence => {
            Some(RaceKind::UseBeforeAllocation)
        }
        _ if ordered => None,
        (Mode::Free, _) | (_, Mode::Alloc) => Some(RaceKind::UseAcrossReuse),
        (_, Mode::Free) => Some(RaceKind::UseAfterFree),
        (Mode::Alloc, _) => Some(RaceKind::UseBeforeAllocation),
        (Mode::Write, Mode::Write) => Some(RaceKind::WriteWrite),
        (Mode::Write, Mode::Read) | (Mode::Read, Mode::Write) => Some(RaceKind::ReadWrite),
    }
}
