//! Gates, which block a held stream.
//!
//! The stream waits for a counter in pinned host memory, and releasing a gate is one store to it, without a driver call or a lock of the
//! device. Each slot has one counter, which only grows: hold k of a slot waits for "counter ≥ k" (compared cyclically), and its release
//! stores k. A slot can serve the next hold before the device has polled, because a later value also satisfies the earlier wait.
//!
//! If the driver cannot wait for a value, a host function blocks instead, which occupies a thread of the driver.
//!
//! Invariants: a slot belongs to one gate at a time; pages stay until the device is closed, which no gate outlives.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

use cudarc::driver::sys::CUstream;

use super::abi::{self, code};
use super::api::{Api, WaitValueCalls};
use super::context::Context;
use super::core::DriverCore;
use super::host_fn;
use crate::sync::Mutex;
use crate::{DriverResult, Gate};

const PAGE_BYTES: usize = 4096;
/// One slot per cache line, so that releasing a gate does not disturb the counter that another stream polls.
const SLOT_BYTES: usize = 64;

pub(super) struct Gates {
    state: Mutex<State>,
    /// Cleared permanently when the driver reports that it cannot wait for a value.
    can_wait_value: AtomicBool,
}

#[derive(Default)]
struct State {
    free: Vec<Slot>,
    pages: Vec<Page>,
}

struct Slot {
    counter: NonNull<AtomicU32>,
    /// The counter as the device addresses it.
    address: u64,
    /// The number of the latest hold, which is also the counter's value while no gate owns the slot.
    holds: u32,
}

// SAFETY: the counter is atomic and lies in a page that stays until the device is closed, on whichever thread.
unsafe impl Send for Slot {}
// SAFETY: a shared slot offers only atomic access to the counter.
unsafe impl Sync for Slot {}

/// Pinned host memory that the device can read.
struct Page(NonNull<c_void>);

// SAFETY: the page is only a pointer to be freed; the driver frees on any thread.
unsafe impl Send for Page {}

impl Gates {
    pub(super) fn new(api: &Api) -> Self {
        Self {
            state: Mutex::new(State::default()),
            can_wait_value: AtomicBool::new(api.wait_value.is_some()),
        }
    }

    /// Frees all pages. The context is current and synchronised, and no gate is left.
    pub(super) fn tear_down(&self, context: &Context) {
        let state = std::mem::take(&mut *self.state.lock());
        for page in state.pages {
            // SAFETY: `cuMemHostAlloc` made the page, and nothing waits for a counter in it any more.
            unsafe { (context.api.calls.mem_free_host)(page.0.as_ptr()) };
        }
    }

    fn pop_slot(&self, context: &Context) -> DriverResult<Slot> {
        loop {
            if let Some(slot) = self.state.lock().free.pop() {
                return Ok(slot);
            }
            // Outside the lock: releasing a gate takes it, and must not wait for a driver call.
            let (page, mut slots) = new_page(context)?;
            let mut state = self.state.lock();
            state.pages.push(page);
            state.free.append(&mut slots);
        }
    }

    fn push_slot(&self, slot: Slot) {
        self.state.lock().free.push(slot);
    }

    fn release(&self, slot: Slot) {
        // SAFETY: the page is alive while the device is open, and the gate that calls this keeps it open.
        unsafe { slot.counter.as_ref() }.store(slot.holds, Ordering::Release);
        self.push_slot(slot);
    }
}

/// Holds `stream` of `core`. The context is current and the stream is not being captured.
pub(super) fn hold(core: &Arc<DriverCore>, stream: CUstream) -> DriverResult<Gate> {
    if let Some(calls) = core.context.api.wait_value
        && core.gates.can_wait_value.load(Ordering::Relaxed)
        && let Some(gate) = hold_by_value(core, stream, calls)?
    {
        return Ok(gate);
    }
    hold_by_host_fn(core, stream)
}

/// Returns `None` if the driver cannot wait for a value.
fn hold_by_value(
    core: &Arc<DriverCore>,
    stream: CUstream,
    calls: WaitValueCalls,
) -> DriverResult<Option<Gate>> {
    let (context, gates) = (&core.context, &core.gates);
    let mut slot = gates.pop_slot(context)?;
    let number = slot.holds.wrapping_add(1);
    // SAFETY: the address is that of a four-byte aligned counter in pinned, mapped memory which outlives the wait.
    let code = unsafe { (calls.wait_value32)(stream, slot.address, number, abi::WAIT_VALUE_GEQ) };
    match code {
        code::SUCCESS => {
            slot.holds = number;
            let core = Arc::clone(core);
            Ok(Some(Gate::new(move || core.gates.release(slot))))
        }
        code::NOT_SUPPORTED => {
            gates.push_slot(slot);
            gates.can_wait_value.store(false, Ordering::Relaxed);
            Ok(None)
        }
        _ => {
            // No gate waits for `number`, so the slot is returned unchanged.
            gates.push_slot(slot);
            context.check("cuStreamWaitValue32", code).map(|()| None)
        }
    }
}

fn hold_by_host_fn(core: &Arc<DriverCore>, stream: CUstream) -> DriverResult<Gate> {
    // Nothing is sent: the wait ends when the gate drops its end.
    let (held, end_of_hold) = mpsc::channel::<()>();
    let wait = move || _ = end_of_hold.recv();
    host_fn::queue(&core.context, stream, Box::new(wait))?;
    let core = Arc::clone(core);
    Ok(Gate::new(move || {
        drop(held);
        drop(core);
    }))
}

fn new_page(context: &Context) -> DriverResult<(Page, Vec<Slot>)> {
    let calls = &context.api.calls;
    let mut host = ptr::null_mut();
    let flags = abi::HOST_ALLOC_PORTABLE | abi::HOST_ALLOC_DEVICE_MAP;
    // SAFETY: the out pointer is valid for the call.
    let code = unsafe { (calls.mem_host_alloc)(&raw mut host, PAGE_BYTES, flags) };
    let (code::SUCCESS, Some(page)) = (code, NonNull::new(host)) else {
        context.note(code);
        return Err(context.api.host_memory_error(code, PAGE_BYTES));
    };
    let mut address = 0;
    // SAFETY: the out pointer is valid, and `page` is mapped pinned memory.
    let code = unsafe { (calls.mem_host_get_device_pointer)(&raw mut address, page.as_ptr(), 0) };
    if let Err(error) = context.check("cuMemHostGetDevicePointer", code) {
        // SAFETY: nothing refers to the page yet.
        unsafe { (calls.mem_free_host)(page.as_ptr()) };
        return Err(error);
    }
    // SAFETY: the page has this many bytes and is not shared yet.
    unsafe { page.cast::<u8>().write_bytes(0, PAGE_BYTES) };
    let slots = (0..PAGE_BYTES / SLOT_BYTES).map(|index| {
        let offset = index * SLOT_BYTES;
        // SAFETY: the offset lies in the page, and the page is aligned far beyond a counter.
        let counter = unsafe { page.cast::<u8>().add(offset) }.cast::<AtomicU32>();
        Slot { counter, address: address + offset as u64, holds: 0 }
    });
    Ok((Page(page), slots.collect()))
}
