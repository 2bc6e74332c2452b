//! The ends of contexts: the driver frees a context's memory and arrays. Pools and physical memory outlive it.

use crate::blocks::{Block, Space, after_success, around, release};
use crate::driver::{CuResult, SUCCESS};
use crate::pools;
use crate::state::{State, existing};
use xlog_base::IntMap;

/// The contexts that allocated memory. A primary context has its device as value.
pub(crate) type Contexts = IntMap<u64, Option<u32>>;

/// The current context, recorded on first use; 0 if there is none.
pub(crate) fn current(state: &State) -> u64 {
    let Some(context) = state.driver.current_context().filter(|context| *context != 0) else {
        return 0;
    };
    if !state.contexts.lock().contains_key(&context) {
        // The device of the request may be another one.
        let device = state.driver.current_device();
        let is_primary = |device: &u32| state.driver.primary_context(*device) == Some(context);
        state.contexts.lock().insert(context, device.filter(is_primary));
    }
    context
}

type Removed = Vec<((Space, u64), Block)>;

fn remove_blocks(state: &State, context: u64) -> Removed {
    let mut blocks = state.blocks.lock();
    let is_of_context =
        |_: &(Space, u64), block: &mut Block| block.context == context && block.pool.is_none();
    blocks.extract_if(is_of_context).collect()
}

fn release_blocks(state: &State, context: u64, blocks: &Removed) {
    state.contexts.lock().remove(&context);
    for ((_, place), block) in blocks {
        release(state, *place, None, block);
    }
}

/// `cuCtxDestroy`.
pub(crate) fn destroy(context: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = || {
        let state = existing().filter(|_| context != 0)?;
        Some((state, remove_blocks(state, context)))
    };
    around(before, call, |(state, blocks), result| match result {
        SUCCESS => release_blocks(state, context, &blocks),
        _ => state.blocks.lock().extend(blocks),
    })
}

/// `cuDevicePrimaryCtxRelease` and `cuDevicePrimaryCtxReset`: the memory is freed if the context is inactive afterwards.
pub(crate) fn release_primary(device: i32, call: impl FnOnce() -> CuResult) -> CuResult {
    after_success(call, || {
        let (state, device) = (existing()?, u32::try_from(device).ok()?);
        pools::forget_current(state);
        if state.driver.is_primary_active(device)? {
            return None;
        }
        let contexts = state.contexts.lock();
        let ended = contexts.iter().find(|(_, of)| **of == Some(device)).map(|(at, _)| *at);
        drop(contexts);
        let context = ended?;
        release_blocks(state, context, &remove_blocks(state, context));
        Some(())
    })
}
