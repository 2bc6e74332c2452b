//! Fault injection: makes calls fail as real drivers do.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;

use xlog_driver::{DriverError, DriverResult, Gate, HostFn, StreamHandle};

use crate::engine::SharedMachine;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The driver calls, for counts and injected faults.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Call {
            $(#[doc = concat!("`", $text, "`")] $(#[$doc])* $name,)*
        }

        const CALLS: usize = Call::ALL.len();

        impl Call {
            /// Every call.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The name of the call.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The error of this call for an argument.
            pub(crate) fn invalid(self, value: impl Display, accepted: impl Display) -> DriverError {
                DriverError::invalid(self.name(), value, accepted)
            }
        }
    };
}

calls! {
    MemoryInfo = "memory_info",
    Synchronize = "synchronize",
    StreamCreate = "stream_create",
    StreamDestroy = "stream_destroy",
    StreamSynchronize = "stream_synchronize",
    StreamQuery = "stream_query",
    StreamIsIdle = "stream_is_idle",
    StreamId = "stream_id",
    StreamCapture = "stream_capture",
    StreamWaitEvent = "stream_wait_event",
    EventCreate = "event_create",
    EventDestroy = "event_destroy",
    EventRecord = "event_record",
    EventQuery = "event_query",
    EventSynchronize = "event_synchronize",
    Alloc = "alloc",
    MemoryAt = "memory_at",
    Free = "free",
    Memset = "memset",
    CopyHtod = "copy_htod",
    CopyDtoh = "copy_dtoh",
    CopyDtod = "copy_dtod",
    HostFn = "host_fn",
    Hold = "hold",
    Launch = "launch",
    PoolCreate = "pool_create",
    PoolDestroy = "pool_destroy",
    PoolUsage = "pool_usage",
    PoolTrim = "pool_trim",
    AllocAsync = "alloc_async",
    FreeAsync = "free_async",
    Reserve = "reserve",
    Release = "release",
    Create = "create",
    Destroy = "destroy",
    Map = "map",
    Unmap = "unmap",
    SetAccess = "set_access",
    AllocHost = "alloc_host",
    FreeHost = "free_host",
    BeginCapture = "begin_capture",
    EndCapture = "end_capture",
    CaptureInfo = "capture_info",
    GraphInstantiate = "graph_instantiate",
    GraphLaunch = "graph_launch",
    GraphRetain = "graph_retain",
    GraphDestroy = "graph_destroy",
    GraphExecDestroy = "graph_exec_destroy",
}

/// The kind of an injected failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Out of device memory.
    OutOfMemory,
    /// Not supported.
    Unsupported,
    /// A driver code without a variant of its own.
    Code(u32),
    /// The device is lost from this call on.
    DeviceLost,
}

/// Injects faults into one simulated device, and counts its calls.
///
/// ```
/// use xlog_driver::Driver;
/// use xlog_sim::{Call, Fault, SimConfig, SimDevice};
///
/// let device = SimDevice::open(SimConfig::default())?;
/// device.faults().fail_nth(Call::EventCreate, 2, Fault::Code(999));
/// assert!(device.event_create().is_ok());
/// assert!(device.event_create().is_err());
/// assert!(device.event_create().is_ok());
/// assert_eq!(device.faults().calls(Call::EventCreate), 3);
/// # Ok::<(), xlog_driver::DriverError>(())
/// ```
#[derive(Debug)]
pub struct Faults {
    pub(crate) shared: Arc<SharedMachine>,
    pub(crate) ordinal: u32,
}

impl Faults {
    /// Fails the `nth` call of this kind from now, where 1 is the next. The failing call changes nothing.
    pub fn fail_nth(&self, call: Call, nth: u64, fault: Fault) {
        let mut state = self.shared.lock();
        let made = state.faults.count(self.ordinal, call);
        state.faults.planned.insert((self.ordinal, call, made + nth.max(1)), fault);
    }

    /// Runs `action` at the start of the `nth` call of this kind from now, where 1 is the next, on the calling thread. It simulates what
    /// another thread could do between two calls, and may call the device.
    pub fn run_before_nth(&self, call: Call, nth: u64, action: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        let made = state.faults.count(self.ordinal, call);
        let at = (self.ordinal, call, made + nth.max(1));
        state.faults.actions.insert(at, Box::new(action));
    }

    /// Limits the device's memory to this many bytes; `None` restores the capacity.
    pub fn limit_memory(&self, bytes: Option<u64>) {
        self.shared.lock().ordinals[self.ordinal as usize].limit = bytes;
    }

    /// Stops the execution of a stream's queued work, except a running operation, until the gate is released or dropped.
    ///
    /// Unlike [`Driver::hold`](xlog_driver::Driver::hold) this is not an operation: it also stops work that is already queued, and orders
    /// nothing.
    pub fn hold_back(&self, stream: StreamHandle) -> DriverResult<Gate> {
        let mut state = self.shared.lock();
        let held = state.streams.get_mut(&stream.number()).filter(|s| s.ordinal == self.ordinal);
        let Some(held) = held else {
            return Err(DriverError::invalid("hold_back", stream, "a live stream of this device"));
        };
        held.held_back += 1;
        held.interrupt();
        drop(state);
        let shared = Arc::clone(&self.shared);
        Ok(Gate::new(move || {
            let mut state = shared.lock();
            if let Some(stream) = state.streams.get_mut(&stream.number()) {
                stream.held_back = stream.held_back.saturating_sub(1);
            }
            state.progress += 1;
            shared.wake(&mut state);
        }))
    }

    /// Loses the device: running work ends, queued work is dropped, and every later call fails.
    pub fn lose_device(&self) {
        self.shared.lose(self.ordinal, 719, "lost by fault injection".to_owned());
    }

    /// Removes all planned failures and actions, and the memory limit.
    pub fn clear(&self) {
        let mut state = self.shared.lock();
        let ordinal = self.ordinal;
        state.faults.planned.retain(|(at, _, _), _| *at != ordinal);
        state.faults.actions.retain(|(at, _, _), _| *at != ordinal);
        state.ordinals[ordinal as usize].limit = None;
    }

    /// Returns how many times a call was made, including failed ones.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.shared.lock().faults.count(self.ordinal, call)
    }

    /// Returns the number of all calls.
    pub fn total_calls(&self) -> u64 {
        self.shared.lock().faults.made[self.ordinal as usize].iter().sum()
    }
}

/// Planned faults and actions, and counts of calls.
pub(crate) struct FaultTable {
    planned: HashMap<(u32, Call, u64), Fault>,
    actions: HashMap<(u32, Call, u64), HostFn>,
    made: Vec<[u64; CALLS]>,
}

impl FaultTable {
    pub(crate) fn new(ordinals: u32) -> Self {
        let made = vec![[0; CALLS]; ordinals as usize];
        Self { planned: HashMap::new(), actions: HashMap::new(), made }
    }

    fn count(&self, ordinal: u32, call: Call) -> u64 {
        self.made[ordinal as usize][call as usize]
    }

    /// Returns the action planned for the next call of this kind.
    pub(crate) fn action(&mut self, ordinal: u32, call: Call) -> Option<HostFn> {
        if self.actions.is_empty() {
            return None;
        }
        let next = self.count(ordinal, call) + 1;
        self.actions.remove(&(ordinal, call, next))
    }

    /// Counts a call and returns its planned fault.
    pub(crate) fn on_call(&mut self, ordinal: u32, call: Call) -> Option<Fault> {
        let made = &mut self.made[ordinal as usize][call as usize];
        *made += 1;
        if self.planned.is_empty() { None } else { self.planned.remove(&(ordinal, call, *made)) }
    }
}
