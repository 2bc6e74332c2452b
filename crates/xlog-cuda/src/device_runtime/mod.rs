//! The runtime of one device: its streams, its memory resources, and the types that they share.
//!
//! The public types of the submodules are also exported here, with the device and stream types that they use.

#[allow(unsafe_code)]
mod adopted;
pub mod async_resource;
pub mod budget;
#[cfg(feature = "guard")]
pub mod debug_guard;
pub mod direct;
pub mod graph;
#[cfg(feature = "ledger")]
pub mod ledger;
pub mod logging;
pub(crate) mod ordering;
pub mod pinned_host;
pub mod pool;
pub mod resource;
pub mod runtime;
mod side_table;
pub mod statistics;
pub(crate) mod stream_ids;
pub mod stream_pool;
mod stream_table;

pub use adopted::AdoptedStream;
pub use async_resource::AsyncCudaResource;
pub use budget::{
    BudgetHandle, BudgetReservation, BudgetScope, EffectiveLimit, EnteredScope, GlobalDeviceBudget,
    LimitSource, OomCause, OomPolicy, OomReport, OtherProcess, OtherUse, Pressure, RefusedBy,
    RefusedCall, Registration, ScopeUsage, TagUsage, WaitPolicy,
};
#[cfg(feature = "guard")]
pub use debug_guard::{
    DamageKind, DebugGuardResource, FoundBy, GuardConfig, GuardHandle, GuardMode, GuardOutput,
    GuardPostMortem, GuardReport, NearbyBlock, PagePlacement,
};
pub use direct::DirectCudaResource;
pub use graph::{CaptureError, CaptureMode, CaptureOptions, CaptureScope, Graph, JoinedCapture};
#[cfg(feature = "ledger")]
pub use ledger::LedgerMeter;
#[cfg(feature = "trace")]
pub use logging::{BinarySink, CsvSink};
pub use logging::{
    InMemorySink, LogAction, LogRecord, LogResult, LoggingResource, LoggingSink, NullSink,
    QueryScope, ServedBy, SinkError, StackId,
};
pub use ordering::EventPolicy;
pub use pinned_host::{PinnedBuffer, PinnedHostResource};
pub use pool::{
    PoolConfig, PoolPaths, PoolResource, PoolReuse, PoolSanitizer, PoolSegments, PoolSnapshot,
    SanitizerSnapshot,
};
pub use resource::{
    Access, AllocRequest, AllocTag, BlockId, BlockState, DeviceBlock, DeviceMemoryResource,
    FreeSpace, Generation, GrowthHook, MIN_ALIGN, MemoryUse, PhysicalCap, PhysicalMeter,
    ResourceError, ResourceHome, ResourceResult, ResourceStatistics, SegmentRange, SegmentWatcher,
    StreamId,
};
pub use runtime::{
    BUDGET_VARIABLE, FailedFree, GUARD_VARIABLE, GuardSetting, LEDGER_VARIABLE, LOG_VARIABLE,
    Layer, LeakReport, LedgerPreview, LedgerSetting, LedgerStatus, LimitPreview,
    MAX_DEVICE_ORDINALS, QUOTA_NAME_VARIABLE, QUOTA_VARIABLE, RESOURCE_VARIABLE, ResourceKind,
    RuntimeConfig, SANITIZER_VARIABLE, STACKS_VARIABLE, XlogDeviceRuntime, check_log, open_log,
    set_failed_free_handler, set_leak_handler,
};
pub use statistics::{
    Backtraces, LiveBlock, LiveReport, Statistics, StatisticsConfig, StatisticsResource,
    StatisticsScope, StatisticsSnapshot,
};
pub use stream_pool::{
    DEFAULT_MAX_STREAMS, StreamLease, StreamPool, StreamPoolError, StreamPriority,
};

pub use crate::device::CudaDevice;
pub use crate::error::{Result, XlogError};
pub use crate::launch::LaunchRecorder;
pub use crate::memory::{
    DeviceRepr, DeviceView, DeviceViewMut, GpuMemoryManager, RawBlock, Reservation,
    TrackedCudaSlice,
};
pub use crate::stream::{DeviceStream, StreamDone};
pub use xlog_driver::Gate;
#[cfg(feature = "sim")]
pub use xlog_sim::RaceReport;
