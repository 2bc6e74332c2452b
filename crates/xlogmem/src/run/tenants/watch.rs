//! The processes of a run, and the monitor of their ledger.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use xlog_cuda::ledger::{LedgerResult, LedgerView, Snapshot};

use super::super::progress::Progress;
use super::worker::{Line, Outcome};
use crate::temporary::{self, Folder, Registered};

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LedgerPeaks {
    pub(super) samples: u64,
    /// The maximum used and granted bytes of all slots.
    pub(super) highest: u64,
    /// Readings above the limit.
    pub(super) violations: u64,
}

/// Reads the ledger until `done`, and once more.
pub(super) fn watch(view: &LedgerView, done: &AtomicBool) -> LedgerResult<LedgerPeaks> {
    let mut peaks = LedgerPeaks::default();
    loop {
        let last = done.load(Ordering::Acquire);
        let snapshot = steady(view)?;
        if let Some(snapshot) = snapshot {
            let held = snapshot.used() + snapshot.granted();
            peaks.samples += 1;
            peaks.highest = peaks.highest.max(held);
            peaks.violations += u64::from(held > snapshot.limit);
        }
        if last {
            return Ok(peaks);
        }
        std::thread::sleep(Duration::from_micros(300));
    }
}

/// Takes a consistent snapshot. Slots are read one after another, so a byte that moves between two slots could be counted
/// twice; two equal readings are consistent.
fn steady(view: &LedgerView) -> LedgerResult<Option<Snapshot>> {
    let words = |snapshot: &Snapshot| -> Vec<(u32, u64, u64)> {
        snapshot.slots.iter().map(|slot| (slot.index, slot.used, slot.granted)).collect()
    };
    let (first, second) = (view.snapshot()?, view.snapshot()?);
    Ok((words(&first) == words(&second)).then_some(second))
}

/// A process that is killed on drop.
pub(super) struct Worker {
    child: Child,
    _registered: Registered,
}

impl Worker {
    pub(super) fn spawn(mut command: Command) -> std::io::Result<(Self, Option<ChildStdout>)> {
        let (mut child, _registered) =
            temporary::process(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let output = child.stdout.take();
        Ok((Self { child, _registered }, output))
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn wait(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It has already ended, unless this run failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a process's output until it ends; returns its outcome, if it reported one.
pub(super) fn listen(output: Option<ChildStdout>, progress: &Progress) -> Option<Outcome> {
    let mut outcome = None;
    for line in BufReader::new(output?).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Line::Steps(steps)) => (0..steps).for_each(|_| progress.step()),
            Ok(Line::Done(done)) => outcome = Some(done),
            Err(_) => {}
        }
    }
    outcome
}

/// A directory for the ledger of a run, removed on drop.
pub(super) struct Scratch(Folder);

impl Scratch {
    pub(super) fn new() -> std::io::Result<Self> {
        let shared_memory = Path::new("/dev/shm");
        let base = if shared_memory.is_dir() { shared_memory.into() } else { std::env::temp_dir() };
        Folder::create_in(&base, "xlogmem-tenants-").map(Self)
    }

    pub(super) fn ledger(&self) -> PathBuf {
        self.0.path().join("tenants.ledger")
    }
}
