//! Copies between pageable host memory and the device, through pinned buffers.
//!
//! The driver may wait for the stream when it copies from or to pageable memory. `copy_in` first copies the source into a pinned buffer, so
//! that the source is free on return and nothing waits, even for a held stream. `copy_out` uses a pinned buffer too, so that only the
//! calling thread waits and no lock of the driver is held.
//!
//! Buffer sizes are powers of two; larger copies are split. After a copy is queued, its buffer is in flight behind a recorded event. A
//! thread that needs a buffer reclaims those whose event has completed; if none has, it allocates another. `cuMemFreeHost` may wait for the
//! whole device, so buffers beyond [`KEEP_BYTES`] are freed only by calls that may wait. Until then the cache holds the peak that was in
//! flight.
//!
//! Invariant: a buffer is in one of four states: idle; owned by one copy; in flight behind its event; or stranded, because no event could
//! be recorded behind its copy. A stranded buffer is reusable only after all streams were synchronised.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::{CUevent, CUstream};

use super::abi::code;
use super::context::Context;
use crate::sync::Mutex;
use crate::{DriverResult, Waited};

const SMALLEST_BYTES: usize = 4 << 10;
/// The largest buffer, and so the unit into which copies are split.
pub(super) const LARGEST_BYTES: usize = 4 << 20;
const CLASSES: usize = (LARGEST_BYTES.ilog2() - SMALLEST_BYTES.ilog2()) as usize + 1;
/// Smaller buffers are cut from slabs of this size, which stay until the device is closed.
const SLAB_BYTES: usize = 1 << 20;
/// Bytes that the cache keeps in buffers that have an allocation of their own.
pub(super) const KEEP_BYTES: usize = 64 << 20;
/// The maximum number of pieces of one copy to the host in flight at once.
const WINDOW: usize = 4;

#[derive(Default)]
pub(super) struct Staging {
    state: Mutex<State>,
    /// Bytes in buffers with an allocation of their own, idle or not.
    whole_bytes: AtomicUsize,
}

#[derive(Default)]
struct State {
    idle: [Vec<Buffer>; CLASSES],
    /// By stream and in queueing order, so that one query per stream finds whether a buffer can be reclaimed.
    in_flight: HashMap<usize, VecDeque<Buffer>>,
    stranded: Vec<Buffer>,
    slabs: Vec<NonNull<c_void>>,
}

// SAFETY: slabs are only pointers to be freed, on any thread; everything else is `Send` by itself.
unsafe impl Send for State {}

struct Buffer {
    host: NonNull<u8>,
    bytes: usize,
    /// Recorded behind the latest copy; null before the first copy.
    event: CUevent,
    /// The buffer has its own allocation and is not part of a slab.
    is_whole: bool,
}

// SAFETY: a buffer has one owner at a time, and pinned memory and events may be used on any thread.
unsafe impl Send for Buffer {}

impl Buffer {
    fn class(bytes: usize) -> usize {
        let rounded = bytes.clamp(SMALLEST_BYTES, LARGEST_BYTES).next_power_of_two();
        (rounded.ilog2() - SMALLEST_BYTES.ilog2()) as usize
    }

    fn raw(&self) -> *mut c_void {
        self.host.as_ptr().cast()
    }
}

impl Staging {
    /// Queues a copy of `src` to `dst`. The context is current and the stream is not being captured.
    ///
    /// An error after the first piece leaves the destination unspecified.
    ///
    /// # Safety
    /// The destination range is live memory of this device when the work runs.
    pub(super) unsafe fn copy_in(
        &self,
        context: &Context,
        mut dst: u64,
        src: &[u8],
        stream: CUstream,
    ) -> DriverResult<()> {
        for chunk in src.chunks(LARGEST_BYTES) {
            let buffer = self.allocate(context, chunk.len())?;
            // SAFETY: the buffer is at least as long as the piece, and this copy is its only owner.
            unsafe { ptr::copy_nonoverlapping(chunk.as_ptr(), buffer.host.as_ptr(), chunk.len()) };
            // SAFETY: the caller guarantees the destination; the source stays until the event behind it completes.
            let code = unsafe {
                (context.api.calls.memcpy_htod_async)(dst, buffer.raw(), chunk.len(), stream)
            };
            if let Err(error) = context.check("cuMemcpyHtoDAsync", code) {
                self.push_idle(buffer);
                return Err(error);
            }
            let buffer = self.record(context, buffer, stream)?;
            self.push_in_flight(stream, buffer);
            dst = dst.wrapping_add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Queues a copy from `src` and waits for it. The context is current and the stream is not being captured.
    ///
    /// # Safety
    /// The source range is live memory of this device when the work runs.
    pub(super) unsafe fn copy_out(
        &self,
        context: &Context,
        dst: &mut [u8],
        mut src: u64,
        stream: CUstream,
    ) -> DriverResult<()> {
        let mut chunks = dst.chunks_mut(LARGEST_BYTES);
        let mut window: VecDeque<(Buffer, &mut [u8])> = VecDeque::with_capacity(WINDOW);
        let outcome = loop {
            if window.len() < WINDOW
                && let Some(chunk) = chunks.next()
            {
                // SAFETY: the caller guarantees the source range, of which this is a part.
                match unsafe { self.queue_chunk(context, chunk.len(), src, stream) } {
                    Ok(buffer) => {
                        src = src.wrapping_add(chunk.len() as u64);
                        window.push_back((buffer, chunk));
                        continue;
                    }
                    Err(error) => break Err(error),
                }
            }
            let Some((buffer, chunk)) = window.pop_front() else {
                break Ok(());
            };
            // SAFETY: the event is alive and was recorded behind the copy.
            let code = unsafe { (context.api.calls.event_synchronize)(buffer.event) };
            if let Err(error) = context.check("cuEventSynchronize", code) {
                self.push_in_flight(stream, buffer);
                break Err(error);
            }
            // SAFETY: the copy into the buffer has completed, and the buffer is at least as long as the piece.
            unsafe {
                ptr::copy_nonoverlapping(buffer.host.as_ptr(), chunk.as_mut_ptr(), chunk.len())
            };
            self.push_idle(buffer);
        };
        // Only after an error: the device may still write into these buffers.
        for (buffer, _) in window {
            self.push_in_flight(stream, buffer);
        }
        outcome
    }

    /// Queues a copy of `bytes` from `src` into a buffer.
    ///
    /// # Safety
    /// As [`Staging::copy_out`].
    unsafe fn queue_chunk(
        &self,
        context: &Context,
        bytes: usize,
        src: u64,
        stream: CUstream,
    ) -> DriverResult<Buffer> {
        let buffer = self.allocate(context, bytes)?;
        // SAFETY: the caller guarantees the source; the buffer is long enough and waits for the event behind it.
        let code =
            unsafe { (context.api.calls.memcpy_dtoh_async)(buffer.raw(), src, bytes, stream) };
        if let Err(error) = context.check("cuMemcpyDtoHAsync", code) {
            self.push_idle(buffer);
            return Err(error);
        }
        self.record(context, buffer, stream)
    }

    /// Records the buffer's event, or strands the buffer.
    fn record(&self, context: &Context, buffer: Buffer, stream: CUstream) -> DriverResult<Buffer> {
        // SAFETY: the event belongs to the buffer and is alive; the stream is the caller's.
        let code = unsafe { (context.api.calls.event_record)(buffer.event, stream) };
        match context.check("cuEventRecord", code) {
            Ok(()) => Ok(buffer),
            Err(error) => {
                self.state.lock().stranded.push(buffer);
                Err(error)
            }
        }
    }

    /// Returns a buffer of at least `bytes`, at most [`LARGEST_BYTES`], with an event.
    fn allocate(&self, context: &Context, bytes: usize) -> DriverResult<Buffer> {
        let class = Buffer::class(bytes);
        let mut buffer = match self.pop_idle(context, class) {
            Some(buffer) => buffer,
            None => self.grow(context, class)?,
        };
        if buffer.event.is_null() {
            match context.create_event() {
                Ok(event) => buffer.event = event,
                Err(error) => {
                    self.push_idle(buffer);
                    return Err(error);
                }
            }
        }
        Ok(buffer)
    }

    fn pop_idle(&self, context: &Context, class: usize) -> Option<Buffer> {
        let mut state = self.state.lock();
        if let Some(buffer) = state.idle[class].pop() {
            return Some(buffer);
        }
        state.reclaim(context);
        state.idle[class].pop()
    }

    fn push_idle(&self, buffer: Buffer) {
        self.state.lock().push_idle(buffer);
    }

    fn push_in_flight(&self, stream: CUstream, buffer: Buffer) {
        self.state.lock().in_flight.entry(stream.addr()).or_default().push_back(buffer);
    }

    /// Allocates a buffer of `class`, outside the lock because pinning memory is slow.
    fn grow(&self, context: &Context, class: usize) -> DriverResult<Buffer> {
        let bytes = SMALLEST_BYTES << class;
        let is_whole = bytes >= SLAB_BYTES;
        let allocated = if is_whole { bytes } else { SLAB_BYTES };
        let mut memory = ptr::null_mut();
        // SAFETY: the out pointer is valid for the call.
        let code = unsafe { (context.api.calls.mem_host_alloc)(&raw mut memory, allocated, 0) };
        let (code::SUCCESS, Some(memory)) = (code, NonNull::new(memory)) else {
            context.note(code);
            return Err(context.api.host_memory_error(code, allocated));
        };
        let buffer = Buffer { host: memory.cast(), bytes, event: ptr::null_mut(), is_whole };
        if is_whole {
            self.whole_bytes.fetch_add(bytes, Ordering::Relaxed);
            return Ok(buffer);
        }
        let mut state = self.state.lock();
        state.slabs.push(memory);
        for offset in (bytes..SLAB_BYTES).step_by(bytes) {
            // SAFETY: the offset lies inside the slab.
            let host = unsafe { memory.cast::<u8>().add(offset) };
            state.idle[class].push(Buffer { host, bytes, event: ptr::null_mut(), is_whole });
        }
        Ok(buffer)
    }

    /// Runs `wait`, and makes stranded buffers idle if it covered all streams.
    pub(super) fn around_wait(
        &self,
        wait: impl FnOnce() -> DriverResult<Waited>,
    ) -> DriverResult<Waited> {
        // Taken before the wait, because the wait may not cover a buffer that is stranded during it.
        let stranded = std::mem::take(&mut self.state.lock().stranded);
        let outcome = wait();
        if !stranded.is_empty() {
            let mut state = self.state.lock();
            match outcome {
                Ok(Waited::ForAll) => {
                    stranded.into_iter().for_each(|buffer| state.push_idle(buffer))
                }
                Ok(Waited::ForSome) | Err(_) => state.stranded.extend(stranded),
            }
        }
        outcome
    }

    /// Frees buffers beyond [`KEEP_BYTES`]. May wait for the device; the context is current.
    pub(super) fn trim(&self, context: &Context) {
        let excess = self.whole_bytes.load(Ordering::Relaxed).saturating_sub(KEEP_BYTES);
        if excess == 0 {
            return;
        }
        let mut surplus = Vec::new();
        {
            let mut state = self.state.lock();
            state.reclaim(context);
            let mut found = 0;
            for idle in state.idle.iter_mut().rev() {
                while found < excess && idle.last().is_some_and(|buffer| buffer.is_whole) {
                    found += idle.last().map_or(0, |buffer| buffer.bytes);
                    surplus.extend(idle.pop());
                }
            }
        }
        // Outside the lock: the device may need another thread's action before the free returns.
        for buffer in surplus {
            self.whole_bytes.fetch_sub(buffer.bytes, Ordering::Relaxed);
            free(context, &buffer);
        }
    }

    /// Frees everything. The context is current and synchronised, and no copy is under way.
    pub(super) fn tear_down(&self, context: &Context) {
        let state = std::mem::take(&mut *self.state.lock());
        let idle = state.idle.into_iter().flatten();
        let in_flight = state.in_flight.into_values().flatten();
        for buffer in idle.chain(in_flight).chain(state.stranded) {
            free(context, &buffer);
        }
        for slab in state.slabs {
            // SAFETY: `cuMemHostAlloc` made the slab, and none of its buffers is in use.
            unsafe { (context.api.calls.mem_free_host)(slab.as_ptr()) };
        }
        self.whole_bytes.store(0, Ordering::Relaxed);
    }

    /// How many buffers are in flight or stranded.
    #[cfg(test)]
    pub(super) fn busy(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.in_flight.values().map(VecDeque::len).sum(), state.stranded.len())
    }
}

impl State {
    fn push_idle(&mut self, buffer: Buffer) {
        self.idle[Buffer::class(buffer.bytes)].push(buffer);
    }

    /// Reclaims every buffer whose event has completed. A stream completes in order, so its scan stops at the first pending event.
    fn reclaim(&mut self, context: &Context) {
        let idle = &mut self.idle;
        self.in_flight.retain(|_, buffers| {
            while let Some(buffer) = buffers.front() {
                // SAFETY: the event belongs to the buffer and was recorded.
                let code = unsafe { (context.api.calls.event_query)(buffer.event) };
                if code != code::SUCCESS {
                    context.note(code);
                    break;
                }
                if let Some(buffer) = buffers.pop_front() {
                    idle[Buffer::class(buffer.bytes)].push(buffer);
                }
            }
            !buffers.is_empty()
        });
    }
}

/// Frees an unused buffer: its event, and its memory unless that is part of a slab.
fn free(context: &Context, buffer: &Buffer) {
    let calls = &context.api.calls;
    if !buffer.event.is_null() {
        // SAFETY: the event belongs to this buffer alone.
        unsafe { (calls.event_destroy)(buffer.event) };
    }
    if buffer.is_whole {
        // SAFETY: `cuMemHostAlloc` made this memory, and the device does not touch it any more.
        unsafe { (calls.mem_free_host)(buffer.raw()) };
    }
}
