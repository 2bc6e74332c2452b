//! Checks of guarded bytes on the device, in the order of a stream.
//!
//! A check is queued like any work and writes its findings into a slot of device memory, 128 bytes. After it has completed, a
//! separate stream reads the slot back, which waits for no other work.
//!
//! On a GPU the check is the kernel of `kernels/guard.cu`. The simulated device runs an equal kernel in Rust. For any other driver the
//! host copies and compares the bytes, which waits for the stream.
//!
//! Invariant: a slot is reused only after its check has completed. The checker does not order checks: the caller does.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use xlog_driver::cuda::{CudaFunction, LaunchShape};
use xlog_driver::sync::Mutex;
use xlog_driver::{DeviceKind, DriverError, DriverResult, StreamHandle, Waited};
#[cfg(feature = "sim")]
use xlog_sim::{SimDevice, SimKernel};

use super::redzones::{CANARY, FREED, Redzones};
use crate::CudaDevice;
#[cfg(feature = "sim")]
use crate::device_runtime::resource::Access;
use crate::device_runtime::resource::{PhysicalMeter, ResourceResult};
use crate::kernels::guard;

/// The bytes of a slot.
const SLOT: usize = 128;
/// The number of slots that are allocated from the device at a time.
const CHUNK: usize = 256;
/// The number of damaged bytes that a finding shows.
const SHOWN: usize = 16;
/// The number of bytes that a check on the host compares at a time.
const STEP: usize = 256;

/// A run of damaged bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Finding {
    /// The offset of the first one from the base of the redzones.
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) found: Vec<u8>,
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Findings {
    pub(super) around: Option<Finding>,
    pub(super) inside: Option<Finding>,
}

/// A slot that a queued check writes.
///
/// A check may still write a slot that is dropped unread, so such a slot is reused only after all work of the device has completed
/// ([`Checker::reclaim`]).
#[derive(Debug)]
pub(super) struct FindingSlot {
    at: u64,
    slots: Arc<Mutex<FindingSlots>>,
}

impl FindingSlot {
    /// Frees the slot. Its check has completed and was read, or was never queued.
    pub(super) fn free(mut self) {
        self.slots.lock().free_all([std::mem::take(&mut self.at)]);
    }
}

impl Drop for FindingSlot {
    fn drop(&mut self) {
        if self.at != 0 {
            self.slots.lock().abandoned.push(self.at);
        }
    }
}

/// A requested check.
#[derive(Debug)]
pub(super) enum Check {
    /// The check is queued, and writes this slot.
    Queued(FindingSlot),
    /// The check has completed.
    Done(Findings),
}

/// The method of checks on this device.
#[derive(Debug)]
enum CheckMethod {
    Cuda(CudaFunction),
    #[cfg(feature = "sim")]
    Simulated(Arc<SimDevice>),
    Copied,
}

/// Queues checks and reads their findings.
#[derive(Debug)]
pub(super) struct Checker {
    device: Arc<CudaDevice>,
    method: OnceLock<CheckMethod>,
    reader: OnceLock<StreamHandle>,
    slots: Arc<Mutex<FindingSlots>>,
    /// Locked while a chunk is allocated, so that each is metered once.
    meter: Mutex<Option<Meter>>,
}

/// The meter of the chunks' memory.
struct Meter(Arc<dyn PhysicalMeter>);

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meter")
    }
}

#[derive(Debug, Default)]
struct FindingSlots {
    free: Vec<u64>,
    chunks: Vec<u64>,
    taken: usize,
    /// Slots that were dropped unread: a check may still write them.
    abandoned: Vec<u64>,
}

impl FindingSlots {
    fn free_all(&mut self, given: impl IntoIterator<Item = u64>) {
        let before = self.free.len();
        self.free.extend(given);
        self.taken -= (self.free.len() - before).min(self.taken);
        // The lowest address is popped first, so that neighbours are read back together.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
    }
}

impl Checker {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        let (method, reader) = (OnceLock::new(), OnceLock::new());
        Self { device, method, reader, slots: Arc::default(), meter: Mutex::new(None) }
    }

    /// Loads the kernel and allocates the stream and the first slots, before the first block is allocated.
    pub(super) fn make_ready(&self) -> ResourceResult<()> {
        if self.method.get().is_none() {
            let _ = self.method.set(self.choose_method()?);
        }
        if matches!(self.method.get(), Some(CheckMethod::Copied)) {
            return Ok(());
        }
        let driver = self.device.driver();
        if self.reader.get().is_none() {
            let reader = driver.stream_create(0)?;
            if self.reader.set(reader).is_err() {
                #[allow(unsafe_code)]
                // SAFETY: just created, so no other thread names it.
                unsafe {
                    driver.stream_destroy(reader)?;
                }
            }
        }
        if self.slots.lock().chunks.is_empty() {
            self.add_chunk()?;
        }
        Ok(())
    }

    fn choose_method(&self) -> ResourceResult<CheckMethod> {
        #[cfg(feature = "sim")]
        if let Some(sim) = self.device.sim() {
            return Ok(CheckMethod::Simulated(sim.clone()));
        }
        match self.device.properties().kind {
            DeviceKind::Cuda => Ok(CheckMethod::Cuda(guard::load(&self.device)?)),
            _ => Ok(CheckMethod::Copied),
        }
    }

    /// Returns the physical memory of a chunk: the driver allocates whole units of its alignment.
    fn chunk_bytes(&self) -> usize {
        let step = self.device.properties().allocation_alignment.max(1);
        (CHUNK * SLOT).next_multiple_of(step)
    }

    /// Charges the existing chunks to a meter, and later ones before they are allocated.
    pub(super) fn start_meter(&self, meter: Arc<dyn PhysicalMeter>) -> ResourceResult<()> {
        let mut kept = self.meter.lock();
        let chunks = self.slots.lock().chunks.len();
        meter.charge(chunks * self.chunk_bytes())?;
        *kept = Some(Meter(meter));
        Ok(())
    }

    fn add_chunk(&self) -> ResourceResult<()> {
        let meter = self.meter.lock();
        if !self.slots.lock().free.is_empty() {
            // Another thread has added a chunk.
            return Ok(());
        }
        if let Some(Meter(meter)) = &*meter {
            meter.charge(self.chunk_bytes())?;
        }
        let start = self.device.driver().alloc(CHUNK * SLOT).inspect_err(|_| {
            if let Some(Meter(meter)) = &*meter {
                meter.release(self.chunk_bytes());
            }
        })?;
        let mut slots = self.slots.lock();
        slots.chunks.push(start);
        slots.free.extend((0..CHUNK).rev().map(|n| start + (n * SLOT) as u64));
        Ok(())
    }

    fn allocate_slot(&self) -> ResourceResult<FindingSlot> {
        loop {
            {
                let mut slots = self.slots.lock();
                if let Some(at) = slots.free.pop() {
                    slots.taken += 1;
                    drop(slots);
                    return Ok(FindingSlot { at, slots: self.slots.clone() });
                }
            }
            self.add_chunk()?;
        }
    }

    /// Reclaims the slots of unread checks, after a wait for all streams.
    pub(super) fn reclaim(&self) -> DriverResult<()> {
        let abandoned = std::mem::take(&mut self.slots.lock().abandoned);
        if abandoned.is_empty() {
            return Ok(());
        }
        let waited = self.device.driver().synchronize_streams();
        let mut slots = self.slots.lock();
        match waited {
            Ok(Waited::ForAll) => slots.free_all(abandoned),
            Ok(Waited::ForSome) | Err(_) => slots.abandoned.extend(abandoned),
        }
        waited.map(drop)
    }

    /// Queues a check of the redzones, and with `inside` of the poison in a freed block.
    ///
    /// The caller guarantees that the bytes stay live until the check has run, and orders the check against all other work on them.
    pub(super) fn check(
        &self,
        redzones: &Redzones,
        inside: bool,
        stream: StreamHandle,
    ) -> ResourceResult<Check> {
        if redzones.checked_bytes(inside) == 0 {
            return Ok(Check::Done(Findings::default()));
        }
        match self.method.get() {
            Some(CheckMethod::Cuda(function)) => {
                self.check_by_kernel(function, redzones, inside, stream)
            }
            #[cfg(feature = "sim")]
            Some(CheckMethod::Simulated(sim)) => {
                self.check_simulated(sim, redzones, inside, stream)
            }
            Some(CheckMethod::Copied) | None => {
                Ok(Check::Done(self.check_copy(redzones, inside, stream)?))
            }
        }
    }

    /// Checks the redzones of a block whose work has completed, on the reader's stream. Waits only for the check.
    pub(super) fn check_idle(&self, redzones: &Redzones) -> DriverResult<Findings> {
        match self.reader.get() {
            Some(reader) => self.check_copy(redzones, false, *reader),
            None => Err(DriverError::Unsupported { call: "guard slots" }),
        }
    }

    fn check_by_kernel(
        &self,
        function: &CudaFunction,
        redzones: &Redzones,
        inside: bool,
        stream: StreamHandle,
    ) -> ResourceResult<Check> {
        let slot = self.allocate_slot()?;
        let arguments = [
            redzones.base.into(),
            (redzones.front as u64).into(),
            (redzones.bytes as u64).into(),
            (redzones.back as u64).into(),
            u32::from(CANARY).into(),
            u32::from(FREED).into(),
            u32::from(inside).into(),
            slot.at.into(),
        ];
        let shape = LaunchShape::for_rows(redzones.checked_bytes(inside));
        #[allow(unsafe_code)]
        // SAFETY: the slot is memory of this device that only this check uses; the redzones are live and ordered by the caller, and
        // these are the kernel's arguments.
        let queued = unsafe {
            self.device
                .driver()
                .memset(slot.at, 0, SLOT, stream)
                .and_then(|()| function.launch(stream, shape, &arguments))
        };
        Ok(queued.map(|()| Check::Queued(slot))?)
    }

    #[cfg(feature = "sim")]
    fn check_simulated(
        &self,
        sim: &SimDevice,
        redzones: &Redzones,
        inside: bool,
        stream: StreamHandle,
    ) -> ResourceResult<Check> {
        let slot = self.allocate_slot()?;
        let z = *redzones;
        let kernel = SimKernel::new("guard_check", move |args| {
            let mut comparison = Comparison::default();
            let at = args.len() - 1;
            if inside {
                comparison.compare(args.bytes(0), 0, &z);
            } else {
                let mut next = 0;
                for (bytes, from) in [(z.front, 0), (z.back, z.front + z.bytes)] {
                    if bytes > 0 {
                        comparison.compare(args.bytes(next), from, &z);
                        next += 1;
                    }
                }
            }
            comparison.encode(args.bytes_mut(at));
        });
        let kernel = if inside {
            kernel.arg(z.base, z.checked_bytes(true), Access::Read)
        } else {
            let ranges = [(z.base, z.front), (z.back_at(), z.back)];
            let ranges = ranges.into_iter().filter(|(_, bytes)| *bytes > 0);
            ranges.fold(kernel, |kernel, (ptr, bytes)| kernel.arg(ptr, bytes, Access::Read))
        };
        match sim.launch(stream, kernel.arg(slot.at, SLOT, Access::Write)) {
            Ok(()) => Ok(Check::Queued(slot)),
            Err(error) => {
                slot.free();
                Err(error.into())
            }
        }
    }

    fn check_copy(
        &self,
        redzones: &Redzones,
        inside: bool,
        stream: StreamHandle,
    ) -> DriverResult<Findings> {
        let mut comparison = Comparison::default();
        let ranges: &[(usize, usize)] = match inside {
            true => &[(0, redzones.checked_bytes(true))],
            false => &[(0, redzones.front), (redzones.front + redzones.bytes, redzones.back)],
        };
        for &(from, count) in ranges.iter().filter(|(_, count)| *count > 0) {
            let mut bytes = vec![0; count];
            #[allow(unsafe_code)]
            // SAFETY: the redzones are live and ordered by the caller; the call returns when the copy is done.
            unsafe {
                self.device.driver().copy_dtoh(&mut bytes, redzones.base + from as u64, stream)?;
            }
            comparison.compare(&bytes, from, redzones);
        }
        Ok(comparison.findings())
    }

    /// Reads the findings of completed checks, in the order of `checked`.
    pub(super) fn read(&self, checked: &[&FindingSlot]) -> DriverResult<Vec<Findings>> {
        let Some(reader) = self.reader.get() else {
            return Err(DriverError::Unsupported { call: "guard slots" });
        };
        let checked: Vec<u64> = checked.iter().map(|slot| slot.at).collect();
        let mut order: Vec<usize> = (0..checked.len()).collect();
        order.sort_unstable_by_key(|&n| checked[n]);
        let mut findings = vec![Findings::default(); checked.len()];
        let chunks = self.slots.lock().chunks.clone();
        for run in order.chunk_by(|&a, &b| are_together(checked[a], checked[b], &chunks)) {
            let Some(&first) = run.first() else { continue };
            let mut bytes = vec![0; run.len() * SLOT];
            #[allow(unsafe_code)]
            // SAFETY: these slots belong to the checker, are adjacent, and their checks have completed.
            unsafe {
                self.device.driver().copy_dtoh(&mut bytes, checked[first], *reader)?;
            }
            for (slot, &n) in bytes.chunks_exact(SLOT).zip(run) {
                findings[n] = decode(slot);
            }
        }
        Ok(findings)
    }

    /// Frees the device memory if no check can still write it.
    pub(super) fn end(&self) {
        let driver = self.device.driver();
        let meter = self.meter.lock();
        let mut slots = self.slots.lock();
        if slots.taken == 0 {
            slots.free.clear();
            slots.chunks.retain(|&chunk| {
                #[allow(unsafe_code)]
                // SAFETY: every slot was read back after its check had completed, so nothing uses this memory.
                let freed = unsafe { driver.free(chunk) };
                if let (Ok(()), Some(Meter(meter))) = (&freed, &*meter) {
                    meter.release(self.chunk_bytes());
                }
                // A chunk that the driver could not free stays charged.
                freed.is_err()
            });
        }
        drop((slots, meter));
        if let Some(reader) = self.reader.get() {
            // A lost device has destroyed it already.
            #[allow(unsafe_code)]
            // SAFETY: the checker owns the stream, and is not used after this.
            let _ = unsafe { driver.stream_destroy(*reader) };
        }
    }
}

/// Returns whether one copy can read two slots. A driver refuses a copy across two allocations, even if they are adjacent.
fn are_together(slot: u64, next: u64, chunks: &[u64]) -> bool {
    slot + SLOT as u64 == next && !chunks.contains(&next)
}

/// The progress of a check on the host. The kernel keeps its progress in the slot.
#[derive(Default)]
struct Comparison {
    around: Option<Finding>,
    inside: Option<Finding>,
}

impl Comparison {
    /// Compares `bytes`, which begin `from` bytes after the base.
    fn compare(&mut self, bytes: &[u8], from: usize, redzones: &Redzones) {
        let user = redzones.front..redzones.front + redzones.bytes;
        let cuts = [user.start, user.end, from + bytes.len()];
        let mut at = from;
        for cut in cuts {
            let end = cut.clamp(at, from + bytes.len());
            let is_inside = user.contains(&at);
            let (due, finding) = match is_inside {
                true => (FREED, &mut self.inside),
                false => (CANARY, &mut self.around),
            };
            compare(bytes, from, at..end, due, finding);
            at = end;
        }
    }

    fn findings(self) -> Findings {
        Findings { around: self.around, inside: self.inside }
    }

    #[cfg(feature = "sim")]
    fn encode(&self, slot: &mut [u8]) {
        slot.fill(0);
        for (part, finding) in slot.chunks_exact_mut(SHOWN + 16).zip([&self.around, &self.inside]) {
            let Some(finding) = finding else { continue };
            let (words, found) = part.split_at_mut(16);
            words[..8].copy_from_slice(&(!finding.first).to_le_bytes());
            words[8..].copy_from_slice(&finding.count.to_le_bytes());
            found[..finding.found.len()].copy_from_slice(&finding.found);
        }
    }
}

/// Adds the bytes that are not `due` to `finding`. `range` has offsets from the base.
fn compare(bytes: &[u8], from: usize, range: Range<usize>, due: u8, finding: &mut Option<Finding>) {
    let same = [due; STEP];
    let mut start = range.start;
    for chunk in bytes[range.start - from..range.end - from].chunks(STEP) {
        if chunk != &same[..chunk.len()] {
            for (n, _) in chunk.iter().enumerate().filter(|(_, byte)| **byte != due) {
                let first = start + n;
                let shown = &bytes[first - from..bytes.len().min(first - from + SHOWN)];
                let new = || Finding { first: first as u64, count: 0, found: shown.to_vec() };
                finding.get_or_insert_with(new).count += 1;
            }
        }
        start += chunk.len();
    }
}

fn decode(slot: &[u8]) -> Findings {
    let word = |at: usize| {
        let bytes = slot.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let finding = |at: usize| {
        let count = word(at + 8);
        let found = slot.get(at + 16..at + 16 + SHOWN).unwrap_or_default().to_vec();
        (count > 0).then(|| Finding { first: !word(at), count, found })
    };
    Findings { around: finding(0), inside: finding(32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDZONES: Redzones = Redzones { base: 0, front: 300, bytes: 700, back: 100 };

    fn intact() -> Vec<u8> {
        let mut bytes = vec![CANARY; 1100];
        bytes[300..1000].fill(FREED);
        bytes
    }

    fn check(bytes: &[u8]) -> Findings {
        let mut comparison = Comparison::default();
        comparison.compare(bytes, 0, &REDZONES);
        let mut slot = [1; SLOT];
        comparison.encode(&mut slot);
        decode(&slot)
    }

    #[test]
    fn slots_of_chunks_that_touch_are_read_apart() {
        let (first, slot) = (0x1000, SLOT as u64);
        let second = first + CHUNK as u64 * slot;
        let chunks = [first, second];
        assert!(are_together(first, first + slot, &chunks));
        assert!(!are_together(second - slot, second, &chunks));
        assert!(are_together(second, second + slot, &chunks));
        assert!(!are_together(first, first + 2 * slot, &chunks));
    }

    #[test]
    fn every_single_byte_is_seen_where_it_is() {
        assert_eq!(check(&intact()), Findings::default());
        for at in 0..1100 {
            let mut bytes = intact();
            bytes[at] ^= 1;
            let found = check(&bytes);
            let is_inside = (300..1000).contains(&at);
            let (hit, other) = match is_inside {
                true => (found.inside, found.around),
                false => (found.around, found.inside),
            };
            let hit = hit.unwrap();
            assert_eq!((hit.first, hit.count, other), (at as u64, 1, None));
            let shown = (1100 - at).min(SHOWN);
            assert_eq!(hit.found[..shown], bytes[at..at + shown]);
        }
    }

    #[test]
    fn damage_in_every_part_is_counted_by_kind() {
        let mut bytes = intact();
        for at in [5, 299, 300, 640, 999, 1000, 1099] {
            bytes[at] = 0;
        }
        let found = check(&bytes);
        let sums = |finding: Option<Finding>| finding.map(|finding| (finding.first, finding.count));
        assert_eq!(sums(found.around), Some((5, 4)));
        assert_eq!(sums(found.inside), Some((300, 3)));
    }
}
