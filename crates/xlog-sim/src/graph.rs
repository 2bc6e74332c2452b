//! Captured work of the simulated device: the nodes of graphs, and how a launch queues them.
//!
//! A node stores its captured stream and the nodes it follows. A launch maps every captured stream to a lane: the launch stream for the
//! stream on which the capture began, and a stream of the executable graph for every other one. Nodes are queued on their lanes, with waits
//! where they follow a node of another lane. So replayed work uses the normal analysis, race detector and engines, and branches of a graph
//! are concurrent.
//!
//! Invariants:
//! - Work on a stream of an open capture is recorded and never queued.
//! - Launches of one executable graph run one after another.
//! - A function that a graph retains runs once, without the lock, after the last launch has completed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use xlog_base::Mutex;
use xlog_driver::{DriverResult, EventHandle, HostFn, StreamHandle};

use crate::device::SimDevice;
use crate::faults::Call;
use crate::kernel::{KernelBody, RepeatableBody};
use crate::op::{Argument, Label, Marker, OpKind};
use crate::state::State;

/// Work that a graph can repeat.
#[derive(Clone)]
pub(crate) enum CapturedWork {
    Memset(u8),
    CopyDevice,
    Kernel(Arc<RepeatableBody>),
}

impl CapturedWork {
    /// Returns the repeatable form of queued work. Work that runs only once is refused.
    pub(crate) fn of(call: Call, kind: OpKind) -> DriverResult<Self> {
        match kind {
            OpKind::Memset(value) => Ok(Self::Memset(value)),
            OpKind::CopyDevice => Ok(Self::CopyDevice),
            OpKind::Kernel(KernelBody::Repeatable(body)) => Ok(Self::Kernel(body)),
            OpKind::Kernel(KernelBody::Once(_)) => Err(call.invalid(
                "a kernel that runs once, on a stream that is being captured",
                "a kernel of SimKernel::repeatable",
            )),
            _ => Err(call.invalid(
                "a stream that is being captured",
                "a stream whose work is run, not recorded",
            )),
        }
    }

    fn queued(&self) -> OpKind {
        match self {
            Self::Memset(value) => OpKind::Memset(*value),
            Self::CopyDevice => OpKind::CopyDevice,
            Self::Kernel(body) => OpKind::Kernel(KernelBody::Repeatable(Arc::clone(body))),
        }
    }
}

/// One captured operation.
pub(crate) struct Node {
    /// The number of the stream it was captured on.
    stream: u64,
    label: Label,
    work: CapturedWork,
    arguments: Vec<Argument>,
    /// The nodes that it follows.
    after: Vec<usize>,
}

/// An open capture.
pub(crate) struct Capture {
    pub(crate) id: u64,
    pub(crate) graph: u64,
    nodes: Vec<Node>,
    /// For each stream of the capture, the nodes that its next work follows.
    tails: BTreeMap<u64, Vec<usize>>,
    /// The reason, if the capture is invalid.
    pub(crate) broken: Option<String>,
}

/// The point of a capture at which an event was recorded.
#[derive(Clone)]
pub(crate) struct CapturedPoint {
    pub(crate) capture: u64,
    nodes: Vec<usize>,
}

/// A graph: its nodes, once the capture has ended, and its retained functions.
pub(crate) struct SimGraph {
    origin: u64,
    nodes: Arc<Vec<Node>>,
    retained: Vec<Arc<Retained>>,
}

/// A function that runs when its last owner is dropped.
pub(crate) struct Retained(Mutex<Option<HostFn>>);

impl Drop for Retained {
    fn drop(&mut self) {
        if let Some(release) = self.0.lock().take() {
            release();
        }
    }
}

pub(crate) struct Exec {
    ordinal: u32,
    origin: u64,
    nodes: Arc<Vec<Node>>,
    /// The lanes' streams, by captured stream.
    lanes: BTreeMap<u64, StreamHandle>,
    /// The end of the last launch.
    last: Option<Arc<Marker>>,
    retained: Vec<Arc<Retained>>,
}

/// The captures and graphs of a machine.
#[derive(Default)]
pub(crate) struct GraphTable {
    /// Open captures, by the stream that they began on.
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, SimGraph>,
    pub(crate) execs: HashMap<u64, Exec>,
    /// Retained functions of destroyed executable graphs whose last launch may be pending.
    departed: Vec<(Arc<Marker>, Vec<Arc<Retained>>)>,
}

impl State {
    /// The capture that records the work of `stream`.
    pub(crate) fn capture_of(&self, stream: StreamHandle) -> Option<u64> {
        let origin = self.streams.get(&stream.number())?.captured_by?;
        self.graphs.captures.contains_key(&origin).then_some(origin)
    }

    /// Invalidates a capture, as CUDA does after a forbidden call.
    pub(crate) fn break_capture(&mut self, origin: u64, why: &str) {
        if let Some(capture) = self.graphs.captures.get_mut(&origin) {
            capture.broken.get_or_insert_with(|| why.to_owned());
        }
    }

    /// Begins a capture on `stream` and returns the number of its graph.
    pub(crate) fn open_capture(&mut self, stream: StreamHandle) -> u64 {
        let (id, graph) = (self.handle(), self.handle());
        let tails = BTreeMap::from([(stream.number(), Vec::new())]);
        let capture = Capture { id, graph, nodes: Vec::new(), tails, broken: None };
        self.graphs.captures.insert(stream.number(), capture);
        let nodes = Arc::new(Vec::new());
        let empty = SimGraph { origin: stream.number(), nodes, retained: Vec::new() };
        self.graphs.graphs.insert(graph, empty);
        if let Some(stream) = self.streams.get_mut(&stream.number()) {
            stream.captured_by = Some(stream.handle.number());
        }
        graph
    }

    /// Ends a capture; its streams run their work again. Returns the graph, or the reason of failure with the functions that the graph
    /// retained.
    pub(crate) fn close_capture(
        &mut self,
        origin: u64,
    ) -> Result<u64, (String, Vec<Arc<Retained>>)> {
        for joined in self.streams.values_mut().filter(|each| each.captured_by == Some(origin)) {
            joined.captured_by = None;
        }
        let Some(capture) = self.graphs.captures.remove(&origin) else {
            return Err(("no capture began on this stream".to_owned(), Vec::new()));
        };
        let why = capture.broken.clone().or_else(|| capture.unjoined(origin));
        if let Some(why) = why {
            let graph = self.graphs.graphs.remove(&capture.graph);
            return Err((why, graph.map(|graph| graph.retained).unwrap_or_default()));
        }
        if let Some(graph) = self.graphs.graphs.get_mut(&capture.graph) {
            graph.nodes = Arc::new(capture.nodes);
        }
        Ok(capture.graph)
    }

    /// Records an operation on a stream of the capture `origin`.
    pub(crate) fn record(
        &mut self,
        origin: u64,
        stream: StreamHandle,
        label: Label,
        work: CapturedWork,
        arguments: Vec<Argument>,
    ) {
        if let Some(capture) = self.graphs.captures.get_mut(&origin) {
            let node = capture.nodes.len();
            let tail = capture.tails.entry(stream.number()).or_default();
            let after = std::mem::replace(tail, vec![node]);
            let stream = stream.number();
            capture.nodes.push(Node { stream, label, work, arguments, after });
        }
    }

    /// The point at which an event is recorded on a stream of a capture.
    pub(crate) fn captured_point(&self, origin: u64, stream: StreamHandle) -> CapturedPoint {
        let capture = self.graphs.captures.get(&origin);
        let nodes = capture.and_then(|capture| capture.tails.get(&stream.number())).cloned();
        CapturedPoint { capture: capture.map_or(0, |c| c.id), nodes: nodes.unwrap_or_default() }
    }

    /// Makes later work of `stream` follow a point of the capture `origin`. The stream joins that capture.
    pub(crate) fn follow_point(
        &mut self,
        origin: u64,
        stream: StreamHandle,
        point: &CapturedPoint,
    ) {
        if let Some(capture) = self.graphs.captures.get_mut(&origin) {
            let tail = capture.tails.entry(stream.number()).or_default();
            for &node in &point.nodes {
                if !tail.contains(&node) {
                    tail.push(node);
                }
            }
        }
        if let Some(stream) = self.streams.get_mut(&stream.number()) {
            stream.captured_by = Some(origin);
        }
    }

    /// The stream on which the open capture of this number began.
    pub(crate) fn origin_of(&self, capture: u64) -> Option<u64> {
        let mut captures = self.graphs.captures.iter();
        captures.find(|(_, open)| open.id == capture).map(|(&origin, _)| origin)
    }

    /// Takes the functions of destroyed executable graphs whose launches have completed. The caller drops them without the lock.
    pub(crate) fn take_released(&mut self) -> Vec<Arc<Retained>> {
        if self.graphs.departed.is_empty() {
            return Vec::new();
        }
        let departed = std::mem::take(&mut self.graphs.departed);
        let (done, pending): (Vec<_>, Vec<_>) =
            departed.into_iter().partition(|(last, _)| last.is_done());
        self.graphs.departed = pending;
        let mut released = Vec::new();
        for (last, retained) in done {
            // The driver releases after the work has completed, so the host is ordered after it.
            if let Some(point) = last.reached.get() {
                self.host_learns(&point.clock, point.time);
            }
            released.extend(retained);
        }
        released
    }

    pub(crate) fn retain(&mut self, graph: u64, release: HostFn) {
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.retained.push(Arc::new(Retained(Mutex::new(Some(release)))));
        }
    }

    pub(crate) fn instantiate(&mut self, graph: u64, ordinal: u32) -> Option<u64> {
        let graph = self.graphs.graphs.get(&graph)?;
        let (origin, nodes, retained) =
            (graph.origin, Arc::clone(&graph.nodes), graph.retained.clone());
        let mut lanes = BTreeMap::new();
        for node in nodes.iter().filter(|node| node.stream != origin) {
            lanes.entry(node.stream).or_insert_with(|| self.add_stream(ordinal));
        }
        let handle = self.handle();
        let exec = Exec { ordinal, origin, nodes, lanes, last: None, retained };
        self.graphs.execs.insert(handle, exec);
        Some(handle)
    }

    /// Removes an executable graph and returns its lanes. Queued launches still run.
    pub(crate) fn destroy_exec(&mut self, exec: u64) -> Vec<u64> {
        let Some(exec) = self.graphs.execs.remove(&exec) else { return Vec::new() };
        let lanes: Vec<u64> = exec.lanes.values().map(|lane| lane.number()).collect();
        for lane in &lanes {
            if let Some(stream) = self.streams.get_mut(lane) {
                stream.destroyed = true;
            }
        }
        let last = exec.last.unwrap_or_else(|| {
            let marker = Marker::new(StreamHandle::numbered(0), 0);
            marker.set_done();
            marker
        });
        self.graphs.departed.push((last, exec.retained));
        lanes
    }

    /// True if an open capture records into this graph.
    pub(crate) fn is_open_graph(&self, graph: u64) -> bool {
        self.graphs.captures.values().any(|capture| capture.graph == graph)
    }
}

impl Capture {
    /// Names work that does not happen before the origin stream's last work.
    fn unjoined(&self, origin: u64) -> Option<String> {
        let mut is_joined = vec![false; self.nodes.len()];
        let mut open = self.tails.get(&origin).cloned().unwrap_or_default();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut is_joined[node], true) {
                open.extend(&self.nodes[node].after);
            }
        }
        let left = is_joined.iter().position(|joined| !joined)?;
        let Node { stream, label, .. } = &self.nodes[left];
        Some(format!(
            "{label} on {} was not joined: the stream that the capture began on must wait for it",
            StreamHandle::numbered(*stream)
        ))
    }
}

impl SimDevice {
    /// Queues work, or records it if the stream is being captured.
    pub(crate) fn submit(
        &self,
        state: &mut State,
        call: Call,
        stream: StreamHandle,
        label: Label,
        kind: OpKind,
        arguments: Vec<Argument>,
    ) -> DriverResult<()> {
        match state.capture_of(stream) {
            Some(origin) => {
                let work = CapturedWork::of(call, kind)?;
                Self::cost(state, |model| model.launch);
                state.record(origin, stream, label, work, arguments);
            }
            None => {
                self.push(state, stream, label, kind, arguments);
            }
        }
        Ok(())
    }

    /// Refuses a stream of an open capture. `breaks` invalidates the capture, for calls that do so on CUDA.
    pub(crate) fn refuse_captured(
        &self,
        state: &mut State,
        call: Call,
        stream: StreamHandle,
        breaks: bool,
    ) -> DriverResult<()> {
        let Some(origin) = state.capture_of(stream) else { return Ok(()) };
        if breaks {
            state.break_capture(origin, &format!("{} on a stream of the capture", call.name()));
        }
        Err(call.invalid(
            format!("{stream}, which is being captured"),
            "a stream whose work is run, not recorded",
        ))
    }

    /// Handles a wait whose stream or event belongs to a capture. Returns false for other waits.
    pub(crate) fn wait_in_capture(
        &self,
        state: &mut State,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<bool> {
        let refuse =
            |value: String, accepted: &str| Err(Call::StreamWaitEvent.invalid(value, accepted));
        let into = state.capture_of(stream);
        let Some((_, known)) = state.events.get(&event.number()) else { return Ok(false) };
        let (point, is_recorded) = (known.point.clone(), known.marker.is_some());
        match (into, point) {
            (None, None) => Ok(false),
            (Some(_), None) if !is_recorded => Ok(true),
            (Some(origin), None) => {
                state.break_capture(origin, "a wait for an event that was recorded outside");
                let accepted = "an event of the same capture: a graph cannot wait for work outside";
                refuse(format!("{event}, recorded outside of the capture"), accepted)
            }
            (into, Some(point)) => match (into, state.origin_of(point.capture)) {
                (_, None) => refuse(
                    format!("{event} of a capture that has ended"),
                    "an event of an open capture",
                ),
                (Some(into), Some(origin)) if into != origin => {
                    state.break_capture(into, "a wait for an event of another capture");
                    state.break_capture(origin, "a wait of another capture");
                    refuse(format!("{event} of another capture"), "an event of the same capture")
                }
                (_, Some(origin)) => {
                    state.follow_point(origin, stream, &point);
                    Ok(true)
                }
            },
        }
    }

    /// Refuses to query or synchronise an event recorded in a capture, and invalidates the capture.
    pub(crate) fn refuse_captured_event(
        state: &mut State,
        call: Call,
        event: EventHandle,
    ) -> DriverResult<()> {
        let known = state.events.get(&event.number());
        let Some(point) = known.and_then(|(_, event)| event.point.clone()) else { return Ok(()) };
        if let Some(origin) = state.origin_of(point.capture) {
            state.break_capture(origin, call.name());
        }
        let value = format!("{event}, which was recorded in a capture");
        Err(call.invalid(value, "an event of work that runs"))
    }

    pub(crate) fn queue_graph(
        &self,
        state: &mut State,
        exec: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let call = Call::GraphLaunch;
        let known = state.graphs.execs.get(&exec).filter(|exec| exec.ordinal == self.ordinal());
        let Some(known) = known else {
            let value = format!("executable graph {exec}, unknown or destroyed");
            return Err(call.invalid(value, "a live executable graph of this device"));
        };
        let (origin, nodes, lanes) = (known.origin, Arc::clone(&known.nodes), known.lanes.clone());
        let last = known.last.clone();
        // The addresses are resolved to the memory live at the launch.
        let named = nodes.iter().map(|node| {
            let renew = |a: &Argument| {
                let kind = if matches!(node.work, CapturedWork::CopyDevice) {
                    Call::CopyDtod
                } else {
                    call
                };
                self.argument(state, kind, a.ptr, a.bytes as usize, a.access)
            };
            node.arguments.iter().map(renew).collect::<DriverResult<Vec<_>>>()
        });
        let arguments = named.collect::<DriverResult<Vec<_>>>()?;
        Self::cost(state, |model| model.launch);
        let lane_of = |node: &Node| match node.stream == origin {
            true => stream,
            false => lanes.get(&node.stream).copied().unwrap_or(stream),
        };
        let wait = |state: &mut State, lane: StreamHandle, marker: &Arc<Marker>| {
            let kind = OpKind::Wait(Arc::clone(marker));
            state.push(lane, Label::Fixed("wait"), kind, Vec::new());
        };
        if let Some(last) = &last {
            wait(state, stream, last);
        }
        let begin = state.push_marker(stream, "graph");
        for lane in lanes.values() {
            wait(state, *lane, &begin);
        }
        let mut is_awaited = vec![false; nodes.len()];
        for node in nodes.iter() {
            for &before in node.after.iter().filter(|&&b| nodes[b].stream != node.stream) {
                is_awaited[before] = true;
            }
        }
        let mut reached: Vec<Option<Arc<Marker>>> = vec![None; nodes.len()];
        for ((index, node), arguments) in nodes.iter().enumerate().zip(arguments) {
            let lane = lane_of(node);
            for before in &node.after {
                if let Some(marker) = &reached[*before]
                    && nodes[*before].stream != node.stream
                {
                    wait(state, lane, marker);
                }
            }
            // Reports name the launch stream, because the program does not know the lanes.
            let meta = state.meta(node.label.clone(), Some(stream));
            state.push_as(lane, meta, node.work.queued(), arguments);
            if is_awaited[index] {
                reached[index] = Some(state.push_marker(lane, "record"));
            }
        }
        for lane in lanes.values() {
            let tail = state.push_marker(*lane, "record");
            wait(state, stream, &tail);
        }
        let end = state.push_marker(stream, "graph");
        if let Some(known) = state.graphs.execs.get_mut(&exec) {
            known.last = Some(end);
        }
        for lane in lanes.values() {
            self.shared.queued(state, lane.number());
        }
        self.shared.queued(state, stream.number());
        Ok(())
    }
}
