//! Plans a request: chooses the addresses at which the fewest bytes are missing.
//!
//! Free memory and unmapped addresses alternate. A window of the size of the request may lie over both. Free memory inside
//! it stays mapped, even a part of a handle; unmapped parts are filled with handles that are free elsewhere, then with
//! fresh ones. A free range is therefore extended in place, or two are bridged, before a whole range is moved.
//!
//! ```text
//!   live │ free       │ unmapped     │ free  │ live          │ unmapped ...
//!        └──────────── window ───────────┘
//!          stays        filled         stays
//! ```
//!
//! Nothing here calls the driver.

use std::cmp::Reverse;

use super::super::Span;

/// Windows for which a full plan is made: those with the fewest missing bytes.
const CANDIDATES: usize = 4;

/// A request of whole units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) bytes: u64,
    pub(super) align: u64,
    /// The unit of handles and of unmapped addresses.
    pub(super) granularity: u64,
    /// The maximum of free handles that may be moved.
    pub(super) max_moved: usize,
}

/// A range of addresses without a block: free memory, or unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) span: Span,
    pub(super) is_mapped: bool,
}

/// An unmapped range that gets handles: moved ones in this order, then fresh ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fill {
    pub(super) ptr: u64,
    pub(super) moved: Vec<Span>,
    pub(super) fresh: u64,
}

impl Fill {
    pub(super) fn bytes(&self) -> u64 {
        self.moved.iter().map(|span| span.bytes).sum::<u64>() + self.fresh
    }
}

/// A window with the free memory and fills that it consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) span: Span,
    /// Free memory that stays mapped.
    pub(super) stays: Vec<Span>,
    pub(super) fills: Vec<Fill>,
}

impl Plan {
    pub(super) fn fresh(&self) -> u64 {
        self.fills.iter().map(|fill| fill.fresh).sum()
    }

    pub(super) fn moved(&self) -> impl Iterator<Item = Span> {
        self.fills.iter().flat_map(|fill| fill.moved.iter().copied())
    }

    /// Returns the parts of the free memory that the plan uses, by address.
    pub(super) fn uses(&self) -> Vec<Span> {
        let mut uses: Vec<Span> = self.stays.iter().copied().chain(self.moved()).collect();
        uses.sort_unstable();
        uses
    }
}

/// Plans a request over `pieces`, sorted by address, with the `handles` that are completely free. Of the windows with the
/// fewest missing bytes it takes the one with the least fresh memory, then with the fewest handles. `None` without enough
/// contiguous addresses.
pub(super) fn plan(pieces: &[Piece], handles: &[Span], need: Need) -> Option<Plan> {
    let mut windows: Vec<Window<'_>> = pieces
        .chunk_by(|one, next| one.span.end() == next.span.ptr)
        .flat_map(|run| windows_in(run, need))
        .collect();
    let key = |window: &Window<'_>| (window.missing, window.span.ptr);
    if windows.len() > CANDIDATES {
        windows.select_nth_unstable_by_key(CANDIDATES, key);
        windows.truncate(CANDIDATES);
    }
    windows.sort_unstable_by_key(key);
    let handles = by_size(handles);
    let plans = windows.into_iter().map(|window| window.plan(&handles, need));
    plans.min_by_key(|plan| (plan.fresh(), plan.moved().count()))
}

/// Addresses for a request, inside a run of contiguous pieces.
#[derive(Debug)]
struct Window<'a> {
    run: &'a [Piece],
    span: Span,
    missing: u64,
}

/// Returns the windows that begin with a piece, or end with free memory.
fn windows_in(run: &[Piece], need: Need) -> Vec<Window<'_>> {
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return Vec::new() };
    let (begin, end) = (first.span.ptr, last.span.end());
    if end - begin < need.bytes {
        return Vec::new();
    }
    let coarse = need.align.max(need.granularity);
    let starts = run.iter().filter_map(|piece| piece.span.ptr.checked_next_multiple_of(need.align));
    let ends = run.iter().filter(|piece| piece.is_mapped);
    let before = ends.filter_map(|piece| {
        let start = piece.span.end().checked_sub(need.bytes)?;
        Some(start - start % coarse)
    });
    let in_run = starts.chain(before).filter(|&ptr| {
        ptr >= begin && ptr.checked_add(need.bytes).is_some_and(|window_end| window_end <= end)
    });
    in_run.map(|ptr| Window::new(run, ptr, need)).collect()
}

impl<'a> Window<'a> {
    fn new(run: &'a [Piece], ptr: u64, need: Need) -> Self {
        let first = run.partition_point(|piece| piece.span.end() <= ptr);
        let end = ptr + need.bytes;
        let count = run[first..].partition_point(|piece| piece.span.ptr < end);
        let run = &run[first..first + count];
        let span = Span { ptr, bytes: need.bytes };
        let unmapped = run.iter().filter(|piece| !piece.is_mapped);
        let missing = unmapped.map(|piece| part(piece.span, span).bytes).sum();
        Self { run, span, missing }
    }

    fn plan(self, handles: &[FreeHandle], need: Need) -> Plan {
        let granularity = need.granularity;
        let outside = |handle: &&FreeHandle| {
            handle.span.end() <= self.span.ptr || handle.span.ptr >= self.span.end()
        };
        let mut handles: Vec<FreeHandle> = handles.iter().filter(outside).copied().collect();
        let mut plan = Plan { span: self.span, stays: Vec::new(), fills: Vec::new() };
        for piece in self.run {
            let part = part(piece.span, self.span);
            if piece.is_mapped {
                plan.stays.push(part);
                continue;
            }
            // Handles lie at multiples of the granularity.
            let ptr = part.ptr - part.ptr % granularity;
            let wanted = (part.end() - ptr).next_multiple_of(granularity);
            let room = piece.span.end() - ptr;
            let most = need.max_moved - plan.moved().count();
            let moved = take_handles(&mut handles, FillRequest { wanted, room, most });
            let bytes: u64 = moved.iter().map(|span| span.bytes).sum();
            let fill = Fill { ptr, moved, fresh: wanted.saturating_sub(bytes) };
            plan.span.ptr = plan.span.ptr.min(ptr);
            let end = plan.span.end().max(ptr + fill.bytes());
            plan.span.bytes = end - plan.span.ptr;
            plan.fills.push(fill);
        }
        plan
    }
}

fn part(span: Span, window: Span) -> Span {
    let ptr = span.ptr.max(window.ptr);
    Span { ptr, bytes: span.end().min(window.end()).saturating_sub(ptr) }
}

/// A completely free handle, and the length of its run of contiguous free handles.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct FreeHandle {
    bytes: u64,
    run: Reverse<usize>,
    span: Span,
}

/// Sorts free handles by size. Of equal ones those of the shortest run are last, so that long runs stay whole.
fn by_size(handles: &[Span]) -> Vec<FreeHandle> {
    let runs = handles.chunk_by(|one, next| one.end() == next.ptr);
    let mut sorted: Vec<FreeHandle> = runs
        .flat_map(|run| {
            let of = |span: &Span| FreeHandle {
                bytes: span.bytes,
                run: Reverse(run.len()),
                span: *span,
            };
            run.iter().map(of)
        })
        .collect();
    sorted.sort_unstable();
    sorted
}

/// Unmapped addresses that need `wanted` bytes, at most `room`, in at most `most` handles.
#[derive(Clone, Copy, Debug)]
struct FillRequest {
    wanted: u64,
    room: u64,
    most: usize,
}

/// Removes the fewest handles for a fill from `handles`. If the allowed handles have too few bytes, it removes 5/8 of their
/// number, and fresh memory supplies the rest.
fn take_handles(handles: &mut Vec<FreeHandle>, fill: FillRequest) -> Vec<Span> {
    let FillRequest { wanted, room, most } = fill;
    let mut chosen = fewest(handles, wanted, room);
    let bytes: u64 = chosen.iter().map(|&at| handles[at].bytes).sum();
    if chosen.len() > most || bytes < wanted {
        // Fresh handles are also needed. The largest free ones are first.
        chosen.truncate(most - most / 8 * 3);
    }
    chosen.sort_unstable();
    let mut spans: Vec<Span> = chosen.iter().map(|&at| handles[at].span).collect();
    for at in chosen.into_iter().rev() {
        handles.remove(at);
    }
    spans.sort_unstable();
    spans
}

/// Returns the fewest handles: the largest ones, and last the smallest that suffices within `room`.
fn fewest(handles: &[FreeHandle], wanted: u64, room: u64) -> Vec<usize> {
    let mut missing = wanted;
    let mut chosen: Vec<usize> = Vec::new();
    let mut end = handles.len();
    while missing > 0 {
        let last = handles[..end].partition_point(|handle| handle.bytes < missing);
        if let Some(handle) = handles[..end].get(last)
            && wanted - missing + handle.bytes <= room
        {
            // The last of the equal ones belongs to the shortest run.
            let equal = handles[..end].partition_point(|other| other.bytes <= handle.bytes);
            chosen.push(equal - 1);
            break;
        }
        end = last;
        let Some(at) = end.checked_sub(1) else { break };
        missing -= handles[at].bytes;
        chosen.push(at);
        end = at;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAIN: u64 = 0x1000;

    fn span(ptr: u64, grains: u64) -> Span {
        Span { ptr: ptr * GRAIN, bytes: grains * GRAIN }
    }

    fn free(ptr: u64, grains: u64) -> Piece {
        Piece { span: span(ptr, grains), is_mapped: true }
    }

    fn gap(ptr: u64, grains: u64) -> Piece {
        Piece { span: span(ptr, grains), is_mapped: false }
    }

    fn need(grains: u64) -> Need {
        Need { bytes: grains * GRAIN, align: 256, granularity: GRAIN, max_moved: usize::MAX }
    }

    fn fill(wanted: u64, room: u64) -> FillRequest {
        FillRequest { wanted: wanted * GRAIN, room: room * GRAIN, most: usize::MAX }
    }

    #[test]
    fn a_request_is_put_where_the_fewest_bytes_are_missing() {
        let pieces = [free(0, 2), free(10, 5), gap(15, 4), free(19, 1), free(30, 3), gap(33, 100)];
        let handles = [span(0, 2), span(10, 5), span(19, 1), span(30, 3)];
        // Behind the five; the handle of two moves there.
        let plan = plan(&pieces, &handles, need(7)).unwrap();
        assert_eq!((plan.span, plan.stays.as_slice()), (span(10, 7), &[span(10, 5)][..]));
        assert_eq!(plan.fills, [Fill { ptr: 15 * GRAIN, moved: vec![span(0, 2)], fresh: 0 }]);
        assert_eq!(plan.uses(), [span(0, 2), span(10, 5)]);
    }

    #[test]
    fn unmapped_addresses_between_two_free_ranges_are_filled_exactly() {
        let pieces = [free(0, 3), gap(3, 2), free(5, 3), free(20, 4), gap(24, 100)];
        let handles = [span(0, 3), span(5, 3), span(20, 4)];
        // The handle of four does not fit between them, and would not be needed behind them.
        let plan = plan(&pieces, &handles, need(8)).unwrap();
        assert_eq!(plan.span, span(20, 10).min(plan.span));
        assert_eq!(plan.fresh(), 0, "{plan:?}");
        let only = [free(0, 3), gap(3, 2), free(5, 3)];
        let bridged = super::plan(&only, &[span(0, 3), span(5, 3)], need(8)).unwrap();
        assert_eq!((bridged.span, bridged.fresh()), (span(0, 8), 2 * GRAIN));
        assert_eq!(bridged.stays, [span(0, 3), span(5, 3)]);
    }

    #[test]
    fn without_moves_only_fresh_memory_fills() {
        let pieces = [free(0, 2), free(10, 5), gap(15, 40)];
        let still = Need { max_moved: 0, ..need(7) };
        let plan = plan(&pieces, &[span(0, 2), span(10, 5)], still).unwrap();
        assert_eq!((plan.span, plan.fresh(), plan.moved().count()), (span(10, 7), 2 * GRAIN, 0));
    }

    #[test]
    fn too_few_addresses_in_a_row_are_no_place() {
        let pieces = [free(0, 2), gap(2, 3), free(10, 4), gap(14, 1)];
        assert_eq!(plan(&pieces, &[span(0, 2)], need(6)), None);
        assert_eq!(plan(&[], &[], need(1)), None);
    }

    #[test]
    fn a_request_begins_at_its_alignment() {
        let odd = Span { ptr: 10 * GRAIN + 256, bytes: 5 * GRAIN - 256 };
        let pieces = [Piece { span: odd, is_mapped: true }, gap(15, 100)];
        for align in [256, 512, GRAIN, 4 * GRAIN] {
            let plan = plan(&pieces, &[], Need { align, ..need(6) }).unwrap();
            assert!(plan.span.holds(6 * GRAIN, align), "{align}: {plan:?}");
        }
    }

    #[test]
    fn the_fewest_handles_that_have_room_are_taken() {
        let take = |sizes: &[u64], wanted: u64, room: u64| {
            let mut ptr = 0;
            let spans = sizes.iter().map(|&size| {
                ptr += size + 1;
                span(ptr - size - 1, size)
            });
            let mut handles = by_size(&spans.collect::<Vec<_>>());
            let mut taken: Vec<u64> = take_handles(&mut handles, fill(wanted, room))
                .iter()
                .map(|span| span.bytes / GRAIN)
                .collect();
            taken.sort_unstable();
            assert_eq!(taken.len() + handles.len(), sizes.len());
            taken
        };
        assert_eq!(take(&[16, 8, 4, 2, 1], 13, 100), [16]);
        assert_eq!(take(&[16, 8, 4], 13, 13), [4, 8], "no room for more");
        assert_eq!(
            take(&[8, 4, 2, 1], 11, 100),
            [4, 8],
            "the last one is the smallest that suffices"
        );
        assert_eq!(take(&[2, 2], 14, 100), [2, 2], "all that there is");
        assert!(take(&[], 3, 100).is_empty());
    }

    #[test]
    fn of_equal_handles_the_shortest_run_is_broken() {
        let handles = [span(0, 2), span(2, 2), span(4, 2), span(10, 2), span(20, 2), span(22, 2)];
        let mut sorted = by_size(&handles);
        assert_eq!(take_handles(&mut sorted, fill(2, 2)), [span(10, 2)]);
        assert_eq!(take_handles(&mut sorted, fill(4, 4)), [span(20, 2), span(22, 2)]);
    }

    #[test]
    fn of_more_handles_than_a_request_may_move_the_largest_are_moved_and_the_rest_is_fresh() {
        let pieces = [free(0, 1), free(10, 4), free(20, 2), free(30, 1), gap(40, 100)];
        let handles = [span(0, 1), span(10, 4), span(20, 2), span(30, 1)];
        let all = plan(&pieces, &handles, need(8)).unwrap();
        assert_eq!((all.moved().count(), all.fresh()), (4, 0));
        let two = plan(&pieces, &handles, Need { max_moved: 2, ..need(8) }).unwrap();
        assert_eq!(two.moved().collect::<Vec<_>>(), [span(10, 4), span(20, 2)]);
        assert_eq!((two.fresh(), two.span.bytes), (2 * GRAIN, 8 * GRAIN));
    }
}
