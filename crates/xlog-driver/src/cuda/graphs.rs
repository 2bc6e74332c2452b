//! Stream capture and graphs of the CUDA driver.
//!
//! Begin and end run in the thread's own capture mode, because the driver compares the calling threads. Every other call could wait inside
//! the driver, so it runs in the relaxed mode and leaves other captures valid.
//!
//! Invariant: the function that a graph retains is called once by the driver, or dropped here after the driver refused it.

use std::ffi::{c_uint, c_ulonglong};
use std::ptr;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUuserObject};

use super::abi::{self, code};
use super::api::GraphCalls;
use super::device::CudaDriver;
use super::host_fn;
use crate::{
    CaptureInfo, CaptureMode, DriverError, DriverResult, GraphExecHandle, GraphHandle, Graphs,
    HostFn, StreamHandle,
};

impl CudaDriver {
    fn graph_calls(&self, call: &'static str) -> DriverResult<GraphCalls> {
        self.api().graphs.ok_or(DriverError::Unsupported { call })
    }
}

impl Graphs for CudaDriver {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        let calls = self.graph_calls("begin_capture")?;
        let stream = self.core.raw_stream("begin_capture", stream)?;
        let _bound = self.core.context.bind("begin_capture")?;
        let mode = match mode {
            CaptureMode::Global => abi::CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => abi::CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => abi::CAPTURE_MODE_RELAXED,
        };
        // SAFETY: the handle is of this device, and no call names it once it is destroyed; the value is a mode.
        let code = unsafe { (calls.begin_capture)(stream, mode) };
        self.core.context.check("cuStreamBeginCapture", code)
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        let calls = self.graph_calls("end_capture")?;
        let stream = self.core.raw_stream("end_capture", stream)?;
        let _bound = self.core.context.bind("end_capture")?;
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the out pointer is valid; the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (calls.end_capture)(stream, &raw mut graph) };
        self.core.context.check("cuStreamEndCapture", code)?;
        self.core.graph_handle(graph)
    }

    fn capture_info(&self, stream: StreamHandle) -> DriverResult<Option<CaptureInfo>> {
        let calls = self.graph_calls("capture_info")?;
        let stream = self.core.raw_stream("capture_info", stream)?;
        let _bound = self.core.context.bind("capture_info")?;
        let (mut status, mut id): (c_uint, c_ulonglong) = (abi::CAPTURE_NONE, 0);
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the out pointers are valid, and null for what is not wanted; the handle is of this device.
        let code = unsafe {
            (calls.capture_info)(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        self.core.context.check("cuStreamGetCaptureInfo", code)?;
        if status != abi::CAPTURE_ACTIVE {
            return Ok(None);
        }
        Ok(Some(CaptureInfo { id, graph: self.core.graph_handle(graph)? }))
    }

    fn graph_instantiate(&self, graph: GraphHandle) -> DriverResult<GraphExecHandle> {
        let calls = self.graph_calls("graph_instantiate")?;
        let graph = self.core.raw_graph("graph_instantiate", graph)?;
        let _bound = self.core.context.bind_relaxed("graph_instantiate")?;
        let mut exec: CUgraphExec = ptr::null_mut();
        // SAFETY: the out pointer is valid; the handle is of this device, and no call names it once it is destroyed.
        let code = unsafe { (calls.instantiate)(&raw mut exec, graph, 0) };
        self.core.context.check("cuGraphInstantiate", code)?;
        self.core.exec_handle(exec)
    }

    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> DriverResult<()> {
        let calls = self.graph_calls("graph_launch")?;
        let exec = self.core.raw_exec("graph_launch", exec)?;
        let stream = self.core.raw_stream("graph_launch", stream)?;
        let _bound = self.core.context.bind_relaxed("graph_launch")?;
        self.refuse_capture("graph_launch", stream)?;
        // SAFETY: the caller promises that the memory of the recorded work is live when it runs.
        let code = unsafe { (calls.launch)(exec, stream) };
        self.core.context.check("cuGraphLaunch", code)
    }

    fn graph_retain(&self, graph: GraphHandle, release: HostFn) -> DriverResult<()> {
        let calls = self.graph_calls("graph_retain")?;
        let graph = self.core.raw_graph("graph_retain", graph)?;
        let context = &self.core.context;
        let _bound = context.bind_relaxed("graph_retain")?;
        let work = host_fn::once(release);
        let mut object: CUuserObject = ptr::null_mut();
        let flags = abi::USER_OBJECT_NO_DESTRUCTOR_SYNC;
        // SAFETY: the out pointer is valid; `run` consumes `work`, and the driver calls it once.
        let code = unsafe {
            (calls.user_object_create)(&raw mut object, work, Some(host_fn::run), 1, flags)
        };
        if code != code::SUCCESS {
            // SAFETY: `once` made `work`, and the driver refused it.
            unsafe { host_fn::drop_once(work) };
            return context.check("cuUserObjectCreate", code);
        }
        // SAFETY: the graph is alive, and the one reference of the object moves to it.
        let code =
            unsafe { (calls.retain_user_object)(graph, object, 1, abi::GRAPH_USER_OBJECT_MOVE) };
        if code != code::SUCCESS {
            // SAFETY: the reference did not move, so it is the caller's to release.
            unsafe { (calls.user_object_release)(object, 1) };
        }
        context.check("cuGraphRetainUserObject", code)
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        let calls = self.graph_calls("graph_destroy")?;
        let graph = self.core.raw_graph("graph_destroy", graph)?;
        let _bound = self.core.context.bind_relaxed("graph_destroy")?;
        // SAFETY: the caller promises that the graph is its own, and gives it up.
        let code = unsafe { (calls.destroy)(graph) };
        self.core.context.check("cuGraphDestroy", code)
    }

    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> DriverResult<()> {
        let calls = self.graph_calls("graph_exec_destroy")?;
        let exec = self.core.raw_exec("graph_exec_destroy", exec)?;
        let _bound = self.core.context.bind_relaxed("graph_exec_destroy")?;
        // SAFETY: the caller promises that it is its own, and gives it up. Queued launches still run.
        let code = unsafe { (calls.exec_destroy)(exec) };
        self.core.context.check("cuGraphExecDestroy", code)
    }
}
