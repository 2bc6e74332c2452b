//! Synchronisations of the program, at which the driver returns memory of pools and graphs and the charges are corrected. See
//! `outstanding`.

use crate::driver::{CuResult, SUCCESS};
use crate::graphs;
use crate::messages::guarded;
use crate::outstanding::{Stream, stream_of};
use crate::pools;
use crate::state::{State, existing};

/// Synchronises, and corrects all charges while frees may be outstanding. `covers` returns the test for covered streams.
fn synchronize_with<C: Fn(&Stream) -> bool>(
    covers: impl FnOnce(&State) -> C,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let begun = guarded(|| {
        let state = existing().filter(|state| state.outstanding.is_any())?;
        Some((state, state.outstanding.take(covers(state))))
    });
    let covered = begun.flatten().filter(|(_, streams)| !streams.is_empty());
    let result = call();
    if let (Some((state, streams)), true) = (&covered, result != SUCCESS) {
        guarded(|| state.outstanding.note(streams.iter().copied()));
    }
    let is_due = |state: &&State| covered.is_some() || state.outstanding.is_any();
    if let (SUCCESS, Some(state)) = (result, existing().filter(is_due)) {
        guarded(|| correct_all(state));
    }
    result
}

fn correct_all(state: &State) {
    let changes = state.outstanding.changes();
    let mut is_left = pools::correct_all(state);
    is_left |= graphs::correct_all(state);
    state.outstanding.settle(changes, is_left);
}

fn covers_stream(state: &State, handle: u64) -> impl Fn(&Stream) -> bool + use<> {
    let synchronized = stream_of(state, handle);
    move |stream| *stream == synchronized
}

/// `cuStreamSynchronize`.
pub(crate) fn stream(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    synchronize_with(|state| covers_stream(state, handle), call)
}

/// `cuEventSynchronize`.
pub(crate) fn event(call: impl FnOnce() -> CuResult) -> CuResult {
    synchronize_with(|_| |_: &Stream| false, call)
}

/// `cuCtxSynchronize`.
pub(crate) fn context(call: impl FnOnce() -> CuResult) -> CuResult {
    let covers = |state: &State| {
        let context = state.driver.current_context();
        move |stream: &Stream| Some(stream.0) == context
    };
    synchronize_with(covers, call)
}
