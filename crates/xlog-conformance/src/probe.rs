//! A resource that records its calls, for the checks of forwarding.
//!
//! It behaves like a budget over the async resource. Where that stack returns a default, the probe returns a value of its own, such as
//! [`FREE_SPACE`].
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use xlog_cuda::CudaDevice;
use xlog_cuda::device_runtime::{
    Access, AllocRequest, AllocTag, AsyncCudaResource, BlockId, BlockState, BudgetHandle,
    BudgetReservation, DeviceBlock, DeviceMemoryResource, FreeSpace, GlobalDeviceBudget,
    GrowthHook, MemoryUse, PhysicalCap, PhysicalMeter, ResourceError, ResourceHome, ResourceResult,
    ResourceStatistics, SegmentWatcher, StreamId, StreamPool,
};
use xlog_cuda::driver::sync::Mutex;

/// The limit of the budget in the probe.
pub(crate) const LIMIT: usize = 2 << 30;

/// The free space that the probe reports.
pub(crate) const FREE_SPACE: FreeSpace = FreeSpace { bytes: 12_345, largest: 678 };

/// The physical memory that the probe reports, and how much of it is cached.
pub(crate) const PHYSICAL_BYTES: usize = 98_765;
pub(crate) const CACHED_BYTES: usize = 4_321;

/// The calls of a probe, by method.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<BTreeMap<&'static str, usize>>);

impl Calls {
    fn note(&self, method: &'static str) {
        *self.0.lock().entry(method).or_insert(0) += 1;
    }

    /// The number of calls of `methods`.
    pub(crate) fn of(&self, methods: &[&str]) -> usize {
        let calls = self.0.lock();
        methods.iter().filter_map(|method| calls.get(method)).sum()
    }
}

/// Records every call and forwards it.
pub(crate) struct Probe {
    inner: GlobalDeviceBudget<AsyncCudaResource>,
    calls: Arc<Calls>,
}

impl Probe {
    pub(crate) fn new(device: &Arc<CudaDevice>, streams: &Arc<StreamPool>) -> Self {
        let memory = AsyncCudaResource::new(device.clone(), device.ordinal(), streams.clone());
        Self { inner: GlobalDeviceBudget::over(memory, LIMIT), calls: Arc::default() }
    }

    pub(crate) fn calls(&self) -> Arc<Calls> {
        self.calls.clone()
    }

    pub(crate) fn budget(&self) -> BudgetHandle {
        self.inner.handle()
    }

    fn noted(&self, method: &'static str) -> &GlobalDeviceBudget<AsyncCudaResource> {
        self.calls.note(method);
        &self.inner
    }
}

impl DeviceMemoryResource for Probe {
    fn inner_resource(&self) -> Option<&dyn DeviceMemoryResource> {
        Some(&self.inner)
    }
    fn allocate(
        &self,
        bytes: usize,
        stream: StreamId,
        tag: AllocTag,
    ) -> ResourceResult<DeviceBlock> {
        self.noted("allocate").allocate(bytes, stream, tag)
    }
    fn deallocate(&self, block: DeviceBlock) -> ResourceResult<()> {
        self.noted("deallocate").deallocate(block)
    }
    fn device_ordinal(&self) -> u32 {
        self.inner.device_ordinal()
    }
    fn bytes_outstanding(&self) -> usize {
        self.inner.bytes_outstanding()
    }
    fn reap_pending(&self) -> ResourceResult<()> {
        self.noted("reap_pending").reap_pending()
    }
    fn reap_completed(&self) -> ResourceResult<()> {
        self.noted("reap_completed").reap_completed()
    }
    fn record_block_use(&self, block: &DeviceBlock, use_stream: StreamId) -> ResourceResult<()> {
        self.noted("record_block_use").record_block_use(block, use_stream)
    }
    fn prepare_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.noted("prepare_block_use").prepare_block_use(block, use_stream, access)
    }
    fn finish_block_use(
        &self,
        block: BlockId,
        use_stream: StreamId,
        access: Access,
    ) -> ResourceResult<()> {
        self.noted("finish_block_use").finish_block_use(block, use_stream, access)
    }
    fn finish_block_uses(
        &self,
        uses: &[(BlockId, Access)],
        use_stream: StreamId,
    ) -> ResourceResult<()> {
        self.noted("finish_block_uses").finish_block_uses(uses, use_stream)
    }
    fn block_state(&self, block: BlockId) -> BlockState {
        self.noted("block_state").block_state(block)
    }
    fn allocate_request(
        &self,
        request: AllocRequest,
        reservation: Option<&mut BudgetReservation>,
    ) -> ResourceResult<DeviceBlock> {
        self.noted("allocate_request").allocate_request(request, reservation)
    }
    fn charge_for(&self, bytes: usize, align: usize) -> usize {
        self.noted("charge_for").charge_for(bytes, align)
    }
    fn home(&self) -> Option<ResourceHome> {
        self.noted("home").home()
    }
    fn statistics(&self) -> ResourceStatistics {
        self.noted("statistics").statistics()
    }
    fn trim(&self) -> ResourceResult<usize> {
        self.noted("trim").trim()
    }
    fn trim_under_pressure(&self) -> ResourceResult<usize> {
        self.noted("trim_under_pressure").trim_under_pressure()
    }
    fn return_idle(&self, now: Instant) -> ResourceResult<usize> {
        self.noted("return_idle").return_idle(now)
    }
    fn on_growth(&self, hook: GrowthHook) -> bool {
        self.noted("on_growth").on_growth(hook)
    }
    fn memory_use(&self) -> Option<MemoryUse> {
        Some(MemoryUse::of_physical(PHYSICAL_BYTES, CACHED_BYTES, 0))
    }
    fn meter_physical(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        self.noted("meter_physical").meter_physical(meter)
    }
    fn cap_physical(&self, cap: Arc<PhysicalCap>) -> ResourceResult<()> {
        self.noted("cap_physical").cap_physical(cap)
    }
    fn watch_segments(&self, watcher: &Weak<dyn SegmentWatcher>) -> bool {
        self.noted("watch_segments").watch_segments(watcher)
    }
    fn physical_bytes(&self) -> Option<usize> {
        Some(PHYSICAL_BYTES)
    }
    fn free_space(&self) -> Option<FreeSpace> {
        Some(FREE_SPACE)
    }
    fn reserve_budget(&self, bytes: usize) -> ResourceResult<Option<BudgetReservation>> {
        self.noted("reserve_budget").reserve_budget(bytes)
    }
    fn log_refusal(&self, _request: AllocRequest, _error: &ResourceError) {
        self.calls.note("log_refusal");
    }
}
