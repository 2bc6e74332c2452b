//! The log of a process: one record per allocating or freeing call, tagged with the calling library.
//!
//! Physical memory of `cuMemCreate` and arrays have no address; their records contain the driver's handle and, for physical memory, a
//! generation.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use xlog_base::Mutex;
use xlog_trace::{
    Action, Failure, Fields, Header, Recorder, RecorderConfig, ServedBy, StackId, intern,
    intern_text,
};

use crate::messages::{Kind, say_once};
use crate::settings::log_path;

/// The numbers of the default streams.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;
const FIRST_STREAM: u32 = 3;

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// An open log.
pub(crate) struct Log {
    recorder: Recorder,
    epoch: Instant,
    order: AtomicU64,
    streams: Mutex<HashMap<u64, u32>>,
    process: u32,
}

/// A call to log.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) action: Action,
    pub(crate) device: u32,
    pub(crate) place: Option<u64>,
    pub(crate) generation: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) stream: Option<u64>,
    pub(crate) library: &'static str,
    pub(crate) started: Option<Instant>,
    pub(crate) stack: Option<StackId>,
}

impl Log {
    /// Creates the log that `pattern` names for this process. `is_taken` is true for a name that another log of the run has. Reports an
    /// error and returns `None`.
    pub(crate) fn create(
        pattern: &Path,
        device_name: String,
        is_taken: impl Fn(&Path) -> bool,
    ) -> Option<Self> {
        let process = std::process::id();
        let path = log_path(pattern, process, is_taken);
        let header = Header::of_this_process().with_device_name(device_name);
        match Recorder::create(&path, RecorderConfig::new().with_header(header)) {
            Ok(recorder) => Some(Self {
                recorder,
                epoch: Instant::now(),
                order: AtomicU64::new(0),
                streams: Mutex::default(),
                process,
            }),
            Err(error) => {
                say_once(Kind::Log, &format!("nothing is logged: {error}"));
                None
            }
        }
    }

    /// Writes a record. `failure` is the kind and the text of an error.
    pub(crate) fn write(&self, entry: Entry, failure: Option<(&'static str, &str)>) {
        let now = self.epoch.elapsed();
        let latency = entry.started.map_or_else(Default::default, |started| started.elapsed());
        let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.recorder.emit_fields(Fields {
            action: entry.action,
            device: entry.device,
            order: self.order.fetch_add(1, Ordering::Relaxed),
            time_nanos: nanos(now.saturating_sub(latency)),
            thread: thread(),
            process: self.process,
            stream: entry.stream.map(|handle| self.stream(handle)),
            ptr: entry.place,
            bytes: Some(entry.bytes),
            granted: None,
            alignment: None,
            tag: Some(intern(entry.library)),
            query_id: None,
            generation: entry.generation,
            latency_nanos: nanos(latency),
            served_by: ServedBy::Driver,
            access: None,
            failure: failure
                .map(|(kind, text)| Failure { kind: intern(kind), message: intern_text(text) }),
            site: None,
            stack: entry.stack,
        });
    }

    /// The number of a stream: fixed for default streams, otherwise in order of appearance.
    fn stream(&self, handle: u64) -> u32 {
        match handle {
            0 => 0,
            LEGACY => LEGACY as u32,
            PER_THREAD => PER_THREAD as u32,
            _ => {
                let mut streams = self.streams.lock();
                let next = u32::try_from(streams.len()).unwrap_or(u32::MAX);
                *streams.entry(handle).or_insert(next.saturating_add(FIRST_STREAM))
            }
        }
    }
}

/// The stream that a handle means in a call for per-thread default streams.
pub(crate) fn per_thread(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

pub(crate) fn thread() -> u64 {
    let id = || {
        // SAFETY: the call takes no arguments and cannot fail.
        let id = unsafe { libc::gettid() };
        u64::try_from(id).unwrap_or(0)
    };
    THREAD
        .try_with(|known| {
            if known.get() == 0 {
                known.set(id());
            }
            known.get()
        })
        .unwrap_or_else(|_| id())
}
