//! The calls for stream capture and graphs, simulated. `graph` has their data structures.

#![allow(unsafe_code)]

use xlog_driver::{
    CaptureInfo, CaptureMode, DriverResult, GraphExecHandle, GraphHandle, Graphs, HostFn,
    StreamHandle,
};

use crate::device::SimDevice;
use crate::faults::Call;
use crate::state::State;

impl SimDevice {
    fn check_graph(&self, state: &State, call: Call, graph: GraphHandle) -> DriverResult<()> {
        if state.graphs.graphs.contains_key(&graph.number()) {
            return Ok(());
        }
        let value = format!("{graph}, unknown or destroyed");
        Err(call.invalid(value, "a live graph of this machine"))
    }
}

impl Graphs for SimDevice {
    fn begin_capture(&self, stream: StreamHandle, _mode: CaptureMode) -> DriverResult<()> {
        let call = Call::BeginCapture;
        let mut state = self.enter_on(call, stream)?;
        self.refuse_captured(&mut state, call, stream, false)?;
        state.open_capture(stream);
        Ok(())
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        let call = Call::EndCapture;
        let mut state = self.enter_on(call, stream)?;
        if !state.graphs.captures.contains_key(&stream.number()) {
            let value = format!("{stream}, on which no capture began");
            return Err(call.invalid(value, "the stream of begin_capture"));
        }
        match state.close_capture(stream.number()) {
            Ok(graph) => Ok(GraphHandle::numbered(graph)),
            Err((why, retained)) => {
                drop(state);
                drop(retained);
                let value = format!("the capture of {stream}: {why}");
                Err(call.invalid(value, "a capture that is not broken"))
            }
        }
    }

    fn capture_info(&self, stream: StreamHandle) -> DriverResult<Option<CaptureInfo>> {
        let call = Call::CaptureInfo;
        let state = self.enter_on(call, stream)?;
        let origin = state.capture_of(stream);
        let capture = origin.and_then(|origin| state.graphs.captures.get(&origin));
        Ok(capture.filter(|capture| capture.broken.is_none()).map(|capture| CaptureInfo {
            // Unique in the process, like the ids of streams.
            id: (self.shared.machine << 40) | capture.id,
            graph: GraphHandle::numbered(capture.graph),
        }))
    }

    fn graph_instantiate(&self, graph: GraphHandle) -> DriverResult<GraphExecHandle> {
        let call = Call::GraphInstantiate;
        let mut state = self.enter(call)?;
        self.check_graph(&state, call, graph)?;
        if state.is_open_graph(graph.number()) {
            let value = format!("{graph}, whose capture is open");
            return Err(call.invalid(value, "a graph of an ended capture"));
        }
        let exec = state.instantiate(graph.number(), self.ordinal()).unwrap_or_default();
        Ok(GraphExecHandle::numbered(exec))
    }

    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::GraphLaunch;
        let mut state = self.enter_on(call, stream)?;
        self.refuse_captured(&mut state, call, stream, false)?;
        self.queue_graph(&mut state, exec.number(), stream)
    }

    fn graph_retain(&self, graph: GraphHandle, release: HostFn) -> DriverResult<()> {
        let call = Call::GraphRetain;
        let mut state = self.enter(call)?;
        self.check_graph(&state, call, graph)?;
        state.retain(graph.number(), release);
        Ok(())
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        let call = Call::GraphDestroy;
        let mut state = self.enter(call)?;
        self.check_graph(&state, call, graph)?;
        let gone = state.graphs.graphs.remove(&graph.number());
        drop(state);
        drop(gone);
        Ok(())
    }

    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> DriverResult<()> {
        let call = Call::GraphExecDestroy;
        let mut state = self.enter(call)?;
        if !state.graphs.execs.contains_key(&exec.number()) {
            let value = format!("{exec}, unknown or destroyed");
            return Err(call.invalid(value, "a live executable graph"));
        }
        let lanes = state.destroy_exec(exec.number());
        self.shared.wake(&mut state);
        lanes.into_iter().for_each(|lane| state.bury(lane));
        let released = state.take_released();
        drop(state);
        drop(released);
        Ok(())
    }
}
