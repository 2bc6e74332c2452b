//! Compares the ranges that queued work accesses with those that its launch has prepared.
//!
//! Simulated kernels, copies and fills record their ranges when they are queued, in a thread-local list of one launch. On a GPU
//! kernels record nothing, and nothing is compared.

use std::cell::RefCell;

use xlog_cuda::device_runtime::Access;

/// An address, a length in bytes, and the access.
pub(super) type Range = (u64, usize, Access);

thread_local! {
    /// The ranges of the launch that this thread queues.
    static TOUCHED: RefCell<Vec<Range>> = const { RefCell::new(Vec::new()) };
}

/// Records an access of the work that is being queued.
pub(super) fn touch(ptr: u64, bytes: usize, access: Access) {
    TOUCHED.with_borrow_mut(|touched| touched.push((ptr, bytes, access)));
}

/// Clears the list for the next launch.
pub(super) fn untouch() {
    TOUCHED.with_borrow_mut(Vec::clear);
}

/// Returns the number of accessed ranges that no prepared use covers.
pub(super) fn unprepared(prepared: &[Range]) -> u64 {
    let is_prepared = |one: &Range| prepared.iter().any(|range| allows(range, one));
    TOUCHED.with_borrow(|touched| touched.iter().filter(|one| !is_prepared(one)).count() as u64)
}

fn allows(prepared: &Range, touched: &Range) -> bool {
    let end = |range: &Range| range.0.saturating_add(range.1 as u64);
    let is_within = prepared.0 <= touched.0 && end(touched) <= end(prepared);
    is_within && (touched.2 == Access::Read || prepared.2 != Access::Read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_outside_or_a_write_to_what_is_read_is_not_prepared() {
        let prepared = [(100, 50, Access::Read), (200, 50, Access::Write)];
        for (touched, missing) in [
            ((100, 50, Access::Read), 0),
            ((120, 8, Access::Read), 0),
            ((120, 8, Access::Write), 1),
            ((140, 11, Access::Read), 1),
            ((99, 2, Access::Read), 1),
            ((200, 50, Access::ReadWrite), 0),
            ((200, 50, Access::Read), 0),
            ((300, 1, Access::Read), 1),
        ] {
            untouch();
            touch(touched.0, touched.1, touched.2);
            assert_eq!(unprepared(&prepared), missing, "{touched:?}");
        }
    }
}
