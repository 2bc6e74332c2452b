//! What the tests share: directories that go away, seeded random numbers, child processes.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use xlog_cuda::device_runtime::{LedgerSetting, ResourceKind, RuntimeConfig, XlogDeviceRuntime};
use xlog_cuda::ledger::{DeviceKey, Ledger, LedgerConfig};
use xlog_cuda::{ByteSize, CudaDevice};
use xlog_testing::left_out;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const KINDS: [ResourceKind; 3] =
    [ResourceKind::Direct, ResourceKind::Async, ResourceKind::Pool];

/// A directory of mode 0700, removed with what is in it.
pub(crate) struct TestDirectory(PathBuf);

impl TestDirectory {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
        let shared_memory = Path::new("/dev/shm");
        let base = if shared_memory.is_dir() { shared_memory.into() } else { std::env::temp_dir() };
        let path = base.join(format!("xlog-cuda-test-{}-{count}-{clock}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn ledger_path(&self) -> PathBuf {
        self.0.join("test.ledger")
    }

    /// A runtime that counts in this directory's ledger, created with `limit` if it is the first.
    pub(crate) fn config(&self, kind: ResourceKind, limit: u64) -> RuntimeConfig {
        RuntimeConfig::default()
            .with_resource(kind)
            .with_ledger(LedgerSetting::File(self.ledger_path()))
            .with_ledger_limit(ByteSize::Bytes(limit))
    }

    pub(crate) fn runtime(&self, kind: ResourceKind, limit: u64) -> XlogDeviceRuntime {
        let device = Arc::new(CudaDevice::open("sim").unwrap());
        XlogDeviceRuntime::with_config(device, &self.config(kind, limit)).unwrap()
    }

    /// An opening of the ledger besides any runtime's, without slack.
    pub(crate) fn ledger(&self, limit: u64) -> Ledger {
        let config = LedgerConfig::new(DeviceKey::new("test").unwrap());
        Ledger::open(config.with_directory(&self.0).with_limit(limit).with_chunk(0)).unwrap()
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The seed of a random test: from `XLOG_LEDGER_SEED`, else new; printed either way.
pub(crate) fn seed(test: &str) -> u64 {
    let seed = match std::env::var("XLOG_LEDGER_SEED") {
        Ok(text) => text.parse().expect("XLOG_LEDGER_SEED is a number"),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("{test}: replay with XLOG_LEDGER_SEED={seed}");
    seed
}

pub(crate) use xlog_base::Random;

/// A child that does not outlive its test.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn spawn(mut command: Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: plain system call; the child is not waited for yet, so the id is still its own.
        let refused = unsafe { libc::kill(self.0.id() as libc::pid_t, signal) };
        assert_eq!(refused, 0, "signal {signal}");
    }

    /// Stops the process and returns once it stands still.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.0.id());
        wait_until("the process is stopped", || {
            let text = fs::read_to_string(&stat).unwrap();
            text.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        });
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "waited too long until {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// The interpreter behind `python3`, without wrappers. `None`, with what is left out reported, if there is none.
pub(crate) fn python() -> Option<PathBuf> {
    let probe = "import sys, fcntl; fcntl.F_OFD_SETLK; print(sys.executable)";
    let missing = match Command::new("python3").args(["-c", probe]).output() {
        Ok(output) if output.status.success() => {
            return Some(String::from_utf8(output.stdout).unwrap().trim().into());
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("python3 lacks OFD locks: {}", said.lines().last().unwrap_or_default())
        }
        Err(error) => format!("python3 cannot be run: {error}"),
    };
    left_out("the Python process beside the others", &missing);
    None
}
