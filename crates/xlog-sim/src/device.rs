//! Simulated machines and devices, and their calls beyond the [`Driver`](xlog_driver::Driver) trait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use xlog_driver::{
    Access, DeviceKind, DeviceProperties, DeviceUuid, DriverError, DriverResult, StreamHandle,
};

use crate::config::SimConfig;
use crate::engine::{Guard, SharedMachine};
use crate::faults::{Call, Faults};
use crate::kernel::{KernelRange, SimKernel};
use crate::memory::{BLOCK_ALIGN, Owner as BlockOwner, RegionKind};
use crate::op::{Argument, Label, Meant, OpKind};
use crate::race::{RaceReport, UnreadRaces};
use crate::state::State;
use crate::threads;

/// Several simulated devices with common clocks, so that a stream of one can wait for events of another.
#[derive(Debug)]
pub struct SimMachine {
    owner: Arc<Owner>,
}

impl SimMachine {
    /// Makes a machine. An invalid configuration is refused with the field and its accepted values.
    pub fn new(config: SimConfig) -> DriverResult<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        config.validate()?;
        let shared = SharedMachine::new(config, NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Self { owner: Arc::new(Owner(shared)) })
    }

    /// Opens a device of the machine. All opens of one ordinal share memory and streams.
    pub fn device(&self, ordinal: u32) -> DriverResult<Arc<SimDevice>> {
        let config = &self.owner.0.config;
        if ordinal >= config.ordinals {
            return Err(DriverError::invalid(
                "open simulated device",
                format!("ordinal {ordinal}"),
                format!("an ordinal below {}", config.ordinals),
            ));
        }
        let mut uuid = *b"xlog-sim\0\0\0\0\0\0\0\0";
        uuid[8..15].copy_from_slice(&self.owner.0.machine.to_be_bytes()[1..]);
        uuid[15] = ordinal as u8;
        let properties = DeviceProperties {
            kind: DeviceKind::Simulated,
            ordinal,
            name: match config.seed {
                Some(seed) => format!("simulated device, seed {seed}"),
                None => "simulated device".to_owned(),
            },
            uuid: DeviceUuid(uuid),
            total_bytes: config.capacity,
            driver_version: 0,
            compute_capability: (0, 0),
            multiprocessors: 0,
            least_priority: 0,
            greatest_priority: -5,
            async_pools: config.async_pools,
            virtual_memory: config.virtual_memory,
            granularity: if config.virtual_memory { config.granularity } else { 0 },
            peak_bandwidth: None,
            allocation_alignment: BLOCK_ALIGN as usize,
        };
        Ok(Arc::new(SimDevice {
            shared: Arc::clone(&self.owner.0),
            owner: Arc::clone(&self.owner),
            properties,
        }))
    }
}

/// Shuts the machine down when its last device and machine handle are dropped.
#[derive(Debug)]
struct Owner(Arc<SharedMachine>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

/// One simulated device. It implements [`Driver`](xlog_driver::Driver).
///
/// ```
/// use xlog_driver::Driver;
/// use xlog_sim::{RaceKind, SimConfig, SimDevice};
///
/// let device = SimDevice::open(SimConfig::default().with_seed(1))?;
/// let (a, b) = (device.stream_create(0)?, device.stream_create(0)?);
/// let block = device.alloc(64)?;
/// // SAFETY: the block is live and 64 bytes long.
/// unsafe {
///     device.memset(block, 1, 64, a)?;
///     device.memset(block, 2, 64, b)?; // nothing orders it after the first
/// }
/// assert!(device.stream_synchronize(b).is_err());
/// assert_eq!(device.races()[0].kind, RaceKind::WriteWrite);
/// # Ok::<(), xlog_driver::DriverError>(())
/// ```
pub struct SimDevice {
    pub(crate) shared: Arc<SharedMachine>,
    pub(crate) properties: DeviceProperties,
    owner: Arc<Owner>,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDevice")
            .field("ordinal", &self.properties.ordinal)
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl SimDevice {
    /// Opens the first device of a new machine.
    pub fn open(config: SimConfig) -> DriverResult<Arc<Self>> {
        SimMachine::new(config)?.device(0)
    }

    /// Returns the machine of this device.
    pub fn machine(&self) -> SimMachine {
        SimMachine { owner: Arc::clone(&self.owner) }
    }

    /// Returns the seed of the deterministic scheduler; `None` with threads.
    pub fn seed(&self) -> Option<u64> {
        self.shared.config.seed
    }

    /// Returns the races found on this machine in the order of analysis, at most the first 1000.
    ///
    /// A synchronisation fails with the first race since the last one only; this returns all of them.
    pub fn races(&self) -> Vec<RaceReport> {
        let mut state = self.shared.lock();
        state.detector.mark_all_read();
        state.detector.reports().to_vec()
    }

    /// Returns the number of races found on this machine, including those without a stored report.
    pub fn race_count(&self) -> u64 {
        let mut state = self.shared.lock();
        state.detector.mark_all_read();
        state.detector.total()
    }

    /// Returns and clears the races of this machine that no call has returned and neither [`SimDevice::races`] nor
    /// [`SimDevice::race_count`] has read. A program should check them before it ends.
    #[must_use]
    pub fn take_unread_races(&self) -> UnreadRaces {
        self.shared.lock().detector.take_unread()
    }

    /// Returns a hash of the execution order. Equal programs with equal seeds give equal hashes.
    pub fn order_hash(&self) -> u64 {
        self.shared.lock().order_hash
    }

    /// Returns the simulated time of the host or the last stream, whichever is later. Zero without a latency model.
    pub fn simulated_time(&self) -> Duration {
        let state = self.shared.lock();
        let streams = state.streams.values().map(|stream| stream.line.time).max().unwrap_or(0);
        Duration::from_nanos(streams.max(state.host_time))
    }

    /// Returns fault injection and call counts.
    pub fn faults(&self) -> Faults {
        Faults { shared: Arc::clone(&self.shared), ordinal: self.ordinal() }
    }

    /// Queues a simulated kernel. Its arguments must be live, and may overlap only if all overlapping ones are read-only.
    pub fn launch(&self, stream: StreamHandle, kernel: SimKernel) -> DriverResult<()> {
        let SimKernel { name, ranges, body } = kernel;
        let mut state = self.enter_on(Call::Launch, stream)?;
        refuse_overlap(&ranges)?;
        let arguments = ranges
            .iter()
            .filter(|range| range.bytes > 0)
            .map(|range| self.argument(&state, Call::Launch, range.ptr, range.bytes, range.access))
            .collect::<DriverResult<Vec<_>>>()?;
        if arguments.len() != ranges.len() {
            return Err(
                Call::Launch.invalid("an argument of 0 bytes", "arguments of at least one byte")
            );
        }
        let kind = OpKind::Kernel(body);
        self.submit(&mut state, Call::Launch, stream, Label::Given(name), kind, arguments)
    }

    /// Marks the stream as captured by other code, or ends that. As with CUDA, a stream that waits for an event of a captured stream joins
    /// the capture. Work queued on such streams still runs; [`Graphs::begin_capture`](xlog_driver::Graphs::begin_capture) records instead.
    pub fn set_capturing(&self, stream: StreamHandle, capturing: bool) -> DriverResult<()> {
        let mut state = self.shared.lock();
        self.check_stream(&state, Call::StreamCapture, stream)?;
        let origin = stream.number();
        for joined in state.streams.values_mut().filter(|each| each.captured_by == Some(origin)) {
            joined.captured_by = None;
        }
        if capturing && let Some(stream) = state.streams.get_mut(&origin) {
            stream.captured_by = Some(origin);
        }
        Ok(())
    }

    /// Names live memory in race reports of work queued from now on.
    pub fn tag_memory(&self, ptr: u64, bytes: usize, tag: &str) -> DriverResult<()> {
        let mut state = self.shared.lock();
        state.space.check("tag_memory", ptr, bytes as u64)?;
        state.space.tag(ptr, bytes as u64, tag);
        Ok(())
    }

    /// Runs host threads and waits for them.
    ///
    /// With a seed they are logical: one runs at a time, and at every driver call the seed chooses the next, so that the whole test can be
    /// replayed. They must block only in this device or on an [`xlog_driver::sync::Mutex`]. Without a seed they are ordinary threads.
    ///
    /// # Panics
    /// Resumes the first panic of a body after all have ended.
    pub fn run_threads<'a>(&self, bodies: Vec<Box<dyn FnOnce() + Send + 'a>>) {
        match self.shared.config.seed {
            Some(_) => {
                let seed = self.shared.lock().rng.next_u64();
                threads::run(self.shared.machine, seed, bodies);
            }
            None => threads::run_plain(bodies),
        }
    }

    // Helpers of the driver calls.

    pub(crate) fn ordinal(&self) -> u32 {
        self.properties.ordinal
    }

    pub(crate) fn enter(&self, call: Call) -> DriverResult<Guard<'_>> {
        self.shared.enter(self.ordinal(), call)
    }

    /// [`SimDevice::enter`] for a call that names a stream.
    pub(crate) fn enter_on(&self, call: Call, stream: StreamHandle) -> DriverResult<Guard<'_>> {
        let state = self.enter(call)?;
        self.check_stream(&state, call, stream)?;
        Ok(state)
    }

    /// Adds to the host's simulated time.
    pub(crate) fn cost(state: &mut State, cost: impl FnOnce(&crate::latency::LatencyModel) -> u64) {
        if let Some(model) = &state.latency {
            state.host_time += cost(model);
        }
    }

    pub(crate) fn check_stream(
        &self,
        state: &State,
        call: Call,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        match state.streams.get(&stream.number()) {
            Some(known) if !known.destroyed && known.ordinal == self.ordinal() => Ok(()),
            Some(known) if known.destroyed => Err(call
                .invalid(format!("{stream}, which was destroyed"), "a live stream of this device")),
            Some(known) => Err(call.invalid(
                format!("{stream} of device {}", known.ordinal),
                format!("a live stream of device {}", self.ordinal()),
            )),
            None => Err(call.invalid(
                format!("{stream}, unknown or destroyed"),
                "a live stream of this device",
            )),
        }
    }

    /// Refuses memory of another device, which only `copy_dtod` may access.
    pub(crate) fn check_home(&self, call: Call, ptr: u64, owner: u32) -> DriverResult<()> {
        if owner == self.ordinal() {
            return Ok(());
        }
        Err(call.invalid(
            format!("{ptr:#x} of device {owner}"),
            format!("memory of device {}; between devices there is copy_dtod", self.ordinal()),
        ))
    }

    /// Validates a range and makes it an argument of work.
    pub(crate) fn argument(
        &self,
        state: &State,
        call: Call,
        ptr: u64,
        bytes: usize,
        access: Access,
    ) -> DriverResult<Argument> {
        let (length, writes) = (bytes as u64, access.writes());
        let region = state.space.check(call.name(), ptr, length)?;
        if call != Call::CopyDtod {
            self.check_home(call, ptr, region.ordinal)?;
        }
        let meant = match &region.kind {
            RegionKind::Block { owner: BlockOwner::Plain | BlockOwner::Host, .. } => {
                Meant::Plain(region.generation)
            }
            RegionKind::Block { owner: BlockOwner::Pool(_), .. } => Meant::Ordered,
            RegionKind::Reservation { .. } => Meant::Reserved {
                reservation: region.generation,
                mappings: region.mapped(ptr, length, writes),
            },
        };
        let pieces = match meant {
            Meant::Reserved { .. } => Vec::new(),
            _ => region.pieces(ptr, length, writes).unwrap_or_default(),
        };
        let tag = state.space.tag_of(ptr);
        Ok(Argument { ptr, bytes: bytes as u64, access, meant, tag, pieces })
    }

    /// Queues work and notifies the engine.
    pub(crate) fn push(
        &self,
        state: &mut State,
        stream: StreamHandle,
        label: Label,
        kind: OpKind,
        arguments: Vec<Argument>,
    ) -> u64 {
        Self::cost(state, |model| model.launch);
        let sequence = state.push(stream, label, kind, arguments);
        self.shared.queued(state, stream.number());
        sequence
    }

    /// Returns and clears the race that the next synchronisation of `stream` reports.
    pub(crate) fn report_race(
        state: &mut State,
        call: Call,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        match Self::take_race(state, stream) {
            Some(race) => Err(Self::returned(state, call, &race)),
            None => Ok(()),
        }
    }

    pub(crate) fn take_race(state: &mut State, stream: StreamHandle) -> Option<Arc<str>> {
        state.streams.get_mut(&stream.number()).and_then(|stream| stream.race.take())
    }

    /// The error with which a call returns a race.
    pub(crate) fn returned(state: &mut State, call: Call, race: &Arc<str>) -> DriverError {
        state.detector.mark_returned(race);
        DriverError::Race { call: call.name(), report: race.to_string() }
    }
}

fn refuse_overlap(ranges: &[KernelRange]) -> DriverResult<()> {
    for (i, a) in ranges.iter().enumerate() {
        for b in &ranges[i + 1..] {
            let apart = a.ptr.saturating_add(a.bytes as u64) <= b.ptr
                || b.ptr.saturating_add(b.bytes as u64) <= a.ptr;
            if !apart && (a.access.writes() || b.access.writes()) {
                return Err(Call::Launch.invalid(
                    format!(
                        "the overlapping arguments of {} bytes at {:#x} and {} bytes at {:#x}",
                        a.bytes, a.ptr, b.bytes, b.ptr
                    ),
                    "arguments that overlap only where all of them read",
                ));
            }
        }
    }
    Ok(())
}
