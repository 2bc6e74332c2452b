//! Mapped segments: physical handles, mapped one after the other into a large reservation of addresses.
//!
//! A small request creates small handles, so that a block that stays pins little memory. A large one creates as few
//! handles as possible, since the cost of a handle does not depend on its size. A handle is unmapped and returned whole.
//! Idle handles can be remapped next to each other, so [`Segments::defragment`] fails only if the idle handles and the
//! free memory of the device are together too little.
//!
//! One lock is held while mappings change. A failed undo is kept, and tried again at the next call.

mod addresses;
mod state;

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use xlog_driver::sync::Mutex;
use xlog_driver::{DriverError, VirtualMemory};

use super::super::super::resource::{ResourceError, ResourceResult, StreamId};
use super::account::Account;
use super::config::SegmentConfig;
use super::{Segments, Span, generously, min_size, out_of_memory, to_usize};
use crate::CudaDevice;
use addresses::Addresses;
use state::{PhysicalHandle, State};

/// A pool has about this many small handles, so a large pool has larger ones.
const SMALL_HANDLES: u64 = 256;

/// Virtual memory of one device, for one pool.
pub(crate) struct MappedSegments {
    device: Arc<CudaDevice>,
    config: SegmentConfig,
    granularity: u64,
    account: Account,
    state: Mutex<State>,
}

impl MappedSegments {
    /// Creates segments of `device`, which must offer virtual memory. Takes no memory and reserves no addresses yet.
    pub(crate) fn new(device: Arc<CudaDevice>, config: SegmentConfig) -> ResourceResult<Self> {
        let granularity = virtual_memory(&device)?.granularity() as u64;
        config.validate_handles(granularity)?;
        let addresses = Addresses::new(granularity, device.properties().total_bytes);
        Ok(Self {
            account: Account::new(config.maximum, granularity),
            state: Mutex::new(State::new(addresses)),
            device,
            config,
            granularity,
        })
    }

    /// Bytes that a failure left behind: held of the device, and unknown to the pool.
    #[cfg(test)]
    pub(super) fn hidden_bytes(&self) -> u64 {
        self.state.lock().hidden_bytes()
    }

    fn memory(&self) -> ResourceResult<&dyn VirtualMemory> {
        virtual_memory(&self.device)
    }

    /// The sizes of the few handles that serve `minimum` bytes: about eight of a large request, so that most of them
    /// can be remapped when a smaller block occupies a part.
    fn exactly(&self, minimum: u64) -> Vec<u64> {
        let SegmentConfig { private_bytes, largest_handle, .. } = self.config;
        let largest = match private_bytes {
            0 => largest_handle,
            least => (minimum / 8).next_power_of_two().clamp(least, largest_handle),
        };
        let mut handles = vec![largest; to_usize(minimum / largest)];
        handles.extend(Some(minimum % largest).filter(|&rest| rest > 0));
        handles
    }

    /// The sizes of the handles for one step of growth that serves `minimum` bytes.
    fn growth(&self, minimum: u64) -> Vec<u64> {
        let SegmentConfig { growth, handle_bytes, private_bytes, .. } = self.config;
        let mut handles = match minimum {
            small if small <= handle_bytes => vec![handle_bytes],
            shared if shared <= private_bytes => self.small(shared),
            private => self.exactly(private),
        };
        let mut sum: u64 = handles.iter().sum();
        while sum < growth {
            let bytes = handle_bytes.min(growth - sum);
            handles.push(bytes);
            sum += bytes;
        }
        handles
    }

    /// The sizes of small handles that serve `minimum` bytes together.
    fn small(&self, minimum: u64) -> Vec<u64> {
        let unit = self.config.handle_bytes;
        let times = (self.reserved() / SMALL_HANDLES / unit).next_power_of_two();
        let bytes = unit.saturating_mul(times).min(minimum);
        let mut handles = vec![bytes; to_usize(minimum / bytes)];
        handles.extend(Some(minimum % bytes).filter(|&rest| rest > 0));
        handles
    }

    /// Creates handles of these sizes for a request of `requested` bytes: all or none.
    fn create(
        &self,
        memory: &dyn VirtualMemory,
        sizes: &[u64],
        requested: u64,
    ) -> ResourceResult<Vec<PhysicalHandle>> {
        let mut missing: u64 = sizes.iter().sum();
        if missing == 0 {
            return Ok(Vec::new());
        }
        self.account.charge(missing).map_err(|error| name_request(error, requested))?;
        let mut handles = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            match memory.create(to_usize(bytes)) {
                Ok(memory) => handles.push(PhysicalHandle { bytes, memory }),
                Err(error) => {
                    self.account.release(missing);
                    self.destroy(memory, handles);
                    return Err(name_request(error.into(), requested));
                }
            }
            missing -= bytes;
        }
        Ok(handles)
    }

    /// Destroys unmapped handles. One that the driver refuses is kept for the next sweep.
    fn destroy(&self, memory: &dyn VirtualMemory, handles: Vec<PhysicalHandle>) {
        if handles.is_empty() {
            return;
        }
        let (freed, _) = self.state.lock().destroy(memory, handles);
        self.account.release(freed);
    }

    /// Returns what an earlier failure left behind. What fails again is kept for the next sweep.
    fn sweep(&self, memory: &dyn VirtualMemory) -> ResourceResult<()> {
        let (freed, outcome) = self.state.lock().sweep(memory);
        self.account.release(freed);
        outcome
    }

    fn grow_by(
        &self,
        memory: &dyn VirtualMemory,
        sizes: &[u64],
        requested: u64,
    ) -> ResourceResult<Span> {
        let handles = self.create(memory, sizes, requested)?;
        let placed = self.state.lock().map_handles(memory, handles);
        placed.map_err(|(handles, error)| {
            self.destroy(memory, handles);
            name_request(error.into(), requested)
        })
    }

    /// Remaps the handles at `chosen`, followed by the `fresh` ones, into one range of addresses.
    fn remap_together(
        &self,
        memory: &dyn VirtualMemory,
        chosen: &[Span],
        fresh: Vec<PhysicalHandle>,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        let mut state = self.state.lock();
        let mut unmapped: Vec<(Span, PhysicalHandle)> = Vec::with_capacity(chosen.len());
        let mut refused = None;
        for &span in chosen {
            match state.unmap_handle(memory, span) {
                Ok(handle) => unmapped.push((span, handle)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let all = unmapped.iter().map(|(_, handle)| *handle).chain(fresh).collect();
        let placed = match refused {
            None => state.map_handles(memory, all),
            Some(error) => Err((all, error)),
        };
        let (mut unplaced, error) = match placed {
            Ok(span) => {
                for (old, _) in &unmapped {
                    state.addresses.free(old.ptr, old.bytes);
                }
                let gone = unmapped.into_iter().map(|(old, _)| old).collect();
                return (Some(span), gone, Ok(()));
            }
            Err(failed) => failed,
        };
        let mut gone = Vec::new();
        for (old, handle) in unmapped {
            let Some(index) = unplaced.iter().position(|other| *other == handle) else {
                // Stranded at its new address: only the old one is free.
                state.addresses.free(old.ptr, old.bytes);
                gone.push(old);
                continue;
            };
            unplaced.swap_remove(index);
            if !state.remap(memory, old.ptr, handle) {
                gone.push(old);
            }
        }
        let (freed, _) = state.destroy(memory, unplaced);
        drop(state);
        self.account.release(freed);
        (None, gone, Err(error.into()))
    }
}

impl Segments for MappedSegments {
    fn grow(&self, bytes: u64, _stream: StreamId) -> ResourceResult<Span> {
        let minimum = min_size(bytes, self.granularity, self.device.properties().total_bytes)?;
        let memory = self.memory()?;
        // Best effort: this request may need the bytes.
        let _ = self.sweep(memory);
        generously(self.growth(minimum), self.exactly(minimum), |sizes| {
            self.grow_by(memory, sizes, bytes)
        })
    }

    fn release(&self, idle: &[Span], bytes: u64) -> (Vec<Span>, ResourceResult<()>) {
        let memory = match self.memory() {
            Ok(memory) => memory,
            Err(error) => return (Vec::new(), Err(error)),
        };
        let mut state = self.state.lock();
        let (mut freed, mut outcome) = state.sweep(memory);
        let mut left = bytes;
        let mut gone = Vec::new();
        for span in state.inside(idle).into_iter().rev() {
            if span.bytes > left {
                continue;
            }
            match state.unmap_handle(memory, span) {
                Ok(handle) => {
                    left -= span.bytes;
                    state.addresses.free(span.ptr, span.bytes);
                    gone.push(span);
                    let (destroyed, this) = state.destroy(memory, [handle]);
                    freed += destroyed;
                    outcome = outcome.and(this);
                }
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        drop(state);
        self.account.release(freed);
        gone.reverse();
        (gone, outcome)
    }

    fn defragment(
        &self,
        idle: &[Span],
        bytes: u64,
        _stream: StreamId,
    ) -> (Option<Span>, Vec<Span>, ResourceResult<()>) {
        let total = self.device.properties().total_bytes;
        let checked = min_size(bytes, self.granularity, total)
            .and_then(|minimum| Ok((minimum, self.memory()?)));
        let (minimum, memory) = match checked {
            Ok(checked) => checked,
            Err(error) => return (None, Vec::new(), Err(error)),
        };
        let _ = self.sweep(memory);
        let chosen = choose(self.state.lock().inside(idle), minimum);
        let moved: u64 = chosen.iter().map(|span| span.bytes).sum();
        // Creation is most likely to fail, so it comes first, while nothing has moved.
        let fresh = match self.create(memory, &self.exactly(minimum.saturating_sub(moved)), bytes) {
            Ok(fresh) => fresh,
            Err(error) => return (None, Vec::new(), Err(error)),
        };
        let (span, gone, outcome) = self.remap_together(memory, &chosen, fresh);
        (span, gone, outcome.map_err(|error| name_request(error, bytes)))
    }

    fn choose(&self, idle: &[Span], bytes: u64) -> Vec<Span> {
        let Ok(minimum) = min_size(bytes, self.granularity, u64::MAX) else { return Vec::new() };
        choose(self.state.lock().inside(idle), minimum)
    }

    fn can_move(&self) -> bool {
        true
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn segment_count(&self) -> usize {
        self.state.lock().handles.len()
    }

    fn kind(&self) -> &'static str {
        "mapped"
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }
}

impl Drop for MappedSegments {
    fn drop(&mut self) {
        let Ok(memory) = self.memory() else { return };
        // Handles that the pool has not released stay mapped, with their reservation: work may still run there.
        let _ = self.sweep(memory);
        self.state.lock().addresses.release(memory);
    }
}

impl fmt::Debug for MappedSegments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedSegments")
            .field("device", &self.device.spec())
            .field("config", &self.config)
            .field("reserved", &self.reserved())
            .field("limit", &self.limit())
            .finish_non_exhaustive()
    }
}

fn virtual_memory(device: &CudaDevice) -> ResourceResult<&dyn VirtualMemory> {
    let unsupported = DriverError::Unsupported { call: "virtual memory" };
    device.driver().virtual_memory().ok_or_else(|| unsupported.into())
}

/// Chooses the fewest handles of `idle`, sorted by address, that make up `minimum` bytes; the last is the smallest that
/// suffices. Of equal handles it takes those of the shortest contiguous run, so that long runs stay whole. All handles
/// if they are too few.
fn choose(idle: Vec<Span>, minimum: u64) -> Vec<Span> {
    let runs = idle.chunk_by(|one, next| one.end() == next.ptr);
    let mut idle: Vec<(u64, Reverse<usize>, Span)> = runs
        .flat_map(|run| run.iter().map(|span| (span.bytes, Reverse(run.len()), *span)))
        .collect();
    idle.sort_unstable();
    let mut chosen = Vec::new();
    let mut missing = minimum;
    while missing > 0 && !idle.is_empty() {
        let enough = idle.partition_point(|(bytes, ..)| *bytes < missing);
        let (_, _, span) = idle.remove(enough.min(idle.len() - 1));
        missing = missing.saturating_sub(span.bytes);
        chosen.push(span);
    }
    chosen.sort_unstable();
    chosen
}

/// An error about a handle names the size of the request that needed it.
fn name_request(error: ResourceError, requested: u64) -> ResourceError {
    match error {
        ResourceError::OutOfMemory { detail, .. } => out_of_memory(requested, detail),
        other => other,
    }
}
