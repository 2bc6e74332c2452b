//! A resource that counts bytes and does as it is told, and judges the budget above it.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use xlog_base::Random;
use xlog_cuda::device_runtime::{
    AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource, FreeSpace, Generation,
    GlobalDeviceBudget, OomPolicy, ResourceError, ResourceResult, StreamId,
};

pub(crate) const TAG: AllocTag = AllocTag("rows");

/// Bytes without memory. Its blocks have places in their generations, unless it is told to be a stranger.
pub(crate) struct Counting {
    pub(crate) state: Mutex<State>,
    placed: bool,
    pub(crate) reaps: AtomicUsize,
    pub(crate) trims: AtomicUsize,
    hook: Mutex<Option<Hook>>,
}

/// Called at the beginning of each call but frees, outside all locks, with the bytes that are asked for, if any. What it returns is the
/// failure of an allocation.
pub(crate) type Hook = Arc<dyn Fn(Option<usize>) -> Option<ResourceError> + Send + Sync>;

impl std::fmt::Debug for Counting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counting").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct State {
    blocks: HashMap<(u64, Generation), (usize, BlockState)>,
    free_slots: Vec<u64>,
    next: u64,
    /// Bytes that are live or retired.
    pub(crate) used: usize,
    pub(crate) most: usize,
    /// Blocks are this much larger than asked for.
    pub(crate) larger: usize,
    /// Returned blocks stay retired (or quarantined) until a reap.
    pub(crate) retire: Option<BlockState>,
    /// Whether a reap finds them done.
    pub(crate) reapable: bool,
    /// Of how many allocations one fails, and how.
    pub(crate) fail: Option<ResourceError>,
    pub(crate) fail_one_in: u64,
    pub(crate) fail_frees: bool,
    pub(crate) panics: bool,
    random: Random,
    /// The most that was used since each thread began its call.
    calls: Vec<usize>,
}

impl Counting {
    pub(crate) fn new(placed: bool) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                blocks: HashMap::new(),
                free_slots: Vec::new(),
                next: 1,
                used: 0,
                most: 0,
                larger: 0,
                retire: None,
                reapable: true,
                fail: None,
                fail_one_in: 0,
                fail_frees: false,
                panics: false,
                random: Random::new(7),
                calls: Vec::new(),
            }),
            placed,
            reaps: AtomicUsize::new(0),
            trims: AtomicUsize::new(0),
            hook: Mutex::new(None),
        })
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// A thread begins a call: from now on its most is watched.
    pub(crate) fn begin_call(&self, thread: usize) {
        let mut state = self.state.lock().unwrap();
        if state.calls.len() <= thread {
            state.calls.resize(thread + 1, 0);
        }
        state.calls[thread] = state.used;
    }

    /// The most that was used at an instant of that call.
    pub(crate) fn most_in_call(&self, thread: usize) -> usize {
        self.state.lock().unwrap().calls[thread]
    }

    pub(crate) fn used(&self) -> usize {
        self.state.lock().unwrap().used
    }

    pub(crate) fn set_hook(
        &self,
        hook: impl Fn(Option<usize>) -> Option<ResourceError> + Send + Sync + 'static,
    ) {
        *self.hook.lock().unwrap() = Some(Arc::new(hook));
    }

    pub(crate) fn clear_hook(&self) {
        *self.hook.lock().unwrap() = None;
    }

    fn call_hook(&self, bytes: Option<usize>) -> Option<ResourceError> {
        let hook = self.hook.lock().unwrap().clone();
        hook.and_then(|hook| hook(bytes))
    }

    fn panic_if_told(&self) {
        let told = self.state.lock().unwrap().panics;
        assert!(!told, "told to panic");
    }

    fn reap(&self) {
        self.reaps.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock().unwrap();
        if state.reapable {
            let done: Vec<_> = state
                .blocks
                .iter()
                .filter(|(_, (_, at))| *at == BlockState::Retired)
                .map(|(key, _)| *key)
                .collect();
            done.into_iter().for_each(|key| state.free(key));
        }
    }
}

impl State {
    fn free(&mut self, key: (u64, Generation)) {
        let (bytes, _) = self.blocks.remove(&key).unwrap();
        self.used -= bytes;
        self.free_slots.push(key.1.0 & 0xff_ffff);
    }
}

impl DeviceMemoryResource for Counting {
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.panic_if_told();
        if let Some(error) = self.call_hook(Some(bytes)) {
            return Err(error);
        }
        let mut state = self.state.lock().unwrap();
        let State { random, fail_one_in, .. } = &mut *state;
        if *fail_one_in > 0
            && random.one_in(*fail_one_in)
            && let Some(error) = state.fail.clone()
        {
            return Err(error);
        }
        let bytes = bytes + state.larger;
        state.used += bytes;
        state.most = state.most.max(state.used);
        let used = state.used;
        state.calls.iter_mut().for_each(|most| *most = (*most).max(used));
        let slot = state.free_slots.pop().unwrap_or(state.blocks.len() as u64 + 100);
        state.next += 1;
        let ptr = state.next << 8;
        let low = if self.placed { slot } else { 0 };
        let generation = Generation(state.next << 24 | low);
        state.blocks.insert((ptr, generation), (bytes, BlockState::Live));
        Ok(DeviceBlock {
            ptr,
            device_ordinal: 0,
            alloc_stream: stream,
            bytes,
            align: 256,
            tag,
            generation,
            state: BlockState::Live,
        })
    }

    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.panic_if_told();
        let mut state = self.state.lock().unwrap();
        if block.device_ordinal != 0 {
            return Err(ResourceError::Driver("another device".to_owned()));
        }
        let key = (block.ptr, block.generation);
        let (retire, fail) = (state.retire, state.fail_frees);
        match state.blocks.get_mut(&key) {
            Some((_, at)) if *at == BlockState::Live => {
                if fail {
                    *at = BlockState::Retired;
                    return Err(ResourceError::Driver("half way".to_owned()));
                }
                match retire {
                    Some(retired) => *at = retired,
                    None => state.free(key),
                }
                Ok(())
            }
            _ => Err(ResourceError::UseAfterFree { generation: block.generation }),
        }
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn bytes_outstanding(&self) -> usize {
        self.used()
    }

    fn reap_pending(&self) -> ResourceResult<()> {
        self.reap();
        Ok(())
    }

    fn reap_completed(&self) -> ResourceResult<()> {
        self.call_hook(None);
        self.reap();
        Ok(())
    }

    fn block_state(&self, block: BlockId) -> BlockState {
        self.call_hook(None);
        let state = self.state.lock().unwrap();
        state.blocks.get(&(block.ptr, block.generation)).map_or(BlockState::Freed, |(_, at)| *at)
    }

    fn trim(&self) -> ResourceResult<usize> {
        self.call_hook(None);
        self.trims.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock().unwrap();
        for (_, at) in state.blocks.values_mut() {
            if *at == BlockState::Quarantined {
                *at = BlockState::Retired;
            }
        }
        Ok(0)
    }

    fn free_space(&self) -> Option<FreeSpace> {
        Some(FreeSpace { bytes: 4096, largest: 1024 })
    }

    fn places_blocks(&self) -> bool {
        self.placed
    }
}

pub(crate) type Budget = GlobalDeviceBudget<Arc<Counting>>;

/// A budget over a counting resource.
/// Waits for the device however slow the machine is.
pub(crate) fn patient() -> OomPolicy {
    OomPolicy::default().with_deadline(Duration::from_secs(600))
}

pub(crate) fn budget(limit: usize) -> (Budget, Arc<Counting>) {
    let inner = Counting::new(true);
    (GlobalDeviceBudget::over(inner.clone(), limit), inner)
}

pub(crate) fn allocate(
    budget: &impl DeviceMemoryResource,
    bytes: usize,
) -> ResourceResult<DeviceBlock> {
    budget.allocate(bytes, StreamId::DEFAULT, TAG)
}

pub(crate) fn refusal(requested: usize, remaining: usize) -> Option<ResourceError> {
    Some(ResourceError::OutOfBudget { requested, remaining })
}

/// A claim that somebody else could make.
pub(crate) fn twin(block: &DeviceBlock) -> DeviceBlock {
    DeviceBlock { tag: block.tag, ..*block }
}
