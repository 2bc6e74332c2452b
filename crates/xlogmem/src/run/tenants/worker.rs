//! One process of `run tenants`: a runtime on the shared ledger, and a thread with a budget scope per tenant.
//!
//! A tenant holds buffers with unique contents, somewhat more than its share, and verifies each before its free. A refused
//! allocation is counted, and the tenant frees a buffer. At the end, no byte may be missing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use xlog_base::{Mutex, Random};
use xlog_cuda::device_runtime::{
    AllocTag, LedgerSetting, ResourceError, RuntimeConfig, XlogDeviceRuntime,
};
use xlog_cuda::{
    ByteSize, CudaDevice, DeviceSpec, GpuMemoryManager, Result, TrackedCudaSlice, XlogError,
};
use xlog_workloads::stack::run_threads;

use super::TenantsArguments;
use crate::write_json_line;

const ROWS: AllocTag = AllocTag("tenant rows");
/// The minimum and maximum buffer size in bytes.
const SMALLEST: u64 = 4 << 10;
const LARGEST: u64 = 4 << 20;

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) process: u32,
    pub(super) pid: u32,
    pub(super) blocks: u64,
    pub(super) refused: u64,
    pub(super) verified: u64,
    pub(super) wrong: u64,
    /// The maximum bytes in blocks.
    pub(super) peak_bytes: usize,
    /// How often a scope exceeded its hard limit.
    pub(super) scope_violations: u64,
    pub(super) races: usize,
    /// Bytes of blocks, of the budget and of the ledger that were not returned.
    pub(super) left_bytes: u64,
    pub(super) error: Option<String>,
}

/// A line of JSON that a process writes.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// This many more steps are done.
    Steps(u32),
    /// All steps are done.
    Done(Outcome),
}

/// Returns the configuration of each process's runtime.
pub(super) fn config(ledger: &Path, budget: u64, resource: &str) -> Result<RuntimeConfig> {
    Ok(RuntimeConfig::default()
        .with_resource(resource.parse()?)
        .with_budget(ByteSize::Bytes(budget))
        .with_ledger(LedgerSetting::File(ledger.to_owned())))
}

/// Runs the share of process `number`.
pub(super) fn run(
    number: u32,
    spec: DeviceSpec,
    config: &RuntimeConfig,
    arguments: &TenantsArguments,
) -> Outcome {
    let mut outcome = Outcome { process: number, pid: std::process::id(), ..Outcome::default() };
    if let Err(error) = work(spec, config, arguments, &mut outcome) {
        outcome.error = Some(error.to_string());
    }
    outcome
}

struct WorkerShared<'a> {
    manager: GpuMemoryManager,
    arguments: &'a TenantsArguments,
    /// The share of one tenant in the limit, in bytes.
    share: u64,
    limit: usize,
    refused: AtomicU64,
    verified: AtomicU64,
    wrong: AtomicU64,
    scope_violations: AtomicU64,
    peak: AtomicUsize,
    error: Mutex<Option<XlogError>>,
}

fn work(
    spec: DeviceSpec,
    config: &RuntimeConfig,
    arguments: &TenantsArguments,
    outcome: &mut Outcome,
) -> Result<()> {
    let device = Arc::new(CudaDevice::open_spec(spec)?);
    let runtime = Arc::new(XlogDeviceRuntime::with_config(device.clone(), config)?);
    let limit = runtime.effective_limit().map_or(0, |limit| limit.bytes());
    let all = u64::from(arguments.processes) * u64::from(arguments.tenants);
    let shared = WorkerShared {
        manager: GpuMemoryManager::with_runtime(runtime.clone()),
        arguments,
        share: limit as u64 / all,
        limit,
        refused: AtomicU64::new(0),
        verified: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
        scope_violations: AtomicU64::new(0),
        peak: AtomicUsize::new(0),
        error: Mutex::new(None),
    };
    let thread = |tenant: u32| {
        if let Err(error) = shared.tenant(outcome.process, tenant) {
            shared.error.lock().get_or_insert(error);
        }
    };
    run_threads(&device, arguments.tenants, thread);
    let settled = drain(&device, &runtime);
    outcome.blocks = runtime.statistics().allocations;
    outcome.refused = shared.refused.into_inner();
    outcome.verified = shared.verified.into_inner();
    outcome.wrong = shared.wrong.into_inner();
    outcome.scope_violations = shared.scope_violations.into_inner();
    outcome.peak_bytes = shared.peak.into_inner();
    outcome.races = device.races().len();
    outcome.left_bytes = left(&runtime);
    if let Some(error) = shared.error.into_inner() {
        return Err(error);
    }
    settled
}

fn drain(device: &CudaDevice, runtime: &XlogDeviceRuntime) -> Result<()> {
    device.synchronize()?;
    runtime.reap_pending()?;
    runtime.trim()?;
    Ok(())
}

/// Returns the bytes that were not returned, by any count.
fn left(runtime: &XlogDeviceRuntime) -> u64 {
    let blocks = runtime.bytes_outstanding() as u64;
    let budget = runtime.budget().map_or(0, |budget| budget.reserved_bytes()) as u64;
    let ledger = runtime.ledger().ledger().map_or(0, |ledger| ledger.used());
    blocks.max(budget).max(ledger)
}

struct LiveBuffer {
    buffer: TrackedCudaSlice<u64>,
    salt: u64,
}

impl WorkerShared<'_> {
    fn tenant(&self, process: u32, tenant: u32) -> Result<()> {
        let runtime = self.manager.runtime();
        let Some(budget) = runtime.budget() else {
            return Err(XlogError::Kernel("the runtime has no budget".to_owned()));
        };
        // A tenant is guaranteed its share within this process, and may borrow the same amount again.
        let (soft, hard) = (self.share as usize, (2 * self.share as usize).min(self.limit));
        let scope = budget.scope(&format!("tenant {tenant}"), soft, hard)?;
        let _inside = scope.enter();
        let stream = runtime.stream_pool().lease()?;
        let memory = self.manager.on_stream(stream.id());
        let mut random = Random::new(
            self.arguments.seed ^ (u64::from(process) << 48) ^ (u64::from(tenant) << 32) ^ 0x7e4a,
        );
        // Together the tenants want one and a half times the limit.
        let target = self.share + self.share / 2;
        let largest = LARGEST.min(target / 4).max(SMALLEST);
        let mut held: Vec<LiveBuffer> = Vec::new();
        let mut bytes = 0;
        for round in 0..self.arguments.rounds {
            let full = bytes > target;
            if !held.is_empty() && (full || random.chance(40)) {
                let one = held.swap_remove(random.below(held.len()));
                bytes -= one.buffer.size_bytes() as u64;
                self.free(one)?;
            } else {
                let size = SMALLEST + random.below_u64(largest - SMALLEST + 1);
                match self.allocate(&memory, size, random.next_u64())? {
                    Some(one) => {
                        bytes += one.buffer.size_bytes() as u64;
                        held.push(one);
                    }
                    None if !held.is_empty() => {
                        let one = held.swap_remove(0);
                        bytes -= one.buffer.size_bytes() as u64;
                        self.free(one)?;
                    }
                    None => {}
                }
                self.peak.fetch_max(runtime.bytes_outstanding(), Ordering::Relaxed);
                if scope.used() > hard {
                    self.scope_violations.fetch_add(1, Ordering::Relaxed);
                }
            }
            if round % 16 == 15 {
                // Writing fails only if the parent has ended.
                write_json_line(&Line::Steps(16))
                    .map_err(|error| XlogError::Kernel(error.to_string()))?;
            }
        }
        held.into_iter().try_for_each(|one| self.free(one))
    }

    /// Allocates a buffer with unique contents; `None` if it does not fit.
    fn allocate(
        &self,
        memory: &GpuMemoryManager,
        bytes: u64,
        salt: u64,
    ) -> Result<Option<LiveBuffer>> {
        let words = (bytes / 8) as usize;
        match memory.alloc_tagged(words, ROWS) {
            Ok(mut buffer) => {
                buffer.copy_from_slice(&contents(words, salt))?;
                Ok(Some(LiveBuffer { buffer, salt }))
            }
            Err(XlogError::Resource(
                ResourceError::OutOfBudget { .. } | ResourceError::OutOfMemory { .. },
            )) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Verifies a buffer and frees it.
    fn free(&self, held: LiveBuffer) -> Result<()> {
        let found = held.buffer.to_vec()?;
        let right = found == contents(held.buffer.len(), held.salt);
        let counter = if right { &self.verified } else { &self.wrong };
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn contents(words: usize, salt: u64) -> Vec<u64> {
    (0..words as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt).collect()
}
