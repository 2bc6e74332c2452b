//! The [`Driver`] trait of the simulated device.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use xlog_driver::{
    Access, AsyncPools, CaptureStatus, DeviceProperties, Driver, DriverError, DriverResult,
    EventHandle, Gate, Graphs, HostFn, HostMemory, MemoryInfo, MemoryRange, StreamHandle,
    VirtualMemory, Waited,
};

use crate::detector::{HostEnd, Revoked};
use crate::device::SimDevice;
use crate::engine::{Target, check_alive, gather, scatter};
use crate::faults::Call;
use crate::memory::{BLOCK_ALIGN, Backing, Owner, Region, RegionKind, round_up};
use crate::op::{GateState, Label, Marker, OpKind};
use crate::state::{Event, State, Stream};

impl SimDevice {
    fn check_event(&self, state: &State, call: Call, event: EventHandle) -> DriverResult<()> {
        // An event of another device may be waited for and queried; every other call needs an event of this device.
        match state.events.get(&event.number()) {
            Some((ordinal, _))
                if *ordinal == self.ordinal()
                    || matches!(call, Call::StreamWaitEvent | Call::EventQuery) =>
            {
                Ok(())
            }
            _ => Err(call
                .invalid(format!("{event}, unknown or destroyed"), "a live event of this device")),
        }
    }

    /// Releases cached memory of pools above their threshold, as synchronising calls do.
    fn release_cached(&self, state: &mut State) {
        let pools: Vec<u64> = state.pools.keys().copied().collect();
        for pool in pools {
            let threshold = state.pools.get(&pool).map_or(0, |p| p.options.release_threshold);
            self.release_pool(state, pool, threshold);
        }
    }

    pub(crate) fn refuse_zero(call: Call, bytes: usize) -> DriverResult<()> {
        if bytes == 0 {
            return Err(call.invalid("0 bytes", "at least one byte"));
        }
        Ok(())
    }
}

impl Driver for SimDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let mut state = self.enter(Call::MemoryInfo)?;
        Self::cost(&mut state, |model| model.memory_info);
        let total = self.properties.total_bytes;
        Ok(MemoryInfo { free: state.free_bytes(self.ordinal()), total })
    }

    fn memory_at(&self, ptr: u64) -> DriverResult<Option<MemoryRange>> {
        let state = self.enter(Call::MemoryAt)?;
        let region = state.space.containing(ptr).filter(|region| region.ordinal == self.ordinal());
        Ok(region.and_then(|region| region.memory_at(ptr)))
    }

    fn synchronize(&self) -> DriverResult<()> {
        let call = Call::Synchronize;
        let mut state = self.shared.lock();
        if !state.graphs.captures.is_empty() {
            let open: Vec<u64> = state.graphs.captures.keys().copied().collect();
            open.into_iter().for_each(|origin| state.break_capture(origin, call.name()));
            return Err(call.invalid(
                "a device with a stream that is being captured",
                "a wait without an open capture, which this one has broken",
            ));
        }
        drop(state);
        self.synchronize_but(|_| false)
    }

    fn synchronize_streams(&self) -> DriverResult<Waited> {
        let waited = if self.has_captured_stream() { Waited::ForSome } else { Waited::ForAll };
        self.synchronize_but(|stream| stream.captured_by.is_some()).map(|()| waited)
    }

    fn stream_create(&self, _priority: i32) -> DriverResult<StreamHandle> {
        let mut state = self.enter(Call::StreamCreate)?;
        Ok(state.add_stream(self.ordinal()))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.enter_on(Call::StreamDestroy, stream)?;
        let abandoned = match state.graphs.captures.contains_key(&stream.number()) {
            true => state.close_capture(stream.number()).err(),
            false => None,
        };
        if let Some(stream) = state.streams.get_mut(&stream.number()) {
            stream.destroyed = true;
        }
        self.shared.wake(&mut state);
        state.bury(stream.number());
        drop(state);
        drop(abandoned);
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::StreamSynchronize;
        let mut state = self.enter_on(call, stream)?;
        self.refuse_captured(&mut state, call, stream, true)?;
        Self::cost(&mut state, |model| model.synchronize);
        let marker = state.push_marker(stream, "synchronize");
        self.shared.queued(&mut state, stream.number());
        let mut state = self.shared.wait_for(state, self.ordinal(), call, &marker)?;
        self.release_cached(&mut state);
        Self::report_race(&mut state, call, stream)
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        let mut state = self.enter_on(Call::StreamQuery, stream)?;
        self.refuse_captured(&mut state, Call::StreamQuery, stream, true)?;
        Self::cost(&mut state, |model| model.stream_query);
        let known = state.streams.get(&stream.number()).filter(|s| s.is_drained());
        let Some((clock, time)) = known.map(|s| (s.line.clock.clone(), s.line.time)) else {
            return Ok(false);
        };
        state.host_learns(&clock, time);
        Ok(true)
    }

    fn stream_is_idle(&self, stream: StreamHandle) -> DriverResult<bool> {
        let mut state = self.enter_on(Call::StreamIsIdle, stream)?;
        self.refuse_captured(&mut state, Call::StreamIsIdle, stream, true)?;
        Self::cost(&mut state, |model| model.stream_query);
        Ok(state.streams.get(&stream.number()).is_some_and(|stream| stream.is_drained()))
    }

    fn stream_id(&self, stream: StreamHandle) -> DriverResult<u64> {
        let _state = self.enter_on(Call::StreamId, stream)?;
        // A machine never reuses a handle; its number makes the id unique in the process.
        Ok((self.shared.machine << 40) | stream.number())
    }

    fn stream_capture(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let state = self.enter_on(Call::StreamCapture, stream)?;
        let captured_by = state.streams.get(&stream.number()).and_then(|stream| stream.captured_by);
        Ok(match captured_by {
            None => CaptureStatus::None,
            Some(origin) => match state.graphs.captures.get(&origin) {
                Some(capture) if capture.broken.is_some() => CaptureStatus::Invalidated,
                _ => CaptureStatus::Active,
            },
        })
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let mut state = self.enter_on(Call::StreamWaitEvent, stream)?;
        self.check_event(&state, Call::StreamWaitEvent, event)?;
        Self::cost(&mut state, |model| model.stream_wait);
        if self.wait_in_capture(&mut state, stream, event)? {
            return Ok(());
        }
        let event = state.events.get(&event.number()).map(|(_, event)| event);
        let captured_by = event.and_then(|event| event.captured_by);
        let marker = event.and_then(|event| event.marker.clone());
        state.join_capture(stream, captured_by);
        if let Some(marker) = marker {
            state.push(stream, Label::Fixed("wait"), OpKind::Wait(marker), Vec::new());
            self.shared.queued(&mut state, stream.number());
        }
        Ok(())
    }

    fn raw_stream(&self, _stream: StreamHandle) -> Option<*mut c_void> {
        None
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> DriverResult<StreamHandle> {
        // The first call with a number that is not a stream refuses it.
        Ok(StreamHandle::numbered(raw.addr() as u64))
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        let mut state = self.enter(Call::EventCreate)?;
        Self::cost(&mut state, |model| model.event_create);
        let handle = state.handle();
        state.events.insert(handle, (self.ordinal(), Event::default()));
        Ok(EventHandle::numbered(handle))
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        let mut state = self.enter(Call::EventDestroy)?;
        self.check_event(&state, Call::EventDestroy, event)?;
        Self::cost(&mut state, |model| model.event_create);
        state.events.remove(&event.number());
        Ok(())
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.enter(Call::EventRecord)?;
        self.check_event(&state, Call::EventRecord, event)?;
        self.check_stream(&state, Call::EventRecord, stream)?;
        Self::cost(&mut state, |model| model.event_record);
        if let Some(origin) = state.capture_of(stream) {
            let point = Some(state.captured_point(origin, stream));
            if let Some((_, event)) = state.events.get_mut(&event.number()) {
                *event = Event { marker: None, captured_by: Some(origin), point };
            }
            return Ok(());
        }
        let marker = state.push_marker(stream, "record");
        let captured_by = state.streams.get(&stream.number()).and_then(|stream| stream.captured_by);
        if let Some((_, event)) = state.events.get_mut(&event.number()) {
            *event = Event { marker: Some(marker), captured_by, point: None };
        }
        self.shared.queued(&mut state, stream.number());
        Ok(())
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let mut state = self.enter(Call::EventQuery)?;
        self.check_event(&state, Call::EventQuery, event)?;
        Self::refuse_captured_event(&mut state, Call::EventQuery, event)?;
        Self::cost(&mut state, |model| model.event_query);
        let marker = state.events.get(&event.number()).and_then(|(_, event)| event.marker.clone());
        let Some(marker) = marker else {
            return Ok(true);
        };
        if !marker.is_done() {
            return Ok(false);
        }
        if let Some(point) = marker.reached.get() {
            state.host_learns(&point.clock, point.time);
        }
        Ok(true)
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        let call = Call::EventSynchronize;
        let mut state = self.enter(call)?;
        self.check_event(&state, call, event)?;
        Self::refuse_captured_event(&mut state, call, event)?;
        Self::cost(&mut state, |model| model.synchronize);
        let marker = state.events.get(&event.number()).and_then(|(_, event)| event.marker.clone());
        let Some(marker) = marker else { return Ok(()) };
        let mut state = self.shared.wait_for(state, self.ordinal(), call, &marker)?;
        self.release_cached(&mut state);
        Self::report_race(&mut state, call, marker.stream)
    }

    fn alloc(&self, bytes: usize) -> DriverResult<u64> {
        let call = Call::Alloc.name();
        let mut state = self.enter(Call::Alloc)?;
        Self::refuse_zero(Call::Alloc, bytes)?;
        Self::cost(&mut state, |model| model.alloc);
        let out_of_memory = || DriverError::OutOfMemory { call, requested: bytes as u64 };
        let span = round_up(bytes as u64, BLOCK_ALIGN).ok_or_else(out_of_memory)?;
        state.charge_bytes(call, self.ordinal(), span)?;
        let place = Backing::new(bytes).and_then(|backing| {
            let start = state.space.allocate_addresses(self.ordinal(), span, BLOCK_ALIGN)?;
            Some((start, backing))
        });
        let Some((start, backing)) = place else {
            state.release_bytes(self.ordinal(), span);
            return Err(out_of_memory());
        };
        let kind = RegionKind::Block { owner: Owner::Plain, backing, offset: 0 };
        state.space.insert(start, bytes as u64, span, self.ordinal(), kind);
        Ok(start)
    }

    unsafe fn free(&self, ptr: u64) -> DriverResult<()> {
        let call = Call::Free;
        self.wait_for_captured()?;
        let mut state = self.enter(call)?;
        let plain =
            |kind: &RegionKind| matches!(kind, RegionKind::Block { owner: Owner::Plain, .. });
        if let Some(region) = state.space.containing(ptr) {
            self.check_home(call, ptr, region.ordinal)?;
        }
        match state.space.starting_at(ptr) {
            Some(region) if plain(&region.kind) => {}
            _ => {
                let accepted = match state.space.containing(ptr) {
                    Some(region) => format!(
                        "the start of a block of alloc on this device; this lies in a region of {} bytes at {:#x}",
                        region.bytes, region.start
                    ),
                    None => state.space.why_unknown(ptr),
                };
                return Err(call.invalid(format!("{ptr:#x}"), accepted));
            }
        }
        Self::cost(&mut state, |model| model.alloc);
        if let Some(region) = Self::end_block(&mut state, ptr, "free") {
            state.release_bytes(region.ordinal, region.span);
        }
        Ok(())
    }

    unsafe fn memset(
        &self,
        dst: u64,
        value: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let call = Call::Memset;
        let mut state = self.enter_on(call, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let target = self.argument(&state, call, dst, bytes, Access::Write)?;
        let (label, kind) = (Label::Fixed("memset"), OpKind::Memset(value));
        self.submit(&mut state, call, stream, label, kind, vec![target])
    }

    unsafe fn copy_htod(&self, dst: u64, src: &[u8], stream: StreamHandle) -> DriverResult<()> {
        let call = Call::CopyHtod;
        let mut state = self.enter_on(call, stream)?;
        if src.is_empty() {
            return Ok(());
        }
        self.refuse_captured(&mut state, call, stream, false)?;
        let target = self.argument(&state, call, dst, src.len(), Access::Write)?;
        let idle =
            state.streams.get(&stream.number()).is_some_and(|s| s.is_drained() && s.held_back == 0);
        // With a seed, copying at once is one of the legal schedules.
        let at_once = idle && (self.shared.config.seed.is_none() || state.rng.below(2) == 0);
        if !at_once {
            let kind = OpKind::CopyIn(Box::from(src));
            self.push(&mut state, stream, Label::Fixed("copy_htod"), kind, vec![target]);
            return Ok(());
        }
        // The stream is idle, so the bytes can be copied straight from the source if no other work uses the target now.
        Self::cost(&mut state, |model| model.launch);
        let kind = OpKind::CopyIn(Box::default());
        let sequence = state.push(stream, Label::Fixed("copy_htod"), kind, vec![target]);
        if !state.is_ready(stream.number()) || !state.is_fault_free(stream.number()) {
            if let Some(op) =
                state.streams.get_mut(&stream.number()).and_then(|s| s.queue.back_mut())
            {
                op.kind = OpKind::CopyIn(Box::from(src));
            }
            self.shared.queued(&mut state, stream.number());
            return Ok(());
        }
        if let Some(op) = state.start(stream.number()) {
            drop(state);
            scatter(&op.arguments[0].pieces, src);
            state = self.shared.lock();
            state.finish(stream.number(), sequence);
            self.shared.wake(&mut state);
            let more = state.streams.get(&stream.number()).is_some_and(|s| !s.queue.is_empty());
            if more {
                self.shared.queued(&mut state, stream.number());
            }
        }
        Ok(())
    }

    unsafe fn copy_dtoh(&self, dst: &mut [u8], src: u64, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::CopyDtoh;
        let mut state = self.enter_on(call, stream)?;
        if dst.is_empty() {
            return Ok(());
        }
        self.refuse_captured(&mut state, call, stream, false)?;
        let source = self.argument(&state, call, src, dst.len(), Access::Read)?;
        let label = Label::Fixed("copy_dtoh");
        let sequence = self.push(&mut state, stream, label, OpKind::CopyOut, vec![source]);
        let ready = |state: &mut State| state.is_copy_out_ready(stream.number(), sequence);
        let target = Target { stream: stream.number(), sequence };
        let mut state = match self.shared.wait(state, self.ordinal(), call, target, ready) {
            Ok(state) => state,
            Err(error) => {
                let mut state = self.shared.lock();
                let queue = state.streams.get_mut(&stream.number()).map(|s| s.queue.iter_mut());
                for op in queue.into_iter().flatten().filter(|op| op.meta.sequence == sequence) {
                    op.kind = OpKind::Cancelled;
                }
                self.shared.wake(&mut state);
                return Err(error);
            }
        };
        let Some(op) = state.start(stream.number()) else {
            return Ok(());
        };
        if let Some(fault) = op.fault {
            state.finish(stream.number(), sequence);
            drop(state);
            self.shared.lose(self.ordinal(), 700, fault);
            return check_alive(&self.shared.lock(), self.ordinal(), call);
        }
        drop(state);
        gather(&op.arguments[0].pieces, dst);
        let mut state = self.shared.lock();
        state.finish(stream.number(), sequence);
        if let Some(known) = op.known {
            state.host_learns(&known.clock(), known.time);
        }
        self.shared.wake(&mut state);
        if state.streams.get(&stream.number()).is_some_and(|s| !s.queue.is_empty()) {
            self.shared.queued(&mut state, stream.number());
        }
        self.release_cached(&mut state);
        Self::report_race(&mut state, call, stream)
    }

    unsafe fn copy_dtod(
        &self,
        dst: u64,
        src: u64,
        bytes: usize,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let call = Call::CopyDtod;
        let mut state = self.enter_on(call, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let target = self.argument(&state, call, dst, bytes, Access::Write)?;
        let source = self.argument(&state, call, src, bytes, Access::Read)?;
        if dst.abs_diff(src) < bytes as u64 {
            return Err(call.invalid(
                format!("the overlapping ranges of {bytes} bytes at {dst:#x} and {src:#x}"),
                "ranges that do not overlap",
            ));
        }
        let label = Label::Fixed("copy_dtod");
        self.submit(&mut state, call, stream, label, OpKind::CopyDevice, vec![target, source])
    }

    fn host_fn(&self, stream: StreamHandle, work: HostFn) -> DriverResult<()> {
        let mut state = self.enter_on(Call::HostFn, stream)?;
        self.refuse_captured(&mut state, Call::HostFn, stream, false)?;
        self.push(&mut state, stream, Label::Fixed("host_fn"), OpKind::HostFn(work), Vec::new());
        Ok(())
    }

    fn hold(&self, stream: StreamHandle) -> DriverResult<Gate> {
        let mut state = self.enter_on(Call::Hold, stream)?;
        self.refuse_captured(&mut state, Call::Hold, stream, false)?;
        let gate = Arc::new(GateState::default());
        let kind = OpKind::Gate(Arc::clone(&gate));
        self.push(&mut state, stream, Label::Fixed("hold"), kind, Vec::new());
        let shared = Arc::clone(&self.shared);
        Ok(Gate::new(move || shared.open_gate(&gate)))
    }

    fn name_stream(&self, stream: StreamHandle, name: &str) -> DriverResult<()> {
        let mut state = self.shared.lock();
        self.check_stream(&state, Call::StreamId, stream)?;
        if let Some(stream) = state.streams.get_mut(&stream.number()) {
            stream.name = Some(Arc::from(name));
        }
        Ok(())
    }

    // Work on the range that is not ordered after this is a use before allocation or across reuse.
    fn begin_range(
        &self,
        ptr: u64,
        bytes: usize,
        stream: StreamHandle,
        tag: &str,
    ) -> DriverResult<()> {
        let mut state = self.shared.lock();
        self.check_stream(&state, Call::AllocAsync, stream)?;
        self.refuse_captured(&mut state, Call::AllocAsync, stream, false)?;
        let mut argument = self.argument(&state, Call::AllocAsync, ptr, bytes, Access::Write)?;
        state.space.tag(ptr, bytes as u64, tag);
        argument.tag = Some(Arc::from(tag));
        let kind = OpKind::Alloc { completed: Vec::new() };
        self.push(&mut state, stream, Label::Fixed("begin_range"), kind, vec![argument]);
        Ok(())
    }

    // Work on the range that is not ordered before this is a use after free.
    fn end_range(&self, ptr: u64, bytes: usize, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.shared.lock();
        self.check_stream(&state, Call::FreeAsync, stream)?;
        self.refuse_captured(&mut state, Call::FreeAsync, stream, false)?;
        let argument = self.argument(&state, Call::FreeAsync, ptr, bytes, Access::Write)?;
        let meta = state.meta(Label::Fixed("end_range"), Some(stream));
        let marker = Marker::new(stream, meta.sequence);
        state.push_as(stream, meta, OpKind::Free(marker), vec![argument]);
        self.shared.queued(&mut state, stream.number());
        Ok(())
    }

    fn async_pools(&self) -> Option<&dyn AsyncPools> {
        self.properties.async_pools.then_some(self as &dyn AsyncPools)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }

    fn host_memory(&self) -> Option<&dyn HostMemory> {
        Some(self)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.properties.virtual_memory.then_some(self as &dyn VirtualMemory)
    }
}

impl SimDevice {
    /// True if a stream of this device is being captured.
    fn has_captured_stream(&self) -> bool {
        let state = self.shared.lock();
        let ordinal = self.ordinal();
        state.streams.values().any(|s| s.ordinal == ordinal && s.captured_by.is_some())
    }

    /// Waits for the work that [`Driver::synchronize_streams`] left out, as `cuMemFree` and `cuMemFreeHost` do.
    pub(crate) fn wait_for_captured(&self) -> DriverResult<()> {
        if self.has_captured_stream() { self.synchronize_but(|_| false) } else { Ok(()) }
    }

    /// Removes the block that begins at `ptr`. Work that may still use it races with this call.
    pub(crate) fn end_block(state: &mut State, ptr: u64, call: &'static str) -> Option<Region> {
        let region = state.space.remove(ptr)?;
        let meta = state.meta(Label::Fixed(call), None);
        let host = Arc::clone(&state.host);
        for piece in region.pieces(ptr, region.bytes, true).unwrap_or_default() {
            let end = HostEnd { host: &host, meta: &meta, what: Revoked::Block };
            let notices = state.detector.end_by_host(&piece, &end);
            state.notify_races(notices);
            state.detector.forget(piece.backing_id());
        }
        state.space.free_addresses(region.ordinal, region.start, region.span);
        Some(region)
    }

    /// Waits for all streams of this device except those that `leaves_out` selects.
    fn synchronize_but(&self, leaves_out: impl Fn(&Stream) -> bool) -> DriverResult<()> {
        let mut state = self.enter(Call::Synchronize)?;
        Self::cost(&mut state, |model| model.synchronize);
        let mine = |state: &State| -> Vec<StreamHandle> {
            let ordinal = self.ordinal();
            let mine = state.streams.values().filter(|s| s.ordinal == ordinal && !leaves_out(s));
            mine.map(|s| s.handle).collect()
        };
        let mut markers = Vec::new();
        for stream in mine(&state) {
            markers.push(state.push_marker(stream, "synchronize"));
            self.shared.queued(&mut state, stream.number());
        }
        for marker in markers {
            state = self.shared.wait_for(state, self.ordinal(), Call::Synchronize, &marker)?;
        }
        let device = &mut state.ordinals[self.ordinal() as usize];
        let (departed, time) = (device.departed.clone(), device.departed_time);
        let mut race = device.departed_race.take();
        state.host_learns(&departed, time);
        self.release_cached(&mut state);
        for stream in mine(&state) {
            let this = Self::take_race(&mut state, stream);
            race = race.or(this);
        }
        match race {
            Some(race) => Err(Self::returned(&mut state, Call::Synchronize, &race)),
            None => Ok(()),
        }
    }
}
