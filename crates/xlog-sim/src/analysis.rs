//! The analysis of queued operations: their clocks and their races.
//!
//! An operation is analysed once everything ordered before it has been analysed. That is at once, unless a closed gate precedes it; then it
//! is when the gate opens. The analysis computes the operation's clock and passes it to the race detector. Only analysed operations are
//! executed, and the results do not depend on when they are executed.

use std::sync::Arc;

use crate::detector::Visit;
use crate::latency::LatencyModel;
use crate::memory::AddressSpace;
use crate::op::{Argument, Meant, Op, OpKind, Reached};
use crate::race::RaceKind;
use crate::shadow::Mode;
use crate::state::State;

impl State {
    /// Analyses a stream, and the stalled streams that this unblocks.
    pub(crate) fn analyse(&mut self, first: u64) {
        if !self.analyse_stream(first) || self.stalled.is_empty() {
            return;
        }
        let mut work: Vec<u64> = self.stalled.iter().copied().collect();
        while let Some(handle) = work.pop() {
            if self.analyse_stream(handle) {
                work.extend(self.stalled.iter().copied());
            }
        }
    }

    /// Analyses up to the first unreached wait or closed gate. Returns true if it reached a marker that other streams may wait for.
    fn analyse_stream(&mut self, handle: u64) -> bool {
        let was_stalled = self.stalled.remove(&handle);
        let Some(stream) = self.streams.get_mut(&handle) else {
            return false;
        };
        let mut reached = false;
        let mut notices = Vec::new();
        while let Some(op) = stream.queue.get_mut(stream.analysed) {
            match &op.kind {
                OpKind::Wait(marker) => match marker.reached.get() {
                    Some(point) => stream.line.join(&point.clock, point.time),
                    None => {
                        self.stalled.insert(handle);
                        break;
                    }
                },
                OpKind::Gate(gate) => match gate.opened.get() {
                    Some((clock, time)) => stream.line.join(clock, *time),
                    None => {
                        self.stalled.insert(handle);
                        break;
                    }
                },
                _ => {}
            }
            stream.line.join_host(&op.host);
            let line = &mut stream.line;
            let epoch = line.tick();
            if let Some(model) = &self.latency {
                line.time = line.time.max(op.issued) + duration(model, op);
            }
            let mode = match &op.kind {
                OpKind::Alloc { completed } => {
                    for point in completed.iter().filter_map(|free| free.reached.get()) {
                        for piece in op.arguments.iter().flat_map(|a| &a.pieces) {
                            self.detector.retire(piece, &point.clock);
                        }
                    }
                    Some(Mode::Alloc)
                }
                OpKind::Free(_) => Some(Mode::Free),
                _ => None,
            };
            for argument in &mut op.arguments {
                let found = resolve(&self.space, argument, was_stalled, mode.is_none());
                if let Some(kind) = found.stale {
                    let (ptr, bytes) = (argument.ptr, argument.bytes);
                    let tag = argument.tag.as_ref();
                    notices.extend(self.detector.stale(&op.meta, kind, ptr, bytes, tag));
                }
                if let Some(why) = found.fault {
                    op.fault.get_or_insert(why);
                }
                if found.ended {
                    continue;
                }
                let visit = Visit {
                    mode: mode.unwrap_or(if argument.access.writes() {
                        Mode::Write
                    } else {
                        Mode::Read
                    }),
                    clock: &line.clock,
                    epoch,
                    meta: &op.meta,
                    tag: argument.tag.as_ref(),
                };
                for piece in &argument.pieces {
                    notices.extend(self.detector.visit(piece, &visit));
                }
            }
            match &op.kind {
                OpKind::Record(marker) | OpKind::Free(marker) => {
                    let clock = Arc::new(line.clock.clone());
                    let _ = marker.reached.set(Reached { epoch, clock, time: line.time });
                    reached = true;
                }
                OpKind::HostFn(_) | OpKind::CopyOut => {
                    op.known = Some(line.known(epoch));
                }
                _ => {}
            }
            stream.analysed += 1;
        }
        self.notify_races(notices);
        reached
    }
}

/// How an argument's memory changed since it was queued.
#[derive(Default)]
struct Resolved {
    /// The argument meant memory that was freed or unmapped before the host saw this work complete.
    stale: Option<RaceKind>,
    /// The fault, if the device cannot reach the memory.
    fault: Option<String>,
    /// Its bytes belong to no block any more, so there is no access to compare.
    ended: bool,
}

/// Resolves an argument to the bytes it reaches now. If `works` is false, the operation only marks a range and accesses nothing.
fn resolve(
    space: &AddressSpace,
    argument: &mut Argument,
    was_stalled: bool,
    works: bool,
) -> Resolved {
    let (reservation, mappings) = match &argument.meant {
        Meant::Ordered => return Resolved::default(),
        Meant::Plain(generation) => {
            let region = space.containing(argument.ptr);
            let lives = !was_stalled || region.is_some_and(|r| r.generation == *generation);
            let stale = (!lives && works).then_some(RaceKind::UseAfterFree);
            return Resolved { stale, ended: !lives, ..Resolved::default() };
        }
        Meant::Reserved { reservation, mappings } => (*reservation, mappings),
    };
    let (ptr, bytes) = (argument.ptr, argument.bytes);
    let writes = works && argument.access.writes();
    let region = space.containing(ptr).filter(|region| region.generation == reservation);
    let pieces = region.and_then(|region| region.pieces(ptr, bytes, writes));
    let mut found = Resolved::default();
    if works && was_stalled && !mappings.is_empty() {
        let now = region.map(|region| region.mapped(ptr, bytes, writes)).unwrap_or_default();
        found.stale = (now != *mappings).then_some(RaceKind::UnmapUnderUse);
    }
    if works && pieces.is_none() {
        found.fault = Some(format!(
            "illegal address: {bytes} bytes at {ptr:#x} are not all mapped for {}",
            if writes { "writing" } else { "reading" }
        ));
    }
    argument.pieces = pieces.unwrap_or_default();
    found
}

/// The duration of an operation on its stream in simulated time.
fn duration(model: &LatencyModel, op: &Op) -> u64 {
    let bytes: u64 = op.arguments.iter().map(|argument| argument.bytes).sum();
    match &op.kind {
        OpKind::CopyIn(_) | OpKind::CopyOut => {
            model.work_start + bytes / model.host_bandwidth.max(1)
        }
        OpKind::Memset(_) | OpKind::CopyDevice | OpKind::Kernel(_) => {
            model.work_start + bytes / model.device_bandwidth.max(1)
        }
        OpKind::HostFn(_) => model.work_start,
        _ => 0,
    }
}
